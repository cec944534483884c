"""The commit protocol: a checkpoint is there whole, under its name, or not at all.

    save    1. a private temp folder beside the checkpoints: .tmp-step-00000010-<random>
            2. every rank writes its shard file there, fsync
            3. sizes and hashes are gathered; rank 0 writes manifest.json and manifest.sha256, fsync each
            4. fsync the temp folder
            5. the fencing token is still ours? then rename to step-00000010
            6. fsync the parent
    replace an older step-00000010 is renamed to .old-step-00000010-<random> first; after a crash between the
            two renames the next run renames it back
    remove  rename to .gone-step-00000010-<random>, delete manifest.sha256 and manifest.json, then the shards: what a
            crash leaves can't be taken for a checkpoint
    clean   a run that takes the folder renames what dead runs left to .gone-… and deletes it. A stopped writer that
            wakes after that finds its temp folder gone and can't rename it into place

A reader needs no lock: a name step-NNNNNNNN always is a whole folder.
"""

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from onecurve import faults
from onecurve.checkpoint.errors import SaveFailed
from onecurve.checkpoint.lock import Fence
from onecurve.checkpoint.manifest import MANIFEST, MANIFEST_HASH, hash_line
from onecurve.checkpoint.shard import write_new

_STEP = re.compile(r"step-(\d{8})", re.ASCII)
_LEFTOVER = re.compile(r"\.(tmp|old|gone)-(step-\d{8})-[0-9a-f]{8}", re.ASCII)


class Found(NamedTuple):
    """A folder named step-NNNNNNNN: its step and path. Nothing is known of its content yet."""

    step: int
    path: Path


def step_name(step: int) -> str:
    if not 0 <= step <= 99_999_999:
        raise SaveFailed(f"step {step} does not fit into step-NNNNNNNN")
    return f"step-{step:08d}"


def list_steps(folder: Path) -> list[Found]:
    """The step folders in `folder`, newest first; links and other names are not among them."""
    if not folder.is_dir():
        return []
    found = []
    for entry in os.scandir(folder):
        match = _STEP.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found.append(Found(int(match[1]), folder / entry.name))
    return sorted(found, reverse=True)


def open_temp(folder: Path, step: int) -> Path:
    """Make the private folder of one save."""
    name = step_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    temp = folder / f".tmp-{name}-{secrets.token_hex(4)}"
    temp.mkdir()
    return temp


def commit(folder: Path, temp: Path, step: int, manifest: bytes, fence: Fence | None = None) -> Path:
    """Steps 3 to 6 on rank 0: `temp` becomes the checkpoint of `step`. Raises Superseded if the token is not ours."""
    write_new(temp / MANIFEST, [manifest])
    write_new(temp / MANIFEST_HASH, [hash_line(manifest)])
    sync_folder(temp)
    final = folder / step_name(step)
    faults.at("save.rename", rank=0, step=step)
    if fence is not None:
        fence.check()
    old = None
    if os.path.lexists(final):
        old = _aside(final, "old")
    try:
        temp.rename(final)
    except OSError:
        if old is not None:
            old.rename(final)
        if fence is not None:
            fence.check()  # the new owner may have removed our temp folder after the check above
        raise
    sync_folder(folder)
    if old is not None:
        with contextlib.suppress(OSError):  # the new one is in place; the next run cleans up what is left of the old
            _delete(old)
    return final


def discard(temp: Path) -> None:
    """Remove the temp folder of a save that failed; a folder that is gone already is fine."""
    if temp.is_dir():
        _delete(temp)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, or what is left of one."""
    _delete(_aside(path, "gone"))


def clean_leftovers(folder: Path) -> list[str]:
    """Remove what dead runs left in `folder`, put back a checkpoint whose replacement was never finished, and say what
    was done. Only for the holder of the run folder: a save that is still going on would lose its temp folder."""
    if not folder.is_dir():
        return []
    notes = []
    for name in sorted(path.name for path in folder.iterdir()):
        match = _LEFTOVER.fullmatch(name)
        path = folder / name
        if not match or path.is_symlink() or not path.is_dir():
            continue
        if match[1] == "old" and not os.path.lexists(folder / match[2]):
            path.rename(folder / match[2])
            notes.append(f"{match[2]}: put back, its replacement was never finished")
        else:
            _delete(path if match[1] == "gone" else _aside(path, "gone", match[2]))
            what = "an unfinished save" if match[1] == "tmp" else "an unfinished removal"
            notes.append(f"{match[2]}: {what} was removed ({name})")
    sync_folder(folder)
    return notes


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _aside(path: Path, kind: str, name: str | None = None) -> Path:
    to = path.parent / f".{kind}-{name or path.name}-{secrets.token_hex(4)}"
    path.rename(to)
    return to


def _delete(folder: Path) -> None:
    """Delete a flat folder (or a link to one), the manifest first. A folder inside it is not ours: OSError."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
        return
    for name in (MANIFEST_HASH, MANIFEST):
        (folder / name).unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        path.unlink()
    folder.rmdir()
