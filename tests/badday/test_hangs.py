"""A rank that makes no progress is found, every rank's stack is printed, and nothing is left."""

import os
import signal
import time

import pytest

from tests.badday.commands import Run, processes

STALL = 3.0
LIMIT = ("limits.stall_seconds=3.0",)


def found(run, command, since):
    assert command.wait(40) == 3
    assert time.monotonic() - since < STALL + 5
    for rank in range(4):
        assert f"--- rank {rank}: " in run.errors
    assert 'File "' in run.errors and "resume with: onecurve train" in run.errors.splitlines()[-1]


@pytest.mark.parametrize("how", ["stop", "hang"])
def test_a_silent_rank_is_found(new_run, reference, how):
    run = new_run()
    command = run.start(*LIMIT, armed=f"{how}:rank=2,step=8,place=backward")
    run.wait_for_row(8)
    found(run, command, time.monotonic())
    assert "rank 2 made no progress for 3 s at step 8, in backward" in run.errors
    assert ("it is stopped (state T)" if how == "stop" else "it hangs") in run.errors
    assert run.train("layout.dp=3", resume=True) == 0
    assert run.result() == reference()


ELSEWHERE = [pytest.param(place, marks=pytest.mark.slow) for place in ("evaluation", "save.write", "save.commit")]


@pytest.mark.parametrize("place", ["save", *ELSEWHERE])
def test_in_an_evaluation_and_in_a_save(new_run, place):
    run = new_run("observe.eval_every=5")
    rank = 0 if place == "save.commit" else 3
    command = run.start(*LIMIT, armed=f"stop:rank={rank},step=5,place={place}")
    run.wait_for_row(4)
    found(run, command, time.monotonic())


@pytest.mark.parametrize("place", ["save.rename", "save.written"])
def test_a_stopped_run_that_wakes_up_cannot_commit(new_run, reference, place):
    """Its lock is gone, as on another host or where somebody removed it; another run took the folder and went on.
    The old one wakes in the middle of a save: it must not touch the new one's checkpoints."""
    run = new_run()
    old = run.start(armed=f"stop:rank=0,step=10,place={place}")
    ranks = old.ranks(4)
    while processes()[ranks[0]][1] != "T":
        time.sleep(0.01)
    for pid in [old.pid, *ranks]:
        os.kill(pid, signal.SIGSTOP)
    new = Run(run.folder, run.config, output="new")
    assert new.train(resume=True) == 2 and "in use by process" in new.errors  # a stopped run still holds the folder
    (run.folder / "run.lock").unlink()
    assert new.train("layout.dp=2", resume=True) == 0
    listing = sorted((run.folder / "checkpoints").iterdir())
    assert run.result() == reference()
    for pid in [*ranks, old.pid]:
        os.kill(pid, signal.SIGCONT)
    assert old.wait() == 3
    assert sorted((run.folder / "checkpoints").iterdir()) == listing
    assert run.result() == reference()
    reason = "taken over by process" if place == "save.rename" else "No such file or directory"  # its temp folder
    assert reason in old.errors
