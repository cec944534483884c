"""What the contract costs: the same training step, with and without the fixed order of additions.

The unordered twin hands each rank's gradient to the backend's `reduce_scatter` (gloo adds in the order it likes) in
place of the exchange and the tree; everything else is the same code: the buffers, the norm, the verdict, AdamW, the
all-gather. One pair per transport, so that both of a pair gather over the same one; ratio of paired rounds.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks import measure
from benchmarks.ours import optimizer_of, step_of
from benchmarks.workload import WORKLOADS, Workload
from onecurve.launch import RankContext
from onecurve.parallel import Mesh, ZeroOptimizer
from onecurve.parallel.contiguous import ContiguousGradients

TRANSPORTS = ("shm", "p2p", "alltoall")
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def unordered(optimizer: ZeroOptimizer) -> ZeroOptimizer:
    """`optimizer` with the backend's additions. For leaves in one aligned run per rank, without tied parameters."""
    gradients = optimizer._gradients
    assert isinstance(gradients, ContiguousGradients)

    def reduce() -> list[tuple[int, Tensor]]:
        (mine,) = (partial.tensor for partial in gradients._tree.partials())
        own = mine.new_empty(optimizer.partition.local)
        _reduce_scatter(own, mine)
        gradients._tree.clear()
        gradients._free[:] = gradients._buffers
        return [(0, own)]

    gradients.reduce = reduce  # type: ignore[method-assign]
    return optimizer


def measure_price(work: Workload, world: int, rounds: int, steps: int, realtime: bool) -> dict[str, Any]:
    """Seconds per step of both twins of each pair, and their losses."""

    def worker(context: RankContext) -> dict[str, Any]:
        losses: dict[str, list[float]] = {}

        def burst(name: str, step: Callable[[int], float]) -> Callable[[], None]:
            own = losses.setdefault(name, [])

            def run() -> None:
                for _ in range(steps):
                    own.append(step(len(own)))

            return run

        turns = {}
        for name in TRANSPORTS:
            for twin, changed in (("ordered", lambda o: o), ("unordered", unordered)):
                optimizer = changed(optimizer_of(work, Mesh(dp=world, transport=name), stage=1))
                turns[f"{twin}, {name}"] = burst(f"{twin}, {name}", step_of(work, optimizer))
        taken = measure.take_turns(turns, rounds=rounds, warm_up=2, context=context, realtime=realtime)
        return {"taken": taken, "losses": losses}

    by_rank = measure.on_ranks(worker, world)
    taken = measure.together([r["taken"] for r in by_rank], steps)
    return {**taken._asdict(), "losses": by_rank[0]["losses"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.arguments(__doc__, rounds=25, realtime=True)
    parser.add_argument("--model", choices=list(WORKLOADS), default="1m")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--steps", type=int, help="steps per burst (default 20 for the demo, else 1)")
    options = parser.parse_args(argv)
    work, steps = WORKLOADS[options.model], options.steps or (20 if options.model == "demo" else 1)
    measured = measure_price(work, options.width, options.rounds, steps, options.realtime)
    seconds, losses = measured["seconds"], measured["losses"]
    rows = []
    for name in TRANSPORTS:
        ordered, other = seconds[f"ordered, {name}"], seconds[f"unordered, {name}"]
        first = next((i + 1 for i, pair in enumerate(zip(*_twins(losses, name), strict=True)) if len(set(pair)) > 1), 0)
        milliseconds = [f"{1e3 * measure.Spread.of(s).median:.2f}" for s in (ordered, other)]
        rows.append([name, *milliseconds, measure.speed_up(other, ordered), f"from step {first}" if first else "no"])
    title = f"{work.name}: {work.tokens:,} tokens per step, ZeRO-1, W = {options.width}"
    headers = ["transport", "ordered ms", "unordered ms", "x unordered [quartiles]", "loss differs"]
    measure.report(headers, rows, title)
    measure.write_json(options.json, machine=measure.machine(), model=work.name, width=options.width, **measured)
    return 0


def _twins(losses: dict[str, list[float]], name: str) -> tuple[list[float], list[float]]:
    return losses[f"ordered, {name}"], losses[f"unordered, {name}"]


if __name__ == "__main__":
    sys.exit(main())
