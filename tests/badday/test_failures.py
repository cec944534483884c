"""A rank that raises, leaves, or is killed, at any place: the command ends within seconds with the first real error,
nothing is left, and the run goes on to the bits of the undisturbed one."""

import itertools

import pytest

WAYS = {
    "raise": ("rank 2 failed at step 7", "InjectedFault: injected at rank=2, step=7"),
    "exit": ("rank 2 vanished without a word at step 7", "it left with exit code 0 before it returned a result"),
    "kill": ("rank 2 vanished without a word at step 7", "killed by SIGKILL"),
}
PLACES = ["forward", "backward", "exchange", "save", "save.write", "evaluation", "rollback"]
SETS = ("observe.eval_every=7", "checkpoint.every_steps=7", "optimizer.lr=0.02")


def failed(run, way, place):
    poison = "" if place != "rollback" else ";poison:rank=1,step=7,place=logits"
    assert run.train(armed=f"{way}:rank=2,step=7,place={place}{poison}") == 3
    if (way, place) == ("raise", "save.write"):  # on a thread of its own, so the others wrote theirs: a failed save
        assert "rank 2: can't write" in run.errors and "InjectedFault" in run.errors
    else:
        for text in WAYS[way]:
            assert text in run.errors, run.errors
    assert run.last.took < 30
    assert "resume with: onecurve train" in run.errors.splitlines()[-1]
    (event,) = run.events("error")
    assert event["text"] in run.errors


@pytest.mark.parametrize(("way", "place"), [*itertools.product(WAYS, ["forward", "exchange", "save.write"])])
def test_case_21_the_real_error_is_named(new_run, way, place):
    """Case 21."""
    failed(new_run(*SETS), way, place)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "place"), [*itertools.product(WAYS, PLACES)])
def test_case_21_at_every_place_and_resumed(new_run, reference, way, place):
    """Case 21."""
    run = new_run(*SETS)
    failed(run, way, place)
    assert run.train("layout.dp=2", resume=True) == 0
    assert run.result() == reference(*SETS)


def test_the_whole_command_killed(new_run, reference):
    run = new_run()
    assert run.train(armed="kill:to=group,rank=3,step=12,place=exchange") == -9
    assert run.train("layout.dp=6", "layout.zero=3", resume=True) == 0
    assert run.result() == reference()


def test_restarts_go_on_by_themselves(new_run, reference, tmp_path):
    """A fault that fires once over all restarts; then one that comes back until the budget is gone."""
    run = new_run()
    once = f"kill:rank=1,step=8,place=forward,once={tmp_path / 'fired'}"
    assert run.train(armed=once, flags=("--restarts", "1")) == 0
    (event,) = run.events("restart")
    assert event["attempt"] == 1 and event["step"] == 5 and "rank 1 vanished" in event["error"]
    assert "starting again (1, at most 1 in a row without progress)" in run.errors
    assert run.result() == reference()


def test_the_budget_of_restarts_refills_with_progress(new_run, reference):
    """Each attempt is killed 7 steps after it began, and saves once before: three restarts on a budget of one."""
    run = new_run("checkpoint.background=false")
    assert run.train(armed="kill:rank=1,place=exchange,after=7", flags=("--restarts", "1")) == 0
    assert [event["step"] for event in run.events("restart")] == [5, 10, 15]
    assert run.result() == reference()


def test_the_budget_ends(new_run):
    run = new_run()
    assert run.train(armed="kill:rank=1,step=8,place=exchange", flags=("--restarts", "2")) == 3
    assert [event["step"] for event in run.events("restart")] == [5, 5]
    assert "rank 1 vanished without a word at step 8" in run.errors and run.events("error")


def test_bad_input_is_not_tried_again(new_run):
    run = new_run()
    assert run.train("layout.dp=9", flags=("--restarts", "2")) == 2
    assert run.errors.count("\n") == 1 and not run.folder.exists()
