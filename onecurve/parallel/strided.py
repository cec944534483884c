"""ZeRO-2 and 3: the same tree as contiguous.py, built on shards.

In tick t rank r runs leaf t·W + r. Each unit is exchanged as soon as its backward is done, and the owner of a range
pushes the W leaves of the tick into its counters, in leaf order:

    tick 0: leaves 0 1 2 3 on ranks 0 1 2 3  -> each owner: [0-3] of its range
    tick 1: leaves 4 5 6 7 on ranks 0 1 2 3  -> each owner: [0-3] + [4-7]
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from onecurve.errors import UsageError
from onecurve.parallel.bands import STRAY, Band, GradientSpace, Pool
from onecurve.parallel.gathered import GatheredWeights, Journal
from onecurve.parallel.transports import Route, Transport
from onecurve.parallel.tree import TreeSum, strided_leaves
from onecurve.parallel.weights import WholeWeights


class StridedGradients:
    """Buffers alive: two units (with accumulate > 1 one whole buffer instead), and the counters' shards.

    Units are exchanged in one fixed order, last unit first, whatever order backward finishes them in. `weights` is told
    when a unit has all its gradients. `journal` keeps the collectives of this rank's first leaf: without a leaf in the
    last tick, it goes through those again.
    """

    def __init__(
        self,
        space: GradientSpace,
        transport: Transport,
        leaves: int,
        accumulate: int,
        weights: WholeWeights | GatheredWeights,
        journal: Journal,
    ) -> None:
        self._space, self._transport = space, transport
        self._leaves, self._accumulate = leaves, accumulate
        self._weights, self._journal = weights, journal
        self.leaf_ids = list(self.leaves_of(transport.rank))
        self._ticks = -(-leaves // transport.size)
        self._tick = 0
        self._last = False
        self._order = list(reversed(space.units))
        self._places: dict[str, int] = {}  # of each gradient in its unit's buffer
        self._sizes: dict[str, int] = {}
        self._names: dict[str, list[str]] = {unit: [] for unit in space.units}
        for name in space.gradients_of:
            unit = space.unit_of[name]
            self._names[unit].append(name)
            self._places[name] = space.start[name] - self._base(unit, name)
        self._routes: dict[Band, list[Route]] = {}  # each rank's part of a band, in its unit's buffer
        for unit, bands in space.unit_bands.items():
            self._sizes[unit] = 0
            for band in bands:
                base = 0 if accumulate > 1 else band.source - self._sizes[unit]
                self._routes[band] = band.routes(space.partition, base)
                self._sizes[unit] += band.length
        self._whole: Tensor | None = None
        self._buffers: list[Tensor] = []
        self._free: list[Tensor] = []
        self._retired: Tensor | None = None
        self._in_work: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}  # unit -> its buffer, and each leaf's view
        self._views: dict[tuple[str, int], dict[str, Tensor]] = {}  # those views, by unit and address of the buffer
        self._trees: dict[Band, TreeSum] = {}
        self._pools: list[Pool] = []
        for bands in space.unit_bands.values():
            for band in bands:
                pool = Pool()
                self._pools.append(pool)
                self._trees[band] = TreeSum(pool.take, pool.give)
        for name, p in space.gradients_of.items():
            p.register_post_accumulate_grad_hook(self._hook(name))

    def leaves_of(self, rank: int) -> range:
        return strided_leaves(self._leaves, self._transport.size, rank)

    def begin(self, micro: int) -> None:
        self._journal.in_backward = True
        self._last = micro == self._accumulate - 1
        self._missing = {unit: set(names) for unit, names in self._names.items()}
        self._pending = list(self._order)
        if self._tick == 0 and micro == 0:
            for pool in self._pools:
                pool.reset()  # the sums of the step before are used up
        if micro == 0 and self._accumulate > 1:
            if self._whole is None:
                self._whole = self._transport.empty(self._space.size, torch.float32)
            self._whole.zero_()

    def end(self, leaf: int, last: bool) -> None:
        if last:
            self._flush(everything=True)
        self._weights.end_backward()
        self._journal.in_backward = False
        if last:
            self._journal.end_leaf()
            self._tick += 1
            if self._whole is not None and self._tick < self._ticks:
                # One whole buffer per rank: the next leaf may not overwrite what another rank still reads.
                self._transport.all_gather_bytes(b".")

    def reduce(self) -> list[tuple[int, Tensor]]:
        """As `ContiguousGradients.reduce`, in one tensor per unit. A rank without a leaf in the last tick joins it."""
        rank, partition = self._transport.rank, self._space.partition
        while self._tick < self._ticks:
            self._tick += 1
            self._journal.replay()
        self._tick = 0
        self._journal.clear()
        gradient: list[tuple[int, Tensor]] = []
        for unit in self._space.units:
            for band in (b for b in self._space.unit_bands[unit] if not b.tied):
                lo, hi = partition.routes(band.target, band.target + band.length)[rank]
                if hi > lo:
                    gradient.append((partition.local_of(rank, lo), self._trees[band].total()))
                self._trees[band].clear()
        for band in self._space.tied_bands:
            lo, hi = partition.routes(band.target, band.target + band.length)[rank]
            if hi > lo:
                at, use = partition.local_of(rank, lo), self._trees[band].total()
                begin, first = next((a, t) for a, t in gradient if a <= at < a + t.numel())
                first[at - begin : at - begin + hi - lo].add_(use)
            self._trees[band].clear()
        return gradient

    def live(self) -> list[Tensor]:
        whole = [self._whole] if self._whole is not None else []
        return [*whole, *self._buffers, *(t for pool in self._pools for t in pool.every)]

    def _base(self, unit: str, name: str) -> int:
        """What to subtract from a leaf's place in the gradient space to get its place in the unit's buffer."""
        at = 0
        for band in self._space.unit_bands[unit]:
            if band.source <= self._space.start[name] < band.source + max(band.length, 1):
                return band.source - at
            at += band.length
        return self._space.start[name]  # an empty parameter at the very end

    def _hook(self, name: str) -> Callable[[nn.Parameter], None]:
        unit = self._space.unit_of[name]

        def hook(p: nn.Parameter) -> None:
            assert p.grad is not None
            self._refuse(name, unit)
            self._buffer(unit)[1][name].add_(p.grad)
            p.grad = None
            self._missing[unit].remove(name)
            if not self._missing[unit]:
                self._weights.gradients_done(unit)
                if self._last:
                    self._flush(everything=False)

        return hook

    def _refuse(self, name: str, unit: str) -> None:
        """Raise UsageError for a gradient of `name` that can't be the right one."""
        if not self._journal.in_backward:
            raise UsageError(STRAY.format(name=name))
        if name not in self._missing[unit]:
            raise UsageError(
                f"{name} got two gradients in one backward, as from a reentrant checkpoint of a module that is used "
                "twice; use checkpoint(..., use_reentrant=False), or stage 0 or 1"
            )
        if not self._weights.is_here(unit):
            raise UsageError(
                f"{name} was read outside the forward of its unit {unit}, where its weights are not gathered; "
                "read it in a forward of that unit, name another unit (units=), or use a stage below 3"
            )

    def _buffer(self, unit: str) -> tuple[Tensor, dict[str, Tensor]]:
        """The buffer of a unit in this leaf and its views, zeroed when first asked for."""
        if unit not in self._in_work:
            if self._whole is not None:
                buffer, places = self._whole, self._space.start
            else:
                if not self._free:
                    self._buffers.append(self._transport.empty(max(self._sizes.values()), torch.float32))
                    self._free.append(self._buffers[-1])
                buffer, places = self._free.pop(), self._places
                buffer[: self._sizes[unit]].zero_()
            key = (unit, buffer.data_ptr())
            if key not in self._views:
                self._views[key] = self._space.views(buffer, self._names[unit], places)
            self._in_work[unit] = (buffer, self._views[key])
        return self._in_work[unit]

    def _flush(self, *, everything: bool) -> None:
        """Exchange the units that are next in the fixed order and whose gradients are all there."""
        while self._pending and (everything or not self._missing[self._pending[0]]):
            unit = self._pending.pop(0)
            self._journal.record(f"exchange {unit}", partial(self._exchange, unit, None))
            buffer, _ = self._buffer(unit)
            self._exchange(unit, buffer)
            if self._whole is None:
                # Others may read this buffer until they are seen in a later exchange: it rests for one round.
                if self._retired is not None:
                    self._free.append(self._retired)
                self._retired = buffer
                del self._in_work[unit]

    def _exchange(self, unit: str, buffer: Tensor | None) -> None:
        """Send this tick's gradient of `unit` (None: this rank has no leaf) and push those of all ranks."""
        transport = self._transport
        tick = self._tick if buffer is not None else self._ticks - 1
        first = tick * transport.size
        counts = [int(first + rank < self._leaves) for rank in range(transport.size)]
        for band in self._space.unit_bands[unit]:
            routes = self._routes[band]
            received = transport.exchange([buffer] if buffer is not None else [], counts, routes)
            if routes[transport.rank][1] > routes[transport.rank][0]:
                for rank, parts in enumerate(received):
                    for part in parts:
                        self._trees[band].push(first + rank, 1, part, writable=not transport.zero_copy)
                self._trees[band].settle()
