"""What can go wrong with a checkpoint, one type per kind, so that callers and tests need not match text."""

import errno

from onecurve.errors import CheckpointError, GaveUp, InputError

__all__ = [
    "CheckpointError",
    "DamagedCheckpoint",
    "DiskFull",
    "FolderInUse",
    "ForeignCheckpoint",
    "MirrorFailed",
    "NewerCheckpoint",
    "NotWritable",
    "SaveFailed",
    "Superseded",
    "save_error",
]


class DamagedCheckpoint(CheckpointError):
    """Files that are missing, changed, or not what their manifest says."""


class NewerCheckpoint(CheckpointError):
    """Written by a later version of the format than this one reads."""


class ForeignCheckpoint(CheckpointError):
    """A checkpoint of another curve, or of another model."""


class SaveFailed(CheckpointError):
    """A save did not become a checkpoint; the older ones are untouched (exit 3)."""

    exit_code = 3


class DiskFull(SaveFailed):
    """No space, or no quota, left where the checkpoint goes."""


class NotWritable(SaveFailed):
    """No permission to write where the checkpoint goes."""

    exit_code = 2


class Superseded(SaveFailed, GaveUp):
    """Another run has taken the run folder since; this one may not commit, nor start there again."""


class MirrorFailed(CheckpointError):
    """A copy to or from the mirror failed; local checkpoints are untouched (exit 3)."""

    exit_code = 3


class FolderInUse(InputError):
    """Another process holds the run folder."""


_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def save_error(rank: int, doing: str, cause: BaseException) -> CheckpointError:
    """`cause`, met on `rank` while `doing`, as a named error; one that is named already stays as it is."""
    if isinstance(cause, CheckpointError):
        return cause
    kind = SaveFailed
    text = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, OSError):
        kind = DiskFull if cause.errno in _FULL else NotWritable if cause.errno in _DENIED else SaveFailed
        text = cause.strerror or text
    return kind(f"rank {rank}: {doing}: {text}")
