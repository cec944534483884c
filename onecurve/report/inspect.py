"""A checkpoint's manifest as a table, and its content checked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from onecurve.checkpoint.errors import DamagedCheckpoint
from onecurve.checkpoint.manifest import Manifest
from onecurve.checkpoint.read import read_manifest, verify_checkpoint
from onecurve.errors import CheckFailed, InputError
from onecurve.paths import FOLDER, need
from onecurve.report.console import human_bytes, printable, table


def inspect_checkpoint(path: str | Path, *, check: bool = False) -> tuple[list[str], list[str]]:
    """The lines of the table and, with `check`, what is wrong: empty for a whole checkpoint.

    InputError where there is none or its manifest can't be trusted; with `check` the latter is CheckFailed.
    """
    path = Path(path)
    need(path, FOLDER, "checkpoint", "give a run's checkpoints/step-NNNNNNNN")
    if (path / "checkpoints").is_dir():
        raise InputError(f"{path}: is a run folder; give one of {path / 'checkpoints'}/step-NNNNNNNN")
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        if check:
            raise CheckFailed(str(error)) from None
        raise
    return manifest_lines(manifest), verify_checkpoint(path) if check else []


def manifest_lines(manifest: Manifest) -> list[str]:
    """What the manifest holds: the run's place, the files, the tensors with their (slice, offset, length) per file."""
    elements = sum(tensor.slice_numel * tensor.slices for tensor in manifest.tensors)
    size = sum(file.size for file in manifest.files)
    schema = f"read as schema {manifest.schema_version}, chunks of the digest by {manifest.chunk_hash}"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.wall_clock))
    facts: list[tuple[str, Any]] = [
        ("step", f"{manifest.step}, {manifest.updates} updates, next batch {manifest.data_step}"),
        ("skipped batches", ", ".join(map(str, manifest.skipped)) or "none"),
        ("saved", when),
        ("layout", _pairs(manifest.layout)),
        ("curve", manifest.curve_id or "none"),
        ("data", manifest.data_fingerprint or "none"),
        ("state digest", manifest.state_digest + ("" if manifest.finite else "  (holds values that are not finite)")),
        ("content", f"{elements:,} trained elements in {size:,} bytes ({human_bytes(size)}), {schema}"),
        ("numerics", _pairs(manifest.numerics)),
    ]
    lines = [f"{name:<15}  {printable(str(value))}" for name, value in facts]
    lines += [
        "",
        *table(["file", "bytes", "sha256"], [(f.name, f"{f.size:,}", f.sha256) for f in manifest.files], left=(0, 2)),
    ]
    rows = []
    for tensor in manifest.tensors:
        places = []
        for file, ranges in sorted(tensor.ranges.items()):
            cut = [f"{f'{index}:' if tensor.slices > 1 else ''}{start}+{length}" for index, start, length in ranges]
            places.append(f"{file.removesuffix('.safetensors')} {' '.join(cut)}")
        rows.append((printable(tensor.name), _shape(tensor.shape), tensor.dtype, ", ".join(places) or "no elements"))
    where = "slice:offset+length" if any(tensor.slices > 1 for tensor in manifest.tensors) else "offset+length"
    lines += ["", *table(["tensor", "shape", "dtype", f"in file ({where})"], rows, left=(0, 1, 2, 3))]
    if manifest.extras:
        extras = [(printable(e.name), _shape(e.shape), e.dtype, e.file) for e in manifest.extras]
        lines += ["", *table(["frozen or buffer", "shape", "dtype", "in file"], extras, left=(0, 1, 2, 3))]
    return lines


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "none"
