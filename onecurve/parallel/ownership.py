"""Which rank owns which range of which parameter. ZeRO, norms, checkpoints and memory accounting all read this table.

A canonical place is (parameter, slice, offset in the slice), the same on every layout. On one model-parallel partition
(a pipeline stage and a tensor rank) the pieces, one per (parameter, slice), are laid one after another into flat
*spaces*, and each space is cut into `dp` equal shards:

    stage 0-2   one space for everything: |embedding|block 0|block 1|head|pad|, cut into dp shards
    stage 3     one space per unit, each cut on its own, so that a unit can be gathered alone; pads more

Positions in the concatenation of a partition's spaces are called flat; those in the concatenation of a rank's shards
are called local. Every piece starts at a multiple of `PIECE_ALIGN` elements and every shard at one of `SHARD_ALIGN`:
the vectorised AdamW kernel rounds its tail differently from its body, so no cut may move an element between them.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

PIECE_ALIGN = 32  # elements: 64 bytes also in a two-byte dtype
SHARD_ALIGN = 16  # elements: the widest vector, 64 bytes of fp32


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class ParamSpec:
    """A trained parameter as the table needs it. `shape` is the whole parameter's."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the working weights, as torch names it: "float32"
    unit: str
    decay: bool = True
    slices: int = 1  # pieces of the tensor grid; 1 = replicated over (or not cut by) the tensor axis
    stage: int = 0  # pipeline stage that holds it

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class Piece:
    """One (parameter, slice) of a partition. `start` is its flat position."""

    name: str
    slice: int
    numel: int
    start: int
    unit: str
    decay: bool


@dataclass(frozen=True)
class Space:
    """A flat interval [start, start + dp · width) cut into dp shards of `width`; `local` is where each rank's shard
    of it begins in that rank's local vector."""

    start: int
    width: int
    local: int
    units: tuple[str, ...]


@dataclass(frozen=True)
class OwnedRange:
    """`length` elements at a canonical place, held at local position `at`."""

    name: str
    slice: int
    offset: int
    length: int
    at: int


@dataclass(frozen=True)
class Partition:
    """Everything one (pipeline stage, tensor rank) holds, laid out flat."""

    pieces: tuple[Piece, ...]
    spaces: tuple[Space, ...]
    dp: int
    replicated: bool  # stage 0: every rank holds the state of every range; local positions are flat ones

    @property
    def flat(self) -> int:
        """Elements of all spaces, padding included."""
        return sum(space.width * self.dp for space in self.spaces)

    @property
    def local(self) -> int:
        """Elements of one rank's state vectors, padding included."""
        return self.flat if self.replicated else sum(space.width for space in self.spaces)

    @property
    def numel(self) -> int:
        """Trained elements, without padding."""
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def piece_of(self) -> dict[str, Piece]:
        return {piece.name: piece for piece in self.pieces}

    def unit_range(self, unit: str) -> tuple[int, int]:
        """The flat interval of `unit`'s pieces, up to the shard grid; (0, 0) where it trains nothing."""
        pieces = [p for p in self.pieces if p.unit == unit]
        return (pieces[0].start, round_up(pieces[-1].start + pieces[-1].numel, SHARD_ALIGN)) if pieces else (0, 0)

    def routes(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Each rank's part of the flat interval [start, stop), which lies within one space; empty parts are (x, x)."""
        space = self.spaces[bisect_right([s.start for s in self.spaces], start) - 1]
        cuts = [min(max(space.start + r * space.width, start), stop) for r in range(self.dp + 1)]
        return list(itertools.pairwise(cuts))

    def local_of(self, rank: int, position: int) -> int:
        """The local position on dp rank `rank` of a flat position that it owns."""
        if self.replicated:
            return position
        space = self.spaces[bisect_right([s.start for s in self.spaces], position) - 1]
        return space.local + position - space.start - rank * space.width

    def owned(self, rank: int) -> list[OwnedRange]:
        """The canonical ranges in dp rank `rank`'s shard, in flat order."""
        ranges = []
        for piece in self.pieces:
            if piece.numel == 0:
                continue
            lo, hi = self.routes(piece.start, piece.start + piece.numel)[rank]
            if lo < hi:
                place = (piece.name, piece.slice, lo - piece.start, hi - lo, self.local_of(rank, lo))
                ranges.append(OwnedRange(*place))
        return ranges

    def held(self, rank: int) -> list[OwnedRange]:
        """All canonical ranges whose state dp rank `rank` holds: its own, or at stage 0 every piece whole."""
        if not self.replicated:
            return self.owned(rank)
        return [OwnedRange(p.name, p.slice, 0, p.numel, p.start) for p in self.pieces if p.numel]


class OwnershipTable:
    """The table for a dp x tp x pp mesh under a ZeRO stage; global rank = (pp_rank · dp + dp_rank) · tp + tp_rank."""

    def __init__(self, parameters: Sequence[ParamSpec], *, dp: int, tp: int = 1, pp: int = 1, stage: int = 1) -> None:
        self.parameters = tuple(parameters)
        self.dp, self.tp, self.pp = dp, tp, pp
        self.stage = stage
        self._shares = {(p, t): self._lay_out(p, t) for p in range(pp) for t in range(tp)}

    def _lay_out(self, stage: int, tp_rank: int) -> Partition:
        mine = [spec for spec in self.parameters if spec.stage == stage]
        units = list(dict.fromkeys(spec.unit for spec in mine))
        groups = [(unit,) for unit in units] if self.stage == 3 else [tuple(units)]
        pieces: list[Piece] = []
        spaces: list[Space] = []
        start = local = 0
        for group in groups:
            end = start
            for spec in (s for s in mine if s.unit in group):
                numel = spec.numel // spec.slices
                if spec.slices > 1:
                    each = spec.slices // self.tp
                    held = range(tp_rank * each, (tp_rank + 1) * each)
                else:
                    held = range(1)
                for index in held:
                    end = start + round_up(end - start, PIECE_ALIGN)
                    pieces.append(Piece(spec.name, index, numel, end, spec.unit, spec.decay))
                    end += numel
            width = round_up(end - start, SHARD_ALIGN * self.dp) // self.dp
            spaces.append(Space(start, width, local, group))
            start += width * self.dp
            local += width
        return Partition(tuple(pieces), tuple(spaces), self.dp, replicated=self.stage == 0)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(dp_rank, tp_rank, pp_rank) of a global rank."""
        return (rank // self.tp) % self.dp, rank % self.tp, rank // (self.tp * self.dp)

    def partition(self, rank: int) -> Partition:
        _, tp_rank, pp_rank = self.coordinates(rank)
        return self._shares[pp_rank, tp_rank]

    def owned(self, rank: int) -> list[OwnedRange]:
        """The ranges whose primary owner is global rank `rank`. A parameter that the tensor axis does not cut has
        bitwise copies on the other tensor ranks; tensor rank 0 is primary."""
        dp_rank, tp_rank, _ = self.coordinates(rank)
        cut = {spec.name for spec in self.parameters if spec.slices > 1}
        return [r for r in self.partition(rank).owned(dp_rank) if tp_rank == 0 or r.name in cut]
