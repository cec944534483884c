"""NaN, +inf and a finite spike on one rank only, in a micro-batch that is not the last, on a step that no line tells
of: one verdict on all ranks, and the weights are those before the bad step."""

import json

import pytest

from onecurve.checkpoint import read_manifest
from onecurve.launch import run_ranks
from onecurve.train.loop import train_step
from onecurve.train.plan import Plan
from onecurve.train.start import open_session

# On rank 3, in the first micro-batch of its first leaf (it runs four), when 7 updates are done: step 8.
BAD = {
    "nan": "poison:rank=3,step=7,place=logits,index=5",
    "inf": "poison:rank=3,step=7,place=logits,index=5,value=inf",
    "spike": "poison:rank=3,step=7,place=logits,index=5,value=1e5",
    "gradient nan": "poison:rank=3,step=7,place=gradient,index=5",
    "gradient inf": "poison:rank=3,step=7,place=gradient,index=5,value=inf",
}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.mark.parametrize("bad", BAD)
def test_case_20_same_verdict_everywhere_and_the_bad_step_changes_nothing(new_run, reference, bad):
    """Case 20."""
    run = new_run()
    assert run.train(armed=BAD[bad]) == 0, run.errors
    (event,) = run.events("rollback")
    assert (event["step"], event["back_to"], event["restored"], event["skipped"]) == (8, 6, 5, [6, 7])
    assert ("more than 2 x" if bad == "spike" else "is not finite") in event["reason"]
    # Which rank and micro-batch it was does not matter, nor which of the three, nor the layout.
    assert run.result() == reference(armed="poison:step=7,place=logits,after=3")
    assert run.result() != reference()


def weights(session):
    tensors = [t for t in session.optimizer.tensors()["parameters"] if t.untyped_storage().nbytes()]  # else: freed
    tensors += [getattr(session.optimizer, kind) for kind in ("master", "exp_avg", "exp_avg_sq")]
    return [t.detach().clone().numpy().tobytes() for t in tensors]


@STAGES
@pytest.mark.parametrize("bad", ["nan", "inf", "spike"])
def test_weights_are_bit_equal_to_those_before(tmp_path, new_run, bad, stage):
    """Looked at on each rank, between the verdict and the rollback."""
    from onecurve import faults
    from onecurve.config import load_config

    config = load_config(new_run().config, [f"layout.zero={stage}"])
    plan = Plan(config, tmp_path, "c" * 64, None, False, quiet=True)

    def worker(context):
        session = open_session(plan, context)
        for _ in range(7):
            stats, _ = train_step(session)
            session.step += 1
            session.guard.accept(session.step, stats)
        before, updates = weights(session), session.optimizer.updates
        stats, _ = train_step(session)
        assert weights(session) == before and session.optimizer.updates == updates
        return [session.guard.objection(stats) is not None, stats.accepted, str(stats.loss), stats.finite]

    faults.arm(BAD[bad])
    try:
        told = run_ranks(worker, 4, folder=tmp_path, stall_seconds=60)
    finally:
        faults.disarm()
    assert all(json.dumps(answer) == json.dumps(told[0]) for answer in told)
    assert told[0][:2] == [True, False] and told[0][3] == (bad == "spike")


def test_gives_up_with_the_story(new_run):
    """A trouble that new batches do not cure: exit 3 after max_rollbacks, and the last healthy checkpoint stays. It
    would be the same again, so there is no other attempt."""
    run = new_run("guard.max_rollbacks=2")
    assert run.train(armed="poison:rank=1,step=7,place=logits,times=0", flags=("--restarts", "3")) == 3
    assert run.events("restart") == []
    assert len(run.events("rollback")) == 2
    assert "step 8: loss nan or a gradient is not finite; gave up after 2 rollbacks in a row" in run.errors
    assert "batches given up so far: [6, 7, 8, 9]" in run.errors
    assert run.steps == [5] and "resume with: onecurve train" in run.errors
    assert run.events("error")


def test_a_resumed_run_has_no_more_rollbacks_than_one_that_was_not_killed(new_run):
    """How many there were in a row is state."""
    run = new_run("guard.max_rollbacks=2", "checkpoint.every_steps=1")
    bad = "poison:rank=1,step=7,place=logits,times=0"
    # two rollbacks go from step 8 to the state after step 6; step 7 is then saved with new batches, and kills
    assert run.train(armed=bad + ";kill:rank=0,place=save,step=7,after=2") == 3
    assert run.train(armed=bad, resume=True) == 3
    assert "gave up after 2 rollbacks in a row" in run.errors


def test_case_9_nan_weights_never_push_out_a_healthy_checkpoint(new_run):
    """Case 9. A rate so large that the update overflows; each step is saved, keep = 2, and the run gives up."""
    run = new_run(
        "faults.lr_multiplier={step=9,factor=1e300}", "checkpoint.every_steps=1", "checkpoint.background=false",
        "guard.max_rollbacks=0",
    )  # fmt: skip
    assert run.train() == 3
    assert "step 10: loss nan" in run.errors
    assert run.steps == [7, 8, 9] and [read_manifest(run.checkpoint(step)).finite for step in run.steps] == [1, 1, 0]
    assert run.train(resume=True) == 3
    assert "passed over step-00000009: holds values that are not finite" in run.errors
    assert run.events("resume")[-1]["step"] == 8


def test_case_9_keep_1_is_refused_and_a_failed_save_leaves_the_old_one(new_run, reference):
    """Case 9."""
    run = new_run()
    assert run.train("checkpoint.keep=1") == 2
    assert run.errors.count("\n") == 1 and "checkpoint.keep" in run.errors
