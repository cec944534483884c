"""How everything here is measured.

All candidates live in the same processes and take turns in short bursts (A B C  B C A  C A B ...), so that what else
the machine does falls on all alike. A burst counts as its slowest rank. What is compared are ratios of bursts of the
same round: their median, and the quartiles as the spread.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onecurve.launch import RankContext, run_ranks
from onecurve.report.console import table

Burst = Callable[[], object]  # one run of a candidate's work on this rank
Seconds = dict[str, list[float]]  # per candidate, one value per round


class Turns(NamedTuple):
    """What the candidates' bursts took on a rank: by the clock, and of the processor (all its threads)."""

    seconds: Seconds
    cpu_seconds: Seconds


class Spread(NamedTuple):
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"


def take_turns(
    candidates: Mapping[str, Burst], *, rounds: int, warm_up: int, context: RankContext, realtime: bool = False
) -> Turns:
    """Run each candidate's burst once per round; the order moves by one each round. Collective.

    `realtime`: see `ahead_of_others`.
    """
    with ahead_of_others(realtime):
        return _take_turns(candidates, rounds, warm_up, context)


def _take_turns(candidates: Mapping[str, Burst], rounds: int, warm_up: int, context: RankContext) -> Turns:
    names = list(candidates)
    turns = Turns({name: [] for name in names}, {name: [] for name in names})
    for turn in range(-warm_up, rounds):
        if turn == 0:
            gc.collect()
            gc.freeze()  # what the other candidates hold must not slow this one's collections
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            context.progress(turn + warm_up, rounds + warm_up, name)
            _meet()
            began, began_cpu = time.perf_counter(), time.process_time()
            candidates[name]()
            if turn >= 0:
                turns.seconds[name].append(time.perf_counter() - began)
                turns.cpu_seconds[name].append(time.process_time() - began_cpu)
    gc.unfreeze()
    return turns


@contextmanager
def ahead_of_others(wanted: bool) -> Iterator[None]:
    """Real-time priority for all threads that this rank has now (Linux, root): what else the machine does has to wait,
    so keep it to seconds. The ranks still share the cores among themselves."""
    if wanted:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
    yield
    if wanted:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def together(by_rank: Sequence[Sequence[Seconds]], steps: int) -> Turns:
    """All ranks' turns as one, per step: a burst takes as long as on its slowest rank; processor time is summed."""
    return Turns(*(
        {name: [add(burst) / steps for burst in zip(*(own[name] for own in owns), strict=True)] for name in owns[0]}
        for add, owns in zip((max, sum), zip(*by_rank, strict=True), strict=True)
    ))  # fmt: skip


def speed_up(base: Sequence[float], other: Sequence[float]) -> Spread:
    """How many times as fast as `base` the other is, round by round."""
    return Spread.of([a / b for a, b in zip(base, other, strict=True)])


def on_ranks(worker: Callable[[RankContext], Any], world: int, stall_seconds: float = 300.0) -> list[Any]:
    """`worker` on `world` local ranks over gloo, one thread each; their results in rank order."""
    with tempfile.TemporaryDirectory(prefix="onecurve-bench-") as folder:
        return run_ranks(worker, world, folder=Path(folder), stall_seconds=stall_seconds, progress=_show, group=True)


def arguments(description: str | None, *, rounds: int, realtime: bool = False) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take, and `--realtime` where it can be had."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=style)
    parser.add_argument("--rounds", type=int, default=rounds, help="measured bursts each (default %(default)s)")
    if realtime:
        text = "on a busy machine: ahead of all else while it measures (Linux, root)"
        parser.add_argument("--realtime", action="store_true", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    return parser


def machine() -> dict[str, Any]:
    """Where the figures hold."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_before": list(os.getloadavg()),
    }


def report(headers: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    print((f"{title}\n" if title else "") + "\n".join(table(headers, rows)), end="\n\n", flush=True)


def write_json(path: Path | None, **figures: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _show(step: int, total: int | None, text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K  round {step + 1} of {total}: {text}", end="\r", file=sys.stderr, flush=True)
