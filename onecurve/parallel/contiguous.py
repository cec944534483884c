"""ZeRO-0 and 1: from the gradients of leaves to the summed gradient of the ranges that this rank owns.

A rank runs a contiguous range of leaves through its own counter, in whole buffers, and hands over the partial sums that
are left; one exchange per step, and each owner finishes the tree (tree.py):

    rank 0: leaves 0 1 2 3 -> [0-3] --.
    rank 1: leaves 4 5 6 7 -> [4-7] --+--> the owner of a range adds its parts of [0-3] and [4-7]
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from onecurve.errors import UsageError
from onecurve.parallel.bands import STRAY, Band, GradientSpace
from onecurve.parallel.transports import Route, Transport
from onecurve.parallel.tree import TreeSum, aligned_partials, contiguous_leaves

BUCKET = 1 << 20  # elements of a rank's range exchanged at once where parts are copied: bounds the receive buffer
BLOCK = 1 << 16  # elements added at once, so that partial sums stay in cache


class ContiguousGradients:
    """Buffers alive: those of the counter, at most log2(leaves per rank) + 1.

    Who may touch which memory in `reduce`: between the start of an exchange and the next operation, the others read
    every part of this rank's partials but its own, and this rank writes its own part of its first partial, where the
    sum goes. With the next leaf the buffers are written again; an all-gather or a message lies in between.
    """

    def __init__(self, space: GradientSpace, transport: Transport, leaves: int) -> None:
        self._space, self._transport = space, transport
        self._leaves = leaves
        self.leaf_ids = list(self.leaves_of(transport.rank))
        self._aligned = [aligned_partials(self.leaves_of(rank)) for rank in range(transport.size)]
        self._counts = [len(partials) for partials in self._aligned]
        self._buffers: list[Tensor] = []
        self._free: list[Tensor] = []
        self._views: dict[int, dict[str, Tensor]] = {}
        self._tree = TreeSum(lambda _: self._take(), self._free.append)
        self._current: Tensor | None = None
        # fp32 gradients are accumulated in place by autograd; others are cast as they come, before their first add.
        self._cast = {name: p for name, p in space.gradients_of.items() if p.dtype != torch.float32}
        self._in_place = {name: p for name, p in space.gradients_of.items() if p.dtype == torch.float32}
        for name, p in self._cast.items():
            p.register_post_accumulate_grad_hook(self._add_cast(name))

    def leaves_of(self, rank: int) -> range:
        return contiguous_leaves(self._leaves, self._transport.size, rank)

    def begin(self, micro: int) -> None:
        if micro == 0:
            self._current = self._take()
            self._current.zero_()
        assert self._current is not None
        views = self._views[self._current.data_ptr()]
        for name, p in self._in_place.items():
            if p.grad is not None:
                raise _stray(name)
            p.grad = views[name]

    def end(self, leaf: int, last: bool) -> None:
        for p in self._in_place.values():
            p.grad = None
        if last:
            assert self._current is not None
            self._tree.push(leaf, 1, self._current, writable=True)
            self._current = None

    def reduce(self) -> list[tuple[int, Tensor]]:
        """(local position, summed gradient) of what this rank owns. At stage 0, of everything. Collective."""
        partition, transport = self._space.partition, self._transport
        mine = [partial.tensor for partial in self._tree.partials()]
        (main,) = partition.spaces
        own = mine[0][transport.rank * main.width : (transport.rank + 1) * main.width]
        self._sum(Band("", 0, 0, partition.flat), mine, own)
        for band in self._space.tied_bands:
            lo, hi = band.routes(partition)[transport.rank]
            use = mine[0][lo:hi]
            self._sum(band, mine, use)
            begin = lo - band.source + band.target - transport.rank * main.width
            own[begin : begin + hi - lo].add_(use)
        self._tree.clear()
        self._free[:] = self._buffers  # safe: the next operation comes before the next leaf's first write
        if partition.replicated:
            whole = mine[0][: partition.flat]
            transport.all_gather(whole, own)()
            return [(0, whole)]
        return [(0, own)]

    def live(self) -> list[Tensor]:
        return list(self._buffers)

    def _sum(self, band: Band, mine: list[Tensor], out: Tensor) -> None:
        """Exchange `band` and add this rank's part of it into `out`, in the tree."""
        transport = self._transport
        done = 0
        for routes in self._stripes(band.routes(self._space.partition)):
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
            self._views[buffer.data_ptr()] = self._space.views(
                buffer, list(self._space.gradients_of), self._space.start
            )
            return buffer
        return self._free.pop()

    def _add_cast(self, name: str) -> Callable[[nn.Parameter], None]:
        def hook(p: nn.Parameter) -> None:
            if self._current is None:
                raise _stray(name)
            assert p.grad is not None
            self._views[self._current.data_ptr()][name].add_(p.grad)
            p.grad = None

        return hook


def _stray(name: str) -> UsageError:
    return UsageError(STRAY.format(name=name))
