"""After a failure nothing is left: stubborn survivors, grandchildren, a parent that is killed itself."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from onecurve.errors import RunFailed
from onecurve.launch import run_ranks
from tests.launch.helpers import Command, announce, leftovers, rank_pids, start_grandchild, stepping_worker


def test_grandchildren_and_stubborn_survivors_are_ended(tmp_path):
    def worker(context):
        announce(context)
        start_grandchild(context)
        dist.barrier()
        if context.rank == 1:
            raise ValueError("boom")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(RunFailed, match="rank 1 failed: ValueError: boom"):
        run_ranks(worker, 3, folder=tmp_path)
    assert time.monotonic() - started < 5
    assert leftovers(tmp_path) == []


def test_grandchildren_are_ended_after_success_too(tmp_path):
    def worker(context):
        announce(context)
        start_grandchild(context)
        return context.rank

    assert run_ranks(worker, 2, folder=tmp_path) == [0, 1]
    assert leftovers(tmp_path) == []


def test_survivors_run_their_finally_blocks_and_see_no_preemption(tmp_path):
    def worker(context):
        announce(context)
        dist.barrier()
        if context.rank == 0:
            time.sleep(0.2)
            raise ValueError("boom")
        try:
            time.sleep(60)
        finally:
            (context.folder / f"cleaned-{context.rank}").write_text(str(context.stop_requested))

    with pytest.raises(RunFailed, match="rank 0 failed"):
        run_ranks(worker, 3, folder=tmp_path)
    assert [(tmp_path / f"cleaned-{rank}").read_text() for rank in (1, 2)] == ["False", "False"]
    assert not (tmp_path / "errors/rank-1.json").exists()  # being told to leave is no error of one's own


@pytest.mark.parametrize("lifeline", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_die_with_a_killed_parent(tmp_path, lifeline, stopped):
    if lifeline and stopped:
        pytest.skip("a stopped process runs no thread: only the kernel's way ends it")
    command = Command(lambda: run_ranks(stepping_worker(), 3, folder=tmp_path, lifeline=lifeline), tmp_path)
    pids = rank_pids(tmp_path, 3)
    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
    assert all(os.getsid(pid) == pid for pid in pids)  # the parent's group does not reach them
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    assert leftovers(tmp_path, wait=3) == []


def test_a_failing_progress_callback_ends_the_ranks(tmp_path):
    def progress(step, total, text):
        raise OSError("terminal is gone")

    with pytest.raises(OSError, match="terminal is gone"):
        run_ranks(stepping_worker(), 2, folder=tmp_path, progress=progress)
    assert leftovers(tmp_path) == []


def test_no_descriptor_is_left_open(tmp_path):
    run_ranks(lambda context: 1, 3, folder=tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        run_ranks(lambda context: 1, 3, folder=tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
