"""The same worker under torchrun, on any number of hosts.

    with context_from_torchrun(folder) as context:
        result = worker(context)

torchrun does rendezvous, teardown and restarts. There is no parent of ours, so each rank looks after itself: it writes
its own error, tells a teardown from preemption by the records that failed ranks left in the folder, and watches its own
progress.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from onecurve import faults
from onecurve.errors import InputError, Stopped
from onecurve.launch import blame
from onecurve.launch.board import Board
from onecurve.launch.context import RankContext
from onecurve.launch.rank import FAILED_EXIT, LOOPBACK, STACK_SIGNAL, TornDown, listen_to_signals

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and all(name in os.environ for name in VARIABLES)


class _LoneBoard(Board):
    """A rank's board without a parent: a record of another rank's error in the run folder stands for its mark."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self.folder = folder

    @property
    def torn_down(self) -> bool:
        return any((self.folder / "errors").glob("rank-*.json"))


@contextlib.contextmanager
def context_from_torchrun(
    folder: Path, *, stall_seconds: float = 300.0, threads: int = 1, backend: str = "gloo"
) -> Iterator[RankContext]:
    """Join the process group that torchrun describes in the environment; leave it at the end.

    The first error of this rank goes to `folder/errors/rank-N.json` and to torchrun's own error file, then up. SIGTERM
    and SIGINT set `context.stop_requested` on the ranks that got them (torchrun passes them on to all). A rank without
    progress for `stall_seconds` prints its stacks and ends with exit code 3. Raises InputError outside torchrun.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise InputError(f"not under torchrun: {', '.join(missing)} not set; start with torchrun, or use run_ranks")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faults.arm_from_environment()
    faults.here(rank, 0)
    blame.error_path(folder, rank).unlink(missing_ok=True)  # of an earlier attempt; the others remove theirs
    board = _LoneBoard(folder)
    context = RankContext(rank, world, folder, board, slot=0)
    reporting = listen_to_signals(board)
    faulthandler.enable(all_threads=True)
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    board.mark_place(0, "start")
    over = threading.Event()
    threading.Thread(target=_watch, args=(context, board, stall_seconds, over), daemon=True, name="watchdog").start()
    try:
        _join(backend, stall_seconds, threads)
        yield context
    except BaseException as error:
        reporting.set()
        cause = error.__context__ if isinstance(error, TornDown) else error
        if cause is not None and not isinstance(cause, Stopped):
            _record(blame.describe(cause, rank=rank, step=context.step, place=context.current_place), folder)
        if isinstance(error, TornDown):
            raise SystemExit(FAILED_EXIT) from None
        raise
    finally:
        over.set()
    import torch.distributed as dist

    dist.barrier()  # nobody leaves while another rank may still need it
    dist.destroy_process_group()


def _join(backend: str, stall_seconds: float, threads: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # one host: nothing to listen to outside
    # torchrun keeps one store over its restarts (seen on 2.13): without a prefix of their own, ranks of a later attempt
    # may read the addresses that dead ones left there.
    timeout = timedelta(seconds=stall_seconds)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _record(record: dict[str, Any], folder: Path) -> None:
    with contextlib.suppress(OSError):
        blame.write_record(folder, record)
    # torchrun blames the earliest record; one that only tells of a lost peer must not compete.
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) and not record["secondary"]:
        told = {
            "message": f"{record['type']}: {record['message']}",
            "extraInfo": {"py_callstack": record["traceback"], "timestamp": str(int(record["time"]))},
        }
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": told}))


def _watch(context: RankContext, board: Board, stall_seconds: float, over: threading.Event) -> None:
    idle, last, looked = 0.0, -1, time.monotonic()
    while not over.wait(min(1.0, stall_seconds / 4)):
        now = time.monotonic()
        passed, looked = min(now - looked, 1.0), now
        beat = board.last_beat(0)
        idle, last = (idle + passed if beat == last else 0.0), beat
        if idle >= stall_seconds:
            place = blame.where(context.step, context.current_place)
            line = f"rank {context.rank} made no progress for {stall_seconds:g} s{place}"
            print(line, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            record = blame.describe(TimeoutError(line), rank=context.rank, step=context.step, place=board.place(0))
            record["monotonic_ns"] = beat  # the rank that fell silent first is the one the others wait for
            _record(record, context.folder)
            os._exit(FAILED_EXIT)
