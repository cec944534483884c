"""A command as a test sees it: a process that runs ranks, can be signalled, and must leave nothing behind."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from onecurve.errors import OnecurveError, Stopped


class Command:
    """Forks a process (in a session of its own) that calls `main()`; its exit code is that of the error raised."""

    def __init__(self, main: Callable[[], object], folder: Path):
        self.folder = folder
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                main()
                code = 0
            except OnecurveError as error:
                (folder / "outcome").write_text(str(error))
                code = error.exit_code
            finally:
                os._exit(code)

    def wait(self, seconds: float = 20.0) -> int:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"the command did not end within {seconds} s")

    @property
    def outcome(self) -> str:
        return (self.folder / "outcome").read_text()


def announce(context) -> None:
    """A worker's first act: leave its process id, and the group's, in the folder."""
    path = context.folder / f"pid-{context.rank}"
    path.with_suffix(".new").write_text(json.dumps([os.getpid(), os.getpgid(0)]))
    path.with_suffix(".new").rename(path)


def rank_pids(folder: Path, world: int, seconds: float = 10.0) -> list[int]:
    """The ranks' process ids, once all have announced themselves."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        paths = [folder / f"pid-{rank}" for rank in range(world)]
        if all(path.exists() for path in paths):
            return [json.loads(path.read_text())[0] for path in paths]
        time.sleep(0.005)
    raise AssertionError("not all ranks started")


def leftovers(folder: Path, wait: float = 0.0) -> list[int]:
    """Announced processes, or members of their groups, that still exist (zombies count)."""
    limit = time.monotonic() + wait
    announced = [json.loads(path.read_text()) for path in folder.glob("pid-*") if path.suffix != ".new"]
    assert announced, "no rank announced itself: the check would see nothing"
    while True:
        left = [pid for pid, _ in announced if Path(f"/proc/{pid}").exists()]
        groups = {group for _, group in announced}
        left += [pid for pid, group in _all_processes() if group in groups and pid not in left]
        if not left or time.monotonic() >= limit:
            return left
        time.sleep(0.01)


def _all_processes() -> list[tuple[int, int]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found.append((int(path.parent.name), int(fields[2])))
    return found


def stepping_worker(steps: int = 2000, pause: float = 0.002):
    """A loop like a trainer's: exchange, and stop at a step that all ranks agree on."""

    def worker(context):
        announce(context)
        for step in range(1, steps + 1):
            context.progress(step, steps)
            context.place("compute")
            time.sleep(pause)
            context.place("exchange")
            stop = torch.tensor([int(context.stop_requested)])
            dist.all_reduce(stop)
            if stop.item():
                context.place("save")
                (context.folder / f"saved-{context.rank}").write_text(str(step))
                raise Stopped(f"stopped at step {step} of {steps}")
        return steps

    return worker


def start_grandchild(context):
    """A process that ignores SIGTERM and would live on."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        os._exit(0)
    path = context.folder / f"pid-grandchild-{context.rank}"
    path.write_text(json.dumps([pid, os.getpgid(pid)]))


def freeze_and_thaw(parent, ranks, seconds):
    """The parent last and first: it has seen the last beats, and wakes up to find them old."""
    for pid in [*ranks, parent]:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.06)
    time.sleep(seconds)
    for pid in [parent, *ranks]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.12)
