"""Plain text for people: tables in columns, and a run's progress on a terminal or off one."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TextIO


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, left: Iterable[int] = (0,)) -> list[str]:
    """Lines of a table: columns two spaces apart, right-aligned unless listed in `left`, no rules."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    leftish = set(left)
    lines = []
    for row in cells:
        parts = [c.ljust(w) if i in leftish else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(parts).rstrip())
    return lines


def printable(text: str, keep: str = "") -> str:
    """`text` on one line of any terminal: line breaks and controls (a file's name may hold them) as visible escapes,
    except those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def say_on(stream: TextIO, line: str) -> None:
    """A line for whoever reads it. Where nobody does any more (a closed pipe, a terminal that is gone) the stream goes
    nowhere from now on: a long run must not end for that, and what matters is in its records."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def human_bytes(count: float) -> str:
    """Bytes with a binary unit: 89472 -> '87.4 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """A run's progress on stderr: a bar with step, loss, tokens/s and time left on a terminal, plain lines off one.

    `log_every` counts steps between plain lines (0 = none; the last step is always shown). The bar is drawn from
    `update` alone, at most ten times a second: no thread, since the caller may fork.
    """

    def __init__(self, total: int, *, start: int = 0, log_every: int = 1, stream: TextIO | None = None) -> None:
        self.total, self.log_every = total, log_every
        self.stream = sys.stderr if stream is None else stream
        self._start, self._begun, self._drawn = start, time.monotonic(), 0.0
        self._bar: Any = None
        if self.stream.isatty():
            self._bar, self._task = _bar(self.stream, total, start)

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        val_loss: float | None = None,
    ) -> None:
        """`step` steps are done. It may go backwards, after a rollback. One with a `val_loss` always has its line."""
        now = time.monotonic()
        speed = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        losses = {"loss": loss, "val_loss": val_loss}
        value = "  ".join(f"{name} {number:.4f}" for name, number in losses.items() if number is not None)
        left = human_seconds((now - self._begun) / max(1, step - self._start) * (self.total - step)) + " left"
        if self._bar is None:
            due = step == self.total or val_loss is not None
            if due or (self.log_every and step % self.log_every == 0):
                self.say("  ".join(part for part in (f"step {step}/{self.total}", value, speed, left) if part))
        elif step == self.total or now - self._drawn >= 0.1:
            self._drawn = now
            self._bar.update(self._task, completed=step, loss=value, speed=speed, left=left, refresh=True)

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._bar is None:
            say_on(self.stream, line)
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stages:
    """Progress of work that is a list of named parts: one line, drawn again, on a terminal; a line per part off one."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what, self._begun = what, time.monotonic()
        self.stream = sys.stderr if stream is None else stream
        self._drawn = False

    def update(self, done: int, total: int, text: str) -> None:
        """`done` of `total` parts are; `text` is the next one's name, empty at the end."""
        left = (time.monotonic() - self._begun) / max(1, done) * (total - done)
        counted = f"{done}/{total} {self._what}" + (f", {human_seconds(left)} left" if done else "")
        if self.stream.isatty():
            columns = shutil.get_terminal_size().columns
            self.stream.write("\r\x1b[K" + f"{counted}: {text}"[: columns - 1] if text else "\r\x1b[K")
            self._drawn = bool(text)
        elif text:
            self.stream.write(f"{counted}: {text}\n")
        self.stream.flush()

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            self.stream.write("\n")


class ByteProgress:
    """Progress of work that is counted in bytes: a bar on a terminal; off one a line per kind of work, once `quiet`
    seconds have passed, so that a short command (or one that refuses its input) says what matters and no more."""

    def __init__(self, stream: TextIO | None = None, quiet: float = 2.0) -> None:
        self.stream = sys.stderr if stream is None else stream
        self._what, self._drawn, self._aloud = "", 0.0, time.monotonic() + quiet
        self._bar: Any = None
        if self.stream.isatty():
            self._bar, self._task = _bar(self.stream, 0, 0, steps=False)

    def update(self, what: str, done: int, total: int) -> None:
        """`what` is being done; `done` of `total` bytes are."""
        now = time.monotonic()
        if self._bar is None:
            if what == self._what or now < self._aloud:
                return
            print(f"{what}: {human_bytes(total)}", file=self.stream, flush=True)
        elif what != self._what or done >= total or now - self._drawn >= 0.1:
            self._drawn = now
            left = f"{human_bytes(done)} of {human_bytes(total)}"
            # `total` 0 would draw a bar that pulses
            self._bar.update(self._task, completed=done, total=max(1, total), loss=what, left=left, refresh=True)
        self._what = what

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(stream: TextIO, total: int, start: int, *, steps: bool = True) -> tuple[Any, Any]:
    # rich costs 40 ms: only where there is a terminal to draw on
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = [BarColumn(), *(TextColumn(f"{{task.fields[{name}]}}") for name in ("loss", "speed", "left"))]
    if steps:
        columns.insert(0, TextColumn("step {task.completed}/{task.total}"))
    bar = Bar(*columns, console=Console(file=stream), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    task = bar.add_task("", total=total, completed=start, loss="", speed="", left="")
    bar.start()
    return bar, task
