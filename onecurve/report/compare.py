"""Two runs side by side: the same curve, a part of it, or the first step that differs; and how the runs differ.

Values are compared by their bits as `metrics.jsonl` holds them; where both runs kept a checkpoint of a step, its state
digest is compared too, because a loss can stay equal for a while after the weights have parted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecurve.config import CURVE_SECTIONS, RUN_SECTIONS
from onecurve.config_text import read_toml, show
from onecurve.errors import InputError
from onecurve.paths import FOLDER, need, read_bytes
from onecurve.report.console import printable, table

VALUES = ("loss", "grad_norm", "param_norm", "val_loss")
PARTS = {"curve": CURVE_SECTIONS, "layout": RUN_SECTIONS, "numerics": ("numerics",)}


@dataclass
class Run:
    """What a run folder says of itself. `notes` are flaws that do not stop a comparison."""

    path: Path
    rows: dict[int, dict[str, Any]]
    config: dict[str, Any]
    record: dict[str, Any]  # run.json
    digests: dict[tuple[int, str], str]  # (step, leaf hash) -> state digest of the checkpoints that are there
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """One value of one step that is not the same in both runs; None where a run has no such value."""

    step: int
    name: str
    a: float | str | None
    b: float | str | None

    @property
    def ulps(self) -> int | None:
        """How many fp64 values lie between the two; None where that means nothing."""
        return ulps_apart(self.a, self.b) if isinstance(self.a, float) and isinstance(self.b, float) else None


@dataclass(frozen=True)
class Comparison:
    """`first` holds every difference of the first step that differs; empty where all that both have is equal."""

    a: Run
    b: Run
    steps: int  # compared
    first: list[Difference]
    settings: list[tuple[str, str, str, str]]  # part, name, in a, in b

    @property
    def same(self) -> bool:
        """Whether both have the same steps, with the same bits."""
        return not self.first and not self.gaps

    @property
    def gaps(self) -> list[str]:
        """Which run begins later, which ends earlier than the other, in words."""
        sides = {"A": self.a.rows.keys(), "B": self.b.rows.keys()}
        begin, end = max(map(min, sides.values())), min(map(max, sides.values()))
        late = [f"{name} begins at step {begin}" for name, steps in sides.items() if min(steps) == begin]
        early = [f"{name} ends at step {end}" for name, steps in sides.items() if max(steps) == end]
        return [text for found in (late, early) if len(found) == 1 for text in found]

    def lines(self) -> list[str]:
        """The comparison as plain text."""
        lines = [f"A  {printable(str(self.a.path))}", f"B  {printable(str(self.b.path))}"]
        lines += [f"note: {printable(note)}" for run in (self.a, self.b) for note in run.notes]
        digests = len(self.a.digests.keys() & self.b.digests.keys())
        if not self.first:
            both = [step for step in self.a.rows.keys() & self.b.rows.keys() if _evaluated(self.a, self.b, step)]
            what = f"{self.steps} steps, {len(both)} validation losses and {digests} state digests"
            verdict = "SAME CURVE" if self.same else "EQUAL SO FAR" if self.steps else "NO STEP IN COMMON"
            lines.append("; ".join([f"{verdict}  {what} are equal bit for bit", *self.gaps]))
        else:
            step = self.first[0].step
            lines.append(f"DIFFERENT  step {step} is the first that differs, {self.steps} steps before it are equal")
            rows = [row for item in self.first for row in _rows(item)]
            lines += table(["value", "run", "decimal", "hex", "ulps apart"], rows, left=(0, 1, 2, 3))
        if self.settings:
            lines.append("")
            rows = [list(row) for row in self.settings]
            lines += table(["differs in", "name", "A", "B"], rows, left=range(4))
        else:
            lines.append("curve, layout and numerics are the same in both runs")
        return lines


def compare_runs(a: str | Path, b: str | Path) -> Comparison:
    """Compare two run folders. InputError where one is no run folder or has no metrics."""
    left, right = read_run(Path(a)), read_run(Path(b))
    equal, first = 0, list[Difference]()
    digests = left.digests.keys() & right.digests.keys()
    for step in sorted(left.rows.keys() | right.rows.keys() | {step for step, _ in digests}):
        first = list(_differences(step, left, right))
        if first:
            break
        equal += step in left.rows and step in right.rows
    return Comparison(left, right, equal, first, list(_settings(left, right)))


def read_run(path: Path) -> Run:
    """Read a run folder: `metrics.jsonl` is needed; what else is missing is noted."""
    need(path, FOLDER, "run", "give a run folder, such as one below runs/")
    notes = list[str]()
    rows = _read_metrics(path, notes)
    record = _read_json(path / "run.json", notes)
    config: dict[str, Any] = {}
    if (path / "config.toml").is_file():
        config = read_toml(path / "config.toml")
    else:
        notes.append(f"{path / 'config.toml'} is missing: settings are not compared")
    return Run(path, rows, config, record, _read_digests(path / "checkpoints"), notes)


def ulps_apart(a: float, b: float) -> int | None:
    """The number of steps between neighbouring fp64 values from a to b; 0 for equal bits, None with a NaN."""
    if math.isnan(a) or math.isnan(b):
        return None
    return abs(_order(a) - _order(b))


def _order(x: float) -> int:
    """Doubles as integers in their own order; both zeros are 0."""
    bits: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return bits if bits >= 0 else -(bits & 0x7FFF_FFFF_FFFF_FFFF)


def _differences(step: int, a: Run, b: Run) -> Iterator[Difference]:
    if step in a.rows and step in b.rows:
        for name in VALUES:
            x, y = _value(a.rows[step], name), _value(b.rows[step], name)
            if (name != "val_loss" or _evaluated(a, b, step)) and _bits(x) != _bits(y):
                yield Difference(step, name, x, y)
    elif any(min(run.rows) <= step <= max(run.rows) and step not in run.rows for run in (a, b)):  # a hole
        x, y = (_value(run.rows.get(step, {}), "loss") for run in (a, b))
        yield Difference(step, "loss", x, y)
    for key in a.digests.keys() & b.digests.keys():  # those hashed alike
        if key[0] == step and a.digests[key] != b.digests[key]:
            yield Difference(step, "state_digest", a.digests[key], b.digests[key])


def _evaluated(a: Run, b: Run, step: int) -> bool:
    """Both runs have a validation loss of the step: how often a run evaluates is no part of its curve."""
    return all(_value(run.rows[step], "val_loss") is not None for run in (a, b))


def _value(row: dict[str, Any], name: str) -> float | None:
    """A metric as fp64. `loss_hex` is the loss' own bits; other values are JSON numbers, which keep theirs."""
    if name == "loss" and "loss_hex" in row:
        return float.fromhex(row["loss_hex"])
    value = row.get(name)
    return None if value is None else float(value)


