"""`onecurve train` as a process of its own, with a bad day ahead of it; what it said and what it left.

The process is forked from the test's, so torch need not be imported again; it has its own session, signal handlers and
output, and its ranks are its children. Whatever it leaves behind becomes a child of the test's process (a subreaper),
so that nothing can hide.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onecurve import cli, faults
from onecurve.checkpoint import list_steps, read_manifest

torch.set_num_threads(1)
PR_SET_CHILD_SUBREAPER = 36
running: set[int] = set()  # commands that have not ended


def adopt_orphans(yes: bool) -> None:
    """Whether what commands leave behind becomes this process's, or init's as ever."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


# 8 leaves, so that any width up to 8 can run it; two micro-batches per leaf; everything that the arithmetic knows.
SMALL = """
[model]
layers = 1
width = 16
heads = 2
vocab = 32
context = 8
[train]
steps = {steps}
leaves = 8
accumulate = 2
micro_batch = 2
[optimizer]
lr = 4e-3
weight_decay = 0.1
clip = 1.0
warmup_steps = 3
decay = "cosine"
[layout]
dp = 4
zero = 1
[checkpoint]
every_steps = 5
keep = 2
[observe]
log_every = 1000
[limits]
stall_seconds = 60.0
"""


def small(folder: Path, steps: int = 20) -> Path:
    path = folder / "small.toml"
    path.write_text(SMALL.format(steps=steps))
    return path


class Command:
    """A started `onecurve ARGUMENTS`; `armed` is its ONECURVE_FAULTS, `before` runs in its process before it."""

    def __init__(
        self, *arguments: object, armed: str = "", before: Callable[[], object] | None = None, output: Path
    ) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.output, self.began = output, time.monotonic()
        self.pid = os.fork()
        running.add(self.pid)
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                self._redirect()
                os.environ[faults.ENVIRONMENT] = armed
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if before is not None:
                    before()
                code = cli.main([str(argument) for argument in arguments])
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _redirect(self) -> None:
        for number, name in ((0, os.devnull), (1, self.output / "stdout"), (2, self.output / "stderr")):
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number else 0), 0o644)
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code (minus the signal), within `seconds`, with no process left. Kept: `took`, in seconds."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                running.discard(self.pid)
                self.took = time.monotonic() - self.began
                assert left_behind() == []
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        running.discard(self.pid)
        left_behind()
        raise AssertionError(f"no end within {seconds} s; it said: {self.errors[-2000:]}")

    @property
    def errors(self) -> str:
        return (self.output / "stderr").read_text()

    def ranks(self, world: int, seconds: float = 20.0) -> list[int]:
        """Process ids of its ranks in rank order, once all are there."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            found = sorted(pid for pid, (parent, _) in processes().items() if parent == self.pid)
            if len(found) == world:
                return found
            time.sleep(0.005)
        raise AssertionError(f"no {world} ranks within {seconds} s")


def processes() -> dict[int, tuple[int, str]]:
    """All processes: id -> (parent, state)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = (int(fields[1]), fields[0])
    return found


def left_behind(seconds: float = 2.0) -> list[int]:
    """Living orphans of commands that have ended, after a moment to die in; they are ended."""
    limit = time.monotonic() + seconds
    while True:
        mine = {pid: state for pid, (parent, state) in processes().items() if parent == os.getpid() and _is_fork(pid)}
        mine = {pid: state for pid, state in mine.items() if pid not in running}
        for pid, state in mine.items():
            if state == "Z":
                os.waitpid(pid, os.WNOHANG)
        left = [pid for pid, state in mine.items() if state != "Z"]
        if not left:
            return []
        if time.monotonic() > limit:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return left
        time.sleep(0.01)


def _is_fork(pid: int) -> bool:
    """Whether it runs this very command line (a fork): servers that a test started do not count. A zombie has none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() in (b"", Path("/proc/self/cmdline").read_bytes())
    return False


@dataclass
class Run:
    """One run folder and the commands that work on it."""

    folder: Path
    config: Path
    sets: tuple[str, ...] = ()
    last: Command | None = None
    output: str = "output"

    def start(self, *sets: str, resume: bool = False, flags: tuple[str, ...] = (), **options: Any) -> Command:
        settings = [part for text in (*self.sets, *sets) for part in ("--set", text)]
        more = ("--resume", *flags) if resume else flags
        output = self.config.parent / f"{self.folder.name}-{self.output}"  # not beside the run: that disk may be full
        self.last = Command("train", self.config, "--run", self.folder, *settings, *more, output=output, **options)
        return self.last

    def train(self, *sets: str, seconds: float = 60.0, **options: Any) -> int:
        return self.start(*sets, **options).wait(seconds)

    @property
    def errors(self) -> str:
        assert self.last is not None
        return self.last.errors

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first."""
        return sorted(found.step for found in list_steps(self.folder / "checkpoints"))

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for_row(self, step: int, seconds: float = 30.0) -> None:
        """Until the metrics have a row of `step`."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            with contextlib.suppress(OSError):
                if (self.folder / "metrics.jsonl").read_text().count("\n") >= step:
                    return
            time.sleep(0.002)
        raise AssertionError(f"no row of step {step} within {seconds} s: {self.errors[-2000:]}")

    def result(self) -> tuple[str, list[Any]]:
        """What must not depend on the day: the last state's digest, and every row to the last bit."""
        rows = self.rows()
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        kept = ("loss_hex", "grad_norm", "param_norm", "lr", "val_loss")
        return read_manifest(self.checkpoint(len(rows))).state_digest, [[row.get(k) for k in kept] for row in rows]
