"""Loading: any checkpoint into any layout, proven by the digest of what has arrived in memory.

    round 1   rank 0 reads and checks the manifest and the folder    -> the manifest, to all
    read      each rank: header bytes of the files it needs, then exactly its ranges, straight into its vectors
    round 2   chunk hashes of what each rank now owns                -> the root, compared with the manifest's
    round 3   only where that fails: files are hashed, spread over the ranks, to name the damaged one

The digest covers every element, the header is compared byte for byte, extras have hashes of their own: so no bit of a
file is used unseen, with one pass over the data instead of two.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from onecurve import faults
from onecurve.checkpoint.agree import Alone, RankGroup, agree, attempt
from onecurve.checkpoint.digest import Part, combine, digest_part, nodes, slots_of
from onecurve.checkpoint.errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint
from onecurve.checkpoint.holdings import Saveable, owned_places
from onecurve.checkpoint.manifest import CHUNK_HASH, KINDS, ChunkHash, FileEntry, Manifest, parse_manifest
from onecurve.checkpoint.patience import Alive, Count, silent, together
from onecurve.checkpoint.read import check_folder, check_hash, parse_checked, read_extra, read_manifest_bytes
from onecurve.checkpoint.reshard import check_fits, plan_reads
from onecurve.checkpoint.shard import check_shape, floats, layouts, opened, raw, read_into
from onecurve.checkpoint.store import list_steps


def state_digest(optimizer: Saveable) -> str:
    """Collective: the digest of the optimizer's masters and moments, in hex, the same on every rank and layout."""
    return combine(slots_of(optimizer.table.parameters), _all_parts(optimizer))


def tensor_digests(optimizer: Saveable) -> dict[tuple[str, str, int], bytes]:
    """Collective: as `state_digest`, one digest for each (kind, parameter, slice)."""
    return nodes(slots_of(optimizer.table.parameters), _all_parts(optimizer))


def _all_parts(optimizer: Saveable) -> list[Part]:
    part, error = attempt(partial(_own_part, optimizer), partial(_load_error, optimizer.mesh.rank, "the state digest"))
    header, blob = part.pack() if part is not None else ({}, b"")
    return [Part.unpack(*message) for message in agree(optimizer.mesh, header, blob, error)]


def load_checkpoint(
    path: str | Path, optimizer: Saveable, *, curve_id: str | None = None, alive: Alive = silent
) -> Manifest:
    """Collective: fill the optimizer (masters, moments, update count, extras, working weights) from the checkpoint
    `path`, whatever layout saved it, and return its manifest on every rank. `alive`: see patience.py.

    Raises the same error on all ranks: ForeignCheckpoint (of another model, or another curve than `curve_id`),
    NewerCheckpoint, DamagedCheckpoint (names the file). After an error in the data the state is undefined: load
    another checkpoint, or stop.
    """
    path, mesh = Path(path), optimizer.mesh
    manifest = _share_manifest(path, mesh, curve_id)
    to_error = partial(_load_error, mesh.rank, f"can't load {path}")

    def work(count: Count) -> tuple[Part | None, CheckpointError | None]:
        return attempt(partial(_fill, path, manifest, optimizer, count), to_error)

    part, error = together(mesh, work, alive, f"load of step {manifest.step}")
    header: dict[str, Any] = {"extras": sorted(optimizer.extras())}
    blob = b""
    if part is not None:
        state, blob = part.pack()
        header |= state
    try:
        told = agree(mesh, header, blob, error)
        missing = {e.name for e in manifest.extras}.difference(*(message["extras"] for message, _ in told))
        if missing:
            raise ForeignCheckpoint(
                f"{path}: this model has no frozen parameter or buffer {', '.join(sorted(missing))}"
            )
        parts = [Part.unpack(*message) for message in told]
        found = combine(slots_of(manifest.tensors), parts, manifest.chunk_hash)
        if found != manifest.state_digest:
            raise DamagedCheckpoint(f"{path}: what was read does not have the manifest's state digest")
    except DamagedCheckpoint as error:
        damaged = hash_problems(path, manifest, mesh, alive)
        raise DamagedCheckpoint("; ".join([*damaged]) or str(error)) from None
    optimizer.updates = manifest.updates
    optimizer.refresh()
    return manifest


