"""A folder that appears whole or not at all."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onecurve.errors import InputError
from onecurve.paths import FOLDER, need_place, show


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A private folder to write into, beside `out`; renamed to `out` when the block ends, removed when it fails, with
    the parents that were made for it.

    What a killed predecessor left beside `out` is removed: its lock ended with it. Raises InputError where `out`
    exists already, or where the place can't be written.
    """
    if os.path.lexists(out):
        raise InputError(f"--out {show(out)}: it exists already; name a new folder or remove this one first")
    need_place(out, FOLDER, "--out", "name a place with room and rights")
    for place in (out.resolve(), *out.resolve().parents):
        if place.name == "checkpoints" and (place.parent / "run.json").exists():
            raise InputError(
                f"--out {show(out)}: it lies among the checkpoints of the run {show(place.parent)}; name another"
            )
    try:
        with _parents(out):
            remove_abandoned(out.parent, _prefix(out))
            folder, lock = create_locked(out.parent, _prefix(out))
            try:
                yield folder
                _sync(folder)
                if os.path.lexists(out):
                    raise InputError(f"--out {show(out)}: it was made by somebody else meanwhile; name a new folder")
                folder.rename(out)
                _sync(out.parent)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            finally:
                os.close(lock)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"--out {show(out)}: can't be written ({reason}); name a place with room and rights"
        ) from error


@contextmanager
def _parents(out: Path) -> Iterator[None]:
    missing = [parent for parent in out.parents if not parent.exists()]  # innermost first
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # somebody else may use them by now
            for parent in missing:
                parent.rmdir()
        raise


def create_locked(parent: Path, prefix: str, mode: int = 0o777) -> tuple[Path, int]:
    """A new folder and a descriptor: while it is open, also in a child, `remove_abandoned` leaves the folder alone."""
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir(mode)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Between the two calls another process may have taken the folder for an abandoned one.
        if folder.exists() and os.path.samestat(os.fstat(lock), folder.stat()):
            return folder, lock
        os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders of `create_locked` whose owners are dead."""
    for folder in parent.iterdir():
        if not folder.name.startswith(prefix) or folder.is_symlink() or not folder.is_dir():
            continue
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or removed meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(lock)


def _prefix(out: Path) -> str:
    return f".{out.name}.partial-"


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
