"""What a config will cost before anything is started: ranks, balance, memory, traffic, disk.

Counted from the config and the ownership table alone; no process, no tensor. The memory formulas, per rank, with P
elements, N data-parallel ranks, b bytes of the working dtype, c gradient buffers alive in the counter:

    zero 0   weights bP     gradients 4Pc                   optimizer 12P
    zero 1   weights bP     gradients 4Pc                   optimizer 12P/N
    zero 2   weights bP     gradients 4P/N c + two units    optimizer 12P/N
    zero 3   weights bP/N   gradients 4P/N c + two units    optimizer 12P/N    scratch: two units of weights

(`accumulate` > 1 at zero 2 and 3: one full gradient buffer instead of the two units. Tied embeddings: the head's use
has a gradient of its own until both are added.) What alignment adds is named beside each, so that formula and padding
are together what `memory.json` counts. Over p2p and alltoall the counters of zero 2 and 3 hold what was received: that
memory comes and goes within the step, and memory.json, which counts between steps, does not show it.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import NamedTuple

from onecurve.config import Config, ModelConfig
from onecurve.parallel.ownership import OwnershipTable, ParamSpec
from onecurve.parallel.tree import contiguous_leaves, counter_states, strided_leaves
from onecurve.report.console import human_bytes, table

BYTES = {"float32": 4, "bfloat16": 2}


def parameters(model: ModelConfig) -> list[ParamSpec]:
    """The GPT's trained parameters by formula, in its own order; with `tied` the head's matrix is the embedding's."""
    c, v = model.width, model.vocab
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        ("embedding", "token", (v, c)),
        ("embedding", "position", (model.context, c)),
    ]
    for i in range(model.layers):
        block = {
            "norm1.weight": (c,),
            "norm1.bias": (c,),
            "attention.qkv": (3 * c, c),
            "attention.out": (c, c),
            "norm2.weight": (c,),
            "norm2.bias": (c,),
            "mlp.up.weight": (4 * c, c),
            "mlp.up.bias": (4 * c,),
            "mlp.down.weight": (c, 4 * c),
            "mlp.down.bias": (c,),
        }
        shapes += [(f"blocks.{i}", name, shape) for name, shape in block.items()]
    if not model.tied:
        shapes.append(("head", "weight", (v, c)))
    shapes += [("head", "norm.weight", (c,)), ("head", "norm.bias", (c,))]
    return [ParamSpec(f"{unit}.{name}", shape, "float32", unit) for unit, name, shape in shapes]


class RankCost(NamedTuple):
    """Leaves per step, and bytes. `padding` is what alignment adds to the optimizer's state, `weights_padding` and
    `gradients_padding` to the other two. `counters`: the part of the gradients that is in the counters of zero 2 and 3.
    `scratch`: weights of other ranks, gathered for a moment. `sent`: per step."""

    leaves: int
    weights: int
    gradients: int
    optimizer: int
    padding: int
    sent: int
    weights_padding: int = 0
    gradients_padding: int = 0
    counters: int = 0
    scratch: int = 0

    @property
    def all_padding(self) -> int:
        return self.padding + self.weights_padding + self.gradients_padding

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.all_padding + self.scratch


def counter_buffers(leaves: int, width: int) -> int:
    """The most buffers that an owner's counter has alive at zero 2 and 3, where it takes `width` leaves per tick from
    memory that it may not write to and copies what is left after each tick (TreeSum.settle)."""
    stack: list[tuple[int, bool]] = []  # (leaves in the sum, is it in a buffer of the counter's own?)
    alive = most = 0
    for leaf in range(leaves):
        size, own = 1, False
        while stack and stack[-1][0] == size and (leaf + 1) % (2 * size) == 0:
            left_own = stack.pop()[1]
            alive += 1 - left_own - own
            most = max(most, alive)
            size, own = 2 * size, True
        stack.append((size, own))
        if (leaf + 1) % width == 0 or leaf + 1 == leaves:
            alive += sum(not own for _, own in stack)
            stack = [(size, True) for size, _ in stack]
        most = max(most, alive)
    return most


