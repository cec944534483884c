"""The working weights: what forward and backward read, always a rounded copy of the masters.

Stage 0-2 keep them whole: every parameter is a view of one flat tensor, refreshed by one all-gather per step.

Stage 3 keeps a shard, and gathers a unit's weights just before its forward and again before its backward, freeing them
after each. The parameters are views of a flat tensor whose storage is emptied and refilled in place; what autograd
saved for backward shares that storage, and is read only after the second gather.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onecurve.parallel.ownership import Piece, Share, Space
from onecurve.parallel.transports import Transport
from onecurve.parallel.units import Trained


class SpaceWeights:
    """The working weights of one space on this rank.

    `shard`: this rank's part, 1-D, in the working dtype (fp32 where the parameters have several). `flat`: all parts.
    Parameters of one dtype are views of `flat`; of several dtypes, they have storages of their own, refilled from it.
    """

    def __init__(self, space: Space, pieces: list[Piece], trained: Trained, transport: Transport, whole: bool) -> None:
        self._transport = transport
        self._mixed = trained.working_dtype is None
        dtype = trained.working_dtype or torch.float32
        size = space.width * transport.size
        if whole:
            self.flat = transport.empty(size, dtype).zero_()
            self.shard = self.flat[transport.rank * space.width : (transport.rank + 1) * space.width]
        else:
            self.flat = torch.zeros(size, dtype=dtype)
            self.shard = transport.empty(space.width, dtype)
        self._views: list[tuple[Tensor, Tensor]] = []  # (a parameter's data, its part of flat)
        for piece in pieces:
            p = trained.parameters[piece.name]
            view = self.flat[piece.start - space.start :][: piece.numel].view(p.shape)
            view.copy_(p.detach())
            if self._mixed:
                p.data = p.data.clone(memory_format=torch.contiguous_format)  # no one else may share what is freed
                self._views.append((p.data, view))
            else:
                p.data = view
        for second, first in trained.tied.values():
            if first in {piece.name for piece in pieces}:
                second.data = trained.parameters[first].data
        self._waiting: Callable[[], None] | None = None
        self._holders = 0

    @property
    def prefetched(self) -> bool:
        return self._waiting is not None

    def start_gather(self) -> bool:
        """Begin to refill `flat` from all ranks' shards unless it is full or on its way. Collective."""
        if self._holders or self._waiting:
            return False
        self._grow(self.flat)
        self._waiting = self._transport.all_gather(self.flat, self.shard)
        return True

    def finish_gather(self) -> None:
        assert self._waiting is not None
        self._waiting()
        self._waiting = None
        self._fill_own_storages()

    def fill(self, master: Tensor) -> None:
        """Round a whole master copy into the working weights, without any exchange."""
        self.flat.copy_(master)
        self._fill_own_storages()

    def hold(self) -> None:
        """Have the weights here until `release`; nested holds count."""
        if not self._holders:
            self.start_gather()
            self.finish_gather()
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self.free()

    def free(self) -> None:
        """Give the memory of the whole weights back; the shard stays."""
        self.flat.untyped_storage().resize_(0)
        for data, _ in self._views:
            data.untyped_storage().resize_(0)

    def live(self) -> list[Tensor]:
        return [self.flat, self.shard, *(data for data, _ in self._views)]

    @property
    def gathered_bytes(self) -> int:
        """What the whole weights take now; 0 while they are freed."""
        return sum(t.untyped_storage().nbytes() for t in (self.flat, *(data for data, _ in self._views)))

    def _fill_own_storages(self) -> None:
        for data, view in self._views:
            self._grow(data)
            data.copy_(view)

    @staticmethod
    def _grow(tensor: Tensor) -> None:
        needed = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < needed:
            tensor.untyped_storage().resize_(needed)


class WholeWeights:
    """Stages 0 to 2."""

    def __init__(self, share: Share, trained: Trained, transport: Transport) -> None:
        self.spaces = [SpaceWeights(share.spaces[0], list(share.pieces), trained, transport, whole=True)]

    def refresh(self, master: Tensor) -> None:
        """Round this rank's masters into its shard (or all of them, where it has all) and gather. Collective."""
        (space,) = self.spaces
        if master.numel() == space.flat.numel():
            space.fill(master)
            return
        space.shard.copy_(master)
        space.start_gather()
        space.finish_gather()


class GatheredWeights:
    """Stage 3. `journal(operation)` is told of every collective that forward and backward begin, so that a rank without
    a leaf can do the same ones, in the same order, without computing."""

    def __init__(self, share: Share, trained: Trained, transport: Transport, journal: Callable) -> None:
        self._share = share
        self._journal = journal
        self.by_unit: dict[str, SpaceWeights] = {}
        for space in share.spaces:
            (unit,) = space.units
            pieces = [p for p in share.pieces if p.unit == unit]
            self.by_unit[unit] = SpaceWeights(space, pieces, trained, transport, whole=False)
        self.spaces = list(self.by_unit.values())
        self._needs = trained.needs
        self._order = [unit for unit in trained.modules if trained.needs[unit]]
        self._in_backward: set[str] = set()
        self.most_gathered = 0  # bytes of whole units that were here at once
        for unit in self._order:
            module = trained.modules[unit]
            module.register_forward_pre_hook(self._before_forward(unit))
            module.register_forward_hook(self._after_forward(unit), always_call=True)

    def refresh(self, master: Tensor) -> None:
        """Round this rank's masters into its shards; units are gathered when they are next used."""
        for space, weights in zip(self._share.spaces, self.spaces, strict=True):
            weights.shard.copy_(master[space.local : space.local + space.width])
            weights.free()

    def hold(self, unit: str) -> None:
        for need in self._needs[unit]:
            self._begin(need)
            self.by_unit[need].hold()

    def release(self, unit: str) -> None:
        for need in self._needs[unit]:
            self.by_unit[need].release()

    def replay(self, unit: str) -> None:
        """One gather on behalf of the others."""
        self.by_unit[unit].hold()
        self.by_unit[unit].release()

    def backward_done(self, unit: str) -> None:
        """All gradients of `unit` are there (or backward has ended): its weights are no longer needed."""
        if unit in self._in_backward:
            self._in_backward.discard(unit)
            self.release(unit)

    def end_backward(self) -> None:
        for unit in list(self._in_backward):
            self.backward_done(unit)
        for weights in self.spaces:
            if weights.prefetched:  # for a unit that backward then skipped
                weights.finish_gather()
                weights.free()

    def _begin(self, unit: str) -> None:
        if self.by_unit[unit].start_gather():
            self.most_gathered = max(self.most_gathered, sum(w.gathered_bytes for w in self.spaces))
            self._journal(lambda: self.replay(unit))

    def _prefetch(self, unit: str, direction: int) -> None:
        at = self._order.index(unit) + direction
        if 0 <= at < len(self._order):
            for need in self._needs[self._order[at]]:
                self._begin(need)

    def _before_forward(self, unit: str) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            self.hold(unit)
            self._prefetch(unit, +1)

        return hook

    def _after_forward(self, unit: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            self.release(unit)
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._before_backward(unit))

        return hook

    def _before_backward(self, unit: str) -> None:
        if unit not in self._in_backward:
            self._in_backward.add(unit)
            self.hold(unit)
            self._prefetch(unit, -1)
