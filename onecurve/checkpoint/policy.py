"""When to save, and what to keep. Decisions are plain functions; only `apply_retention` touches files."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onecurve.checkpoint.agree import attempt
from onecurve.checkpoint.errors import CheckpointError, save_error
from onecurve.checkpoint.lock import Fence
from onecurve.checkpoint.manifest import Manifest
from onecurve.checkpoint.read import check_folder, read_manifest
from onecurve.checkpoint.store import list_steps, remove_checkpoint
from onecurve.errors import InputError

MIN_KEEP = 2


def due_by_step(step: int, *, total: int, every_steps: int) -> bool:
    """Whether a checkpoint is due after `step` (1-based) of `total`; the last step always is. `every_steps` 0 = off."""
    return step == total or (every_steps > 0 and step % every_steps == 0)


def due_by_clock(seconds: float, *, every_minutes: float) -> bool:
    """Whether one is due `seconds` after the last, by *one* rank's clock: clocks differ, so that rank decides for all.
    `every_minutes` 0 = off."""
    return 0.0 < every_minutes <= seconds / 60


class Candidate(NamedTuple):
    """A checkpoint of this run. `intact`: its files are there with their sizes; `finite`: as its manifest says."""

    step: int
    intact: bool = True
    finite: bool = True


def to_remove(found: Sequence[Candidate], current: int, keep: int, protect: int | None = None) -> list[int]:
    """The steps to remove once `current` was saved, oldest first.

    Kept are: the newest `keep` intact ones; the newest intact finite one; with `protect`, the newest intact finite one
    at or below that step (old enough for a rollback); damaged ones, until all that is kept is newer; and all above
    `current`, which a run that went back will pass again. Raises InputError for keep < 2: a save that goes wrong in a
    way nobody noticed would leave nothing.
    """
    if keep < MIN_KEEP:
        raise InputError(f"checkpoint.keep = {keep}: at least {MIN_KEEP}")
    old = sorted((c for c in found if c.step <= current), reverse=True)
    intact = [c.step for c in old if c.intact]
    healthy = [c.step for c in old if c.intact and c.finite]
    kept = set(intact[:keep]) | set(healthy[:1])
    if protect is not None:
        kept.update([step for step in healthy if step <= protect][:1])
    floor = min(kept, default=current)
    return sorted(c.step for c in old if c.step not in kept and (c.intact or c.step < floor))


def apply_retention(
    folder: Path,
    current: Manifest,
    keep: int,
    *,
    protect: int | None = None,
    spare: Collection[int] = (),
    fence: Fence | None = None,
) -> list[str]:
    """Remove what `to_remove` says and `spare` does not hold, in one process; what went wrong, one line each.

    A folder that can't be read as a checkpoint of `current`'s curve is not ours: it is neither counted nor touched.
    Neither is any, once another run has the folder (`fence`).
    """

    def remove(path: Path) -> None:
        if fence is not None:
            fence.check()
        remove_checkpoint(path)

    found, notes = [], []
    for step, path in list_steps(folder):
        try:
            manifest = read_manifest(path, curve_id=current.curve_id)
        except (CheckpointError, OSError):
            continue  # not ours to remove; `latest_checkpoint` says what is wrong with it
        found.append(Candidate(step, not check_folder(path, manifest), manifest.finite))
    paths = {step: path for step, path in list_steps(folder)}
    for step in to_remove(found, current.step, keep, protect):
        if step not in spare:
            doing = f"can't remove the old checkpoint {paths[step]}"
            _, error = attempt(partial(remove, paths[step]), partial(save_error, 0, doing))
            notes += [str(error)] if error else []
    return notes
