"""What a run tells: lines for the person who watches, rows and events in its folder. Rank 0 does; on the others nothing
comes of it."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onecurve.launch import RankContext
from onecurve.report.console import Progress, say_on
from onecurve.train.memory import RankMemory, aggregate
from onecurve.train.records import METRICS, REMOVED, Metrics, log_event, write_json


@dataclass
class Recorder:
    """`steps`: of the whole run. `lines`: off a terminal rank 0 prints one per step; on one the launcher draws a bar.
    `memory`: maximum and mean over the ranks, once measured."""

    folder: Path
    context: RankContext
    steps: int
    quiet: bool = False
    lines: Progress | None = None
    metrics: Metrics | None = None
    memory: tuple[int, float] | None = None
    val_loss: float | None = None  # the last one, for the bar

    @property
    def leader(self) -> bool:
        return self.context.rank == 0

    def say(self, text: str) -> None:
        """One line on stderr, once per run."""
        if self.leader and not self.quiet:
            say_on(sys.stderr, f"onecurve: {text}")

    def event(self, name: str, step: int, **details: Any) -> None:
        if self.leader:
            log_event(self.folder, name, step, **details)

    def keep_rows(self, through: int) -> None:
        """The metrics end with step `through`: what comes next is written behind it."""
        if not self.leader:
            return
        if self.metrics is None:
            self.metrics = Metrics(self.folder, through)
        else:
            self.metrics.cut(through)
        if self.metrics.lost or self.metrics.removed:
            self.say(damage(self.metrics, through))
            self.event("metrics_lost", through, rows=self.metrics.lost, removed=self.metrics.removed)

    def row(self, row: dict[str, Any]) -> None:
        """The metrics of a step that is done."""
        if self.metrics is not None:
            self.metrics.write(row)
        if self.lines is not None:
            shown = {name: row.get(name) for name in ("loss", "val_loss", "tokens_per_second")}
            self.lines.update(row["step"], **shown)
        self.val_loss = row.get("val_loss", self.val_loss)
        numbers = (row["loss"], row["tokens_per_second"], self.val_loss)
        text = " ".join("None" if number is None else f"{number:.6g}" for number in numbers)
        self.context.progress(row["step"], self.steps, text)

    def profile(self, ranks: Sequence[RankMemory]) -> None:
        """The memory of all ranks, into memory.json."""
        maximum, mean = self.memory = aggregate(ranks)
        if self.leader:
            rows = [asdict(rank) | {"total": rank.total} for rank in ranks]
            write_json(self.folder / "memory.json", {"ranks": rows, "maximum": maximum, "mean": mean})


def damage(metrics: Metrics, keep: int) -> str:
    """What was found wrong with the rows up to step `keep`, in one line."""
    parts = [f"lines that are no rows, moved to {REMOVED}: {metrics.removed}"] * bool(metrics.removed)
    parts += [f"steps without a row, of the first {keep}: {metrics.lost}"] * bool(metrics.lost)
    return f"{METRICS} was changed from outside: {'; '.join(parts)}"
