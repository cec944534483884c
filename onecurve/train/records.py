"""What a run writes down: a row per step, events, and small JSON files. Only rank 0 writes."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from onecurve.errors import RunFailed
from onecurve.paths import read_bytes

METRICS = "metrics.jsonl"
REMOVED = "metrics.removed.jsonl"
EVENTS = "events.jsonl"


class RecordFailed(RunFailed):
    """A record of the run can't be written; its checkpoints are as they were (exit 3)."""


@contextlib.contextmanager
def _recording(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordFailed(f"{path}: can't be written: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, so that a reader sees the old or the new content, never half of it. Raises
    RecordFailed."""
    replace_text(path, json.dumps(value, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _recording(path):
            temp.write_text(text, encoding="utf-8")
            temp.replace(path)
    except RecordFailed:
        temp.unlink(missing_ok=True)
        raise


class Metrics:
    """`metrics.jsonl`: each step once, in order. Rows are flushed to the system one by one. Raises RecordFailed."""

    def __init__(self, folder: Path, keep_through: int) -> None:
        """Open the file, cut after step `keep_through`."""
        self._path, self._beside = folder / METRICS, folder / REMOVED
        self._file: TextIO | None = None
        self.cut(keep_through)

    def cut(self, keep_through: int) -> None:
        """Drop the rows past step `keep_through`, and a last line that a kill left torn.

        What else is no row, or a step's second one, somebody else has done to the file: `removed` such lines are moved
        to REMOVED. `lost` is how many of the steps up to there have no row.
        """
        if self._file is not None:
            self._file.close()
        rows, strange = self._read()
        kept = [line for step, line in sorted(rows.items()) if step <= keep_through]
        self.lost, self.removed = keep_through - len(kept), len(strange)
        with _recording(self._beside):
            if strange:
                with self._beside.open("ab") as file:
                    file.write(b"".join(line + b"\n" for line in strange))
        replace_text(self._path, "".join(f"{line}\n" for line in kept))
        with _recording(self._path):
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        assert self._file is not None
        with _recording(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def _read(self) -> tuple[dict[int, str], list[bytes]]:
        """The last row of each step, and the lines that should not be there."""
        cure = "move it away; the run goes on without the rows in it"
        content = read_bytes(self._path, "metrics", cure) if self._path.exists() else b""
        lines = content.split(b"\n")
        if _step_of(lines[-1]) is None:
            lines.pop()  # torn, or the nothing after the last line
        rows: dict[int, str] = {}
        strange = []
        for line in lines:
            step = _step_of(line)
            if step is None:
                strange.append(line)
                continue
            if step in rows:
                strange.append(rows[step].encode())
            rows[step] = line.decode()
        return rows, strange


def _step_of(line: bytes) -> int | None:
    """The step of a row of metrics; None if it is none."""
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int and step > 0 else None


def log_event(folder: Path, event: str, step: int, **details: Any) -> None:
    """Append one line to `events.jsonl`, in one write, so that lines of two processes never mix. Where that fails the
    line goes to stderr instead: an event often tells of an error, and must not hide it behind one of its own."""
    line = json.dumps({"event": event, "step": step, "time": time.time(), **details}) + "\n"
    try:
        with (folder / EVENTS).open("ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                line = "\n" + line  # a full disk has torn the one before
            file.write(line.encode())
    except OSError as error:
        print(f"onecurve: {folder / EVENTS}: {error.strerror or error}; not recorded: {line}", end="", file=sys.stderr)
