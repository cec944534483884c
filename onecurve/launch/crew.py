"""The ranks of one host as the parent holds them: started, listened to, reaped, ended.

Started by fork from a parent that has imported torch (milliseconds per rank). With `spawn` the forked child at once
becomes a fresh interpreter (`onecurve.launch.spawned`), as more than one thread per rank and CUDA need it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from onecurve.launch import process, spawned
from onecurve.launch.blame import Ending
from onecurve.launch.board import Board
from onecurve.launch.context import RankContext
from onecurve.launch.rank import FRAME, TORN_DOWN_EXIT, Seat, run_rank

Worker = Callable[[RankContext], Any]


@dataclass
class Member:
    """One rank's process."""

    rank: int
    pid: int
    pipe: int
    stacks: IO[bytes]
    received: bytearray = field(default_factory=bytearray)
    message: dict[str, Any] | None = None  # {"result": …} or {"error": …}
    open: bool = True
    ending: Ending | None = None
    killed: bool = False

    def read(self) -> None:
        """Take what the pipe holds, without blocking."""
        while self.open:
            try:
                chunk = os.read(self.pipe, 1 << 20)
            except BlockingIOError:
                return
            if not chunk:
                self.open = False
            self.received += chunk
            if self.message is None and len(self.received) >= FRAME.size:
                (length,) = FRAME.unpack_from(self.received)
                if len(self.received) >= FRAME.size + length:
                    self.message = json.loads(self.received[FRAME.size : FRAME.size + length])
                    self.received = bytearray()

    @property
    def record(self) -> dict[str, Any] | None:
        """The rank's own error, if it reported one."""
        return (self.message or {}).get("error")

    @property
    def delivered(self) -> bool:
        return "result" in (self.message or {})

    @property
    def result(self) -> Any:
        return (self.message or {})["result"]

    def stack_text(self) -> str:
        self.stacks.seek(0)
        return self.stacks.read().decode("utf-8", "replace").strip()


