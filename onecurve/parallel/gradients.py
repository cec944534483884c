"""From the gradients of leaves to the summed gradient of the ranges that this rank owns.

Both ways build the same tree (tree.py) over the same leaf gradients, so they give the same bits:

    ContiguousGradients (ZeRO-0, 1)  a rank runs a contiguous range of leaves through its own counter, in whole buffers,
                                     and hands over the partial sums that are left; one exchange per step
    StridedGradients (ZeRO-2, 3)     in tick t rank r runs leaf t·W + r; each unit is exchanged as soon as its backward
                                     is done, and the owner pushes W leaves at a time into its counters, on shards only

The gradient space is the flat space of the ownership table, followed by one region for each tied second use: those are
reduced on their own and added to the first use once, at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onecurve.parallel.ownership import Share
from onecurve.parallel.transports import Route, Transport
from onecurve.parallel.tree import TreeSum, aligned_partials, contiguous_leaves
from onecurve.parallel.units import Trained
from onecurve.parallel.weights import GatheredWeights

BUCKET = 1 << 20  # elements of a rank's range exchanged at once where parts are copied: bounds the receive buffer
BLOCK = 1 << 16  # elements added at once, so that partial sums stay in cache


@dataclass(frozen=True)
class Band:
    """`length` gradient elements at `source` in the gradient space, that belong to the flat positions at `target`."""

    unit: str
    source: int
    target: int
    length: int
    tied: bool = False

    def routes(self, share: Share, base: int = 0) -> list[Route]:
        """Each rank's part, as positions in a buffer that begins at `base` of the gradient space."""
        shift = self.source - self.target - base
        return [(lo + shift, hi + shift) for lo, hi in share.routes(self.target, self.target + self.length)]


