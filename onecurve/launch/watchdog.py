"""Finds a rank that makes no progress, and says where every rank stands."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from onecurve.launch import process
from onecurve.launch.blame import where
from onecurve.launch.crew import Crew, Member
from onecurve.launch.rank import STACK_SIGNAL


@dataclass(frozen=True)
class Finding:
    """What the watchdog says: one line that names the culprit (if one rank is), and every rank's state and stack."""

    line: str
    stacks: str
    rank: int | None


class Watchdog:
    """Counts, for each rank, the time in which the parent ran and saw no sign of life.

    Its own clock, not the ranks' time stamps: when the whole machine sleeps or the parent is stopped for an hour, no
    rank is blamed for that hour.
    """

    LONGEST_LOOK = 1.0  # seconds between two looks that count at most

    def __init__(self, crew: Crew, stall_seconds: float, limit_seconds: float | None = None) -> None:
        self.crew = crew
        self.stall_seconds = stall_seconds
        self.limit_seconds = limit_seconds
        self._idle = [0.0] * crew.world
        self._beats = [-1] * crew.world
        self._started = self._looked = time.monotonic()

    def look(self) -> Finding | None:
        """Whether the run must end: a rank without a sign of life for `stall_seconds`, or the whole limit is used."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, self.LONGEST_LOOK), now
        board = self.crew.board
        for member in self.crew.running:
            rank = member.rank
            beat = board.last_beat(rank)
            self._idle[rank] = 0.0 if beat != self._beats[rank] or board.done(rank) else self._idle[rank] + passed
            self._beats[rank] = beat
        silent = [member for member in self.crew.running if self._idle[member.rank] >= self.stall_seconds]
        if silent:
            # The one that fell silent first: the others wait for it.
            return self._silence(min(silent, key=lambda member: board.last_beat(member.rank)))
        if self.limit_seconds is not None and now - self._started > self.limit_seconds:
            return Finding(f"the ranks took longer than {self.limit_seconds:g} s", self._stacks(), None)
        return None

    def _silence(self, first: Member) -> Finding:
        stopped = self._stopped()
        culprit = (stopped or [first])[0].rank
        board = self.crew.board
        why = "it is stopped (state T) by a signal" if stopped else "it hangs"
        place = where(board.step(culprit), board.place(culprit))
        line = f"rank {culprit} made no progress for {self.stall_seconds:g} s{place}: {why}"
        return Finding(line, self._stacks(), culprit)

    def _stopped(self) -> list[Member]:
        return [member for member in self.crew.running if process.state(member.pid) in ("T", "t")]

    def _stacks(self) -> str:
        stopped = self._stopped()
        states = {member.rank: process.state(member.pid) for member in self.crew.running}
        self._ask_for_stacks([member for member in self.crew.running if member not in stopped])
        board, lines = self.crew.board, []
        for member in self.crew.members:
            rank = member.rank
            seconds = (time.monotonic_ns() - board.last_beat(rank)) / 1e9
            state = "ended" if member.ending else "done" if board.done(rank) else f"state {states.get(rank) or '?'}"
            lines.append(
                f"--- rank {rank}: {state}, step {board.step(rank)}, place {board.place(rank) or '?'}, "
                f"last sign of life {seconds:.1f} s ago"
            )
            lines.append(member.stack_text() or "    (no stack: it is stopped or has ended)")
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
