"""One run per run folder: a lock that frees itself when its owner dies, and a fencing token for owners that come back.

The lock is a POSIX record lock (`fcntl.lockf`): the kernel drops it when its process ends, however it ends, and forked
ranks do not inherit it. It does not stop a rank that outlives its run (stopped by SIGSTOP, or cut off) from writing;
the token does: whoever takes the folder writes a new one, and every commit re-reads it just before its rename.
"""

import fcntl
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from onecurve.checkpoint.errors import CheckpointError, FolderInUse, NotWritable, Superseded
from onecurve.errors import InputError
from onecurve.paths import FOLDER, obstacle, read_bytes, show

LOCK_NAME, FENCE_NAME = "run.lock", "run.fence"

# Real paths locked by this process. A second lockf by the same process would succeed, and closing its file would
# drop the first one's lock: such is POSIX.
_held: set[str] = set()


@dataclass(frozen=True)
class Fence:
    """The right to commit in a run folder while `token` is the one in its fence file. Plain data, for all ranks."""

    path: Path
    token: str

    def check(self) -> None:
        """Raise Superseded unless the token still is ours."""
        if not self.path.parent.exists():
            raise Superseded(
                f"{self.path.parent}: is gone, moved or removed while the run went on; resume it where it is"
            )
        holder = read_fence(self.path)
        if holder is None or holder.get("token") != self.token:
            by = "nobody (its fence file is gone)" if holder is None else _who(holder)
            raise Superseded(f"{self.path.parent}: taken over by {by}; this run may not commit there any more")


def read_fence(path: Path) -> dict[str, object] | None:
    """What the fence file says of the folder's owner, or None where there is no readable one."""
    try:
        holder = json.loads(read_bytes(path, "fence", "remove it", 4096))
    except (InputError, ValueError):
        return None
    return holder if isinstance(holder, dict) else None


def _who(holder: dict[str, object]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')} (since {holder.get('since')})"


class RunLock:
    """Holds a run folder from `acquire` (or `with`) to `release` or the end of the process.

    Raises FolderInUse where another run holds it, NotWritable where the folder can't be written. Take it in the process
    that lives as long as the run, and keep no other descriptor of the lock file in it: closing one drops the lock.
    """

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder
        self._fd: int | None = None
        self._key = ""

    def acquire(self) -> Fence:
        path, key = self.folder / LOCK_NAME, os.path.realpath(self.folder)
        if key in _held:
            raise FolderInUse(f"{self.folder}: this process holds it already")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise CheckpointError(f"{self.folder}: can't be locked: {error.strerror}") from None
            holder = read_fence(self.folder / FENCE_NAME)
            by = _who(holder) if holder else "another process"
            raise FolderInUse(
                f"{self.folder}: in use by {by}; wait for it, stop it, or choose another folder"
            ) from None
        self._fd, self._key = fd, key
        _held.add(key)
        try:
            return self._new_fence()
        except OSError as error:
            self.release()
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> NotWritable:
        place = f"{show(error.filename)}: " if error.filename else ""
        reason = obstacle(self.folder, FOLDER) or f"{place}{error.strerror}"
        return NotWritable(f"run folder {show(self.folder)}: {reason}; name a folder, new or of a run, with --run")

    def _new_fence(self) -> Fence:
        fence = Fence(self.folder / FENCE_NAME, secrets.token_hex(16))
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        holder = {"token": fence.token, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
        temp = fence.path.with_name(f"{FENCE_NAME}.{secrets.token_hex(4)}")
        try:
            with temp.open("xb") as file:
                file.write(json.dumps(holder).encode())
                file.flush()
                os.fsync(file.fileno())
            temp.replace(fence.path)
        except OSError:
            temp.unlink(missing_ok=True)
            raise
        return fence

    def release(self) -> None:
        """Let go of the folder; the fence file stays and keeps naming the last owner."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            _held.discard(self._key)

    def __enter__(self) -> Fence:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
