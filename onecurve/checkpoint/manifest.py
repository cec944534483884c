"""The manifest: what a checkpoint says of itself. Everything in it is checked before anything it names is opened.

`manifest.json` is canonical JSON (sorted keys, no spaces, ASCII, one newline), `manifest.sha256` the hash over its
bytes as `sha256sum` prints it. Where a range lies in a file follows from the manifest alone: a shard file holds, for
each of `master`, `exp_avg`, `exp_avg_sq`, its ranges one after another in the order of `tensors`, slice and offset.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from onecurve.checkpoint.errors import DamagedCheckpoint, NewerCheckpoint

SCHEMA = 2
ChunkHash = Literal["blake3", "sha256"]
CHUNK_HASH: ChunkHash = "blake3"  # what state digests are made with; see digest.py
KINDS = ("master", "exp_avg", "exp_avg_sq")  # the optimizer's state, fp32, in this order in files and in the digest
MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.sha256"
MAX_MANIFEST_BYTES = 1 << 28
FILE_NAME = re.compile(r"rank-(\d{4,6})\.safetensors", re.ASCII)

# How each older schema becomes the next one: the number it has -> the change to the raw JSON object.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda raw: raw | {"schema": 2, "chunk_hash": "sha256"},
}

_Count = Annotated[int, Field(ge=0, le=1 << 48)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_FileName = Annotated[str, Field(pattern=rf"^{FILE_NAME.pattern}$", max_length=64)]
_Shape = Annotated[list[_Count], Field(max_length=16)]
_Dtype = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class FileEntry(_Strict):
    """One shard file: plain name, size in bytes, sha256 over all its bytes."""

    name: _FileName
    size: _Count
    sha256: _Sha256


class TensorEntry(_Strict):
    """A trained parameter. `shape` is the whole parameter's; `dtype` that of its working weights (the state is fp32);
    `split`: along what dimension its slices join, where known; `ranges[file]`: (slice, offset, length) in elements."""

    name: _Name
    shape: _Shape
    dtype: _Dtype
    slices: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    split: int | None = None
    ranges: dict[_FileName, list[tuple[_Count, _Count, _Count]]] = Field(default_factory=dict)

    @property
    def slice_numel(self) -> int:
        return math.prod(self.shape) // self.slices


class ExtraEntry(_Strict):
    """A frozen parameter or a buffer, stored once as `extra.<name>`; `sha256` is over its bytes."""

    name: _Name
    shape: _Shape
    dtype: _Dtype
    file: _FileName
    sha256: _Sha256


class Segment(NamedTuple):
    """`length` elements of (`name`, `slice`) from `offset` on, stored at element `at` of each kind in `file`."""

    file: str
    name: str
    slice: int
    offset: int
    length: int
    at: int


class Manifest(_Strict):
    """See docs/checkpoint.md. `wall_clock` is in seconds since the epoch; `finite` says that every value of the
    masters and moments is; `updates` counts AdamW's accepted updates; `faults` are the rehearsals that have fired;
    `chunk_hash` is what hashed the chunks of `state_digest`."""

    schema_version: int = Field(alias="schema", default=SCHEMA)
    onecurve: str = ""  # the version that wrote it
    step: Annotated[int, Field(ge=0, le=99_999_999)]
    curve_id: Annotated[str, Field(max_length=128)] = ""
    state_digest: _Sha256
    chunk_hash: ChunkHash = CHUNK_HASH
    updates: _Count
    finite: bool
    numerics: dict[str, Any] = Field(default_factory=dict)
    layout: dict[str, Any] = Field(default_factory=dict)
    wall_clock: float
    data_fingerprint: str = ""
    data_step: _Count
    skipped: list[_Count] = Field(default_factory=list)
    guard: dict[str, Any] = Field(default_factory=dict)
    faults: list[Any] = Field(default_factory=list)
    files: list[FileEntry]
    tensors: list[TensorEntry]
    extras: list[ExtraEntry] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        names = [f.name for f in self.files]
        for what, values in (("file", names), ("tensor", [t.name for t in self.tensors]),
                             ("extra", [e.name for e in self.extras])):  # fmt: skip
            if len(set(values)) != len(values):
                raise ValueError(f"a {what} is listed twice")
        known = set(names)
        for tensor in self.tensors:
            if math.prod(tensor.shape) % tensor.slices or not set(tensor.ranges) <= known:
                raise ValueError(f"tensor {tensor.name}: its slices do not divide it, or its ranges name unknown files")
            places = sorted(r for ranges in tensor.ranges.values() for r in ranges)
            expected = [(s, 0) for s in range(tensor.slices)] if tensor.slice_numel else []
            for index, offset, length in places:  # each slice must be covered once, without holes
                if not expected or (index, offset) != expected[0] or not 0 < length <= tensor.slice_numel - offset:
                    raise ValueError(f"tensor {tensor.name}: range {(index, offset, length)} overlaps or leaves a hole")
                end = offset + length
                expected = expected[1:] if end == tensor.slice_numel else [(index, end), *expected[1:]]
            if expected:
                raise ValueError(f"tensor {tensor.name}: slice {expected[0][0]} ends at {expected[0][1]}")
        if any(extra.file not in known for extra in self.extras):
            raise ValueError("an extra names an unknown file")
        return self

    def segments(self) -> Iterator[Segment]:
        """Every stored range, with its place in its file; in each file in stored order."""
        filled = {f.name: 0 for f in self.files}
        for tensor in self.tensors:
            for index, offset, length, file in sorted((*r, f) for f, rs in tensor.ranges.items() for r in rs):
                yield Segment(file, tensor.name, index, offset, length, filled[file])
                filled[file] += length

    def to_bytes(self) -> bytes:
        return canonical_json(self.model_dump(by_alias=True))  # as it is: pydantic's JSON turns NaN into null


def canonical_json(value: Any) -> bytes:
    """One spelling for one value: sorted keys, no spaces, ASCII. NaN and infinities are refused (ValueError)."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode("ascii")


def hash_line(data: bytes) -> bytes:
    """The content of `manifest.sha256`, as `sha256sum manifest.json` prints it."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode("ascii")


def parse_manifest(data: bytes, stated_hash: bytes, where: str) -> Manifest:
    """The manifest in `data`, after its hash, schema and every field were checked. `where` names it in errors.

    Raises NewerCheckpoint for a later schema, DamagedCheckpoint for anything else that is not right.
    """
    if stated_hash != hash_line(data):
        raise DamagedCheckpoint(f"{where}: {MANIFEST} does not match {MANIFEST_HASH}")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: {MANIFEST} is not JSON: {error}") from None
    if not isinstance(raw, dict) or type(raw.get("schema")) is not int:
        raise DamagedCheckpoint(f"{where}: {MANIFEST} has no schema number")
    if raw["schema"] > SCHEMA:
        raise NewerCheckpoint(
            f"{where}: checkpoint schema {raw['schema']} is newer than {SCHEMA}, the newest this version reads; "
            "read it with the version of onecurve that wrote it"
        )
    while raw["schema"] < SCHEMA:
        if raw["schema"] not in UPGRADES:
            raise DamagedCheckpoint(f"{where}: there is no checkpoint schema {raw['schema']}")
        raw = UPGRADES[raw["schema"]](raw)
    try:
        return Manifest.model_validate_json(canonical_json(raw))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "content"
        raise DamagedCheckpoint(f"{where}: {MANIFEST}: {place}: {first['msg']}") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{where}: {MANIFEST}: {error}") from None