class Crew:
    """All ranks of this host. Use as a context: at its end no process is left, whatever happened."""

    def __init__(
        self, worker: Worker, world: int, folder: Path, *, start: str, lifeline: bool = False, **seat_values: Any
    ) -> None:
        self.worker, self.world, self.folder, self.spawn = worker, world, folder, start == "spawn"
        self.seat_values = seat_values  # group, backend, timeout, threads
        self.members: list[Member] = []
        self.told_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._open = contextlib.ExitStack()  # closed at the end
        self._page = -1  # only a fresh interpreter needs a file behind the board
        if self.spawn:
            page = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            page.truncate(Board.size(world))
            self._page = page.fileno()
        self.board = Board(world, self._page)
        self._open.enter_context(process.adopting_orphans())
        self._lifeline = os.pipe() if lifeline or process.needs_lifeline() else None

    # --- start -----------------------------------------------------------------------------
    def __enter__(self) -> Crew:
        for stream in (sys.stdout, sys.stderr):  # else each rank would print what is still buffered here
            with contextlib.suppress(Exception):
                stream.flush()
        # The parent binds, so there is no race for the port; rank 0 inherits the socket and serves the store on it.
        listener = socket.create_server(("127.0.0.1", 0), backlog=2 * self.world + 16)
        # A signal that comes while ranks are starting waits until everybody has a handler for it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            for rank in range(self.world):
                self._start(rank, listener)
        except BaseException:
            self.__exit__()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            listener.close()
            if self._lifeline is not None:
                os.close(self._lifeline[0])
        return self

    def _start(self, rank: int, listener: socket.socket) -> None:
        read_end, write_end = os.pipe()
        stacks = self._open.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
        seat = Seat(
            rank=rank,
            world=self.world,
            folder=str(self.folder),
            parent=os.getpid(),
            pipe=write_end,
            stacks=stacks.fileno(),
            lifeline=self._lifeline[0] if self._lifeline else None,
            listener=listener.fileno() if rank == 0 else None,
            port=listener.getsockname()[1],
            **self.seat_values,
        )
        order = -1
        if self.spawn:
            file = self._open.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
            file.write(spawned.order(seat, self.worker, self._page))
            file.seek(0)
            order = file.fileno()
        with warnings.catch_warnings():
            # Python ≥ 3.12 warns when other threads exist; ranks use none of the parent's locks but torch's own, which
            # are free while the parent is here.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._become(seat, listener, read_end, order)
        os.close(write_end)
        os.set_blocking(read_end, False)
        member = Member(rank, pid, read_end, stacks)
        self.members.append(member)
        self._selector.register(read_end, selectors.EVENT_READ, member)

    def _become(self, seat: Seat, listener: socket.socket, read_end: int, order: int) -> None:
        """In the child; never returns. `order`: the file that a fresh interpreter reads, -1 where this one stays."""
        try:
            os.setsid()  # a group of its own: Ctrl-C reaches the parent alone, and the whole group can be ended
            for unwanted in [read_end, *(member.pipe for member in self.members)]:
                os.close(unwanted)
            if self._lifeline is not None:
                os.close(self._lifeline[1])
            if seat.rank != 0:
                listener.close()
            if order >= 0:
                for descriptor in (seat.pipe, seat.stacks, seat.lifeline, seat.listener, self._page, order):
                    if descriptor is not None:
                        os.set_inheritable(descriptor, True)
                environment = {**os.environ, "OMP_NUM_THREADS": str(seat.threads)}
                os.execve(sys.executable, spawned.command(order), environment)
            if seat.listener is not None:
                listener.detach()  # the store owns the descriptor
            run_rank(seat, self.board, lambda: self.worker)
        finally:
            os._exit(1)

    # --- listen ------------------------------------------------------------------------------
    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.ending is None]

    def poll(self, seconds: float) -> None:
        """Wait up to `seconds` for news; read pipes, reap what has ended."""
        if any(not member.open for member in self.running):
            seconds = min(seconds, 0.002)  # its pipe is closed: it ends in a moment
        if self._selector.get_map():
            for key, _ in self._selector.select(seconds):
                self._take(key.data)
        else:
            time.sleep(seconds)
        for member in self.running:
            seen_ns = time.monotonic_ns()
            status = process.reap(member.pid)
            if status is not None:
                self._take(member)  # what it wrote before it ended
                self._conclude(member, status, seen_ns)

    def _take(self, member: Member) -> None:
        was_open = member.open
        member.read()
        if was_open and not member.open:
            self._selector.unregister(member.pipe)

    def _conclude(self, member: Member, status: int | None, seen_ns: int) -> None:
        torn_down = bool(self.told_at) and status == TORN_DOWN_EXIT
        member.ending = Ending(
            rank=member.rank,
            record=member.record,
            status=status,
            seen_ns=seen_ns,
            ours=member.delivered or member.killed or torn_down,
            step=self.board.step(member.rank),
            place=self.board.place(member.rank),
            stack=member.stack_text() if status is not None and status < 0 else "",
        )

    # --- end -----------------------------------------------------------------------------------
    def tell(self) -> None:
        """Tell the survivors to leave: marked on the board first, so that no rank takes it for preemption."""
        if self.told_at:
            return
        self.told_at = time.monotonic()
        self.board.announce_teardown()
        for member in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End every rank that still runs, with all it started. Gives up only on a process that the kernel holds."""
        self.board.announce_teardown()
        for member in self.running:
            member.killed = True
            process.kill_group(member.pid)
        limit = time.monotonic() + 3.0
        while self.running and time.monotonic() < limit:
            self.poll(0.01)
        for member in self.running:
            self._conclude(member, None, time.monotonic_ns())

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill()
        self._selector.close()
        for member in self.members:
            os.close(member.pipe)
        self._open.close()
        if self._lifeline is not None:
            os.close(self._lifeline[1])
        self.board.close()
