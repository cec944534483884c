"""Saving: every rank writes the ranges it owns, rank 0 commits.

    begin    rank 0 makes the temp folder            -> share 1: its name, and which rank knows which extras
    write    each rank: its file, sha256, digest leaves; no collective, so it may run on another thread
    finish   sizes, hashes, leaves, cut chunks       -> share 2: the manifest on rank 0, commit
                                                     -> share 3: the manifest's bytes, to all

Every share also carries errors (see agree.py): all ranks raise the same one, and rank 0 removes the temp folder.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from onecurve import __version__
from onecurve.checkpoint import store
from onecurve.checkpoint.agree import Shares, agree, attempt
from onecurve.checkpoint.digest import Part, combine, digest_part, slots_of
from onecurve.checkpoint.errors import CheckpointError, SaveFailed, save_error
from onecurve.checkpoint.lock import Fence
from onecurve.checkpoint.manifest import KINDS, ExtraEntry, FileEntry, Manifest, TensorEntry
from onecurve.checkpoint.shard import Spec, file_layout, floats, raw, write_new

INFO_FIELDS = ("curve_id", "numerics", "layout", "data_fingerprint", "data_step", "skipped", "guard", "faults")
_OVERLAP_BYTES = 1 << 20  # above this, hashing overlaps with writing on a second thread


class Saveable(Protocol):
    """The part of an optimizer that is saved."""

    mesh: Any
    table: Any
    stage: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    updates: int

    def held(self) -> Iterable[Any]: ...
    def extras(self) -> dict[str, Tensor]: ...


class OwnedPart(NamedTuple):
    """A range in canonical order; `at` is its place in the buffers at hand."""

    name: str
    slice: int
    offset: int
    length: int
    at: int


class Written(NamedTuple):
    """What one rank's `write` has to tell."""

    file: FileEntry | None
    part: Part
    extras: list[ExtraEntry]
    finite: bool


def owned_in_order(table: Any, rank: int) -> list[OwnedPart]:
    """The rank's ranges in the model's order (a table may list them in the order of its flat spaces)."""
    order = {spec.name: index for index, spec in enumerate(table.parameters)}
    ranges = sorted(table.owned(rank), key=lambda r: (order[r.name], r.slice, r.offset))
    return [OwnedPart(r.name, r.slice, r.offset, r.length, r.at) for r in ranges]


def owned_places(optimizer: "Saveable") -> list[OwnedPart]:
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


