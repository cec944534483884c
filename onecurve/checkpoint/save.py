"""Saving: every rank writes the ranges it owns, rank 0 commits.

    begin      collective   rank 0 makes the temp folder; its name goes to all, and which rank knows which extras
    write      each rank    its file, sha256, chunk hashes
    gather     collective   sizes, hashes of files and chunks, cut chunks
    commit     rank 0       the manifest, fsync, rename: see store.py
    conclude   collective   the manifest's bytes, to all

`write` and `commit` take part in no collective, so they may run on another thread. Every
exchange also carries errors (see agree.py): all ranks raise the same one, and rank 0 removes the temp folder.

Places for injected faults (onecurve/faults.py): save.begin, save.write, save.written on each rank; save.commit and
save.rename on rank 0.
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onecurve import __version__, faults
from onecurve.checkpoint import store
from onecurve.checkpoint.agree import Message, RankGroup, agree, attempt
from onecurve.checkpoint.digest import Part, combine, digest_part, slots_of
from onecurve.checkpoint.errors import CheckpointError, SaveFailed, save_error
from onecurve.checkpoint.holdings import (
    OwnedPart,
    Saveable,
    dtype_name,
    gather_extras,
    owned_in_order,
    owned_places,
    snapshot,
    spans,
)
from onecurve.checkpoint.lock import Fence
from onecurve.checkpoint.manifest import KINDS, ExtraEntry, FileEntry, Manifest, TensorEntry
from onecurve.checkpoint.patience import Count, silent
from onecurve.checkpoint.shard import Layout, Spec, file_layout, floats, raw, write_new

INFO_FIELDS = ("curve_id", "numerics", "layout", "data_fingerprint", "data_step", "skipped", "guard", "faults")
_OVERLAP_BYTES = 1 << 20  # above this, a foreground save writes on a second thread while it hashes


class Written(NamedTuple):
    """What one rank's `write` has to tell."""

    file: FileEntry | None  # None: this rank owns nothing, and wrote nothing
    part: Part
    extras: list[ExtraEntry]
    finite: bool


