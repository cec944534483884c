"""The state digest: one hash over masters and moments, the same for every layout, computed shard by shard.

    chunk  BLAKE3 over 2^14 elements in a row (little-endian fp32) of one (kind, parameter, slice); the last is shorter
    node   sha256 over the canonical JSON [kind, parameter, slice, elements] and the hashes of its chunks
    root   sha256 over all nodes: kind by kind, parameters in the model's order, slices in order

BLAKE3 because all bytes pass here once more than through the files' sha256: it is as strong and several times as fast.

Each holder hashes the chunks that it holds whole and hands over the bytes of those it shares with a neighbour; one
exchange later everybody has all hashes. A holder is a rank with its shard, or a file of a checkpoint: same code.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from blake3 import blake3

from onecurve.checkpoint.errors import DamagedCheckpoint
from onecurve.checkpoint.manifest import CHUNK_HASH, KINDS, ChunkHash, canonical_json

CHUNK = 1 << 14  # elements: 64 KiB, small beside a shard, and in cache while it is hashed
HASHES: dict[ChunkHash, Callable[[bytes | memoryview], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}


class Slot(NamedTuple):
    """One (parameter, slice) of the model, with its number of elements; slots are in canonical order."""

    name: str
    slice: int
    numel: int


class Range(Protocol):
    """`length` elements of (`name`, `slice`) from `offset` on, at position `at` of the holder's buffers."""

    @property
    def name(self) -> str: ...
    @property
    def slice(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def at(self) -> int: ...


@dataclass
class Part:
    """What one holder contributes: hashes of whole chunks, keyed (kind, slot, chunk), and bytes of cut ones, keyed
    (kind, slot, offset)."""

    chunks: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    fragments: dict[tuple[int, int, int], bytes] = field(default_factory=dict)

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """A JSON header and a blob, for `agree`."""
        runs: list[list[int]] = []  # [kind, slot, first chunk, chunks]
        for kind, slot, chunk in self.chunks:
            if runs and runs[-1][:2] == [kind, slot] and sum(runs[-1][2:]) == chunk:
                runs[-1][3] += 1
            else:
                runs.append([kind, slot, chunk, 1])
        header = {
            "chunks": runs,
            "fragments": [[*key, len(data)] for key, data in self.fragments.items()],
        }
        return header, b"".join([*self.chunks.values(), *self.fragments.values()])

    @classmethod
    def unpack(cls, header: Mapping[str, Any], blob: bytes) -> "Part":
        part, at = cls(), 0
        for kind, slot, first, count in header["chunks"]:
            for chunk in range(first, first + count):
                part.chunks[kind, slot, chunk] = blob[at : at + 32]
                at += 32
        for kind, slot, offset, size in header["fragments"]:
            part.fragments[kind, slot, offset] = blob[at : at + size]
            at += size
        return part


def slots_of(parameters: Iterable[Any]) -> list[Slot]:
    """The slots of parameters that have `name`, `shape` and `slices` (a table's, or a manifest's tensors)."""
    slots = []
    for spec in parameters:
        numel = 1
        for size in spec.shape:
            numel *= size
        slots += [Slot(spec.name, index, numel // spec.slices) for index in range(spec.slices)]
    return slots


def digest_part(
    slots: Sequence[Slot],
    ranges: Iterable[Range],
    buffers: Sequence[np.ndarray],
    chunk_hash: ChunkHash = CHUNK_HASH,
    beside: Callable[[memoryview], object] | None = None,
) -> Part:
    """Hash this holder's `ranges` of its `buffers`: one 1-D fp32 array for each of KINDS.

    `beside` is called with all bytes, kind by kind and range by range, in pieces that are in cache then.
    """
    part, hasher = Part(), HASHES[chunk_hash]
    order = {(slot.name, slot.slice): index for index, slot in enumerate(slots)}
    ranges = list(ranges)
    for kind in range(len(KINDS)):
        data = buffers[kind].data.cast("B") if buffers[kind].size else memoryview(b"")
        for r in ranges:
            slot, offset, end = order[r.name, r.slice], r.offset, r.offset + r.length
            base = 4 * (r.at - r.offset)  # byte position of the slice's element 0, had we held it
            while offset < end:
                stop = min(end, (offset // CHUNK + 1) * CHUNK)
                view = data[base + 4 * offset : base + 4 * stop]
                if beside is not None:
                    beside(view)
                if offset % CHUNK == 0 and (stop % CHUNK == 0 or stop == slots[slot].numel):
                    part.chunks[kind, slot, offset // CHUNK] = hasher(view).digest()
                else:
                    part.fragments[kind, slot, offset] = bytes(view)
                offset = stop
    return part


def combine(slots: Sequence[Slot], parts: Iterable[Part], chunk_hash: ChunkHash = CHUNK_HASH) -> str:
    """The root, in hex, from everybody's parts. Raises DamagedCheckpoint where they leave a hole."""
    return hashlib.sha256(b"".join(nodes(slots, parts, chunk_hash).values())).hexdigest()


def nodes(
    slots: Sequence[Slot], parts: Iterable[Part], chunk_hash: ChunkHash = CHUNK_HASH
) -> dict[tuple[str, str, int], bytes]:
    """The digest of each (kind, parameter, slice), in canonical order. Raises DamagedCheckpoint as `combine` does."""
    chunks: dict[tuple[int, int, int], bytes] = {}
    cut: dict[tuple[int, int, int], list[tuple[int, bytes]]] = {}
    for part in parts:
        chunks.update(part.chunks)
        for (kind, slot, offset), data in part.fragments.items():
            cut.setdefault((kind, slot, offset // CHUNK), []).append((offset, data))
    for (kind, slot, chunk), pieces in cut.items():
        pieces.sort()
        data = b"".join(piece for _, piece in pieces)
        if len(data) == 4 * min(CHUNK, slots[slot].numel - chunk * CHUNK):
            chunks[kind, slot, chunk] = HASHES[chunk_hash](data).digest()
    found: dict[tuple[str, str, int], bytes] = {}
    for kind, kind_name in enumerate(KINDS):
        for index, (name, part_of, numel) in enumerate(slots):
            node = hashlib.sha256(canonical_json([kind_name, name, part_of, numel]))
            for chunk in range(-(-numel // CHUNK)):
                hashed = chunks.get((kind, index, chunk))
                if hashed is None:
                    raise DamagedCheckpoint(f"{kind_name} of {name}, slice {part_of}: nobody holds chunk {chunk}")
                node.update(hashed)
            found[kind_name, name, part_of] = node.digest()
    return found
