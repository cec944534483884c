"""Where a step's time goes, per rank: processor milliseconds and what of the clock is spent waiting for other ranks.

Rows that are indented are parts of the one above. "compute" is the model's forward and backward alone, without any of
this library: what no system can go below. The processor time is what counts where there are more ranks than cores.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import measure
from benchmarks.ours import optimizer_of, step_of
from benchmarks.workload import REPEAT, WORKLOADS, Workload, mean_loss
from onecurve.launch import RankContext
from onecurve.parallel import Mesh, ZeroOptimizer

ROWS = (
    "compute", "step", "  forward", "  backward", "    begin", "    end", "  reduce", "    exchange, waiting included",
    "  verdict", "    norm", "    messages, waiting included", "  update", "    AdamW", "    refresh weights",
    "      all-gather, waiting included",
)  # fmt: skip


class Clock:
    """Adds up the time of wrapped calls by name: [clock, processor] seconds."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            clock, processor = time.perf_counter(), time.thread_time()
            result = function(*args, **kwargs)
            spent = self.spent[name]
            spent[0] += time.perf_counter() - clock
            spent[1] += time.thread_time() - processor
            return result

        return run

    def wrap(self, thing: Any, method: str, name: str) -> None:
        setattr(thing, method, self.timed(name, getattr(thing, method)))

    def watch(self, optimizer: ZeroOptimizer) -> None:
        gradients, weights, transport = optimizer._gradients, optimizer.weights, optimizer.mesh.transport
        rule = type(optimizer.rule)
        for thing, method, name in [
            (optimizer.model, "forward", "  forward"), (optimizer, "backward", "  backward"),
            (gradients, "begin", "    begin"), (gradients, "end", "    end"), (gradients, "reduce", "  reduce"),
            (transport, "exchange", "    exchange, waiting included"), (optimizer._agreement, "reach", "  verdict"),
            (optimizer._agreement._norm, "message", "    norm"),
            (transport, "all_gather_bytes", "    messages, waiting included"),
            (optimizer, "_update", "  update"), (rule, "update", "    AdamW"),
            (weights, "refresh", "    refresh weights"),
            (transport, "all_gather", "      all-gather, waiting included"),
        ]:  # fmt: skip
            self.wrap(thing, method, name)


def measure_rank(
    context: RankContext, work: Workload, stage: int, steps: int, realtime: bool
) -> dict[str, list[float]]:
    """Per name, [clock, processor] milliseconds of a step on this rank."""
    optimizer = optimizer_of(work, Mesh(dp=context.world), stage=stage)
    step, alone, clock = step_of(work, optimizer), work.model(), Clock()
    batches = work.batches(optimizer.leaf_ids)

    def compute(data_step: int) -> None:
        for batch in batches[data_step % REPEAT]:
            mean_loss(alone, batch).backward()
        alone.zero_grad(set_to_none=True)

    for k in range(3):
        compute(k)
        step(k)
    clock.watch(optimizer)
    step, compute = clock.timed("step", step), clock.timed("compute", compute)
    with measure.ahead_of_others(realtime):
        for k in range(steps):
            context.progress(k, steps)
            compute(k)
            step(k)
    return {name: [1e3 * x / steps for x in spent] for name, spent in clock.spent.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.arguments(__doc__, rounds=50, realtime=True)
    parser.add_argument("--model", choices=list(WORKLOADS), default="demo")
    parser.add_argument("--stage", type=int, choices=range(4), default=1)
    parser.add_argument("--width", type=int, default=4)
    options = parser.parse_args(argv)
    work = WORKLOADS[options.model]
    shape = (work, options.stage, options.rounds, options.realtime)
    by_rank = measure.on_ranks(lambda context: measure_rank(context, *shape), options.width)
    figures = {
        name: [statistics.mean(own[name][i] for own in by_rank) for i in (0, 1)] for name in ROWS if name in by_rank[0]
    }
    title = f"{work.name}: ZeRO-{options.stage}, W = {options.width}, mean of {options.rounds} steps and all ranks"
    rows = [[name, f"{clock:.3f}", f"{processor:.3f}"] for name, (clock, processor) in figures.items()]
    measure.report(["", "clock ms", "processor ms"], rows, title)
    measure.write_json(options.json, machine=measure.machine(), by_rank=by_rank)
    return 0


if __name__ == "__main__":
    sys.exit(main())
