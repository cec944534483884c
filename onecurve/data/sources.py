"""Which files a corpus is made of, and reading them as bytes; every refusal names the file."""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onecurve.errors import InputError
from onecurve.paths import show

BLOCK = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Document:
    """One file that isn't empty: its size in bytes and the sha256 (hex) of its content."""

    path: Path
    size: int
    digest: str


def collect(paths: Sequence[str | os.PathLike[str]], glob: Sequence[str], exclude: Sequence[str] = ()) -> list[Path]:
    """The files named by `paths`: files as they are, and from folders what matches `glob` and not `exclude`.

    A pattern without "/" is matched with the name at any depth, one with it with the path below the folder, where
    "**" stands for any number of folders. `exclude` also prunes folders. Below a folder, names that begin with "."
    are passed over. A file reached twice counts once. Raises InputError.
    """
    if not paths:
        raise InputError("no path was given; name files, or folders together with --glob")
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError) as error:
            raise InputError(f"{show(path)}: {_reason(error)}; name an existing file or folder") from error
        for file in _matching(path, glob, exclude) if stat.S_ISDIR(mode) else [path]:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a regular file in blocks of at most 1 MiB. Raises InputError."""
    try:
        # Looked at before it is opened: opening a named pipe would wait for a writer for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{show(path)}: it is not a regular file; leave it out or copy its content to a file")
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK):
                yield block
    except OSError as error:
        raise InputError(f"{show(path)}: can't be read ({_reason(error)}); make it readable or leave it out") from error


def examine(path: Path, progress: Callable[[int], None]) -> Document:
    """Size and digest of a file, read once; `progress` is told the bytes of each block."""
    digest, size = hashlib.sha256(), 0
    for block in read_blocks(path):
        digest.update(block)
        size += len(block)
        progress(len(block))
    return Document(path, size, digest.hexdigest())


def reread(document: Document) -> Iterator[bytes]:
    """The blocks of a document again; raises InputError at the end if it isn't what was examined."""
    digest = hashlib.sha256()
    for block in read_blocks(document.path):
        digest.update(block)
        yield block
    if digest.hexdigest() != document.digest:
        raise InputError(f"{show(document.path)}: it changed while it was being prepared; run again when it is at rest")


def _matching(folder: Path, glob: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    wanted, unwanted = _matcher(glob), _matcher(exclude)
    files: list[Path] = []
    endings: Counter[str] = Counter()

    def refuse(error: OSError) -> None:  # os.walk would pass over a folder that it can't list
        raise InputError(
            f"{show(error.filename)}: can't be listed ({_reason(error)}); make it readable or leave it out"
        )

    for where, folders, names in os.walk(folder, onerror=refuse):
        below = Path(where).relative_to(folder)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not unwanted((below / f).as_posix()))
        for name in sorted(names):
            relative = (below / name).as_posix()
            if name.startswith(".") or unwanted(relative):
                continue
            endings[Path(name).suffix or "no ending"] += 1
            if wanted(relative):
                files.append(Path(where) / name)
    if not files:
        there = ", ".join(f"{count} with {ending}" for ending, count in endings.most_common(3)) or "no files at all"
        raise InputError(
            f"{show(folder)}: no file in it matches {' or '.join(map(repr, glob))} (there are: {show(there)}); "
            "choose others with --glob"
        )
    return files


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    compiled = [(re.compile(_expression(pattern)), "/" in pattern) for pattern in patterns]
    return lambda path: any(
        expression.fullmatch(path if whole else path.rpartition("/")[2]) for expression, whole in compiled
    )


def _expression(pattern: str) -> str:
    """A glob pattern as a regular expression ("**/" any folders, "*" and "?" within a name, "[a-z]", "[!a-z]")."""
    parts = re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "(?s:" + "".join(known.get(part) or _literal_or_class(part) for part in parts) + ")"


def _literal_or_class(part: str) -> str:
    if len(part) < 3:
        return re.escape(part)
    inverted = part.startswith("[!")
    inner = re.sub(r"([\\^\[\]&~|])", r"\\\1", part[2 if inverted else 1 : -1])
    return f"[{'^' if inverted else ''}{inner}]"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