class PendingSave:
    """One save; its phases are called in the order above.

    With `background` the state is copied first, into `scratch` (12 bytes per owned element, used again by the next
    save), so that the optimizer may go on meanwhile; without, `write` reads the live tensors.
    """

    def __init__(
        self,
        folder: Path,
        optimizer: Saveable,
        step: int,
        *,
        info: dict[str, Any] | None = None,
        fence: Fence | None = None,
        background: bool = False,
        scratch: list[np.ndarray] | None = None,
        count: Count = silent,
    ) -> None:
        self.folder, self.step, self.fence, self.background = folder, step, fence, background
        self._moved = count  # is told of the bytes that are hashed and written
        self.mesh: RankGroup = optimizer.mesh
        self.rank = self.mesh.rank
        self.table, self.updates = optimizer.table, optimizer.updates
        axes = {axis: getattr(self.mesh, axis) for axis in ("dp", "tp", "pp") if hasattr(self.mesh, axis)}
        self.info: dict[str, Any] = {"layout": axes | {"zero": optimizer.stage}, "data_step": step} | (info or {})
        self.file_name = f"rank-{self.rank:04d}.safetensors"
        self.ranges: list[OwnedPart] = []
        self._buffers: list[np.ndarray] = []
        self._written: Written | None = None
        self._told: list[Message] = []
        self._manifest: Manifest | None = None  # on rank 0, once committed

        own = optimizer.extras()
        temp, error = attempt(self._open, partial(save_error, self.rank, f"can't begin a save in {folder}"))
        try:
            told = agree(self.mesh, {"temp": temp, "extras": sorted(own)}, error=error)
            self._temp = folder / told[0][0]["temp"]
            self.extras: dict[str, Tensor] = gather_extras(self.mesh, own, [message["extras"] for message, _ in told])
        except CheckpointError as error:
            self._discard(error, folder / temp if temp else None)
            raise
        take = partial(self._take, optimizer, [] if scratch is None else scratch)
        _, self._error = attempt(take, partial(save_error, self.rank, f"can't copy the state of step {step}"))

    def _open(self) -> str:
        unknown = sorted(set(self.info) - set(INFO_FIELDS))
        if unknown:
            raise SaveFailed(f"info has no place for {', '.join(unknown)}; known are {', '.join(INFO_FIELDS)}")
        faults.at("save.begin", rank=self.rank, step=self.step)
        if self.rank == 0 and self.fence is not None:
            self.fence.check()  # before a folder is made: ours may have been moved
        return store.open_temp(self.folder, self.step).name if self.rank == 0 else ""

    def _take(self, optimizer: Saveable, scratch: list[np.ndarray]) -> None:
        states = [getattr(optimizer, kind).detach() for kind in KINDS]
        self.ranges = owned_places(optimizer)
        if self.background or any(state.device.type != "cpu" for state in states):
            self._buffers, self.ranges = snapshot(states, self.ranges, scratch)
            self.extras = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in self.extras.items()}
        else:
            self._buffers = [floats(state) for state in states]
            self.extras = {name: t.detach().contiguous() for name, t in self.extras.items()}

    def write(self) -> None:
        """Write and hash this rank's file. Never raises an Exception: `gather` shares what went wrong."""
        if self._error is None:
            to_error = partial(save_error, self.rank, f"can't write {self._temp / self.file_name}")
            self._written, self._error = attempt(self._write, to_error)

    def _write(self) -> Written:
        faults.at("save.write", rank=self.rank, step=self.step)
        count = sum(r.length for r in self.ranges)
        specs = [Spec(f"extra.{name}", dtype_name(t), tuple(t.shape)) for name, t in self.extras.items()]
        before, state, after = self._contents(file_layout(count, specs)) if count or specs else ([], [], [])
        contents = [*before, *state, *after]
        hasher = hashlib.sha256()
        with ThreadPoolExecutor(1) if 12 * count > _OVERLAP_BYTES and not self.background else _Inline() as pool:
            path = self._temp / self.file_name
            writing = pool.submit(write_new, path, contents, self._moved) if contents else None

            def hash_(view: memoryview | bytes) -> None:
                hasher.update(view)
                self._moved(len(view))

            for view in before:
                hash_(view)
            part = digest_part(slots_of(self.table.parameters), self.ranges, self._buffers, beside=hash_)
            for view in after:
                hash_(view)
            finite = all(_finite(buffer[a:b]) for buffer in self._buffers for a, b in spans(self.ranges))
            if writing is not None:
                writing.result()
        size = sum(len(view) for view in contents)
        entry = FileEntry(name=self.file_name, size=size, sha256=hasher.hexdigest()) if contents else None
        faults.at("save.written", rank=self.rank, step=self.step)
        return Written(entry, part, [self._extra_entry(name) for name in self.extras], finite)

    def _contents(self, layout: Layout) -> tuple[list[memoryview | bytes], list[memoryview], list[memoryview]]:
        """The file's bytes, in order, as views of the memory they are in: what comes before the state (header and wide
        extras), the state, what comes after it."""
        state = [buffer[a:b].data.cast("B") for buffer in self._buffers for a, b in spans(self.ranges)]
        keys = [spec.key for spec in layout.specs]
        first = keys.index(KINDS[0]) if state else len(keys)
        extras = [
            [raw(self.extras[spec.key.removeprefix("extra.")]) for spec in specs if spec.nbytes]
            for specs in (layout.specs[:first], layout.specs[first + len(KINDS) :])
        ]
        return [layout.header, *extras[0]], state, extras[1]

    def _extra_entry(self, name: str) -> ExtraEntry:
        t = self.extras[name]
        sha256 = hashlib.sha256(raw(t) if t.numel() else b"").hexdigest()
        return ExtraEntry(name=name, shape=list(t.shape), dtype=dtype_name(t), file=self.file_name, sha256=sha256)

    def gather(self) -> None:
        """Collective: what all ranks wrote, or the same error on all."""
        header: dict[str, Any] = {}
        blob = b""
        if self._written is not None:
            header, blob = self._written.part.pack()
            header["file"] = self._written.file and self._written.file.model_dump()
            header["extras"] = [extra.model_dump() for extra in self._written.extras]
            header["finite"] = self._written.finite
        elif self._error is None:
            self._error = SaveFailed(f"rank {self.rank}: gathered before it was written")
        try:
            self._told = agree(self.mesh, header, blob, self._error)
        except CheckpointError as error:
            self._discard(error, self._temp)
            raise

    def commit(self, after_commit: Callable[[Manifest], None] | None = None) -> None:
        """On rank 0: manifest and commit, then `after_commit`. Never raises an Exception: `conclude` shares it."""
        if self.rank == 0:
            to_error = partial(save_error, 0, f"can't commit step {self.step} in {self.folder}")
            self._manifest, self._error = attempt(self._commit, to_error)
            self._moved(1)  # what comes now is no part of the commit that may have taken long
            if after_commit is not None and self._manifest is not None:
                after_commit(self._manifest)

    def conclude(self) -> Manifest:
        """Collective: the manifest of the checkpoint that is now in place, or the same error on all ranks."""
        try:
            data = self._manifest.to_bytes() if self._manifest is not None else b""
            told = agree(self.mesh, {}, data, self._error)
        except CheckpointError as error:
            self._discard(error, self._temp)
            raise
        return Manifest.model_validate_json(told[0][1])

    def _commit(self) -> Manifest:
        told = self._told
        faults.at("save.commit", rank=self.rank, step=self.step)
        parts = [Part.unpack(header, blob) for header, blob in told]
        tensors = {
            spec.name: TensorEntry(name=spec.name, shape=list(spec.shape), dtype=spec.dtype, slices=spec.slices,
                                   split=getattr(spec, "split", None))
            for spec in self.table.parameters
        }  # fmt: skip
        for rank, (header, _) in enumerate(told):
            for r in owned_in_order(self.table, rank) if header["file"] else ():
                tensors[r.name].ranges.setdefault(header["file"]["name"], []).append((r.slice, r.offset, r.length))
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
            **self.info,
        )
        store.commit(self.folder, self._temp, self.step, manifest.to_bytes(), self.fence)
        return manifest

    def _discard(self, error: CheckpointError, temp: Path | None) -> None:
        """Collective. Rank 0 removes the temp folder, for no rank writes into it any more; then all go on to raise."""
        if self.rank == 0 and temp is not None:
            _, left = attempt(partial(store.discard, temp), partial(save_error, 0, f"can't remove {temp}"))
            if left is not None:
                error.args = (f"{error} (and then {left})",)
        self.mesh.all_gather_bytes(b"")


class _Inline:
    """An executor that runs at once, on this thread."""

    def __enter__(self) -> "_Inline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        work(*args)


def _finite(values: np.ndarray) -> bool:
    """aminmax lets NaN through, and runs at memory speed."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(torch.from_numpy(values)))).all())


def save_checkpoint(
    folder: str | Path,
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
    save = PendingSave(Path(folder), optimizer, step, info=info, fence=fence)
    save.write()
    save.gather()
    save.commit(after_commit)
    return save.conclude()
