"""Negative controls: each guard is taken out, and the test that relies on it must see the difference here."""

import contextlib
import os
import signal
import time

import pytest
import torch.distributed as dist

from onecurve.errors import PeerLost, RunFailed
from onecurve.launch import blame, process, run_ranks, signals
from onecurve.launch.board import Board
from onecurve.launch.watchdog import Watchdog
from tests.launch.helpers import (
    Command,
    announce,
    freeze_and_thaw,
    leftovers,
    rank_pids,
    start_grandchild,
    stepping_worker,
)


def end(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_without_the_secondary_class_the_wrong_rank_is_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(blame, "is_secondary", lambda error: False)

    def worker(context):
        dist.barrier()
        if context.rank == 1:
            time.sleep(0.2)
            raise ValueError("boom")
        raise PeerLost("rank 1 is silent")

    with pytest.raises(RunFailed, match="rank 0 failed"):
        run_ranks(worker, 2, folder=tmp_path)


def test_without_the_mark_a_teardown_looks_like_preemption(tmp_path, monkeypatch):
    monkeypatch.setattr(Board, "announce_teardown", lambda self: None)

    def worker(context):
        dist.barrier()
        time.sleep(0.2)
        if context.rank == 0:
            raise ValueError("boom")
        while not context.stop_requested:
            time.sleep(0.01)
        (context.folder / "took-it-for-preemption").touch()

    with pytest.raises(RunFailed):
        run_ranks(worker, 2, folder=tmp_path)
    assert (tmp_path / "took-it-for-preemption").exists()


def test_without_the_tie_ranks_outlive_their_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "die_with_parent", lambda parent, lifeline: None)
    command = Command(lambda: run_ranks(stepping_worker(), 2, folder=tmp_path), tmp_path)
    pids = rank_pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    try:
        assert sorted(leftovers(tmp_path, wait=1)) == sorted(pids)
    finally:
        end(pids)


def test_without_groups_grandchildren_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "killpg", lambda group, signum: None)

    def worker(context):
        announce(context)
        start_grandchild(context)
        return 1

    run_ranks(worker, 1, folder=tmp_path)
    left = leftovers(tmp_path)
    assert len(left) == 1
    end(left)


def test_without_its_own_clock_the_watchdog_blames_a_frozen_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Watchdog, "LONGEST_LOOK", float("inf"))
    worker = stepping_worker(steps=60, pause=0.02)
    command = Command(lambda: run_ranks(worker, 2, folder=tmp_path, stall_seconds=0.7), tmp_path)
    freeze_and_thaw(command.pid, rank_pids(tmp_path, 2), 0.8)
    assert command.wait() == 3


def test_without_the_pause_one_request_counts_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)

    def worker(context):
        announce(context)
        while not context.stop_requested:
            time.sleep(0.001)
        (context.folder / f"asked-{context.rank}").touch()
        time.sleep(20)

    command = Command(lambda: run_ranks(worker, 2, folder=tmp_path), tmp_path)
    rank_pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGTERM)
    limit = time.monotonic() + 10
    while not list(tmp_path.glob("asked-*")):  # the first has arrived: it can't be merged with the second
        assert time.monotonic() < limit
        time.sleep(0.001)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 75
    assert command.outcome.startswith("ended at once")