def _bits(value: float | None) -> bytes | None:
    if value is None:
        return None
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


def _rows(item: Difference) -> Iterator[list[str]]:
    apart = "" if item.ulps is None else f"{item.ulps:,}"
    for run, value in (("A", item.a), ("B", item.b)):
        shown = "none" if value is None else value
        cells = [repr(value), value.hex()] if isinstance(value, float) else [shown, ""]
        yield [item.name if run == "A" else "", run, *cells, apart if run == "A" else ""]


def _settings(a: Run, b: Run) -> Iterator[tuple[str, str, str, str]]:
    """What the two runs were told and where they ran, part by part; each name once."""
    recorded = {
        "curve": ("curve_id", "parent", "data_fingerprint"),
        "layout": ("layout",),  # as it was run: the transport that "auto" chose
        "numerics": ("numerics", "numeric_environment", "versions"),
    }
    for part, sections in PARTS.items():
        found: dict[str, tuple[str, str, str, str]] = {}
        if a.config and b.config:
            for section in sections:
                for change in _changes(part, section, a.config.get(section), b.config.get(section)):
                    found[change[1]] = change
        for key in recorded[part]:
            for change in _changes(part, key, a.record.get(key), b.record.get(key)):
                found.setdefault(change[1], change)
        yield from found.values()


def _changes(part: str, name: str, a: Any, b: Any) -> Iterator[tuple[str, str, str, str]]:
    """The leaves of two nested tables that are not equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _changes(part, f"{name}.{key}", a.get(key), b.get(key))
    elif a != b:
        yield part, name, "none" if a is None else show(a), "none" if b is None else show(b)


def _read_metrics(path: Path, notes: list[str]) -> dict[int, dict[str, Any]]:
    """Rows by step. A torn or foreign line is noted and left out: a run that was killed may end in one."""
    file = path / "metrics.jsonl"
    if not file.exists() and next(path.glob("checkpoints/step-*/manifest.json"), None) is not None:
        raise InputError(
            f"run {path}: it has checkpoints but no metrics.jsonl, as where they came from a mirror, which keeps none; "
            "compare the state digests that `onecurve inspect` shows"
        )
    content = read_bytes(file, "metrics", "give the folder of a run that has begun")
    lines = content.decode("utf-8", errors="replace").splitlines()
    rows = dict[int, dict[str, Any]]()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            step = row["step"]
            if type(step) is not int or step < 1 or not isinstance(row.get("loss_hex", ""), str):
                raise ValueError
            for name in VALUES:
                _value(row, name)
        except (ValueError, KeyError, TypeError):
            notes.append(f"{file}: line {number} of {len(lines)} is torn or no metrics row; it is left out")
            continue
        if step in rows:
            notes.append(f"{file}: step {step} is there twice; the later row counts")
        rows[step] = row
    missing = [step for step in range(min(rows, default=0), max(rows, default=0)) if step not in rows]
    if missing:
        notes.append(f"{file}: {len(missing)} steps are missing, the first is step {missing[0]}")
    if not rows:
        raise InputError(f"run {path}: metrics.jsonl holds no step; there is nothing to compare")
    return rows


def _read_json(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(read_bytes(file, "record", "its values are not compared"))
    except (InputError, ValueError, RecursionError) as error:
        reason = error if isinstance(error, InputError) else f"{file} is not JSON; its values are not compared"
        notes.append(str(reason))
        return {}
    return value if isinstance(value, dict) else {}


def _read_digests(folder: Path) -> dict[tuple[int, str], str]:
    """The state digests that the checkpoints claim; whether they are true is `inspect --check`'s business."""
    digests = dict[tuple[int, str], str]()
    for file in folder.glob("step-????????/manifest.json"):
        notes = list[str]()
        manifest = _read_json(file, notes)
        step, digest = manifest.get("step"), manifest.get("state_digest")
        chunk_hash = str(manifest.get("chunk_hash", "sha256"))  # schema 1 had no such field
        if type(step) is int and isinstance(digest, str):
            digests[step, chunk_hash] = digest
    return digests
