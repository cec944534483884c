"""A rank that makes no progress is found and named, with every rank's stack; a slow one is not."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from onecurve.errors import PeerLost, RunFailed
from onecurve.launch import run_ranks
from tests.launch.helpers import Command, announce, freeze_and_thaw, leftovers, rank_pids, stepping_worker


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_found(tmp_path, capfd, victim):
    def worker(context):
        announce(context)
        for step in range(1, 100):
            context.progress(step)
            context.place("exchange")
            if step == 5 and context.rank == victim:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.barrier()

    started = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        run_ranks(worker, 3, folder=tmp_path, stall_seconds=1.0)
    assert time.monotonic() - started < 1.0 + 5
    assert caught.value.rank == victim
    assert f"rank {victim} made no progress for 1 s at step 5, in exchange: it is stopped (state T)" in str(
        caught.value
    )
    shown = capfd.readouterr().err
    for rank in range(3):
        assert f"--- rank {rank}: state" in shown
    assert shown.count("in worker") >= 2  # the stacks of those that can still write one
    assert leftovers(tmp_path) == []


def test_a_stopped_rank_is_named_when_its_peers_lose_patience_first(tmp_path, capfd):
    def worker(context):
        announce(context)
        dist.barrier()
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)
        raise PeerLost("rank 1 sent nothing for 0.2 s")

    with pytest.raises(RunFailed, match="rank 1 made no progress for 1 s: it is stopped"):
        run_ranks(worker, 2, folder=tmp_path)
    assert (tmp_path / "errors/stacks.txt").read_text() == capfd.readouterr().err
    assert leftovers(tmp_path) == []


def test_a_deadlock_names_all_who_wait(tmp_path):
    def worker(context):
        context.progress(1)
        context.place("exchange")
        dist.recv(torch.ones(1), 1 - context.rank)

    with pytest.raises(RunFailed, match=r"ranks [01], [01] made no progress for 1 s and wait for each other"):
        run_ranks(worker, 2, folder=tmp_path, stall_seconds=1)


def test_a_hanging_rank_is_found(tmp_path, capfd):
    def worker(context):
        announce(context)
        for step in range(1, 100):
            context.progress(step)
            if step == 3 and context.rank == 1:
                context.place("loader")
                threading.Event().wait()
            context.place("exchange")
            dist.barrier()

    with pytest.raises(RunFailed, match="rank 1 made no progress for 1 s at step 3, in loader: it hangs"):
        run_ranks(worker, 3, folder=tmp_path, stall_seconds=1.0)
    assert "threading.py" in capfd.readouterr().err
    assert leftovers(tmp_path) == []


def test_slow_but_alive_is_not_blamed(tmp_path):
    def worker(context):
        for _ in range(7):
            context.place("slow part")
            time.sleep(0.15)
        return "done"

    assert run_ranks(worker, 2, folder=tmp_path, stall_seconds=0.5) == ["done", "done"]


def test_a_rank_that_is_done_may_wait_for_the_others(tmp_path):
    def worker(context):
        for step in range(8 * context.rank):
            context.progress(step)
            time.sleep(0.15)
        return context.rank

    assert run_ranks(worker, 2, folder=tmp_path, stall_seconds=0.5) == [0, 1]


@pytest.mark.slow
def test_time_in_which_everything_slept_is_not_counted(tmp_path):
    """The whole tree is frozen for longer than stall_seconds, as on a laptop with its lid closed."""
    command = Command(
        lambda: run_ranks(stepping_worker(steps=60, pause=0.02), 2, folder=tmp_path, stall_seconds=1), tmp_path
    )
    freeze_and_thaw(command.pid, rank_pids(tmp_path, 2), 1.5)
    assert command.wait() == 0


def test_the_limit_of_the_whole_call(tmp_path, capfd):
    with pytest.raises(RunFailed, match=r"longer than 0\.5 s"):
        run_ranks(stepping_worker(), 2, folder=tmp_path, limit_seconds=0.5)
    assert "--- rank 1: state" in capfd.readouterr().err
    assert leftovers(tmp_path) == []
