"""What is left of a command: processes found by a mark in their environment, which forks and grandchildren inherit."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "ONECURVE_TEST_MARK"


def marked(mark: str) -> list[int]:
    """The processes (no zombies) that were started with MARK=`mark` in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def kill_tree(mark: str) -> None:
    """SIGKILL to all of them, and again to what was forked meanwhile, until none is left."""
    limit = time.monotonic() + 10
    while left := marked(mark):
        assert time.monotonic() < limit, left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def children() -> list[int]:
    """This process's own children, zombies included."""
    me, found = os.getpid(), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == me:
                found.append(int(path.parent.name))
    return found
