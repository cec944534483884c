"""What a run writes down: a row per step, events, and small JSON files. Only rank 0 writes."""

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, so that a reader sees the old or the new content, never half of it."""
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    temp.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temp.replace(path)


class Metrics:
    """`metrics.jsonl`: each step once, in order. Rows are flushed to the system one by one."""

    def __init__(self, folder: Path, keep_through: int) -> None:
        """Open the file, cut after step `keep_through`."""
        self._path = folder / METRICS
        self._file: TextIO | None = None
        self.cut(keep_through)

    def cut(self, keep_through: int) -> None:
        """Drop the rows past step `keep_through`, and a last line that a kill left torn."""
        if self._file is not None:
            self._file.close()
        kept = [line for line, step in self._rows() if step <= keep_through]
        temp = self._path.with_name(f".{METRICS}.{os.getpid()}")
        temp.write_text("".join(kept), encoding="utf-8")
        temp.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def _rows(self) -> list[tuple[str, int]]:
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                rows.append((line, int(json.loads(line)["step"])))
            except (ValueError, KeyError, TypeError):
                break  # torn by a kill: nothing after it can be trusted, and the steps will be run again
        return rows


def log_event(folder: Path, event: str, step: int, **details: Any) -> None:
    """Append one line to `events.jsonl`. Appended in one write, so that lines of two processes never mix."""
    line = json.dumps({"event": event, "step": step, "time": time.time(), **details}) + "\n"
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(line)
