"""What is at a path that somebody gave, found out before it is opened: a named pipe or a device may be waited for for
ever. A refusal is one line: what, where, what is wrong with it, the cure."""

import errno
import os
import stat
from pathlib import Path

from onecurve.errors import InputError

FILE, FOLDER = "file", "folder"
_KINDS = {stat.S_ISREG: FILE, stat.S_ISDIR: FOLDER, stat.S_ISFIFO: "named pipe", stat.S_ISSOCK: "socket"}
_REASONS = {errno.ELOOP: "its links lead in a circle", errno.ENAMETOOLONG: "it is longer than a name may be"}
_UNUSABLE = {*_REASONS, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
_MISSING = "no such "


def show(path: str | os.PathLike[str]) -> str:
    """A path on one line of any terminal: what can't be printed, undecodable bytes too, is escaped; a long one is cut
    in its middle."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in os.fspath(path))
    return text if len(text) <= 300 else f"{text[:140]}…{text[-140:]}"


def trouble(path: Path, wanted: str) -> str:
    """Why there is no usable `wanted` (FILE or FOLDER) at `path`, in words; "" where there is one."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "it is a link to nowhere" if path.is_symlink() else _MISSING + wanted
    except NotADirectoryError:
        above = next(place for place in path.parents if place.exists())
        return f"{show(above)} is not a folder"
    except OSError as error:
        return _REASONS.get(error.errno or 0) or str(error.strerror)
    except ValueError as error:  # a zero byte
        return str(error)
    kind = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "device")
    return "" if kind == wanted else f"it is a {kind}, not a {wanted}"


def obstacle(path: Path, wanted: str) -> str:
    """Why no `wanted` can be at `path`, neither the one that is there nor a new one, in words; "" where it can."""
    problem = trouble(path, wanted)
    for above in path.parents:
        if not problem.startswith(_MISSING):
            break
        problem = trouble(above, FOLDER)
        if problem and not problem.startswith(_MISSING):
            problem = f"{show(above)}: {problem}"
    return problem


def need(path: Path, wanted: str, what: str, cure: str, error: type[InputError] = InputError) -> None:
    """Raises `error` where there is no `wanted` (FILE or FOLDER) at `path`. `what`: the path's role, for the line."""
    if problem := trouble(path, wanted):
        raise error(f"{what} {show(path)}: {problem}; {cure}")


def need_place(path: Path, wanted: str, what: str, cure: str) -> None:
    """Raises InputError where `wanted` neither is at `path` nor can be made there, or may not be written."""
    problem = obstacle(path, wanted)
    if not problem:
        places = [path, *path.parents] if wanted == FOLDER else path.parents
        holder = next(place for place in places if place.is_dir())
        if not os.access(holder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            problem = f"{show(holder)} may not be written to"
    if problem:
        raise InputError(f"{what} {show(path)}: {problem}; {cure}")


def refusal(error: BaseException) -> str:
    """The line for an error of the system about a path that it can't use; "" for any other error."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str) or error.errno not in _UNUSABLE:
        return ""
    reason = _REASONS.get(error.errno) or error.strerror
    return f"{show(error.filename)}: {reason}; name another place, or change its permissions"


def read_bytes(path: Path, what: str, cure: str, limit: int = 0, error: type[InputError] = InputError) -> bytes:
    """The content of a regular file. Raises `error`, also where it has more than `limit` bytes (0: any number)."""
    need(path, FILE, what, cure, error)
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1 if limit else -1)
    except OSError as reason:
        raise error(f"{what} {show(path)}: can't be read ({reason.strerror}); {cure}") from None
    if 0 < limit < len(content):
        raise error(f"{what} {show(path)}: it has more than {limit:,} bytes, so it is no {what}; {cure}")
    return content
