"""Processes at the level of the operating system: state, tying a rank's life to its parent's, ending whole groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37


def die_with_parent(parent: int, lifeline: int | None) -> None:
    """Called in a rank: when the process `parent` dies in any way, SIGKILL included, this one dies as well.

    Linux does it in the kernel. Elsewhere a thread blocks on the read end of a pipe, `lifeline`, of which the parent
    holds the only write end; the end of file ends the rank's whole group.
    """
    if lifeline is not None:
        threading.Thread(target=_watch, args=(lifeline,), daemon=True, name="lifeline").start()
    else:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before this was set up
        os._exit(1)


def _watch(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of what ranks leave behind, so that it can be reaped as well (Linux; elsewhere init does it)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int(0)
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def needs_lifeline() -> bool:
    return not sys.platform.startswith("linux")


def state(pid: int) -> str:
    """The letter that Linux gives for a process: R, S, D, T (stopped), Z …; "" where it cannot be known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def kill_group(pid: int) -> None:
    """SIGKILL to a rank and to whatever it started. The rank must not have been reaped yet: its id is still its own."""
    for kill in (os.killpg, os.kill):  # the group does not exist in a rank's first moment
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def reap(pid: int) -> int | None:
    """The exit code (minus the signal for a death by signal) once the process has ended, else None. Never blocks.

    What the rank started and left behind is ended first, while the zombie still keeps the group's id from reuse.
    """
    if hasattr(os, "waitid") and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    if hasattr(os, "waitid"):
        kill_group(pid)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _reap_orphans(pid)
    return os.waitstatus_to_exitcode(status)


def _reap_orphans(group: int) -> None:
    """What was in a dead rank's group is our child now (see adopting_orphans) and about to die."""
    limit = time.monotonic() + 1.0
    with contextlib.suppress(ChildProcessError):  # no such child (any more)
        while time.monotonic() < limit:
            ended, _ = os.waitpid(-group, os.WNOHANG)
            if not ended:
                time.sleep(0.001)
