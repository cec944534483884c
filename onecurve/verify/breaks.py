"""What each control does: one clause of the arithmetic contract, broken in this process by replacing a part of the
library. `controls.py` says which clause, and when."""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onecurve.data.loader import Loader
from onecurve.model import gpt
from onecurve.parallel import norms, ownership, stats
from onecurve.parallel.bands import Band, GradientSpace
from onecurve.parallel.contiguous import ContiguousGradients
from onecurve.parallel.norms import SharedNorm
from onecurve.parallel.stats import Agreement, Stats
from onecurve.parallel.strided import StridedGradients
from onecurve.parallel.tree import TreeSum, contiguous_leaves
from onecurve.parallel.zero import ZeroOptimizer
from onecurve.train.guard import Guard, Rollback


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def ring_sum(rank: int) -> None:
    """As a ring reduce-scatter adds: each owner begins with its successor's partial sums and ends with its own."""

    def add_around(self: ContiguousGradients, band: Band, mine: list[Tensor], out: Tensor) -> None:
        transport, done = self._transport, 0
        for routes in self._stripes(band.routes(self._space.partition)):
            received = transport.exchange(mine, self._counts, routes)
            ranks = [(transport.rank + 1 + i) % transport.size for i in range(transport.size)]
            parts = list(chain.from_iterable(received[r] for r in ranks))
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            out[done : done + total.numel()].copy_(total)
            done += total.numel()

    _replace(ContiguousGradients, "_sum", lambda _: add_around)


def contiguous_ticks(rank: int) -> None:
    """ZeRO-2 and 3 give each rank a contiguous range of leaves, though one leaf of each rank is added per tick."""

    def leaves_of(original: Callable[..., range]) -> Callable[..., range]:
        def of(self: StridedGradients, rank: int) -> range:
            width = self._transport.size
            return original(self, rank) if self._leaves % width else contiguous_leaves(self._leaves, width, rank)

        return of

    _replace(StridedGradients, "leaves_of", leaves_of)


def losses_in_float(rank: int) -> None:
    """Losses are added in fp32, on each rank and then over the ranks. (Added in fp64 in any order, so few fp32 losses
    make an exact sum: that breaks nothing.)"""

    def reach(original: Callable[..., Stats]) -> Callable[..., Stats]:
        def summed(self: Agreement, *args: Any) -> Stats:
            owners = [list(self._leaves_of(r)) for r in range(self._transport.size)]

            def add(values: Iterable[float]) -> float:
                each = torch.tensor(list(values))
                return float(torch.stack([each[own].sum() for own in owners]).sum())

            stats.tree_sum = add
            return original(self, *args)

        return summed

    _replace(Agreement, "reach", reach)


def data_by_rank(rank: int) -> None:
    """The permutation of the samples is seeded by the rank too."""
    _replace(
        Loader, "micro_batches", lambda original: lambda self, step, ids: _with_seed(self, original, step, ids, rank)
    )


def _with_seed(loader: Loader, original: Callable[..., Any], step: int, ids: Any, rank: int) -> Any:
    loader.seed, seed = loader.seed + rank, loader.seed
    try:
        return list(original(loader, step, ids))
    finally:
        loader.seed = seed


def dropout_by_rank(rank: int) -> None:
    _replace(gpt, "dropout", lambda original: lambda x, p, key: original(x, p, key and (*key, rank)))


def tied_together(rank: int) -> None:
    """Both uses of a tied parameter accumulate into one gradient, which is reduced once."""

    def share_place(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: GradientSpace, partition: Any, trained: Any) -> None:
            original(self, partition, trained)
            for name, (_, first) in trained.tied.items():
                self.start[name] = self.start[first]
            self.tied_bands = []

        return init

    _replace(GradientSpace, "__init__", share_place)


def float_norm(rank: int) -> None:
    """Squares are added in fp32, per shard and then over ranks, as a backend's all-reduce does."""

    def of(self: SharedNorm, mine: Sequence[Tensor], messages: Sequence[bytes]) -> float:
        local = sum((t.square().sum() for t in mine), torch.zeros(()))
        shared = self._all_gather_bytes(struct.pack("<f", float(local)))
        return math.sqrt(torch.tensor([struct.unpack("<f", m)[0] for m in shared]).sum().item())

    _replace(SharedNorm, "of", lambda _: of)


def off_grid(rank: int) -> None:
    """Shards are cut at any element, so that the fused kernel finishes other elements in its scalar tail."""
    ownership.SHARD_ALIGN = 1


