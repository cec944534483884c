"""One shared page where ranks leave signs of life: the parent reads it, nobody waits for anybody.

A rank writes its step, place and time with a few plain stores (under a microsecond, no lock, no system call but the
clock), so it can do so in the hot loop. The parent polls. Words are 8-byte aligned, so a reader sees the old or the new
value of a number; a text may be torn for one poll, which costs a wrong letter in a progress bar and nothing else.
"""

from __future__ import annotations

import mmap
import time
from functools import lru_cache

HEADER_BYTES = 64
STRIDE_BYTES = 256
PLACE_AT, PLACE_BYTES = 64, 32
TEXT_AT, TEXT_BYTES = 96, 160
STOP, TEARDOWN = 0, 1  # words of the header
STEP, TOTAL, BEAT, DONE = 0, 1, 2, 3  # words of a rank's slot


@lru_cache(maxsize=256)
def _padded(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size].ljust(size, b"\0")


class Board:
    """Shared memory for `world` ranks: anonymous (inherited by fork), or over the open file `fd` (given to exec)."""

    def __init__(self, world: int, fd: int = -1) -> None:
        self.world = world
        self.memory = mmap.mmap(fd, HEADER_BYTES + STRIDE_BYTES * world)
        self.words = memoryview(self.memory).cast("q")
        self.closed = False

    @staticmethod
    def size(world: int) -> int:
        """Bytes that the file behind a board of `world` ranks needs."""
        return HEADER_BYTES + STRIDE_BYTES * world

    def _word(self, rank: int) -> int:
        return (HEADER_BYTES + STRIDE_BYTES * rank) // 8

    def _read_text(self, rank: int, at: int, size: int) -> str:
        start = HEADER_BYTES + STRIDE_BYTES * rank + at
        return self.memory[start : start + size].split(b"\0", 1)[0].decode("utf-8", "ignore")

    # --- ranks write ---------------------------------------------------------------------
    def beat(self, rank: int) -> None:
        self.words[self._word(rank) + BEAT] = time.monotonic_ns()

    def mark_place(self, rank: int, name: str) -> None:
        """The place is a sign of life as well; at most 32 bytes of the name are kept."""
        start = HEADER_BYTES + STRIDE_BYTES * rank + PLACE_AT
        self.memory[start : start + PLACE_BYTES] = _padded(name, PLACE_BYTES)
        self.beat(rank)

    def mark_progress(self, rank: int, step: int, total: int | None, text: str) -> None:
        word = self._word(rank)
        if text:
            start = HEADER_BYTES + STRIDE_BYTES * rank + TEXT_AT
            self.memory[start : start + TEXT_BYTES] = text.encode("utf-8", "replace")[:TEXT_BYTES].ljust(
                TEXT_BYTES, b"\0"
            )
        if total is not None:
            self.words[word + TOTAL] = total
        self.words[word + STEP] = step
        self.words[word + BEAT] = time.monotonic_ns()

    def mark_done(self, rank: int) -> None:
        self.words[self._word(rank) + DONE] = 1

    # --- anybody ---------------------------------------------------------------------------
    def request_stop(self, signum: int) -> None:
        """Ask every rank to stop at a step that they agree on. The first signal stays on record."""
        if not self.closed and not self.words[STOP]:
            self.words[STOP] = signum

    @property
    def stop_signal(self) -> int:
        """The signal that asked for a stop; 0 while none did."""
        return self.words[STOP]

    def announce_teardown(self) -> None:
        """From here on SIGTERM means that another rank failed: it is not preemption, and nothing is to be saved."""
        self.words[TEARDOWN] = 1

    @property
    def torn_down(self) -> bool:
        return self.words[TEARDOWN] != 0

    # --- the parent reads ------------------------------------------------------------------
    def last_beat(self, rank: int) -> int:
        """Monotonic nanoseconds of the rank's last sign of life; 0 before the first."""
        return self.words[self._word(rank) + BEAT]

    def step(self, rank: int) -> int:
        return self.words[self._word(rank) + STEP]

    def total(self, rank: int) -> int | None:
        return self.words[self._word(rank) + TOTAL] or None

    def place(self, rank: int) -> str:
        return self._read_text(rank, PLACE_AT, PLACE_BYTES)

    def text(self, rank: int) -> str:
        return self._read_text(rank, TEXT_AT, TEXT_BYTES)

    def done(self, rank: int) -> bool:
        return self.words[self._word(rank) + DONE] != 0

    @property
    def all_done(self) -> bool:
        return all(self.done(rank) for rank in range(self.world))

    def close(self) -> None:
        self.closed = True
        self.words.release()
        self.memory.close()
