"""Shard files: safetensors written and read straight between tensor memory and the file.

    8 bytes: length of the header | JSON header, padded with spaces | master | exp_avg | exp_avg_sq | extras

The header is a function of the manifest, so a reader compares its bytes with the ones it expects and never has to trust
offsets in a file. Extras with elements of 8 bytes come first: safetensors wants every tensor at a multiple of its size.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onecurve import faults
from onecurve.checkpoint.errors import DamagedCheckpoint
from onecurve.checkpoint.manifest import KINDS, Manifest
from onecurve.checkpoint.patience import Count, silent

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_BLOCK = 1 << 24  # bytes that are written or read in one go: each is a sign of life
_SYNC = 1 << 27  # bytes between two waits for the disk: one for the whole of a large file would be a long silence
_ALIGN = 64  # the data starts at a multiple of this, so that mapped tensors are aligned


class Spec(NamedTuple):
    """One tensor of a file: its name there, torch's name of its dtype, its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


class Layout(NamedTuple):
    """A file's exact header bytes, the byte position of each tensor, and the file's size."""

    header: bytes
    position: dict[str, int]
    size: int
    specs: tuple[Spec, ...]


def file_layout(count: int, extras: Sequence[Spec], metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a file with `count` owned elements and `extras` (keys already `extra.<name>`).

    `metadata`: text under safetensors' `__metadata__`; checkpoints have none.

    Raises ValueError for a dtype that safetensors does not know.
    """
    state = [Spec(kind, "float32", (count,)) for kind in KINDS] if count else []
    for spec in extras:
        if spec.dtype not in _DTYPES or not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            raise ValueError(f"{spec.key}: dtype {spec.dtype} can't be stored; known are {', '.join(_DTYPES)}")
    specs = sorted(
        [*state, *extras], key=lambda s: -getattr(torch, s.dtype).itemsize
    )  # stable: state before fp32 extras
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    end = 0
    for spec in specs:
        starts[spec.key], end = end, end + spec.nbytes
        offsets = [starts[spec.key], end]
        entries[spec.key] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, {k: len(header) + s for k, s in starts.items()}, len(header) + end, tuple(specs))


def layouts(manifest: Manifest) -> dict[str, Layout]:
    """What each file of `manifest` must look like."""
    counts = {f.name: 0 for f in manifest.files}
    for tensor in manifest.tensors:
        for file, ranges in tensor.ranges.items():
            counts[file] += sum(length for _, _, length in ranges)
    extras: dict[str, list[Spec]] = {f.name: [] for f in manifest.files}
    for extra in manifest.extras:
        extras[extra.file].append(Spec(f"extra.{extra.name}", extra.dtype, tuple(extra.shape)))
    return {name: file_layout(counts[name], extras[name]) for name in counts}


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def from_bytes(data: bytes, spec: Spec) -> Tensor:
    """A CPU tensor of `spec` with these bytes."""
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    raw(tensor)[:] = data
    return tensor


def floats(tensor: Tensor) -> np.ndarray:
    """A contiguous fp32 CPU tensor as numpy, sharing its memory."""
    return tensor.detach().numpy()


def write_all(fd: int, data: memoryview | bytes, count: Count = silent) -> None:
    """Write every byte: a single write may stop early."""
    view = memoryview(data).cast("B") if isinstance(data, memoryview) else memoryview(data)
    while len(view):
        faults.at("save.block")
        written = os.write(fd, view[:_BLOCK])
        count(written)
        view = view[written:]


def write_new(path: Path, parts: Iterable[memoryview | bytes], count: Count = silent) -> None:
    """Write and fsync a file that must not exist yet; `count` is told of the bytes that went out."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    unsynced = 0

    def sync_at_times(written: int) -> None:
        nonlocal unsynced
        unsynced += written
        if unsynced >= _SYNC:
            os.fsync(fd)
            unsynced = 0
        count(written)

    try:
        for part in parts:
            write_all(fd, part, sync_at_times)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file, for reading; a link, a folder or a device is refused (DamagedCheckpoint)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: is missing") from None
    except OSError as error:
        link = path.is_symlink()
        raise DamagedCheckpoint(f"{path}: {'is a link' if link else error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedCheckpoint(f"{path}: is not a regular file")
        yield fd
    finally:
        os.close(fd)


def read_into(fd: int, view: memoryview, position: int, path: Path, count: Count = silent) -> None:
    """Fill `view` from byte `position` on."""
    while len(view):
        got = os.preadv(fd, [view[:_BLOCK]], position)
        if got == 0:
            raise DamagedCheckpoint(f"{path}: ends at byte {position}")
        count(got)
        view, position = view[got:], position + got


def check_shape(fd: int, layout: Layout, path: Path) -> None:
    """The file has the size and, byte for byte, the header that the manifest asks for."""
    size = os.fstat(fd).st_size
    if size != layout.size:
        raise DamagedCheckpoint(f"{path}: has {size} bytes, the manifest says {layout.size}")
    found = bytearray(len(layout.header))
    read_into(fd, memoryview(found), 0, path)
    if found != layout.header:
        raise DamagedCheckpoint(f"{path}: its header is not the one of the manifest's tensors")


def hash_file(fd: int, count: Count = silent) -> str:
    """sha256 over the whole file, in hex."""
    hasher, buffer, position = hashlib.sha256(), bytearray(1 << 20), 0
    view = memoryview(buffer)
    while got := os.preadv(fd, [view], position):
        faults.at("load.block")
        hasher.update(view[:got])
        count(got)
        position += got
    return hasher.hexdigest()
