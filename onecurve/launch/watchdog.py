"""Finds a rank that makes no progress, and says where every rank stands."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from onecurve.launch import process
from onecurve.launch.blame import where
from onecurve.launch.processes import Member, RankProcesses
from onecurve.launch.rank import STACK_SIGNAL, run_rank

LAUNCHER = run_rank.__code__.co_filename


@dataclass(frozen=True)
class Stall:
    """What the watchdog says: one line that names the culprit (if one rank is), and every rank's state and stack."""

    line: str
    stacks: str
    rank: int | None


class Watchdog:
    """Counts, for each rank, the time in which the parent ran and saw no sign of life.

    Its own clock, not the ranks' time stamps: when the whole machine sleeps or the parent is stopped for an hour, no
    rank is blamed for that hour.
    """

    LONGEST_LOOK = 0.25  # seconds between two looks that count at most

    def __init__(self, processes: RankProcesses, stall_seconds: float, limit_seconds: float | None = None) -> None:
        self.processes = processes
        self.stall_seconds = stall_seconds
        self.limit_seconds = limit_seconds
        self._idle = [0.0] * processes.world
        self._beats = [-1] * processes.world
        self._started = self._looked = time.monotonic()

    def look(self) -> Stall | None:
        """Whether the run must end: a rank without a sign of life for `stall_seconds`, or the whole limit is used."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, self.LONGEST_LOOK), now
        board = self.processes.board
        for member in self.processes.running:
            rank = member.rank
            beat = board.last_beat(rank)
            self._idle[rank] = 0.0 if beat != self._beats[rank] or board.done(rank) else self._idle[rank] + passed
            self._beats[rank] = beat
        if any(self._idle[member.rank] >= self.stall_seconds for member in self.processes.running):
            return self._silence()
        if self.limit_seconds is not None and now - self._started > self.limit_seconds:
            return Stall(f"the ranks took longer than {self.limit_seconds:g} s", self._report(self._stacks()), None)
        return None

    def _silence(self) -> Stall:
        stacks = self._stacks()
        silent = [
            member
            for member in self.processes.running
            if self._idle[member.rank] >= self.stall_seconds / 2 and not self.processes.board.done(member.rank)
        ]
        suspects = self._suspects(silent, stacks)
        rank, board = suspects[0].rank, self.processes.board
        place = where(board.step(rank), board.place(rank))
        if _is_stopped(suspects[0]):
            return self._stopped(suspects[0], stacks)
        if len(suspects) == 1:
            line = f"rank {rank} made no progress for {self.stall_seconds:g} s{place}: it hangs"
        else:
            line = (
                f"ranks {', '.join(str(member.rank) for member in suspects)} made no progress for "
                f"{self.stall_seconds:g} s and wait for each other; rank {rank} fell silent first{place}"
            )
        return Stall(line, self._report(stacks), rank)

    def stopped(self) -> Stall | None:
        """A rank that is stopped by a signal, whatever the time: for when its peers have lost patience first."""
        first = next((member for member in self.processes.running if _is_stopped(member)), None)
        return None if first is None else self._stopped(first, self._stacks())

    def _stopped(self, member: Member, stacks: dict[int, str]) -> Stall:
        board, rank = self.processes.board, member.rank
        seconds = (time.monotonic_ns() - board.last_beat(rank)) / 1e9
        place = where(board.step(rank), board.place(rank))
        line = f"rank {rank} made no progress for {seconds:.0f} s{place}: it is stopped (state T) by a signal"
        return Stall(line, self._report(stacks), rank)

    def _suspects(self, silent: list[Member], stacks: dict[int, str]) -> list[Member]:
        """The ranks that the others wait for: stopped, or behind, or not waiting in a collective, or in a place of
        their own. Each rule narrows the choice where it can; the one that fell silent first comes in front."""
        board = self.processes.board
        lowest = min(board.step(member.rank) for member in silent)
        places = Counter(board.place(member.rank) for member in silent)
        rules: list[Callable[[Member], bool]] = [
            _is_stopped,
            lambda member: board.step(member.rank) == lowest,
            lambda member: not _waits_for_peers(stacks[member.rank]),
            lambda member: len(places) > 1 and places[board.place(member.rank)] == min(places.values()),
        ]
        for rule in rules:
            silent = [member for member in silent if rule(member)] or silent
        return sorted(silent, key=lambda member: board.last_beat(member.rank))

    def _stacks(self) -> dict[int, str]:
        """Each rank's stack; empty where it cannot write one."""
        self._ask_for_stacks([member for member in self.processes.running if not _is_stopped(member)])
        return {member.rank: _own_frames(member.stack_text()) for member in self.processes.members}

    def _report(self, stacks: dict[int, str]) -> str:
        board, lines = self.processes.board, []
        for member in self.processes.members:
            rank = member.rank
            seconds = (time.monotonic_ns() - board.last_beat(rank)) / 1e9
            letter = process.state(member.pid) or "?"
            state = "ended" if member.exit else "done" if board.done(rank) else f"state {letter}"
            lines.append(
                f"--- rank {rank}: {state}, step {board.step(rank)}, place {board.place(rank) or '?'}, "
                f"last sign of life {seconds:.1f} s ago"
            )
            lines.append(stacks[rank] or "    (no stack: it is stopped or has ended)")
        return "\n".join(lines)

    def _ask_for_stacks(self, members: list[Member]) -> None:
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, STACK_SIGNAL)
        limit = time.monotonic() + 1.0
        sizes: list[int] = []
        while time.monotonic() < limit:
            time.sleep(0.05)
            before, sizes = sizes, [os.fstat(member.stacks.fileno()).st_size for member in members]
            if sizes == before and all(sizes):
                return


def _is_stopped(member: Member) -> bool:
    return member.exit is None and process.state(member.pid) in ("T", "t")


def _own_frames(stack: str) -> str:
    """Without the frames below the worker, which are the launcher's and, after a fork, its caller's."""
    kept, below = [], False
    for line in stack.splitlines():
        if not line.startswith("  File"):
            below = False
        below = below or f'"{LAUNCHER}"' in line
        if not below:
            kept.append(line)
    return "\n".join(kept)


def _waits_for_peers(stack: str) -> bool:
    """Whether the main thread, the last one that faulthandler writes, is inside a collective."""
    frames = stack.rpartition("hread 0x")[2].splitlines()[1:4]
    return any("/torch/distributed/" in frame or "/onecurve/parallel/" in frame for frame in frames)
