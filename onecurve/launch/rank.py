"""The life of one rank: tie it to its parent, join the process group, run the worker, report, leave.

Whatever happens, the rank says one thing through its pipe, a result or its first error, and ends with `os._exit`: the
interpreter's own exit takes longer than the launch and may hang on a thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from onecurve import faults
from onecurve.errors import Stopped
from onecurve.launch import blame, process
from onecurve.launch.board import Board
from onecurve.launch.context import RankContext

FRAME = struct.Struct("!Q")  # length of the JSON that follows
FAILED_EXIT, TORN_DOWN_EXIT = 3, 98
STACK_SIGNAL = signal.SIGUSR2
LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


class TornDown(BaseException):
    """Raised in a survivor when the parent tells it that another rank failed; `finally` blocks still run."""


@dataclass(frozen=True)
class RankSetup:
    """What a rank needs to start; plain values and open file descriptors, so that it survives fork and exec alike."""

    rank: int
    world: int
    folder: str
    parent: int
    pipe: int  # write end for the one frame
    stacks: int  # file for faulthandler
    lifeline: int | None
    listener: int | None  # rank 0's listening socket for the store
    port: int
    group: bool
    backend: str
    timeout: float
    threads: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_rank(setup: RankSetup, board: Board, get_worker: Callable[[], Callable[[RankContext], Any]]) -> None:
    """Never returns. `get_worker` is called inside the guarded part, so that its failure is reported as well."""
    code = FAILED_EXIT
    try:
        code = _run(setup, board, get_worker)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _run(setup: RankSetup, board: Board, get_worker: Callable[[], Callable[[RankContext], Any]]) -> int:
    gc.freeze()  # the parent's objects are never garbage here; scanning them would copy their pages
    process.die_with_parent(setup.parent, setup.lifeline)
    faulthandler.enable(file=setup.stacks, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=setup.stacks, all_threads=True)
    context = RankContext(setup.rank, setup.world, Path(setup.folder), board)
    reporting = listen_to_signals(board)
    board.mark_place(setup.rank, "start-up")
    faults.here(setup.rank, 0)
    try:
        _join(setup)
        worker = get_worker()
        board.mark_place(setup.rank, "")
        payload = json.dumps({"result": worker(context)}).encode()
        _join_threads()
    except BaseException as error:
        reporting.set()
        return _report(error, setup, board, context)
    try:
        _send(setup.pipe, payload)
        return _leave_together(setup, board, 0)
    except TornDown:
        return TORN_DOWN_EXIT


def _join(setup: RankSetup) -> None:
    import torch

    torch.set_num_threads(setup.threads)
    if not setup.group:
        return
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    timeout = timedelta(seconds=setup.timeout)
    store = dist.TCPStore(
        "127.0.0.1",
        setup.port,
        setup.world,
        is_master=setup.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=setup.listener,
    )
    dist.init_process_group(setup.backend, store=store, rank=setup.rank, world_size=setup.world, timeout=timeout)
    if setup.backend == "gloo":
        dist.barrier()  # else one that fails at once would fail the others while they still connect


def listen_to_signals(board: Board) -> threading.Event:
    """SIGTERM and SIGINT ask all ranks to stop; during a teardown SIGTERM ends this one.

    Returns the event to set while an error is being reported, which a teardown must not interrupt.
    """
    reporting = threading.Event()

    def handle(signum: int, _frame: FrameType | None) -> None:
        if not board.torn_down:
            board.request_stop(signum)
        elif not reporting.is_set():
            raise TornDown

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    return reporting


def _report(error: BaseException, setup: RankSetup, board: Board, context: RankContext) -> int:
    if isinstance(error, TornDown):
        # The order to leave may have come while this rank's own error was on its way up: then that is what counts.
        if error.__context__ is None:
            return TORN_DOWN_EXIT
        error = error.__context__
    record = blame.describe(error, rank=setup.rank, step=context.step, place=context.current_place)
    if not isinstance(error, Stopped):
        # A full or read-only disk must not hide the cause: it goes through the pipe as well.
        with contextlib.suppress(OSError):
            blame.write_record(context.folder, record)
    _send(setup.pipe, json.dumps({"error": record}).encode())
    if isinstance(error, Stopped):
        return _leave_together(setup, board, FAILED_EXIT)
    return FAILED_EXIT


def _send(pipe: int, payload: bytes) -> None:
    view = memoryview(FRAME.pack(len(payload)) + payload)
    while view:
        view = view[os.write(pipe, view) :]


def _leave_together(setup: RankSetup, board: Board, code: int) -> int:
    """Wait for the others, so that nobody loses a peer (or the store, which rank 0 serves) that it still needs."""
    board.mark_done(setup.rank)
    pause = 0.0005
    while not board.all_done:
        if board.torn_down:
            return TORN_DOWN_EXIT
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    if setup.group and setup.backend != "gloo":
        import torch.distributed as dist

        dist.destroy_process_group()
    return code


def _join_threads() -> None:
    """Work that the worker left to threads is part of the run, but for daemon threads: whoever starts one waits for it
    (a background save: `Checkpointer.close`)."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
