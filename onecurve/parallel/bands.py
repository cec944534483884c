"""The gradient space: where the gradient of each parameter lies, and which flat positions it belongs to.

It is the flat space of the ownership table, followed by one region for each tied second use: those are reduced on their
own and added to the first use once, at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecurve.parallel.ownership import PIECE_ALIGN, Partition, round_up
from onecurve.parallel.transports import Route
from onecurve.parallel.units import Trained

STRAY = (
    "{name} got a gradient outside the backward of its ZeroOptimizer: call that instead of backward(); where another "
    "optimizer's loss reached it, freeze or detach it there"
)


@dataclass(frozen=True)
class Band:
    """`length` gradient elements at `source` in the gradient space, that belong to the flat positions at `target`."""

    unit: str
    source: int
    target: int
    length: int
    tied: bool = False

    def routes(self, partition: Partition, base: int = 0) -> list[Route]:
        """Each rank's part, as positions in a buffer that begins at `base` of the gradient space."""
        shift = self.source - self.target - base
        return [(lo + shift, hi + shift) for lo, hi in partition.routes(self.target, self.target + self.length)]


class GradientSpace:
    """Where the gradient of each parameter lies, and the bands that cover the space."""

    def __init__(self, partition: Partition, trained: Trained) -> None:
        self.partition = partition
        self.gradients_of = trained.gradients_of
        self.start = {name: partition.piece_of[name].start for name in trained.parameters}
        self.unit_of = trained.unit_of_use
        self.tied_bands = []
        self.size = partition.flat
        for name, (p, first) in trained.tied.items():
            self.start[name] = self.size
            self.tied_bands.append(Band(self.unit_of[name], self.size, self.start[first], p.numel(), tied=True))
            self.size += round_up(p.numel(), PIECE_ALIGN)
        used = set(self.unit_of.values())
        self.units = [unit for unit in trained.modules if unit in used]
        self.unit_bands: dict[str, list[Band]] = {}
        for unit in self.units:
            lo, hi = partition.unit_range(unit)
            tied = [band for band in self.tied_bands if band.unit == unit]
            self.unit_bands[unit] = ([Band(unit, lo, lo, hi - lo)] if hi > lo else []) + tied

    def views(self, buffer: Tensor, names: Sequence[str], places: dict[str, int]) -> dict[str, Tensor]:
        """Each name's part of `buffer`, in the shape of its parameter."""
        found = {}
        for name in names:
            p = self.gradients_of[name]
            found[name] = buffer[places[name] :][: p.numel()].view(p.shape)
        return found


class Pool:
    """Tensors of one shape that are made once and used again. Only those that the pool made come back to it: what a
    transport received would stay alive beside the tensors that are counted."""

    def __init__(self) -> None:
        self.every: list[Tensor] = []
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        if not self._free:
            self.every.append(torch.empty_like(like))
            return self.every[-1]
        return self._free.pop()

    def give(self, tensor: Tensor) -> None:
        if any(tensor is own for own in self.every):
            self._free.append(tensor)

    def reset(self) -> None:
        self._free = list(self.every)
