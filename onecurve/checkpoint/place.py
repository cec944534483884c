"""RUN[@STEP]: which of a run's checkpoints a user means."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from onecurve.checkpoint.load import latest_checkpoint
from onecurve.checkpoint.store import list_steps
from onecurve.errors import InputError
from onecurve.paths import FOLDER, show, trouble


class Place(NamedTuple):
    """A run folder and a step of it, or None for the newest; `label` is how errors name it."""

    run: Path
    step: int | None
    label: str


def parse_place(text: str, option: str = "") -> Place:
    """Of "RUN" or "RUN@STEP"; where there is a folder of the whole name, that is the run. Raises InputError."""
    label = show(f"{option} {text}".lstrip())
    run, at, step = text.rpartition("@")
    if not at or not trouble(Path(text), FOLDER):
        return Place(Path(text), None, label)
    if not (run and re.fullmatch("[0-9]{1,18}", step)):
        what = f"{show(step)!r} is no step" if run else "it names no run"
        raise InputError(f"{label}: {what}; write RUN@STEP with a whole number")
    return Place(Path(run), int(step), label)


def find_checkpoint(place: Place, say: Callable[[str], None], *, curve_id: str | None = None) -> Path:
    """The checkpoint of that step, or the newest, that verifies whole, is finite, and of curve `curve_id` where that
    is given. `say` is told, a line each, why newer ones were passed over. Raises InputError."""
    if problem := trouble(place.run, FOLDER):
        raise InputError(f"{place.label}: {problem}; give a run folder, or RUN@STEP")
    checkpoints = place.run / "checkpoints"
    path, reasons = latest_checkpoint(checkpoints, curve_id=curve_id, finite=True, step=place.step)
    if place.step is None:
        for reason in reasons:
            say(f"passed over {reason}")
        if path is None:
            raise InputError(f"{place.label}: it has no whole checkpoint; give a run folder that has saved one")
    elif path is None:
        why = reasons[0] if reasons else f"no checkpoint of step {place.step}"
        there = ", ".join(str(found.step) for found in reversed(list_steps(checkpoints))) or "none"
        raise InputError(f"{place.label}: {why}; steps there: {there}")
    return path
