"""What a rank holds of the state and what of it is saved by it: the ownership table, read for checkpoints."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from onecurve.checkpoint.agree import RankGroup, agree
from onecurve.checkpoint.manifest import KINDS
from onecurve.checkpoint.shard import Spec, floats, from_bytes, raw


class Saveable(Protocol):
    """The part of an optimizer that is saved and loaded: see `ZeroOptimizer`."""

    mesh: Any
    table: Any
    stage: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    updates: int

    def held(self) -> Iterable[Any]: ...
    def extras(self) -> dict[str, Tensor]: ...
    def refresh(self) -> None: ...


class OwnedPart(NamedTuple):
    """`length` elements of (`name`, `slice`) from `offset` on, at place `at` of the buffers at hand."""

    name: str
    slice: int
    offset: int
    length: int
    at: int


def owned_in_order(table: Any, rank: int) -> list[OwnedPart]:
    """The rank's ranges in the model's order (a table may list them in the order of its flat spaces)."""
    order = {spec.name: index for index, spec in enumerate(table.parameters)}
    ranges = sorted(table.owned(rank), key=lambda r: (order[r.name], r.slice, r.offset))
    return [OwnedPart(r.name, r.slice, r.offset, r.length, r.at) for r in ranges]


def owned_places(optimizer: Saveable) -> list[OwnedPart]:
    """This rank's owned ranges where they lie in its vectors: a rank that holds more than it owns (stage 0) keeps them
    at other places than a shard would."""
    held: dict[tuple[str, int], list[Any]] = {}
    for r in optimizer.held():
        held.setdefault((r.name, r.slice), []).append(r)
    places = []
    for own in owned_in_order(optimizer.table, optimizer.mesh.rank):
        home = next(h for h in held[own.name, own.slice] if h.offset <= own.offset < h.offset + h.length)
        places.append(own._replace(at=home.at + own.offset - home.offset))
    return places


def spans(ranges: Sequence[OwnedPart]) -> list[tuple[int, int]]:
    """(start, stop) of the buffers' parts that `ranges` cover, in their order, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for r in ranges:
        if joined and joined[-1][1] == r.at:
            joined[-1] = (joined[-1][0], r.at + r.length)
        else:
            joined.append((r.at, r.at + r.length))
    return joined


def snapshot(
    states: Sequence[Tensor], ranges: Sequence[OwnedPart], scratch: list[np.ndarray]
) -> tuple[list[np.ndarray], list[OwnedPart]]:
    """Copies of `ranges` of each state, packed, and the ranges with their places there.

    The copies live in `scratch`, which keeps them for the next snapshot: 12 bytes per owned element, allocated once.
    """
    count = sum(r.length for r in ranges)
    if len(scratch) != len(KINDS) or scratch[0].size != count:
        scratch[:] = [np.empty(count, np.float32) for _ in KINDS]
    for buffer, state in zip(scratch, states, strict=True):
        at = 0
        for start, stop in spans(ranges):
            target, source = buffer[at : at + stop - start], state[start:stop]
            if source.device.type == "cpu":
                target[:] = floats(source)  # numpy's copy takes two thirds of the time of torch's
            else:
                torch.from_numpy(target).copy_(source)
            at += stop - start
    packed, at = [], 0
    for r in ranges:
        packed.append(r._replace(at=at))
        at += r.length
    return scratch, packed


def gather_extras(mesh: RankGroup, own: dict[str, Tensor], known: Sequence[Iterable[str]]) -> dict[str, Tensor]:
    """On rank 0 all extras of the job, in the order of their names; elsewhere none. `known[rank]`: who has which.

    Rank 0 stores its own. What only others have (a buffer of a later pipeline stage) comes from the lowest such rank:
    collective only in that case, which every rank sees in `known`.
    """
    holder = {name: rank for rank in reversed(range(len(known))) for name in known[rank]}
    if any(rank > 0 for rank in holder.values()):
        mine = {name: own[name].detach().cpu().contiguous() for name in holder if holder[name] == mesh.rank > 0}
        header = {name: [dtype_name(t), list(t.shape)] for name, t in mine.items()}
        for entries, blob in agree(mesh, header, b"".join(raw(t) for t in mine.values())):
            at = 0
            for name, (dtype, shape) in entries.items():
                spec = Spec(name, dtype, tuple(shape))
                own = own | {name: from_bytes(blob[at : at + spec.nbytes], spec)}
                at += spec.nbytes
    return {name: own[name] for name in sorted(holder)} if mesh.rank == 0 else {}


def dtype_name(tensor: Tensor) -> str:
    """torch's name of a dtype, without the module."""
    return str(tensor.dtype).removeprefix("torch.")
