"""`onecurve train` on the launching side: the run folder, what may be resumed, pre-flight, the ranks, the end."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from onecurve.checkpoint import RunLock, clean_leftovers, latest_checkpoint, list_steps, read_manifest
from onecurve.checkpoint.mirror import fetch_latest
from onecurve.checkpoint.reshard import check_fits
from onecurve.config import Config, config_to_toml, load_config, resume_config
from onecurve.curve import curve_id
from onecurve.errors import InputError, RunFailed, Stopped
from onecurve.launch import run_ranks, with_restarts
from onecurve.report.console import Progress
from onecurve.report.plan import parameters
from onecurve.train.loop import train_rank
from onecurve.train.plan import Plan
from onecurve.train.preflight import preflight
from onecurve.train.records import log_event
from onecurve.train.session import new_loader


def train(
    config: Config,
    run: Path | None = None,
    resume: bool = False,
    from_: str | None = None,
    restarts: int = 0,
    *,
    name: str = "run",
    overrides: Iterable[str] = (),
) -> int:
    """Train `config` in a run folder, to its last step. Returns 0.

    `run`: the folder, by default runs/<name>-<first digits of the curve id>. `resume`: go on from the newest whole
    checkpoint there. `from_` = "RUN[@STEP]": start a new curve from that state. `restarts`: start again after a
    failure, so often in a row. `overrides`: the config's --set, which on resume may change the layout's part only.

    Raises InputError, RunFailed (with the first rank's real error) and Stopped (its state is saved).
    """
    overrides = list(overrides)
    loader = new_loader(config, full_check=True)
    parent, parent_digest = find_parent(config, from_) if from_ else (None, "")
    identity = curve_id(config, loader.fingerprint, parent_digest or None)
    folder = run or Path("runs") / f"{name}-{identity[:8]}"
    with RunLock(folder) as fence:
        for note in clean_leftovers(folder / "checkpoints"):
            say(note)
        plan = Plan(config, folder, identity, fence, resume, parent, parent_digest)
        if (folder / "run.json").exists():
            if not resume:
                raise InputError(f"{folder} holds a run already; go on with it by --resume, or give another --run")
            plan = resumed(plan, overrides)
            if finished(plan):
                say(f"{folder} is finished: all {plan.config.train.steps} steps are done")
                return 0
        preflight(plan)
        (folder / "config.toml").write_text(config_to_toml(plan.config), encoding="utf-8")
        say(f"run folder {folder}")
        again = f"onecurve train {name}.toml --run {folder} --resume"
        try:
            with_restarts(
                lambda attempt: run_once(replace(plan, resume=plan.resume or attempt > 0)),
                restarts,
                partial(newest_step, folder),
                lambda attempt, error: restarted(folder, attempt, restarts, error),
            )
        except Stopped as stop:
            log_event(folder, "signal", newest_step(folder), text=str(stop))
            raise Stopped(f"{stop}; resume with: {again}") from None
        except RunFailed as error:
            log_event(folder, "error", newest_step(folder), text=str(error).splitlines()[0])
            raise
    return 0


def run_once(plan: Plan) -> None:
    """Start the ranks and wait for them. A bar on a terminal; off one, rank 0 prints its own lines."""
    limits, numerics, steps = plan.config.limits, plan.config.numerics, plan.config.train.steps
    bar = Progress(steps, start=newest_step(plan.folder)) if sys.stderr.isatty() else None

    def show(step: int, total: int | None, text: str) -> None:
        loss, _, speed = text.partition(" ")
        if bar is not None and speed:
            bar.update(step, loss=float(loss), tokens_per_second=float(speed))

    try:
        run_ranks(
            partial(train_rank, plan.to_json()),
            plan.config.layout.dp,
            folder=plan.folder,
            stall_seconds=limits.stall_seconds,
            threads=numerics.threads,
            progress=show if bar is not None else None,
        )
    finally:
        if bar is not None:
            bar.close()


def resumed(plan: Plan, overrides: list[str]) -> Plan:
    """The plan of a run that is there: its own curve, the layout given now. Raises InputError if the data changed."""
    stored = load_config(plan.folder / "config.toml")
    config, notes = resume_config(plan.config, stored, overrides)
    for note in notes:
        say(note)
    record = read_record(plan.folder)
    fingerprint = new_loader(config).fingerprint
    identity = curve_id(config, fingerprint, record["parent"] or None)
    if identity != record["curve_id"]:
        raise InputError(
            f"{plan.folder}: its curve is {record['curve_id'][:8]}, but its config and the corpus as they are now make "
            f"{identity[:8]}; bring the corpus back (fingerprint {record['data_fingerprint'][:16]}), or start a new run"
        )
    checkpoints = plan.folder / "checkpoints"
    if config.checkpoint.mirror and latest_checkpoint(checkpoints, curve_id=identity)[0] is None:
        path, reasons = fetch_latest(config.checkpoint.mirror, checkpoints, curve_id=identity)
        for reason in reasons:
            say(reason)
        if path is not None:
            say(f"no whole checkpoint here: fetched {path.name} from the mirror")
    return replace(plan, config=config, curve_id=identity, parent_digest=record["parent"])


def read_record(folder: Path) -> dict[str, str]:
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return {name: str(record[name]) for name in ("curve_id", "parent", "data_fingerprint")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'run.json'} can't be read ({error}); give another --run") from None


def finished(plan: Plan) -> bool:
    path, _ = latest_checkpoint(plan.folder / "checkpoints", curve_id=plan.curve_id)
    return path is not None and read_manifest(path).step >= plan.config.train.steps


def find_parent(config: Config, place: str) -> tuple[Path, str]:
    """The checkpoint that "RUN[@STEP]" names, and its digest. Raises InputError if this model can't start there."""
    text, _, step = place.rpartition("@") if "@" in place else (place, "", "")
    checkpoints = Path(text) / "checkpoints"
    if step:
        if not step.isdigit():
            raise InputError(f"--from {place}: {step!r} is no step; write RUN@STEP with a whole number")
        path = checkpoints / f"step-{int(step):08d}"
        if not path.is_dir():
            there = ", ".join(str(found.step) for found in reversed(list_steps(checkpoints))) or "none"
            raise InputError(f"--from {place}: no checkpoint of step {step}; steps there: {there}")
        manifest = read_manifest(path)
    else:
        newest, reasons = latest_checkpoint(checkpoints, finite=True)
        for reason in reasons:
            say(f"passed over {reason}")
        if newest is None:
            raise InputError(f"--from {place}: {text} has no whole checkpoint; give a run folder, or RUN@STEP")
        path, manifest = newest, read_manifest(newest)
    check_fits(manifest, parameters(config.model), f"--from {place}")
    return path, manifest.state_digest


def newest_step(folder: Path) -> int:
    """The newest step that has a checkpoint folder, by name; 0 without any."""
    return max((found.step for found in list_steps(folder / "checkpoints")), default=0)


def restarted(folder: Path, attempt: int, budget: int, error: RunFailed) -> None:
    first_line = str(error).splitlines()[0]
    say(f"{first_line}; starting again ({attempt}, at most {budget} in a row without progress)")
    log_event(folder, "restart", newest_step(folder), attempt=attempt, error=first_line)


def say(text: str) -> None:
    print(f"onecurve: {text}", file=sys.stderr, flush=True)
