"""One step with its learning rate times 1000 makes the loss jump; the run goes back and takes other batches.

The result is a function of the curve: not of the layout, of where checkpoints were made, or of how often it was killed.
"""

import itertools

import pytest

from onecurve.checkpoint import read_manifest

SPIKE = ("train.steps=30", "faults.lr_multiplier={step=12,factor=1000.0}")
CALM = ("train.steps=30",)


def rolled_back_once(run):
    (event,) = run.events("rollback")[-1:]
    assert (event["step"], event["back_to"], event["skipped"], event["count"]) == (13, 11, [11, 12], 1)
    return event


def test_the_run_recovers_and_ends_where_the_calm_one_does(new_run, reference):
    run = new_run(*SPIKE)
    assert run.train() == 0
    event = rolled_back_once(run)
    assert event["restored"] == 10 and "more than 2 x" in event["reason"]
    assert run.result() == reference(*SPIKE)
    spiked, calm = float.fromhex(run.rows()[-1]["loss_hex"]), float.fromhex(reference(*CALM)[1][-1][0])
    assert abs(spiked - calm) < 0.05 * calm
    story = [line.removeprefix("onecurve: ") for line in run.errors.splitlines() if line.startswith("onecurve: ")][1:]
    assert story[0] == "step 12: the rehearsed fault multiplies the learning rate by 1000"
    assert story[1].startswith("step 13: loss ") and " is more than 2 x the previous " in story[1]
    assert story[2] == (
        "rollback 1 of at most 3 in a row: to the state after step 11 (from the checkpoint of step 10, then step 11 "
        "again); steps 12 to 13 with new batches in place of 11, 12"
    )
    assert story[3].startswith("step 13: accepted, loss ")


def matrix(widths, stages, every, background):
    return [
        (f"layout.dp={w}", f"layout.zero={s}", f"checkpoint.every_steps={e}", f"checkpoint.background={str(b).lower()}")
        for w, s, e, b in itertools.product(widths, stages, every, background)
    ]


# a handful now, the whole product in the slow tests
@pytest.mark.parametrize("layout", [*matrix([3], [3], [4], [True]), *matrix([1], [1], [7], [False])], ids=" ".join)
def test_one_digest_on_every_layout(new_run, reference, layout):
    run = new_run(*SPIKE)
    assert run.train(*layout) == 0
    rolled_back_once(run)
    assert run.result() == reference(*SPIKE)


FULL = [*matrix([1, 3, 4], [1, 3], [3, 4, 5, 7], [True, False]), *matrix([4, 6, 8], [0, 2], [5, 0], [True])]


@pytest.mark.slow
@pytest.mark.parametrize("layout", FULL, ids=" ".join)
def test_one_digest_on_every_layout_in_full(new_run, reference, layout):
    test_one_digest_on_every_layout(new_run, reference, layout)


def test_a_checkpoint_made_in_the_replay_knows_its_next_batch(new_run):
    """Those that were given up lie ahead of it: step 9 draws batch 8, as ever, and step 12 the first behind them."""
    run = new_run(*SPIKE, "checkpoint.every_steps=7")
    assert run.train(armed="kill:signal=TERM,rank=0,place=replay") == 75
    assert run.steps == [7, 8] and read_manifest(run.checkpoint(8)).skipped == [11, 12]
    assert read_manifest(run.checkpoint(8)).data_step == 8


KILLED = ["kill:rank=0,place=rollback", "kill:rank={last},place=replay", "kill:to=parent,rank=0,place=replay"]


def killed_and_resumed(run, reference, layout, killed):
    last = int(layout[0].removeprefix("layout.dp=")) - 1
    assert run.train(*layout, armed=killed.format(last=last)) == (-9 if "parent" in killed else 3)
    assert run.train("layout.dp=3", "layout.zero=2", resume=True) == 0
    rolled_back_once(run)
    assert run.result() == reference(*SPIKE)


@pytest.mark.parametrize("killed", [KILLED[0], *(pytest.param(k, marks=pytest.mark.slow) for k in KILLED[1:])])
def test_killed_right_after_the_rollback_and_resumed(new_run, reference, killed):
    killed_and_resumed(new_run(*SPIKE), reference, ("layout.dp=4",), killed)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "killed"), [*zip(FULL, itertools.cycle(KILLED), strict=False)], ids=str)
def test_killed_right_after_the_rollback_in_full(new_run, reference, layout, killed):
    killed_and_resumed(new_run(*SPIKE), reference, layout, killed)