class PendingSave:
    """One save between its collective beginning and its collective end.

    With `snapshot` the state is copied first (12 bytes per owned element, `scratch`), and `write` may run on another
    thread while the optimizer goes on; without, `write` reads the live tensors. Both `__init__` and `finish` are
    collective; `write` is not.
    """

    def __init__(
        self,
        folder: Path,
        optimizer: Saveable,
        step: int,
        *,
        info: dict[str, Any] | None = None,
        fence: Fence | None = None,
        snapshot: bool = False,
        scratch: list[np.ndarray] | None = None,
    ) -> None:
        self.folder, self.step, self.fence = folder, step, fence
        self.mesh: Shares = optimizer.mesh
        self.rank = self.mesh.rank
        self.table = optimizer.table
        self.info = dict(info or {})
        self.updates = optimizer.updates
        self.ranges = owned_places(optimizer)
        self.scratch = scratch if scratch is not None else []
        self._temp: Path | None = None
        self._written: tuple[Written | None, CheckpointError | None] = (
            None,
            SaveFailed(f"rank {self.rank}: not written"),
        )

        mesh, shape = optimizer.mesh, {"zero": optimizer.stage}
        self.layout = {axis: getattr(mesh, axis) for axis in ("dp", "tp", "pp") if hasattr(mesh, axis)} | shape
        own = optimizer.extras()
        temp, error = attempt(self._open, partial(save_error, self.rank, f"can't make a folder in {folder}"))
        told = agree(self.mesh, {"temp": temp, "extras": sorted(own)}, error=error)
        self._temp = folder / told[0][0]["temp"]
        self.extras = self._gather_extras(own, [set(message["extras"]) for message, _ in told])

        states = [getattr(optimizer, kind).detach() for kind in KINDS]
        if snapshot or any(state.device.type != "cpu" for state in states):
            states = self._snapshot(states)
            self.extras = {name: t.detach().to("cpu", copy=True) for name, t in self.extras.items()}
        self._buffers = [floats(state) for state in states]

    def _open(self) -> str:
        unknown = sorted(set(self.info) - set(INFO_FIELDS))
        if unknown:
            raise SaveFailed(f"info has no place for {', '.join(unknown)}; known are {', '.join(INFO_FIELDS)}")
        return store.open_temp(self.folder, self.step).name if self.rank == 0 else ""

    def _gather_extras(self, own: dict[str, Tensor], known: list[set[str]]) -> dict[str, Tensor]:
        """Rank 0's extras and, where other ranks know more (a later stage's buffers), theirs: from the lowest rank."""
        holder = {name: rank for rank in reversed(range(len(known))) for name in known[rank]}
        if any(rank > 0 for rank in holder.values()):
            mine = {name: own[name].cpu().contiguous() for name, rank in holder.items() if rank == self.rank > 0}
            header = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in mine.items()}
            for entries, blob in agree(self.mesh, header, b"".join(raw(t) for t in mine.values())):
                at = 0
                for name, (dtype, shape) in entries.items():
                    size = Spec(name, dtype, tuple(shape)).nbytes
                    flat = torch.frombuffer(bytearray(blob[at : at + size] or b"\0"), dtype=torch.uint8)[:size]
                    own = own | {name: flat.view(getattr(torch, dtype)).reshape(shape)}
                    at += size
        return {name: own[name] for name in sorted(holder)} if self.rank == 0 else {}

    def _snapshot(self, states: list[Tensor]) -> list[Tensor]:
        """Copies of the owned ranges, packed, in `scratch` buffers that the next save may use again."""
        count = sum(r.length for r in self.ranges)
        if len(self.scratch) != len(KINDS) or self.scratch[0].size != count:
            self.scratch[:] = [np.empty(count, np.float32) for _ in KINDS]
        copies = [torch.from_numpy(buffer) for buffer in self.scratch]
        for copy, state in zip(copies, states, strict=True):
            at = 0
            for start, stop in spans(self.ranges):
                copy[at : at + stop - start].copy_(state[start:stop])
                at += stop - start
        at, packed = 0, []
        for r in self.ranges:
            packed.append(r._replace(at=at))
            at += r.length
        self.ranges = packed
        return copies

    def write(self) -> None:
        """Write and hash this rank's file. Never raises an Exception: `finish` shares what went wrong."""
        to_error = partial(save_error, self.rank, f"can't write {self.file_name}")
        self._written = attempt(self._write, to_error)

    @property
    def file_name(self) -> str:
        return f"rank-{self.rank:04d}.safetensors"

    def _write(self) -> Written:
        count = sum(r.length for r in self.ranges)
        extras = {f"extra.{name}": t.detach().cpu().contiguous() for name, t in self.extras.items()}
        specs = [Spec(key, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in extras.items()]
        parts: list[memoryview | bytes] = []
        finite = True
        if count or specs:
            layout = file_layout(count, specs)
            parts.append(layout.header)
            for spec in layout.specs:
                if spec.key in extras:
                    parts.append(raw(extras[spec.key]))
                else:
                    buffer = self._buffers[KINDS.index(spec.key)]
                    chunks = [buffer[start:stop] for start, stop in spans(self.ranges)]
                    finite = finite and all(_finite(chunk) for chunk in chunks)
                    parts += [memoryview(chunk).cast("B") for chunk in chunks]
        path = self._path(self.file_name)
        big = 12 * count > _OVERLAP_BYTES
        with ThreadPoolExecutor(1) if big else _Inline() as pool:
            written = pool.submit(write_new, path, parts) if parts else None
            hasher = hashlib.sha256()
            for view in parts:
                hasher.update(view)
            part = digest_part(slots_of(self.table.parameters), self.ranges, self._buffers)
            if written is not None:
                written.result()
        size = sum(len(view) for view in parts)
        entry = FileEntry(name=self.file_name, size=size, sha256=hasher.hexdigest()) if parts else None
        listed = [
            ExtraEntry(name=name, shape=list(spec.shape), dtype=spec.dtype, file=self.file_name,
                       sha256=hashlib.sha256(raw(extras[spec.key])).hexdigest())
            for name, spec in zip(self.extras, specs, strict=True)
        ]  # fmt: skip
        return Written(entry, part, listed, finite)

    def _path(self, name: str) -> Path:
        assert self._temp is not None
        return self._temp / name

    def finish(self, after_commit: Callable[[Manifest], None] | None = None) -> Manifest:
        """Collective. Gather, commit on rank 0, and return the manifest on all ranks; or raise the same error on all.

        `after_commit` runs on rank 0 once the checkpoint is in place.
        """
        try:
            written, error = self._written
            header: dict[str, Any] = {}
            blob = b""
            if written is not None:
                header, blob = written.part.pack()
                header["file"] = written.file.model_dump() if written.file else None
                header["extras"] = [extra.model_dump() for extra in written.extras]
                header["finite"] = written.finite
            told = agree(self.mesh, header, blob, error)
            data, error = attempt(
                partial(self._commit, told), partial(save_error, self.rank, f"can't commit step {self.step}")
            )
            committed = agree(self.mesh, {}, data or b"", error)[0][1]
        except CheckpointError:
            self._discard()
            raise
        manifest = Manifest.model_validate_json(committed)
        if after_commit is not None and self.rank == 0:
            after_commit(manifest)
        return manifest

    def _commit(self, told: list[tuple[dict[str, Any], bytes]]) -> bytes:
        if self.rank != 0:
            return b""
        parts = [Part.unpack(header, blob) for header, blob in told]
        tensors = {
            spec.name: TensorEntry(name=spec.name, shape=list(spec.shape), dtype=spec.dtype, slices=spec.slices,
                                   split=getattr(spec, "split", None))
            for spec in self.table.parameters
        }  # fmt: skip
        for rank, (header, _) in enumerate(told):
            for r in owned_in_order(self.table, rank) if header["file"] else ():
                tensors[r.name].ranges.setdefault(header["file"]["name"], []).append((r.slice, r.offset, r.length))
        fields: dict[str, Any] = {"layout": self.layout, "data_step": self.step} | self.info
        manifest = Manifest(
            step=self.step,
            state_digest=combine(slots_of(self.table.parameters), parts),
            updates=self.updates,
            finite=all(header["finite"] for header, _ in told),
            wall_clock=time.time(),
            onecurve=__version__,
            files=[FileEntry(**header["file"]) for header, _ in told if header["file"]],
            tensors=list(tensors.values()),
            extras=[ExtraEntry(**extra) for header, _ in told for extra in header["extras"]],
            **fields,
        )
        data = manifest.to_bytes()
        store.commit(self.folder, self._path(""), self.step, data, self.fence)
        return data

    def _discard(self) -> None:
        """Remove the temp folder: on rank 0, when no rank writes into it any more."""
        if self.rank == 0 and self._temp is not None:
            attempt(partial(store.discard, self._temp), partial(save_error, 0, "can't remove the temp folder"))


class _Inline:
    """An executor that runs at once, on this thread."""

    def __enter__(self) -> "_Inline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        work(*args)


def _finite(values: np.ndarray) -> bool:
    """aminmax propagates NaN, and runs at memory speed."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(torch.from_numpy(values)))).all())


def save_checkpoint(
    folder: Path,
    optimizer: Saveable,
    step: int,
    *,
    info: dict[str, Any] | None = None,
    fence: Fence | None = None,
    after_commit: Callable[[Manifest], None] | None = None,
) -> Manifest:
    """Collective: write the optimizer's state as `folder`/step-NNNNNNNN and return its manifest, alike on every rank.

    `folder` is the run's `checkpoints` folder, on a file system that all ranks see. `info` gives the manifest's
    INFO_FIELDS. Raises the same SaveFailed (DiskFull, NotWritable, Superseded) on all ranks, names rank and file, and
    leaves older checkpoints as they were.
    """
    save = PendingSave(folder, optimizer, step, info=info, fence=fence)
    save.write()
    return save.finish(after_commit)
