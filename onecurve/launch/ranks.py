"""Run one worker function on every local rank, and come back with the results or with the real reason."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onecurve import faults
from onecurve.errors import InputError, RunFailed, Stopped
from onecurve.launch import blame
from onecurve.launch.processes import RankProcesses, Worker
from onecurve.launch.signals import StopSignals
from onecurve.launch.watchdog import Stall, Watchdog

POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # a rank lost its peer: so long may the cause take to show
GRACE_SECONDS = 2.0  # between telling survivors to leave and killing them
GROUP_MARGIN_SECONDS = 30.0  # the watchdog speaks before a collective's own time-out does

Progress = Callable[[int, "int | None", str], None]


def run_ranks(
    worker: Worker,
    world: int,
    *,
    folder: Path,
    stall_seconds: float = 300.0,
    threads: int = 1,
    progress: Progress | None = None,
    on_signal: str = "stop",
    group: bool | None = None,
    backend: str = "gloo",
    start: str | None = None,
    lifeline: bool = False,
    limit_seconds: float | None = None,
) -> list[Any]:
    """Call `worker(context)` on `world` ranks of this host; their JSON-able results in rank order.

    Each rank runs `torch.set_num_threads(threads)` and, where `group` says so (by default: world > 1), has joined a
    torch.distributed group over `backend`, bound to loopback. `start` is "fork" (default) or "spawn" (default where
    threads > 1 or the backend is not gloo: a forked child cannot use a second thread or CUDA safely; the worker must
    then be a top-level function). `progress(step, total, text)` is called in this process when rank 0 reports.
    `on_signal` = "stop": the first SIGTERM or SIGINT sets `context.stop_requested` on all ranks, a second ends
    everything; "kill": the first ends everything, and counts also where all ranks just ended. `lifeline` ties the ranks
    to this process by a pipe also on Linux. `limit_seconds` ends the whole call like a hang, with the stacks.

    Raises RunFailed with the first real error (rank, type, message, traceback) or the rank that vanished or hung;
    CheckFailed and InputError as a rank raised them; Stopped on request. `folder/errors/rank-N.json` holds each rank's
    own error. No process is left in any case.
    """
    if world < 1:
        raise InputError(f"world = {world}: at least one rank")
    if on_signal not in ("stop", "kill"):
        raise InputError(f"on_signal = {on_signal!r}: allowed are 'stop' and 'kill'")
    faults.arm_from_environment()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    blame.clear_records(folder)
    start = start or ("spawn" if threads > 1 or backend != "gloo" else "fork")
    if start == "fork":
        # Imported once here, not once in each rank.
        import torch
        import torch.distributed

        # A pool of threads made here would not exist in the forked ranks, which hang waiting for it.
        torch.set_num_threads(1)
    setups: dict[str, Any] = {
        "group": world > 1 if group is None else group,
        "backend": backend,
        "timeout": stall_seconds + GROUP_MARGIN_SECONDS,
        "threads": threads,
    }
    processes = RankProcesses(worker, world, folder, start=start, lifeline=lifeline, **setups)
    with StopSignals(processes.board, at_once=on_signal == "kill") as signals, processes:
        results = _supervise(processes, signals, Watchdog(processes, stall_seconds, limit_seconds), progress)
    if signals.abort and signals.at_once:  # looked at when our handlers are gone: from here on the caller's count
        raise _ended_at_once(signals.abort)
    return results


def _supervise(
    processes: RankProcesses, signals: StopSignals, watchdog: Watchdog, progress: Progress | None
) -> list[Any]:
    trouble_at = 0.0
    shown: tuple[int, int | None, str] | None = None
    while processes.running:
        processes.poll(POLL_SECONDS)
        now = time.monotonic()
        if signals.abort:
            processes.kill()
            if all(member.message for member in processes.members):
                break  # all had said how they ended, and only waited to leave together
            raise _ended_at_once(signals.abort)
        records = [member.record for member in processes.members if member.record is not None]
        failures = [record for record in records if record["exit_code"] != Stopped.exit_code]
        vanished = [member for member in processes.members if member.exit and member.exit.vanished]
        if failures or vanished:
            trouble_at = trouble_at or now
            if vanished or any(not record["secondary"] for record in failures):
                processes.terminate()
            elif now - trouble_at > SETTLE_SECONDS:
                if not processes.terminated_at and (stall := watchdog.stopped()):  # lost, because it was stopped
                    processes.kill()
                    raise _stalled(stall, processes.folder)
                processes.terminate()
        elif stall := watchdog.look():
            processes.kill()
            raise _stalled(stall, processes.folder)
        if processes.terminated_at and now - processes.terminated_at > GRACE_SECONDS:
            processes.kill()
        if progress is not None:
            board = processes.board
            current = (board.step(0), board.total(0), board.text(0))
            if current != shown and current != (0, None, ""):
                progress(*current)
                shown = current
    verdict = blame.verdict([member.exit for member in processes.members if member.exit])
    if verdict is not None:
        raise verdict
    return [member.result for member in processes.members]


def _ended_at_once(signum: int) -> Stopped:
    return Stopped(f"ended at once by {signal.Signals(signum).name}; the newest checkpoint stays whole")


def _stalled(stall: Stall, folder: Path) -> RunFailed:
    """Every rank's state and stack to stderr and to `folder/errors/stacks.txt`; the one line in the error."""
    print(f"{stall.line}\n{stall.stacks}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        (folder / "errors").mkdir(exist_ok=True)
        (folder / "errors" / "stacks.txt").write_text(f"{stall.line}\n{stall.stacks}\n")
    error = RunFailed(stall.line)
    error.rank = stall.rank
    return error
