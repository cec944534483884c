"""A second place for checkpoints: any fsspec URL. Copies are made behind the training, verified, and can be fetched.

An object store has no rename, so the commit mark there is the last file written, `manifest.sha256`:

    copy    shards, each read back and hashed -> manifest.json -> manifest.sha256
    remove  manifest.sha256 -> everything else
    fetch   manifest and its hash first; shards are hashed while they arrive; then the local commit protocol
"""

import hashlib
import os
import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from onecurve.checkpoint import store
from onecurve.checkpoint.agree import attempt
from onecurve.checkpoint.errors import CheckpointError, DamagedCheckpoint, MirrorFailed
from onecurve.checkpoint.manifest import MANIFEST, MANIFEST_HASH, MAX_MANIFEST_BYTES, Manifest
from onecurve.checkpoint.patience import Count, silent
from onecurve.checkpoint.policy import Candidate, to_remove
from onecurve.checkpoint.read import check_folder, parse_checked, read_manifest
from onecurve.checkpoint.shard import layouts
from onecurve.urls import without_secrets

_STEP = re.compile(r"step-\d{8}", re.ASCII)
_BLOCK = 1 << 22
ATTEMPTS = 3
LOOKED_AT = 16  # checkpoints at a mirror, the newest: a run keeps fewer of its own there
LOOK_SECONDS = 20.0


class Remote:
    """Checkpoints under one URL, in one process. `count` is told of the bytes that move."""

    def __init__(self, url: str, count: Count = silent) -> None:
        # Imported here: most runs have no mirror, and it takes 50 ms.
        from fsspec.core import url_to_fs

        self.shown, self._count = without_secrets(url), count
        try:
            self.fs, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise MirrorFailed(f"checkpoint.mirror {self.shown}: {error}") from None
        self.root = root.rstrip("/")
        # Listings are cached by some file systems; a stale one would hide what was just copied.
        self.fs.invalidate_cache()

    def path(self, *parts: str) -> str:
        return "/".join([self.root, *parts])

    @property
    def folder(self) -> Path | None:
        """Where it is on this machine, links followed; None where it is elsewhere."""
        from fsspec.implementations.local import LocalFileSystem

        return Path(self.root or "/").resolve() if isinstance(self.fs, LocalFileSystem) else None

    def steps(self) -> list[str]:
        """Names of the step folders there, newest first."""
        self.fs.invalidate_cache()
        if not self.fs.exists(self.root):
            return []
        names = (entry.rstrip("/").rpartition("/")[2] for entry in self.fs.ls(self.root, detail=False))
        return sorted((name for name in names if _STEP.fullmatch(name)), reverse=True)

    def manifest(self, name: str, curve_id: str | None = None) -> tuple[Manifest, bytes]:
        """The checked manifest of one step folder, and its bytes."""
        content = []
        for file in (MANIFEST, MANIFEST_HASH):
            path = self.path(name, file)
            if not self.fs.exists(path):
                raise DamagedCheckpoint(f"{self.shown}/{name}/{file}: is missing")
            if self.fs.size(path) > MAX_MANIFEST_BYTES:
                raise DamagedCheckpoint(f"{self.shown}/{name}/{file}: is too large")
            content.append(self.fs.cat_file(path))
        shown = Path(f"{self.shown}/{name}")
        return parse_checked(shown, (content[0], content[1]), curve_id), content[0]

    def put(self, local: Path) -> Manifest:
        """Copy a local checkpoint; every file is read back and compared."""
        there = self.folder
        if there is not None and there.exists() and there.samefile(local.parent):
            raise MirrorFailed(f"{self.shown}: is the run's own folder of checkpoints, so there is nothing to copy")
        manifest = read_manifest(local)
        problems = check_folder(local, manifest)
        if problems:
            raise MirrorFailed("; ".join(problems))
        sums = {entry.name: entry.sha256 for entry in manifest.files}
        sums |= {name: hashlib.sha256((local / name).read_bytes()).hexdigest() for name in (MANIFEST, MANIFEST_HASH)}
        self.drop(local.name)
        self.fs.makedirs(self.path(local.name), exist_ok=True)
        for name, sha256 in sums.items():
            self._put(local / name, self.path(local.name, name))
            if self._hash(self.path(local.name, name)) != sha256:
                raise MirrorFailed(f"{self.shown}/{local.name}/{name}: reads back other bytes than were written")
        return manifest

    def _put(self, local: Path, path: str) -> None:
        """Block by block: not every file system's own `put_file` tells how far it is."""
        with local.open("rb") as source, self.fs.open(path, "wb") as target:
            while block := source.read(_BLOCK):
                target.write(block)
                self._count(len(block))

    def _hash(self, path: str) -> str:
        self.fs.invalidate_cache(path)
        hasher = hashlib.sha256()
        with self.fs.open(path, "rb") as file:
            while block := file.read(_BLOCK):
                hasher.update(block)
                self._count(len(block))
        return hasher.hexdigest()

    def drop(self, name: str) -> None:
        """Remove one step folder there, its commit mark first. A link is left alone: what it leads to is no copy."""
        if self.folder is not None and (self.folder / name).is_symlink():
            raise MirrorFailed(f"{self.shown}/{name}: is a link; remove it, copies are folders")
        if self.fs.exists(self.path(name)):
            if self.fs.exists(self.path(name, MANIFEST_HASH)):
                self.fs.rm_file(self.path(name, MANIFEST_HASH))
            self.fs.rm(self.path(name), recursive=True)

    def fetch(self, name: str, folder: Path, curve_id: str | None = None, finite: bool = False) -> Path:
        """Bring one checkpoint into the local `folder`, verified and committed."""
        manifest, data = self.manifest(name, curve_id)
        if finite and not manifest.finite:
            raise DamagedCheckpoint(f"{self.shown}/{name}: holds values that are not finite")
        expected = layouts(manifest)
        temp = store.open_temp(folder, manifest.step)
        try:
            for entry in manifest.files:
                if entry.size != expected[entry.name].size:
                    raise DamagedCheckpoint(f"{self.shown}/{name}/{entry.name}: the manifest gives it a wrong size")
                self._get(self.path(name, entry.name), temp / entry.name, entry.size, entry.sha256)
            return store.commit(folder, temp, manifest.step, data)
        except BaseException:
            store.discard(temp)
            raise

    def _get(self, path: str, local: Path, size: int, sha256: str) -> None:
        hasher, got = hashlib.sha256(), 0
        with self.fs.open(path, "rb") as source, local.open("xb") as target:
            while got <= size and (block := source.read(_BLOCK)):
                hasher.update(block)
                target.write(block)
                got += len(block)
            target.flush()
            os.fsync(target.fileno())
        if got != size or hasher.hexdigest() != sha256:
            raise DamagedCheckpoint(f"{without_secrets(path)}: its bytes are not the manifest's")


