"""SIGTERM and SIGINT to a rank, to the command, to its group; in a step, in an evaluation, in a save.

All ranks agree on a step, save, exit 75 within 10 s and say how to go on; the resumed run ends with the bits of the
undisturbed one."""

import itertools
import os
import random
import shlex
import signal
import subprocess
import time

import pytest

from onecurve.checkpoint import latest_checkpoint
from onecurve.train import run as run_module
from tests.badday.commands import Command
from tests.commands import command, environment

EVALUATED = ("train.steps=40", "observe.eval_every=6", "checkpoint.every_steps=4")
PLACES = ["forward", "exchange", "evaluation", "save", "save.begin", "save.write", "save.commit", "save.rename"]
TARGETS = ["rank", "parent", "group"]
RESUME = "; resume with: onecurve train "


def stopped(run, rng, name, target, place, resume):
    """One signal at one place, at a step that is due soon; the run stops, saves and says so."""
    rank = 0 if place in ("save.commit", "save.rename") else rng.randrange(4)
    due = {"evaluation": 6, "save": 4}.get(place.split(".")[0], 1)
    done = max(run.steps, default=0) if resume else 0
    step = done + due - done % due if place == "evaluation" or place.startswith("save") else done + rng.randrange(1, 4)
    armed = f"kill:signal={name},to={target},rank={rank},step={step},place={place}"
    assert run.train(f"layout.zero={rng.randrange(4)}", armed=armed, resume=resume, seconds=90) == 75, run.errors
    line = run.errors.splitlines()[-1]
    at = int(line.split()[4])
    assert line.startswith(f"onecurve: stopped at step {at} of 40{RESUME}"), line
    assert run.steps[-1] == at and run.events("signal")


NINE = [*itertools.product(TARGETS, ["exchange", "evaluation", "save.write"])]


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        pytest.param("TERM", NINE, id="TERM"),
        pytest.param("INT", NINE[::4], id="INT", marks=pytest.mark.slow),
    ],
)
def test_case_22_one_after_the_other(new_run, reference, name, stops):
    """Case 22: stops in one run, of each kind of target and place."""
    run, rng = new_run(*EVALUATED), random.Random(name)
    for number, (target, place) in enumerate(stops):
        stopped(run, rng, name, target, place, resume=number > 0)
    assert run.train("layout.dp=3", resume=True) == 0
    assert run.result() == reference(*EVALUATED)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("target", "place"), [*itertools.product(TARGETS, PLACES)])
def test_case_22_ten_times_each(new_run, reference, target, place):
    """Case 22: ten stops of one kind, five of them SIGINT; every stop resumed, both runs to the end."""
    for name in ("TERM", "INT"):
        run, rng = new_run(*EVALUATED), random.Random(f"{target} {place} {name}")
        for number in range(5):
            stopped(run, rng, name, target, place, resume=number > 0)
        assert run.train(f"layout.dp={rng.randrange(1, 9)}", f"layout.zero={rng.randrange(4)}", resume=True) == 0
        assert run.result() == reference(*EVALUATED)


@pytest.mark.parametrize("target", TARGETS)
def test_the_signal_is_answered_within_ten_seconds(new_run, target):
    """At a random moment, from outside, as a person or a scheduler would."""
    run = new_run("train.steps=100000", "checkpoint.every_steps=500")
    command = run.start()
    ranks = command.ranks(4)
    run.wait_for_row(3)
    time.sleep(random.random() / 5)
    sent = time.monotonic()
    if target == "group":
        os.killpg(command.pid, signal.SIGTERM)
    else:
        os.kill(command.pid if target == "parent" else ranks[2], signal.SIGTERM)
    assert command.wait() == 75
    assert time.monotonic() - sent < 10
    step = run.steps[-1]
    assert f"stopped at step {step} of 100000{RESUME}" in run.errors and len(run.rows()) == step


def test_a_second_signal_ends_at_once_and_the_last_checkpoint_is_whole(new_run, reference):
    """While it can't stop: a rank hangs in the exchange, another save is being written."""
    run = new_run()
    command = run.start(armed="hang:rank=1,step=11,place=exchange")
    run.wait_for_row(11)
    os.kill(command.pid, signal.SIGTERM)
    time.sleep(0.5)
    os.kill(command.pid, signal.SIGTERM)
    sent = time.monotonic()
    assert command.wait() == 75
    assert time.monotonic() - sent < 3
    assert "ended at once by SIGTERM; the newest checkpoint stays whole" + RESUME in run.errors
    path, reasons = latest_checkpoint(run.folder / "checkpoints")
    assert path is not None and reasons == []
    assert run.train(resume=True) == 0
    assert run.result() == reference()


@pytest.mark.parametrize("name", ["TERM", pytest.param("INT", marks=pytest.mark.slow)])
def test_signals_without_end_after_the_state_is_saved(new_run, name):
    """In a fresh interpreter, to the last moment of its own ending: what is saved and said stays so."""
    run = new_run("train.steps=100000", "checkpoint.every_steps=1000")
    settings = [part for text in run.sets for part in ("--set", text)]
    arguments = command("train", run.config, "--run", run.folder, *settings)
    signum = signal.Signals[f"SIG{name}"]
    with subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        run.last = process
        run.wait_for_row(3)
        process.send_signal(signum)
        while not run.events("signal"):
            time.sleep(0.001)
        while process.poll() is None:
            process.send_signal(signum)
            time.sleep(0.0005)
        errors = process.stderr.read()
    assert process.returncode == 75, errors
    assert f"stopped at step {run.steps[-1]} of 100000{RESUME}" in errors, errors


def test_in_the_last_evaluation(new_run, reference):
    """All updates are done, the last row is not written: still stopped, not finished."""
    sets = ("train.steps=12", "observe.eval_every=6")
    run = new_run(*sets)
    assert run.train(armed="kill:signal=TERM,rank=1,step=12,place=evaluation") == 75
    assert "stopped at step 12 of 12" in run.errors and len(run.rows()) == 11
    assert run.train(resume=True, armed="kill:signal=TERM,rank=1,step=12,place=evaluation") == 75
    assert run.train(resume=True) == 0
    assert run.result() == reference(*sets)
    assert run.train(resume=True) == 0 and "is finished" in run.errors


def test_before_the_ranks_run(new_run):
    """While the command still reads its config and corpus there is nothing to save: it just ends, 75."""
    real = run_module.locate

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    run = new_run()
    assert run.train(before=lambda: setattr(run_module, "locate", interrupted)) == 75
    assert run.errors == "onecurve: interrupted\n" and not run.folder.exists()


def test_the_line_gives_a_command_that_works(new_run, reference, monkeypatch):
    """Copied from the screen, with the layout that the run had."""
    run = new_run("layout.dp=2", "checkpoint.mirror=")
    assert run.train(armed="kill:signal=TERM,rank=1,step=8,place=forward") == 75
    text = run.errors.rpartition("resume with: ")[2].strip()
    program, *arguments = shlex.split(text)
    assert program == "onecurve" and "layout.dp=2" in arguments
    assert Command(*arguments, output=run.folder.with_name("again")).wait() == 0
    assert run.result() == reference()