def rank_costs(config: Config) -> list[RankCost]:
    """What each data-parallel rank holds and sends."""
    layout, train, model = config.layout, config.train, config.model
    n, zero, working = layout.dp, layout.zero, BYTES[train.dtype]
    specs = parameters(model)
    partition = OwnershipTable(specs, dp=n, tp=layout.tp, pp=layout.pp, stage=zero).partition(0)
    p, shard = partition.numel, partition.local
    units = list(dict.fromkeys(spec.unit for spec in specs))
    ranges = {unit: partition.unit_range(unit) for unit in units}
    sizes = {unit: stop - start for unit, (start, stop) in ranges.items()}
    tied = model.vocab * model.width if model.tied else 0
    sizes["head"] += tied
    ticks = -(-train.leaves // n)
    routes, tied_route = [partition.routes(*ranges[unit]) for unit in units], partition.routes(0, tied)
    owners_buffers = counter_buffers(train.leaves, n)
    costs = []
    for rank in range(n):
        mine = (contiguous_leaves if zero <= 1 else strided_leaves)(train.leaves, n, rank)
        elsewhere = partition.flat - shard
        spread = shard * (n - 1)  # elements sent when this rank's shard goes to all others
        counters = scratch = 0
        if zero <= 1:
            held = [len(partials) for partials in counter_states(mine)]
            buffers = max([1, *(before + 1 for before in held[:-1])])
            gradients, gradients_held = 4 * (p + tied) * buffers, 4 * (partition.flat + tied) * buffers
            gather = spread * (4 if zero == 0 else working)
            sent = 4 * elsewhere * (held[-1] if held else 0) + gather
        else:
            parts = [route[rank] for route in routes]
            lo, hi = tied_route[rank]  # of the embedding's matrix, which comes first
            whole = train.accumulate > 1
            others = p + tied if whole else 2 * max(sizes.values())
            others_held = partition.flat + tied if whole else others
            counters = 4 * (sum(stop - start for start, stop in parts) + hi - lo) * owners_buffers
            gradients = round(4 * p / n * owners_buffers) + 4 * (hi - lo) * owners_buffers + 4 * others
            gradients_held = counters + 4 * others_held
            gather = working * spread * (1 if zero == 2 else 2 * train.accumulate * ticks)
            sent = 4 * elsewhere * len(mine) + gather
        weights, weights_held = working * p, working * partition.flat
        if zero == 3:
            weights, weights_held = round(working * p / n), working * (shard + 1)  # one stands for those not here
            widths = [working * n * space.width for space in partition.spaces]
            scratch = max(a + b for a, b in pairwise(widths))
        exact = 12 * p if zero == 0 else 12 * p / n
        state_held = 12 * (partition.flat if zero == 0 else shard)
        cost = RankCost(len(mine), weights, gradients, round(exact), state_held - round(exact), sent)
        padding = {"weights_padding": weights_held - weights, "gradients_padding": gradients_held - gradients}
        costs.append(cost._replace(**padding, counters=counters, scratch=scratch))
    return costs


def plan_lines(config: Config) -> list[str]:
    """The plan as plain text."""
    model, train, layout = config.model, config.train, config.layout
    count = sum(spec.numel for spec in parameters(model))
    sequences = train.leaves * train.accumulate * train.micro_batch
    tokens = sequences * model.context
    costs = rank_costs(config)
    ranks = layout.dp * layout.tp * layout.pp
    lines = [
        f"model    {count:,} parameters: {model.layers} blocks, width {model.width}, {model.heads} heads, "
        f"vocabulary {model.vocab:,}, context {model.context:,}",
        f"mesh     {ranks} ranks = dp {layout.dp} x tp {layout.tp} x pp {layout.pp}, ZeRO-{layout.zero}, "
        f"transport {layout.transport}",
        f"batch    {train.leaves} leaves x {train.accumulate} micro-batches x {train.micro_batch} sequences = "
        f"{sequences:,} sequences, {tokens:,} tokens per step; {train.steps:,} steps, {tokens * train.steps:,} tokens",
        f"balance  {_balance(train.leaves, layout.dp)}",
        "",
        "memory per rank, in bytes (activations and the exchange's buffers come on top)",
    ]
    rows = []
    for cost, group in groupby(enumerate(costs), key=lambda item: item[1]):
        first, *rest = [rank for rank, _ in group]
        cells = [cost.leaves, cost.weights, cost.gradients, cost.optimizer, cost.all_padding, cost.scratch, cost.total]
        rows.append([f"{first}-{rest[-1]}" if rest else f"{first}", *(f"{n:,}" for n in cells)])
    lines += table(["rank", "leaves", "parameters", "gradients", "optimizer", "padding", "scratch", "total"], rows)
    sent = [cost.sent for cost in costs]
    state = 12 * count
    keep = config.checkpoint.keep + 1
    lines += [
        "",
        f"traffic  {human_bytes(max(sent))} sent per step by the busiest rank, {human_bytes(sum(sent))} by all",
        f"disk     {human_bytes(state)} per checkpoint (12 bytes per parameter); "
        f"{keep} of them, keep + 1: {human_bytes(keep * state)}",
    ]
    return lines


def _balance(leaves: int, width: int) -> str:
    busiest = -(-leaves // width)
    if leaves % width == 0:
        return f"each rank runs {busiest} of {leaves} leaves: none waits for another"
    used = leaves / (busiest * width)
    good = ", ".join(str(n) for n in range(1, leaves + 1) if leaves % n == 0)
    return (
        f"{leaves} leaves on {width} ranks: the busiest runs {busiest} and the others wait, "
        f"{used:.0%} of the ranks' time is used; layout.dp that balance: {good}"
    )
