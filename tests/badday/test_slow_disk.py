"""A disk that is slow is waited for, however long; one that hangs is found and named as any other hang."""

import time

import pytest

from onecurve.launch import ranks
from onecurve.train import start

STALL = 2.0
LIMITS = ("train.steps=5", f"limits.stall_seconds={STALL}")
BACKGROUND = [pytest.param("true", marks=pytest.mark.slow), "false"]  # the last save is waited for in both


def impatient():
    """The ranks wait for each other no longer than half of what the watchdog does."""
    ranks.GROUP_MARGIN_SECONDS = start.GROUP_MARGIN_SECONDS = -STALL / 2


@pytest.mark.parametrize("background", BACKGROUND)
def test_a_slow_save_is_no_hang(new_run, background):
    """Neither on the rank whose disk it is, nor on those that wait for it."""
    run = new_run(*LIMITS, f"checkpoint.background={background}")
    assert run.train(armed="slow:rank=2,seconds=0.8,place=save.block,times=0", before=impatient) == 0, run.errors
    assert run.last.took > 4 * 0.8 and run.steps == [5]


@pytest.mark.parametrize("background", BACKGROUND[::-1])
@pytest.mark.parametrize(("place", "rank"), [("save.block", 2), pytest.param("save.rename", 0, marks=pytest.mark.slow)])
def test_a_save_that_hangs_is_found_and_named(new_run, background, place, rank):
    run = new_run(*LIMITS, f"checkpoint.background={background}")
    command = run.start(armed=f"hang:rank={rank},place={place}", before=impatient)
    run.wait_for_row(5)
    since = time.monotonic()
    assert command.wait(30) == 3
    assert time.monotonic() - since < STALL + 5
    assert f"rank {rank} made no progress for 2 s at step 5, in save of step 5: it hangs" in run.errors
    assert run.steps == []


@pytest.mark.slow
def test_a_slow_load_is_no_hang(new_run, reference):
    """Each of two ranks compares two hashes, then reads its share; one of them on a slow disk."""
    run = new_run("train.steps=6", "checkpoint.background=false")
    assert run.train(armed="kill:rank=0,step=5,place=forward") == 3
    slow = "slow:rank=1,seconds=0.8,place=load.block,times=5"
    assert run.train(*LIMITS[1:], "layout.dp=2", resume=True, armed=slow, before=impatient) == 0, run.errors
    assert run.last.took > 5 * 0.8 and run.result() == reference("train.steps=6")
