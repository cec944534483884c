"""From the ranges in a checkpoint's files to the ranges that a rank holds now, whatever layout wrote them.

Both sides name canonical places, so a read is an intersection: no rank reads more than what it needs.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from onecurve.checkpoint.digest import Range
from onecurve.checkpoint.errors import DamagedCheckpoint, ForeignCheckpoint
from onecurve.checkpoint.manifest import Manifest, Segment


class Read(NamedTuple):
    """Copy `length` elements from element `source` of each kind in a file to position `at` of the rank's vectors."""

    source: int
    at: int
    length: int


def check_fits(manifest: Manifest, parameters: Iterable, where: str) -> None:
    """The checkpoint has exactly these trained parameters, with these shapes and slices (else ForeignCheckpoint)."""
    saved = {t.name: (tuple(t.shape), t.slices) for t in manifest.tensors}
    wanted = {p.name: (tuple(p.shape), p.slices) for p in parameters}
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            sides = [f"{s[0]} in {s[1]} slice(s)" if (s := side.get(name)) else "absent" for side in (saved, wanted)]
            raise ForeignCheckpoint(f"{where}: parameter {name} is {sides[0]} there and {sides[1]} in this model")
    if list(saved) != list(wanted):
        raise ForeignCheckpoint(f"{where}: its parameters are in another order than this model's")


def plan_reads(manifest: Manifest, held: Iterable[Range]) -> dict[str, list[Read]]:
    """For each file, what a rank that holds `held` reads from it; neighbours are joined."""
    stored: dict[tuple[str, int], list[Segment]] = {}
    for segment in manifest.segments():
        stored.setdefault((segment.name, segment.slice), []).append(segment)
    plan: dict[str, list[Read]] = {}
    for want in held:
        pieces = stored.get((want.name, want.slice), [])
        index = bisect_right([p.offset for p in pieces], want.offset) - 1
        position, end = want.offset, want.offset + want.length
        while position < end:
            if not 0 <= index < len(pieces):
                raise DamagedCheckpoint(f"{want.name}, slice {want.slice}: nothing is stored at {position}")
            piece = pieces[index]
            stop = min(end, piece.offset + piece.length)
            read = Read(piece.at + position - piece.offset, want.at + position - want.offset, stop - position)
            _append(plan.setdefault(piece.file, []), read)
            position, index = stop, index + 1
    return plan


def _append(reads: list[Read], read: Read) -> None:
    if reads:
        last = reads[-1]
        if last.source + last.length == read.source and last.at + last.length == read.at:
            reads[-1] = last._replace(length=last.length + read.length)
            return
    reads.append(read)
