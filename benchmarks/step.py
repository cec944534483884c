"""One training step beside the systems that do the same work: DDP, DDP + ZeroRedundancyOptimizer, FSDP2, DeepSpeed.

All train the same model from the same weights on the same tokens with the same leaves and accumulation, one thread per
rank, over gloo. They take turns in one set of processes. The losses are shown, so that everyone sees it is one work;
the ratio is against DDP + ZeroRedundancyOptimizer, with the quartiles of its rounds. "CPU ms" is the processor time of
all ranks and their threads per step: what is left of a figure on a machine that is busy with other things.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import deepspeed_peer, measure
from benchmarks.ours import ONECURVE, onecurve
from benchmarks.peers import PEERS
from benchmarks.workload import WORKLOADS, Workload
from onecurve.launch import RankContext

BASE = "DDP+ZeRO"
COMPARED = 10  # steps whose losses must agree; later ones drift apart by rounding, in every system
TOLERANCE = 1e-4


def systems(work: Workload, names: Sequence[str], rank: int, world: int) -> dict[str, Callable[[int], Any]]:
    peers = PEERS | deepspeed_peer.DEEPSPEED
    return {
        name: peers[name](work, rank, world) if name in peers else onecurve(work, world, stage=ONECURVE.index(name))
        for name in names
    }


def measure_steps(
    work: Workload, names: Sequence[str], world: int, rounds: int, steps: int, realtime: bool = False
) -> dict[str, Any]:
    """Seconds per step of each system by round, and its mean loss at every step."""

    def worker(context: RankContext) -> dict[str, Any]:
        losses: dict[str, list[Any]] = {name: [] for name in names}

        def burst(name: str, step: Callable[[int], Any]) -> Callable[[], None]:
            def run() -> None:
                for _ in range(steps):
                    losses[name].append(step(len(losses[name])))

            return run

        turns = {name: burst(name, step) for name, step in systems(work, names, context.rank, world).items()}
        warm_up = -(-COMPARED // steps)
        taken = measure.take_turns(turns, rounds=rounds, warm_up=warm_up, context=context, realtime=realtime)
        return {"taken": taken, "losses": {name: [float(x) for x in own] for name, own in losses.items()}}

    by_rank = measure.on_ranks(worker, world)
    taken = measure.together([r["taken"] for r in by_rank], steps)
    losses = {name: [sum(x) / world for x in zip(*(r["losses"][name] for r in by_rank), strict=True)] for name in names}
    return {**taken._asdict(), "losses": losses}


def show(
    work: Workload,
    world: int,
    seconds: measure.Seconds,
    cpu_seconds: measure.Seconds,
    losses: dict[str, list[float]],
) -> list[dict[str, Any]]:
    """The table of one model and width; returns its figures."""
    base = BASE if BASE in seconds else next(iter(seconds))
    figures = []
    for name, own in seconds.items():
        median = measure.Spread.of(own).median
        apart = max(abs(a - b) / b for a, b in zip(losses[name][:COMPARED], losses[base][:COMPARED], strict=True))
        figures.append({
            "system": name, "seconds": own, "cpu_seconds": cpu_seconds[name],
            "milliseconds": 1e3 * median, "tokens_per_second": work.tokens / median,
            "cpu_milliseconds": 1e3 * measure.Spread.of(cpu_seconds[name]).median,
            "ratio": measure.speed_up(seconds[base], own),
            "first_loss": losses[name][0], "last_loss": losses[name][COMPARED - 1], "apart": apart,
        })  # fmt: skip
    measure.report(
        ["system", "ms/step", "CPU ms", "tokens/s", f"x {base} [quartiles]", "loss 1", f"loss {COMPARED}", "apart"],
        [
            [
                f["system"], f"{f['milliseconds']:.2f}", f"{f['cpu_milliseconds']:.2f}",
                f"{f['tokens_per_second']:,.0f}", f["ratio"],
                f"{f['first_loss']:.6f}", f"{f['last_loss']:.6f}", f"{f['apart']:.0e}",
            ]
            for f in figures
        ],
        f"{work.name}: {work.tokens:,} tokens per step, {work.leaves} leaves x {work.accumulate}, W = {world}",
    )  # fmt: skip
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    names = [*PEERS]
    missing = "its ranks wait for each other by spinning" if options.realtime else deepspeed_peer.why_missing()
    if missing is None:
        names += deepspeed_peer.DEEPSPEED
    names += ONECURVE
    names = [name for name in names if not options.only or any(part in name for part in options.only)]
    if missing and not options.only:
        print(f"DeepSpeed: {missing}\n")
    found, strangers = [], []
    for model in options.model:
        work = WORKLOADS[model].resized(
            leaves=options.leaves, accumulate=options.accumulate, micro_batch=options.micro_batch
        )
        steps = options.steps or (20 if model == "demo" else 2)
        for world in options.width:
            if work.leaves % world:
                print(f"{work.leaves} leaves do not divide among {world} ranks: the peers need equal shares")
                return 2
            measured = measure_steps(work, names, world, options.rounds, steps, options.realtime)
            figures = show(work, world, **measured)
            strangers += [f"{f['system']} ({model}, W = {world})" for f in figures if f["apart"] > TOLERANCE]
            found.append({"model": model, "width": world, "tokens": work.tokens, "systems": figures})
    measure.write_json(options.json, machine=measure.machine(), runs=found)
    if strangers:
        print(f"not the same work: losses more than {TOLERANCE} apart: {', '.join(strangers)}", file=sys.stderr)
    return 1 if strangers else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = measure.arguments(__doc__, rounds=15, realtime=True)
    parser.add_argument("--model", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--width", nargs="+", type=int, default=[2, 4], help="ranks (default 2 4)")
    parser.add_argument("--steps", type=int, help="steps per burst (default 20 for the demo, else 2)")
    parser.add_argument("--leaves", type=int)
    parser.add_argument("--accumulate", type=int)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--only", nargs="+", metavar="PART", help="only systems whose name holds one of these")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
