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
        self._path = folder / METRICS
        self._file: TextIO | None = None
        self.cut(keep_through)

    def cut(self, keep_through: int) -> None:
        """Drop the rows past step `keep_through`, and a last line that a kill left torn. `lost` is then how many of the
        rows up to there are not in the file, which somebody else must have damaged."""
        if self._file is not None:
            self._file.close()
        kept = [line for line, step in self._rows() if step <= keep_through]
        self.lost = keep_through - len(kept)
        replace_text(self._path, "".join(kept))
        with _recording(self._path):
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        assert self._file is not None
        with _recording(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def _rows(self) -> list[tuple[str, int]]:
        if not self._path.exists():
            return []
        rows = []
        content = read_bytes(self._path, "metrics", "move it away; the run goes on without the rows in it")
        for line in content.decode("utf-8", errors="replace").splitlines(keepends=True):
            try:
                rows.append((line, int(json.loads(line)["step"])))
            except (ValueError, KeyError, TypeError):
                break  # torn by a kill: nothing after it can be trusted, and the steps will be run again
        return rows


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