def latest_checkpoint(
    folder: Path,
    mesh: RankGroup | None = None,
    *,
    curve_id: str | None = None,
    finite: bool = False,
    step: int | None = None,
    alive: Alive = silent,
) -> tuple[Path | None, list[str]]:
    """Collective: the newest checkpoint in `folder` that verifies whole, or None, alike on every rank; and, one line
    each, why newer ones were passed over. Rank 0 decides what is there; hashing is spread over the ranks.

    With `curve_id` those of other curves are passed over, with `finite` those that hold a value that is not; with
    `step` no other step's is looked at. `alive`: see patience.py.
    """
    mesh = mesh or Alone()
    reasons: list[str] = []
    steps, error = attempt(partial(list_steps, folder), partial(_load_error, mesh.rank, f"can't read {folder}"))
    names = [found.path.name for found in steps or () if step in (None, found.step)]
    told = agree(mesh, {"names": names}, error=error if mesh.rank == 0 else None)
    for name in told[0][0]["names"]:
        path = folder / name
        try:
            manifest = _share_manifest(path, mesh, curve_id)
        except CheckpointError as problem:
            reasons.append(f"{name}: {problem}")
            continue
        problems = hash_problems(path, manifest, mesh, alive)
        if finite and not manifest.finite and not problems:
            problems = ["holds values that are not finite"]
        if not problems:
            return path, reasons
        reasons.append(f"{name}: {'; '.join(problems)}")
    return None, reasons


def hash_problems(path: Path, manifest: Manifest, mesh: RankGroup, alive: Alive = silent) -> list[str]:
    """Collective: compare every file's sha256, largest files first, each rank taking from the least loaded."""
    load = [0] * mesh.world
    mine: list[FileEntry] = []
    for entry in sorted(manifest.files, key=lambda f: (-f.size, f.name)):
        rank = load.index(min(load))
        load[rank] += entry.size
        if rank == mesh.rank:
            mine.append(entry)

    def work(count: Count) -> list[str]:
        return [p for entry in mine if (p := check_hash(path, entry, count))]

    problems = together(mesh, work, alive, f"check of step {manifest.step}")
    told = agree(mesh, {"problems": problems})
    return sorted(p for message, _ in told for p in message["problems"])


def _share_manifest(path: Path, mesh: RankGroup, curve_id: str | None) -> Manifest:
    """Collective: the manifest of a folder that has the right files, sizes and headers; errors are the same on all."""

    def read() -> tuple[bytes, bytes]:
        content = read_manifest_bytes(path)
        problems = check_folder(path, parse_checked(path, content, curve_id))
        if problems:
            raise DamagedCheckpoint("; ".join(problems))
        return content

    work = read if mesh.rank == 0 else lambda: (b"", b"")
    content, error = attempt(work, partial(_load_error, mesh.rank, f"can't read {path}"))
    data, stated = content or (b"", b"")
    header, blob = agree(mesh, {"size": len(data)}, data + stated, error)[0]
    return parse_manifest(blob[: header["size"]], blob[header["size"] :], where=str(path))


def _fill(path: Path, manifest: Manifest, optimizer: Saveable, count: Count) -> Part:
    """Read this rank's ranges and extras; the digest part of what it owns."""
    faults.at("load.read", rank=optimizer.mesh.rank, step=manifest.step)
    check_fits(manifest, optimizer.table.parameters, str(path))
    vectors = [getattr(optimizer, kind).detach() for kind in KINDS]
    expected = layouts(manifest)
    for file, reads in plan_reads(manifest, optimizer.held()).items():
        with opened(path / file) as fd:
            check_shape(fd, expected[file], path / file)
            for kind, vector in zip(KINDS, vectors, strict=True):
                start = expected[file].position[kind]
                for read in reads:
                    target = vector[read.at : read.at + read.length]
                    staged = target if target.device.type == "cpu" else torch.empty(read.length)
                    faults.at("load.block")
                    read_into(fd, raw(staged), start + 4 * read.source, path / file, count)
                    if staged is not target:
                        target.copy_(staged)
    for name, target in optimizer.extras().items():
        saved = read_extra(path, manifest, name)
        if saved.dtype != target.dtype or saved.shape != target.shape:
            raise ForeignCheckpoint(f"{path}: {name} is {saved.dtype} {tuple(saved.shape)} there, "
                                    f"{target.dtype} {tuple(target.shape)} in this model")  # fmt: skip
        with torch.no_grad():
            target.copy_(saved)
    return _own_part(optimizer, manifest.chunk_hash, count)


def _own_part(optimizer: Saveable, chunk_hash: ChunkHash = CHUNK_HASH, count: Count = silent) -> Part:
    buffers = [floats(getattr(optimizer, kind).detach().cpu()) for kind in KINDS]
    return digest_part(
        slots_of(optimizer.table.parameters), owned_places(optimizer), buffers, chunk_hash, lambda v: count(len(v))
    )


def _load_error(rank: int, doing: str, cause: BaseException) -> CheckpointError:
    if isinstance(cause, CheckpointError):
        return cause
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
    return CheckpointError(f"rank {rank}: {doing}: {text}")