def divide_first(rank: int) -> None:
    """Gradients are divided by the tokens and then multiplied by the clip factor: two roundings."""

    def divided(original: Callable[..., None]) -> Callable[..., None]:
        def update(self: ZeroOptimizer, gradient: Sequence[tuple[int, Tensor]], found: Stats, lr: float) -> None:
            for _, tensor in gradient:
                tensor.div_(found.tokens)
            original(self, gradient, replace(found, tokens=1), lr)

        return update

    _replace(ZeroOptimizer, "_update", divided)


def reduce_each_micro_batch(rank: int) -> None:
    """ZeRO-0 and 1 reduce over the leaves after each micro-batch and add what comes out, not once per leaf."""
    reduce_leaves = ContiguousGradients.reduce
    begin_leaf = ContiguousGradients.begin

    def begin(self: ContiguousGradients, micro: int) -> None:
        trees = self.__dict__.setdefault("micro_trees", [])
        if len(trees) == micro:
            trees.append(TreeSum(lambda _: self._take(), self._free.append))
        self.__dict__["micro"] = micro
        begin_leaf(self, 0)

    def end(self: ContiguousGradients, leaf: int, last: bool) -> None:
        assert self._current is not None
        for p in self._in_place.values():
            p.grad = None
        self.__dict__["micro_trees"][self.__dict__["micro"]].push(leaf, 1, self._current, writable=True)

    def reduce(self: ContiguousGradients) -> list[tuple[int, Tensor]]:
        total: list[tuple[int, Tensor]] = []
        for tree in self.__dict__["micro_trees"]:
            self._tree = tree
            found = [(at, tensor.clone()) for at, tensor in reduce_leaves(self)]
            self._transport.all_gather_bytes(b".")
            total = [(at, a.add_(b)) for (at, a), (_, b) in zip(total, found, strict=True)] if total else found
        return total

    for name, function in (("begin", begin), ("end", end), ("reduce", reduce)):
        setattr(ContiguousGradients, name, function)


def last_in_first_out(rank: int) -> None:
    """A leaf's micro-batches go backward in the reverse of the order in which they went forward."""
    run_backward = ZeroOptimizer.backward

    def backward(self: ZeroOptimizer, loss_sum: Tensor, tokens: int) -> None:
        held = self.__dict__.setdefault("held_back", [])
        held.append((loss_sum, tokens))
        if len(held) == self.accumulate:
            while held:
                run_backward(self, *held.pop())

    _replace(ZeroOptimizer, "backward", lambda _: backward)


def nan_in_last_parameter() -> None:
    """In step 2, one NaN in the gradient of the last leaf: in the last element of the model, so on the last rank."""
    run_backward = ZeroOptimizer.backward

    def backward(self: ZeroOptimizer, loss_sum: Tensor, tokens: int) -> None:
        leaf = self.leaf_ids[min(self._calls // self.accumulate, len(self.leaf_ids) - 1)]
        done = self.__dict__.setdefault("rehearsed", False)
        if self.updates == 1 and leaf == self.leaves - 1 and not done:
            self.__dict__["rehearsed"] = True
            *_, last = self.trained.parameters.values()
            handle = last.register_hook(_spoil)
            run_backward(self, loss_sum, tokens)
            handle.remove()
        else:
            run_backward(self, loss_sum, tokens)

    _replace(ZeroOptimizer, "backward", lambda _: backward)


def _spoil(gradient: Tensor) -> Tensor:
    spoilt = gradient.clone()
    spoilt.view(-1)[-1] = math.nan
    return spoilt


def lose_nan(rank: int) -> None:
    """The largest element is shared as a backend's MAX does it: what is not a number on any rank but 0 is dropped."""

    def dropping(original: Callable[[Tensor], float]) -> Callable[[Tensor], float]:
        return lambda x: original(x if rank == 0 else x[x.isfinite()])

    _replace(norms, "local_max", dropping)
    _replace(norms, "local_squares", lambda original: lambda x, maximum: original(x.nan_to_num(0.0), maximum))


def strided_activations(rank: int) -> None:
    """GELU gets its input in other strides, as where a slice of a wider activation is handed on."""

    def gelu(original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: original(torch.stack([x, x], dim=-1)[..., 0])

    _replace(gpt.F, "gelu", gelu)


def roll_back_one_step(rank: int) -> None:
    """A rollback returns to the state before the step that was refused, as where that was just saved."""

    def nearer(original: Callable[..., Rollback]) -> Callable[..., Rollback]:
        def roll_back(self: Guard, step: int, *args: Any) -> Rollback:
            found = original(self, step, *args)
            kept = self.state.skipped + found.dropped[-1:]
            return replace(found, back_to=step - 1, dropped=kept, state=replace(found.state, skipped=kept))

        return roll_back

    _replace(Guard, "roll_back", nearer)