class GradientSpace:
    """Where each gradient leaf lies, and the bands that cover the space."""

    def __init__(self, share: Share, trained: Trained) -> None:
        self.share = share
        self.leaves = trained.leaves
        self.start = {name: share.piece_of[name].start for name in trained.parameters}
        self.unit_of = trained.unit_of_use
        self.tied_bands = []
        self.size = share.flat
        for name, (p, first) in trained.tied.items():
            self.start[name] = self.size
            self.tied_bands.append(Band(self.unit_of[name], self.size, self.start[first], p.numel(), tied=True))
            self.size += -(-p.numel() // 32) * 32
        used = set(self.unit_of.values())
        self.units = [unit for unit in trained.modules if unit in used]
        self.unit_bands: dict[str, list[Band]] = {}
        for unit in self.units:
            lo, hi = share.unit_range(unit)
            tied = [band for band in self.tied_bands if band.unit == unit]
            self.unit_bands[unit] = ([Band(unit, lo, lo, hi - lo)] if hi > lo else []) + tied

    def views(self, buffer: Tensor, names: Sequence[str], places: dict[str, int]) -> dict[str, Tensor]:
        return {n: buffer[places[n] :][: self.leaves[n].numel()].view(self.leaves[n].shape) for n in names}


class ContiguousGradients:
    """ZeRO-0 and 1. Buffers alive: those of the counter, at most log2(leaves per rank) + 1."""

    def __init__(self, space: GradientSpace, transport: Transport, leaves: int) -> None:
        self._space, self._transport = space, transport
        runs = [contiguous_leaves(leaves, transport.size, rank) for rank in range(transport.size)]
        self.leaf_ids = list(runs[transport.rank])
        self._counts = [len(aligned_partials(run)) for run in runs]
        self._aligned = [aligned_partials(run) for run in runs]
        self._buffers: list[Tensor] = []
        self._free: list[Tensor] = []
        self._views: dict[int, dict[str, Tensor]] = {}
        self._tree = TreeSum(lambda _: self._take(), self._free.append)
        self._current: Tensor | None = None
        # fp32 gradients are accumulated in place by autograd; others are cast as they come, before their first add.
        self._cast = {name: p for name, p in space.leaves.items() if p.dtype != torch.float32}
        for name, p in self._cast.items():
            p.register_post_accumulate_grad_hook(self._add_cast(name))

    def begin(self, micro: int) -> None:
        if micro == 0:
            buffer = self._current = self._take()
            buffer.zero_()
            for name, view in self._views[buffer.data_ptr()].items():
                if name not in self._cast:
                    self._space.leaves[name].grad = view

    def end(self, leaf: int, last: bool) -> None:
        if last:
            assert self._current is not None
            self._tree.push(leaf, 1, self._current, writable=True)
            self._current = None

    def reduce(self) -> list[tuple[int, Tensor]]:
        """(local position, summed gradient) of what this rank owns. At stage 0, of everything. Collective."""
        share, transport = self._space.share, self._transport
        mine = [partial.tensor for partial in self._tree.partials()]
        (main,) = share.spaces
        own = mine[0][transport.rank * main.width : (transport.rank + 1) * main.width]
        self._sum(Band("", 0, 0, share.flat), mine, own)
        for band in self._space.tied_bands:
            lo, hi = band.routes(share)[transport.rank]
            use = mine[0][lo:hi]
            self._sum(band, mine, use)
            begin = lo - band.source + band.target - transport.rank * main.width
            own[begin : begin + hi - lo].add_(use)
        self._tree.clear()
        self._free[:] = self._buffers  # safe: the next operation comes before the next leaf's first write
        if share.replicated:
            whole = mine[0][: share.flat]
            transport.all_gather(whole, own)()
            return [(0, whole)]
        return [(0, own)]

    def live(self) -> list[Tensor]:
        return list(self._buffers)

    def _sum(self, band: Band, mine: list[Tensor], out: Tensor) -> None:
        """Exchange `band` and add this rank's part of it into `out`, in the tree."""
        transport = self._transport
        done = 0
        for routes in self._stripes(band.routes(self._space.share)):
            received = transport.exchange(mine, self._counts, routes)
            length = routes[transport.rank][1] - routes[transport.rank][0]
            for begin in range(0, length, BLOCK):
                block = slice(begin, min(begin + BLOCK, length))
                tree = TreeSum(torch.empty_like)
                for rank, parts in enumerate(received):
                    writable = not transport.zero_copy or rank == transport.rank
                    for (start, size), part in zip(self._aligned[rank], parts, strict=True):
                        tree.push(start, size, part[block], writable=writable)
                total = tree.total()
                target = out[done + block.start : done + block.stop]
                if total.data_ptr() != target.data_ptr():
                    target.copy_(total)
            done += length

    def _stripes(self, routes: list[Route]) -> Iterator[list[Route]]:
        longest = max(hi - lo for lo, hi in routes)
        step = longest if self._transport.zero_copy else BUCKET
        for k in range(0, longest, max(step, 1)):
            yield [(min(lo + k, hi), min(lo + k + step, hi)) for lo, hi in routes]

    def _take(self) -> Tensor:
        if not self._free:
            buffer = self._transport.empty(self._space.size, torch.float32)
            self._buffers.append(buffer)
            self._views[buffer.data_ptr()] = self._space.views(buffer, list(self._space.leaves), self._space.start)
            return buffer
        return self._free.pop()

    def _add_cast(self, name: str) -> Callable[[nn.Parameter], None]:
        def hook(p: nn.Parameter) -> None:
            assert self._current is not None
            self._views[self._current.data_ptr()][name].add_(p.grad)
            p.grad = None

        return hook


class StridedGradients:
    """ZeRO-2 and 3. Buffers alive: two units (with accumulate > 1 one whole buffer instead), and the counters' shards.

    Units are exchanged in one fixed order, last unit first, whatever order backward finishes them in; `weights` (stage
    3) is told when a unit's backward is done. `journal` collects the collectives of a leaf in order: a rank without a
    leaf in the last tick goes through those of its previous leaf.
    """

    def __init__(self, space: GradientSpace, transport: Transport, leaves: int, accumulate: int) -> None:
        self._space, self._transport = space, transport
        self._leaves, self._accumulate = leaves, accumulate
        self.leaf_ids = list(range(transport.rank, leaves, transport.size))
        self.weights: GatheredWeights | None = None
        self._ticks = -(-leaves // transport.size)
        self._tick = 0
        self._journal: list[Callable[[], None]] = []
        self._last = self._inside = False
        self._order = list(reversed(space.units))
        self._places: dict[str, int] = {}  # of each gradient leaf in its unit's buffer
        self._sizes: dict[str, int] = {}
        self._names: dict[str, list[str]] = {unit: [] for unit in space.units}
        for name in space.leaves:
            unit = space.unit_of[name]
            self._names[unit].append(name)
            self._places[name] = space.start[name] - self._base(unit, name)
        for unit, bands in space.unit_bands.items():
            self._sizes[unit] = sum(band.length for band in bands)
        self._whole: Tensor | None = None
        self._buffers: list[Tensor] = []
        self._free: list[Tensor] = []
        self._retired: Tensor | None = None
        self._views: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
        self._trees: dict[Band, TreeSum] = {}
        self._kept: dict[Band, list[Tensor]] = {}
        for bands in space.unit_bands.values():
            for band in bands:
                pool = self._kept[band] = []
                self._trees[band] = TreeSum(
                    lambda like, pool=pool: pool.pop() if pool else torch.empty_like(like), pool.append
                )
        for name, p in space.leaves.items():
            p.register_post_accumulate_grad_hook(self._hook(name))

    def record(self, operation: Callable[[], None]) -> None:
        """Journal a collective of forward or backward; not one of an evaluation."""
        if self._tick == 0 and (self._inside or torch.is_grad_enabled()):
            self._journal.append(operation)

    def begin(self, micro: int) -> None:
        self._inside = True
        self._last = micro == self._accumulate - 1
        self._remaining = {unit: len(names) for unit, names in self._names.items()}
        self._pending = list(self._order)
        if micro == 0 and self._accumulate > 1:
            if self._whole is None:
                self._whole = self._transport.empty(self._space.size, torch.float32)
            self._whole.zero_()

    def end(self, leaf: int, last: bool) -> None:
        if last:
            self._flush(everything=True)
        if self.weights is not None:
            self.weights.end_backward()
        self._inside = False
        if last:
            self._tick += 1
            if self._whole is not None and self._tick < self._ticks:
                # One whole buffer per rank: the next leaf may not overwrite what another rank still reads.
                self._transport.share(b".")

    def reduce(self) -> list[tuple[int, Tensor]]:
        """As `ContiguousGradients.reduce`, in one tensor per unit. A rank without a leaf in the last tick joins it."""
        rank, share = self._transport.rank, self._space.share
        while self._tick < self._ticks:
            self._tick += 1
            for operation in self._journal:
                operation()
        self._tick = 0
        self._journal.clear()
        gradient: list[tuple[int, Tensor]] = []
        for unit in self._space.units:
            for band in (b for b in self._space.unit_bands[unit] if not b.tied):
                lo, hi = share.routes(band.target, band.target + band.length)[rank]
                if hi > lo:
                    gradient.append((share.local_of(rank, lo), self._trees[band].total()))
                self._trees[band].clear()
        for band in self._space.tied_bands:
            lo, hi = share.routes(band.target, band.target + band.length)[rank]
            if hi > lo:
                at, use = share.local_of(rank, lo), self._trees[band].total()
                begin, first = next((a, t) for a, t in gradient if a <= at < a + t.numel())
                first[at - begin : at - begin + hi - lo].add_(use)
            self._trees[band].clear()
        return gradient

    def live(self) -> list[Tensor]:
        whole = [self._whole] if self._whole is not None else []
        counters = [p.tensor for tree in self._trees.values() for p in tree.partials()]
        return [*whole, *self._buffers, *counters, *(t for pool in self._kept.values() for t in pool)]

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
            self._buffer(unit)[1][name].add_(p.grad)
            p.grad = None
            self._remaining[unit] -= 1
            if self._remaining[unit] == 0:
                if self.weights is not None:
                    self.weights.backward_done(unit)
                if self._last:
                    self._flush(everything=False)

        return hook

    def _buffer(self, unit: str) -> tuple[Tensor, dict[str, Tensor]]:
        """The buffer of a unit in this leaf and its views, zeroed when first asked for."""
        if unit not in self._views:
            if self._whole is not None:
                views = self._space.views(self._whole, self._names[unit], self._space.start)
                self._views[unit] = (self._whole, views)
            else:
                if not self._free:
                    self._buffers.append(self._transport.empty(max(self._sizes.values()), torch.float32))
                    self._free.append(self._buffers[-1])
                buffer = self._free.pop()
                buffer[: self._sizes[unit]].zero_()
                self._views[unit] = (buffer, self._space.views(buffer, self._names[unit], self._places))
        return self._views[unit]

    def _flush(self, *, everything: bool) -> None:
        """Exchange the units that are next in the fixed order and whose gradients are all there."""
        while self._pending and (everything or self._remaining[self._pending[0]] == 0):
            unit = self._pending.pop(0)
            self.record(lambda unit=unit: self._exchange(unit, None))
            buffer, _ = self._buffer(unit)
            self._exchange(unit, buffer)
            if self._whole is None:
                # Others may read this buffer until they are seen in a later exchange: it rests for one round.
                if self._retired is not None:
                    self._free.append(self._retired)
                self._retired = buffer
                del self._views[unit]

    def _exchange(self, unit: str, buffer: Tensor | None) -> None:
        """Send this tick's gradient of `unit` (None: this rank has no leaf) and push those of all ranks."""
        transport = self._transport
        tick = self._tick if buffer is not None else self._ticks - 1
        first = tick * transport.size
        counts = [int(first + rank < self._leaves) for rank in range(transport.size)]
        at = 0
        for band in self._space.unit_bands[unit]:
            base = 0 if self._whole is not None else band.source - at
            routes = band.routes(self._space.share, base)
            received = transport.exchange([buffer] if buffer is not None else [], counts, routes)
            if routes[transport.rank][1] > routes[transport.rank][0]:
                for rank, parts in enumerate(received):
                    for part in parts:
                        self._trees[band].push(first + rank, 1, part, writable=not transport.zero_copy)
                self._trees[band].settle()
            at += band.length
