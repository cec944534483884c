"""Reading a checkpoint in one process: its manifest, a full check, its parameters. Nothing is unpickled, ever."""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onecurve.checkpoint.digest import combine, digest_part, slots_of
from onecurve.checkpoint.errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint
from onecurve.checkpoint.manifest import (
    KINDS,
    MANIFEST,
    MANIFEST_HASH,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    parse_manifest,
)
from onecurve.checkpoint.patience import Count, silent
from onecurve.checkpoint.shard import Layout, check_shape, floats, hash_file, layouts, opened, raw, read_into
from onecurve.checkpoint.store import step_name


def read_manifest(path: Path, *, curve_id: str | None = None) -> Manifest:
    """The manifest of the checkpoint folder `path`, checked against its hash and its limits; shard files stay closed.

    Raises NewerCheckpoint, ForeignCheckpoint (where `curve_id` is given and another), DamagedCheckpoint.
    """
    return parse_checked(path, read_manifest_bytes(path), curve_id)


def read_manifest_bytes(path: Path) -> tuple[bytes, bytes]:
    """The bytes of the manifest and of its hash."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise CheckpointError(f"{path}: no checkpoint there: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise DamagedCheckpoint(f"{path}: is {'a link' if stat.S_ISLNK(mode) else 'not a folder'}, not a checkpoint")
    return _small_file(path / MANIFEST), _small_file(path / MANIFEST_HASH)


def parse_checked(path: Path, content: tuple[bytes, bytes], curve_id: str | None) -> Manifest:
    manifest = parse_manifest(*content, where=str(path))
    if path.name.startswith("step-") and path.name != step_name(manifest.step):
        raise DamagedCheckpoint(f"{path}: holds step {manifest.step}")
    if curve_id is not None and manifest.curve_id != curve_id:
        raise ForeignCheckpoint(
            f"{path}: is of curve {manifest.curve_id or '(none)'}, expected {curve_id}; "
            "a checkpoint of another curve can only start a new one (--from)"
        )
    return manifest


def _small_file(path: Path) -> bytes:
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if not 0 < size <= MAX_MANIFEST_BYTES:
            raise DamagedCheckpoint(f"{path}: has {size} bytes, allowed are 1 to {MAX_MANIFEST_BYTES}")
        data = bytearray(size)
        read_into(fd, memoryview(data), 0, path)
    return bytes(data)


def check_folder(path: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the folder's entries: missing, extra, not a plain file, another size or header. Cheap."""
    problems = []
    try:
        expected = layouts(manifest)
    except ValueError as error:
        return [f"{path}: {error}"]
    stated = {f.name: f.size for f in manifest.files}
    for name in sorted({entry.name for entry in os.scandir(path)} - set(expected) - {MANIFEST, MANIFEST_HASH}):
        problems.append(f"{path / name}: is not in the manifest")
    for name, layout in expected.items():
        try:
            if stated[name] != layout.size:
                raise DamagedCheckpoint(f"{path / name}: the manifest gives {stated[name]} bytes to {layout.size}")
            with opened(path / name) as fd:
                check_shape(fd, layout, path / name)
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
    return problems


def check_hash(path: Path, entry: FileEntry, count: Count = silent) -> str | None:
    """None, or what is wrong with the content of one file of the checkpoint `path`."""
    try:
        with opened(path / entry.name) as fd:
            found = hash_file(fd, count)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None if found == entry.sha256 else f"{path / entry.name}: its sha256 is not the manifest's"


def verify_checkpoint(path: Path) -> list[str]:
    """Everything that is wrong with a checkpoint; an empty list if it is whole. Reads every byte twice: for the files'
    hashes and for the state digest."""
    try:
        manifest = read_manifest(path)
        problems = check_folder(path, manifest)
        problems += [p for entry in manifest.files if (p := check_hash(path, entry))] if not problems else []
        if not problems and digest_of_files(path, manifest) != manifest.state_digest:
            problems.append(f"{path}: its files do not have the state digest that the manifest gives")
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return problems


def digest_of_files(path: Path, manifest: Manifest) -> str:
    """The state digest, from the files alone. Memory: the largest file."""
    slots = slots_of(manifest.tensors)
    ranges: dict[str, list] = {f.name: [] for f in manifest.files}
    for segment in manifest.segments():
        ranges[segment.file].append(segment)
    kind = manifest.chunk_hash
    parts = [digest_part(slots, ranges[name], state, kind) for name, state in _states(path, manifest, KINDS)]
    return combine(slots, parts, kind)


def _states(path: Path, manifest: Manifest, kinds: tuple[str, ...]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each file's name and its `kinds`, as flat fp32 arrays."""
    for name, layout in layouts(manifest).items():
        with opened(path / name) as fd:
            check_shape(fd, layout, path / name)
            yield name, [floats(_read(fd, layout, kind, path / name)) for kind in kinds]


def _read(fd: int, layout: Layout, key: str, path: Path) -> Tensor:
    """One tensor of a file, or an empty fp32 one where the file has no such key."""
    spec = next((s for s in layout.specs if s.key == key), None)
    if spec is None:
        return torch.empty(0)
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    if tensor.numel():
        read_into(fd, raw(tensor), layout.position[key], path)
    return tensor


def read_extra(path: Path, manifest: Manifest, name: str) -> Tensor:
    """A frozen parameter or buffer, checked against its hash."""
    entry = next((e for e in manifest.extras if e.name == name), None)
    if entry is None:
        raise ForeignCheckpoint(f"{path}: has no frozen parameter or buffer {name}")
    file = path / entry.file
    with opened(file) as fd:
        tensor = _read(fd, layouts(manifest)[entry.file], f"extra.{name}", file)
    if hashlib.sha256(raw(tensor) if tensor.numel() else b"").hexdigest() != entry.sha256:
        raise DamagedCheckpoint(f"{file}: the bytes of {name} are not those that were saved")
    return tensor


def read_parameters(path: Path, *, kind: str = "master", check: bool = True) -> dict[str, Tensor]:
    """Every trained parameter's fp32 masters (or another of KINDS), by canonical name, in the model's order.

    A parameter in slices is joined along its `split` dimension; where the manifest gives none, its slices are stacked:
    [slices, elements per slice]. With `check` every file's sha256 is compared first (DamagedCheckpoint).
    """
    manifest = read_manifest(path)
    problems = check_folder(path, manifest)
    if check and not problems:
        problems = [p for entry in manifest.files if (p := check_hash(path, entry))]
    if problems:
        raise DamagedCheckpoint("; ".join(problems))
    flat = {t.name: torch.empty(t.slices, t.slice_numel) for t in manifest.tensors}
    segments: dict[str, list] = {f.name: [] for f in manifest.files}
    for segment in manifest.segments():
        segments[segment.file].append(segment)
    for file, (state,) in _states(path, manifest, (kind,)):
        for s in segments[file]:
            flat[s.name][s.slice, s.offset : s.offset + s.length] = torch.from_numpy(state[s.at : s.at + s.length])
    return {t.name: _joined(flat[t.name], t.shape, t.slices, t.split) for t in manifest.tensors}


def _joined(stacked: Tensor, shape: list[int], slices: int, split: int | None) -> Tensor:
    """[slices, elements] -> the parameter's `shape`."""
    if slices == 1:
        return stacked.reshape(shape)
    if split is None:
        return stacked
    part = list(shape)
    part[split] //= slices
    return torch.cat([piece.reshape(part) for piece in stacked], dim=split)
