"""`onecurve train` on the launching side: prepare the folder, start the ranks, say how it ended.

Under torchrun there is no launching side: rank 0 does its work, and tells the others (`train_under_torchrun`).
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onecurve.checkpoint import clean_leftovers, list_steps
from onecurve.checkpoint.store import step_name
from onecurve.config import Config
from onecurve.errors import InputError, OnecurveError, RunFailed, Stopped
from onecurve.launch import context_from_torchrun, run_ranks, with_restarts
from onecurve.launch.blame import clear_records
from onecurve.launch.torchrun import under_torchrun
from onecurve.parallel.transports import PointToPoint, all_gather_any
from onecurve.report.console import Progress
from onecurve.train.folder import leaving_nothing, locate, newest_step, prepare, say
from onecurve.train.loop import train_rank
from onecurve.train.plan import Plan
from onecurve.train.records import log_event
from onecurve.train.request import Request


def train(
    config: Config,
    run: Path | None = None,
    resume: bool = False,
    from_: str | None = None,
    restarts: int = 0,
    *,
    source: Path = Path("run.toml"),
    overrides: Iterable[str] = (),
) -> int:
    """Train `config` in a run folder, to its last step. Returns 0.

    `run`: the folder, by default runs/<source's name>-<first digits of the curve id>. `resume`: go on from the newest
    whole checkpoint there. `from_` = "RUN[@STEP]": start a new curve from that state. `restarts`: start again after a
    failure, so often in a row. `overrides`: the config's --set, which on resume may change the layout's part only.

    Raises InputError, RunFailed (with the first rank's real error) and Stopped (its state is saved).
    """
    request = Request(config, run, resume, from_, restarts, source, tuple(overrides))
    if under_torchrun():
        return train_under_torchrun(request)
    plan = locate(request, full_check=True)
    with leaving_nothing(plan.folder) as fence:
        ready = prepare(request, replace(plan, fence=fence), ranks_here=config.layout.dp)
        if ready is not None:
            with ending(request, ready):
                end = with_restarts(
                    partial(run_once, ready),
                    restarts,
                    partial(newest_step, ready.folder),
                    partial(restarted, ready.folder, restarts),
                )
            say_done(ready, end)
    return 0


def run_once(plan: Plan, attempt: int) -> dict[str, Any]:
    """Start the ranks, wait for them, and return what rank 0 does. A bar on a terminal; off one, rank 0 prints its own
    lines."""
    if attempt:
        if plan.fence is not None:
            plan.fence.check()  # the folder may have been moved, or taken, since
        clean_leftovers(plan.folder / "checkpoints")
        plan = replace(plan, resume=True)
    limits, numerics, steps = plan.config.limits, plan.config.numerics, plan.config.train.steps
    bar = Progress(steps, start=newest_step(plan.folder)) if sys.stderr.isatty() else None

    def show(step: int, total: int | None, text: str) -> None:
        if bar is None or not text:
            return
        try:  # a step without a token has no loss, a run that doesn't evaluate no val_loss
            loss, speed, val_loss = (None if word == "None" else float(word) for word in text.split())
        except ValueError:
            return  # torn by a write at the same time; the next one comes soon
        bar.update(step, loss=loss, tokens_per_second=speed, val_loss=val_loss)

    try:
        ends: list[dict[str, Any]] = run_ranks(
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
    return ends[0]


def say_done(plan: Plan, end: dict[str, Any]) -> None:
    """The last line of a run that has done its last step. `end`: what `train_rank` returned."""
    step, loss = end["step"], end["loss"]
    value = "" if math.isnan(loss) else f"loss {loss:.6f}, "  # nan: no step had a token
    say(f"done: {step} steps, {value}checkpoint {plan.folder / 'checkpoints' / step_name(step)}")


def restarted(folder: Path, budget: int, attempt: int, error: RunFailed) -> None:
    first_line = str(error).splitlines()[0]
    say(f"{first_line}; starting again ({attempt}, at most {budget} in a row without progress)")
    log_event(folder, "restart", newest_step(folder), attempt=attempt, error=first_line)


@contextlib.contextmanager
def ending(request: Request, plan: Plan) -> Iterator[None]:
    """Record a stop or an error of the run, and tell how to go on."""
    try:
        yield
    except Stopped as stop:
        log_event(plan.folder, "signal", newest_step(plan.folder), text=str(stop))
        raise Stopped(f"{stop}; resume with: {request.again(plan.folder)}") from None
    except OnecurveError as error:
        newest = newest_step(plan.folder)
        log_event(plan.folder, "error", newest, text=str(error).splitlines()[0])
        if error.exit_code == RunFailed.exit_code:
            saved = list_steps(plan.folder / "checkpoints")
            there = f"the newest checkpoint is that of step {newest}" if saved else "there is no checkpoint yet"
            if plan.folder.exists():  # else it was moved, and the error says so
                error.args = (f"{error}\n{there}; resume with: {request.again(plan.folder)}",)
        raise


def train_under_torchrun(request: Request) -> int:
    """This rank of a run that torchrun started. Rank 0 holds the lock and prepares; all leave with the same plan or the
    same error, and it alone prints what concerns all. torchrun's restarts resume."""
    leader = os.environ["RANK"] == "0"
    if request.restarts:
        raise InputError("--restarts: under torchrun its own --max-restarts does the same; leave --restarts out")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        request = replace(request, resume=True)
    plan = locate(request, full_check=leader)
    told: dict[str, Any] = {}
    with contextlib.ExitStack() as held:
        refusal = None
        if leader:
            try:
                fence = held.enter_context(leaving_nothing(plan.folder))
                told = prepared_by_leader(request, replace(plan, fence=fence))
            except OnecurveError as error:
                refusal, told = error, {"exit_code": error.exit_code}
        limits, threads = request.config.limits, request.config.numerics.threads
        with context_from_torchrun(plan.folder, stall_seconds=limits.stall_seconds, threads=threads) as context:
            over = PointToPoint(context.rank, context.world)
            told = json.loads(all_gather_any(json.dumps(told).encode(), over.all_gather_bytes)[0])
            if "plan" in told:
                plan = Plan.from_json(told["plan"])
                torch.set_num_threads(plan.config.numerics.threads)  # a resumed run keeps its own
                with ending(request, plan) if leader else quiet_stop():
                    end = train_rank(told["plan"], context)
                if leader:
                    say_done(plan, end)
        if refusal is not None:
            raise refusal
    return int(told.get("exit_code", 0))


def prepared_by_leader(request: Request, plan: Plan) -> dict[str, Any]:
    clear_records(plan.folder)
    here, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if plan.config.layout.dp != world:
        ranks = plan.config.layout.dp
        raise InputError(
            f"layout.dp = {ranks}, but torchrun started {world} ranks; start {ranks}, or --set layout.dp={world}"
        )
    ready = prepare(request, plan, ranks_here=here)
    return {"plan": ready.to_json()} if ready is not None else {}


@contextlib.contextmanager
def quiet_stop() -> Iterator[None]:
    """On ranks other than 0: end with the exit code of a stop, without the line that rank 0 prints."""
    try:
        yield
    except Stopped as stop:
        raise SystemExit(stop.exit_code) from None