class Mirror:
    """Copies checkpoints to `url` on a thread of its own, on the one rank that commits; the newest waiting one wins.

    Nothing here stops a run: what fails (after ATTEMPTS tries) is told by `take_notes`.
    """

    def __init__(self, url: str, *, keep: int = 3, pause: float = 1.0) -> None:
        self.url, self.keep, self.pause = url, keep, pause
        self.shown = without_secrets(url)
        self.moved = 0  # bytes, in all copies
        self._next: Path | None = None
        self._now: Path | None = None
        self._notes: list[str] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def waiting(self) -> set[int]:
        """The steps that are being copied or wait for it: retention spares them."""
        with self._lock:
            return {int(path.name.removeprefix("step-")) for path in (self._now, self._next) if path is not None}

    def submit(self, path: Path) -> None:
        with self._lock:
            if self._next is not None:
                self._notes.append(f"mirror: {self._next.name} was not copied, {path.name} came first")
            self._next = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until everything is copied, or has failed, or was given up."""
        while (thread := self._thread) is not None:
            thread.join()

    def give_up(self, reason: str) -> None:
        """Wait for no copy any more. What its thread still does has no effect: a copy counts with its last file."""
        waiting = self.waiting
        with self._lock:
            self._now = self._next = self._thread = None
            names = ", ".join(map(store.step_name, sorted(waiting)))
            self._notes.append(f"mirror: {names} not copied to {self.shown}: {reason}; it is whole in the run folder")

    def _counted(self, nbytes: int) -> None:
        self.moved += nbytes

    def take_notes(self) -> list[str]:
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def _work(self) -> None:
        while True:
            with self._lock:
                self._now, self._next = path, _ = self._next, None
                if path is None:
                    self._thread = None
                    return
            for trial in range(1, ATTEMPTS + 1):
                _, error = attempt(partial(self._copy, path), partial(_mirror_error, self.shown, path.name))
                if error is None:
                    break
                if trial < ATTEMPTS:
                    time.sleep(self.pause * trial)
            else:
                with self._lock:
                    self._notes.append(f"mirror: {error}")

    def _copy(self, path: Path) -> None:
        remote = Remote(self.url, self._counted)
        current = remote.put(path)
        found = []
        for name in remote.steps():
            manifest, error = attempt(
                partial(remote.manifest, name, current.curve_id), partial(_mirror_error, "", name)
            )
            if manifest is not None and error is None:  # what is not ours is neither counted nor touched
                found.append(Candidate(manifest[0].step, finite=manifest[0].finite))
        for step in to_remove(found, current.step, self.keep):
            remote.drop(store.step_name(step))


def fetch_latest(
    url: str, folder: Path, *, curve_id: str | None = None, finite: bool = False
) -> tuple[Path | None, list[str]]:
    """Bring the newest whole checkpoint from the mirror into the local `folder`, in one process: its path there or
    None, and why newer ones were passed over. With `curve_id` those of other curves are passed over, with `finite`
    those that hold a value that is not. Raises MirrorFailed where the mirror can't be read at all."""
    remote = Remote(url)
    reasons: list[str] = []
    names, error = attempt(remote.steps, partial(_mirror_error, remote.shown, "its listing"))
    if error is not None:
        raise error
    for name in names or ():
        path, error = attempt(
            partial(remote.fetch, name, folder, curve_id, finite), partial(_mirror_error, remote.shown, name)
        )
        if path is not None:
            return path, reasons
        reasons.append(f"mirror: {error}")
    return None, reasons


def local_folder(url: str) -> Path | None:
    """Where a mirror is on this machine, links followed; None where it is elsewhere, or can't be reached."""
    return attempt(lambda: Remote(url).folder, partial(_mirror_error, without_secrets(url), "it"))[0]


def curves_at(url: str) -> set[str]:
    """The curves of the newest checkpoints at a mirror, by their ids; what can't be read within LOOK_SECONDS is left
    out."""
    found: set[str] = set()

    def look() -> None:
        remote = Remote(url)
        for name in remote.steps()[:LOOKED_AT]:
            manifest, _ = attempt(partial(remote.manifest, name), partial(_mirror_error, "", name))
            if manifest is not None:
                found.add(manifest[0].curve_id)

    run = partial(attempt, look, partial(_mirror_error, without_secrets(url), "its listing"))
    thread = threading.Thread(target=run, name="mirror", daemon=True)
    thread.start()
    thread.join(LOOK_SECONDS)
    return set(found)


def _mirror_error(url: str, name: str, cause: BaseException) -> CheckpointError:
    if isinstance(cause, CheckpointError):
        return cause
    text: Any = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
    return MirrorFailed(f"{name} at {url}: {text}")
