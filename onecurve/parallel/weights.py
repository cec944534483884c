"""The working weights: what forward and backward read, always a rounded copy of the masters.

Stages 0 to 2 keep them whole: every parameter is a view of one flat tensor, refreshed by one all-gather per step.
Stage 3 keeps a shard, and a unit's weights come and go (gathered.py):

    sharded --start_gather--> on their way --finish_gather--> whole --free--> sharded

The whole weights are a flat tensor whose storage is emptied and refilled in place, for what autograd saved of them for
backward shares that storage. A parameter whose weights are not here points to a single NaN, spread over its shape: code
that reads weights where they were not gathered gets NaN, which no step accepts, and never another step's weights.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from onecurve.parallel.ownership import Partition, Piece, Space
from onecurve.parallel.transports import Transport
from onecurve.parallel.units import Trained


class Absent:
    """One NaN per dtype, which stands for the weights that are not here."""

    def __init__(self) -> None:
        self.values: dict[torch.dtype, Tensor] = {}

    def like(self, p: Tensor) -> Tensor:
        """It, in the shape of `p` and without its memory."""
        return self.values.setdefault(p.dtype, torch.tensor(math.nan, dtype=p.dtype)).expand(p.shape)


class SpaceWeights:
    """The working weights of one space on this rank.

    `shard`: this rank's part, 1-D, in the working dtype (fp32 where the parameters have several). `flat`: all parts.
    Parameters of one dtype are views of `flat`; of several dtypes, they have storages of their own, refilled from it.
    Without `absent` the weights are always here, and `shard` is a part of `flat`; else it stands for them when not.
    """

    def __init__(
        self, space: Space, pieces: list[Piece], trained: Trained, transport: Transport, absent: Absent | None
    ) -> None:
        self._transport = transport
        self._mixed = trained.working_dtype is None
        dtype = trained.working_dtype or torch.float32
        size = space.width * transport.size
        if absent is None:
            self.flat = transport.empty(size, dtype).zero_()
            self.shard = self.flat[transport.rank * space.width : (transport.rank + 1) * space.width]
        else:
            self.flat = torch.zeros(size, dtype=dtype)
            self.shard = transport.empty(space.width, dtype)
        self._own: list[tuple[Tensor, Tensor]] = []  # (a parameter's own storage, its part of flat)
        self._homes: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # (parameter, its data when here, when not)
        uses = {name: [p] for name, p in trained.parameters.items()}
        for second, first in trained.tied.values():
            uses[first].append(second)
        for piece in pieces:
            p = trained.parameters[piece.name]
            data = view = self.flat[piece.start - space.start :][: piece.numel].view(p.shape)
            view.copy_(p.detach())
            if self._mixed:
                data = p.detach().clone(memory_format=torch.contiguous_format)
                self._own.append((data, view))
            missing = data if absent is None else absent.like(p)
            self._homes += [(use, data, missing) for use in uses[piece.name]]
        for use, data, _ in self._homes:
            use.data = data
        self._waiting: Callable[[], None] | None = None
        self._holders = 0

    @property
    def held(self) -> bool:
        return self._holders > 0

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
            for p, here, _ in self._homes:
                p.data = here
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self.free()

    def free(self) -> None:
        """Give the memory of the whole weights back; the shard stays."""
        if self._waiting:
            self.finish_gather()  # it writes into what is freed
        for p, _, missing in self._homes:
            p.data = missing
        for tensor in (self.flat, *(data for data, _ in self._own)):
            tensor.untyped_storage().resize_(0)

    def live(self) -> list[Tensor]:
        return [self.flat, self.shard, *(data for data, _ in self._own)]

    @property
    def gathered_bytes(self) -> int:
        """What the whole weights take now; 0 while they are freed."""
        return sum(t.untyped_storage().nbytes() for t in (self.flat, *(data for data, _ in self._own)))

    def _fill_own_storages(self) -> None:
        for data, view in self._own:
            self._grow(data)
            data.copy_(view)

    @staticmethod
    def _grow(tensor: Tensor) -> None:
        needed = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < needed:
            tensor.untyped_storage().resize_(needed)


class WholeWeights:
    """Stages 0 to 2: always here."""

    def __init__(self, partition: Partition, trained: Trained, transport: Transport) -> None:
        self.spaces = [SpaceWeights(partition.spaces[0], list(partition.pieces), trained, transport, None)]
        self._replicated = partition.replicated

    def live(self) -> list[Tensor]:
        return self.spaces[0].live()

    def refresh(self, master: Tensor) -> None:
        """Round this rank's masters into its shard (or all of them, where it has all) and gather. Collective."""
        (space,) = self.spaces
        if self._replicated:
            space.fill(master)
            return
        space.shard.copy_(master)
        space.start_gather()
        space.finish_gather()

    def is_here(self, unit: str) -> bool:
        return True

    def gradients_done(self, unit: str) -> None:
        """Nothing to free."""

    def end_backward(self) -> None:
        """Nothing to free."""
