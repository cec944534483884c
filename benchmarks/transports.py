"""Moving the bytes: the exchange with its ordered sum, and the all-gather, over each transport and the backend's own.

"reduce" is what brings every rank the sum of its range: for the transports one exchange and the additions in the fixed
tree, for the backend one `reduce_scatter`, which adds in the order it likes. One thread per rank; the ratio is against
the backend.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import measure
from onecurve.launch import RankContext
from onecurve.parallel import Mesh
from onecurve.parallel.contiguous import BLOCK
from onecurve.parallel.transports import Transport
from onecurve.parallel.tree import TreeSum

TRANSPORTS = ("shm", "p2p", "alltoall")
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reducer(transport: Transport, numel: int) -> Callable[[], Tensor]:
    """The exchange of `numel` elements and the sum of this rank's range, as `ContiguousGradients` does it."""
    width = numel // transport.size
    mine = transport.empty(numel, torch.float32).fill_(1.0)
    routes = [(r * width, (r + 1) * width) for r in range(transport.size)]
    own = mine[slice(*routes[transport.rank])]

    def run() -> Tensor:
        received = transport.exchange([mine], [1] * transport.size, routes)
        for begin in range(0, width, BLOCK):
            tree = TreeSum(torch.empty_like)
            for leaf, (part,) in enumerate(received):
                tree.push(leaf, 1, part[begin : begin + BLOCK], writable=not transport.zero_copy)
            own[begin : begin + BLOCK].copy_(tree.total())
        return own

    return run


def gatherer(transport: Transport, numel: int) -> Callable[[], None]:
    whole = transport.empty(numel, torch.float32).fill_(1.0)
    width = numel // transport.size
    own = whole[transport.rank * width : (transport.rank + 1) * width]
    return lambda: transport.all_gather(whole, own)()


def backend(numel: int, rank: int, world: int) -> dict[str, Callable[[], object]]:
    whole, own = torch.ones(numel), torch.ones(numel // world)
    return {
        "reduce, backend": lambda: _reduce_scatter(own, whole),
        "all-gather, backend": lambda: _all_gather(whole, own),
    }


def measure_size(numel: int, world: int, rounds: int, repeats: int, realtime: bool) -> measure.Seconds:
    """Seconds per operation."""

    def worker(context: RankContext) -> measure.Turns:
        candidates = backend(numel, context.rank, world)
        for name in TRANSPORTS:
            transport = Mesh(dp=world, transport=name).transport
            candidates[f"reduce, {name}"] = reducer(transport, numel)
            candidates[f"all-gather, {name}"] = gatherer(transport, numel)

        def burst(run: Callable[[], object]) -> Callable[[], None]:
            return lambda: [run() for _ in range(repeats)] and None

        turns = {name: burst(run) for name, run in candidates.items()}
        return measure.take_turns(turns, rounds=rounds, warm_up=2, context=context, realtime=realtime)

    return measure.together(measure.on_ranks(worker, world), repeats).seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.arguments(__doc__, rounds=15, realtime=True)
    parser.add_argument("--width", nargs="+", type=int, default=[2, 4], help="ranks (default 2 4)")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1 << 15, 1 << 20, 1 << 23], help="fp32 elements")
    options = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    for world in options.width:
        for size in options.sizes:
            numel = -(-size // (16 * world)) * 16 * world
            repeats = max(1, min(50, (1 << 22) // numel))
            seconds = measure_size(numel, world, options.rounds, repeats, options.realtime)
            rows = []
            for operation in ("reduce", "all-gather"):
                base = seconds[f"{operation}, backend"]
                for name in ("backend", *TRANSPORTS):
                    own = seconds[f"{operation}, {name}"]
                    median = measure.Spread.of(own).median
                    ratio = measure.speed_up(base, own)
                    rows.append([f"{operation}, {name}", f"{1e3 * median:.3f}", ratio])
                    found.append({
                        "width": world, "elements": numel, "operation": operation, "over": name,
                        "seconds": own, "ratio": ratio,
                    })  # fmt: skip
            measure.report(["operation", "ms", "x backend [quartiles]"], rows, f"{numel:,} fp32 elements, W = {world}")
    measure.write_json(options.json, machine=measure.machine(), operations=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
