"""Seeded bad days: random trouble, one after the other, each time resumed on another layout, until the run is done.

All must end at the state that the curve says. A poisoned gradient makes the run give up two batches, which is state: so
what is expected is the undisturbed run that gave up the same ones.
"""

import os
import random
import signal
import time

import pytest

from onecurve.checkpoint import read_manifest

STEPS = 20
STALL = 4.0  # seconds
PLACES = ["step", "forward", "backward", "exchange", "evaluation", "save", "save.begin", "save.write", "save.written"]
LEADERS = ["save.commit", "save.rename"]
SETS = ("observe.eval_every=4", "checkpoint.every_steps=3")
LIMIT = 60.0  # seconds for one command, on a busy machine; a stalled one has its own time in it
ENDS = {
    "kill": {3},
    "stop": {3},
    "signal": {75},
    "raise": {3},
    "exit": {3},
    "io": {3},
    "outside": {-9, 3, 75},
    "none": {0},
}


def fault(rng, kind, world, done):
    """One fault of a kind, at a place that a run which stands at step `done` will pass."""
    rank = rng.randrange(world)
    places = PLACES + LEADERS * (rank == 0)
    place = rng.choice([p for p in places if p.startswith("save.")] if kind == "io" else places)
    every = 4 if place == "evaluation" else 3 if place.startswith("save") else 1
    step = rng.choice([step for step in range(done + 1, STEPS) if step % every == 0] or [STEPS])
    where = f"rank={rank},step={step},place={place}"
    signum = f",signal={rng.choice(['TERM', 'INT'])},to={rng.choice(['rank', 'parent', 'group'])}"
    return {
        "kill": f"kill:{where}" + rng.choice(["", "", ",to=parent"]),
        "signal": f"kill:{where}{signum}",
        "io": f"io:{where},error={rng.choice(['ENOSPC', 'EIO'])}",
    }.get(kind, f"{kind}:{where}")


def rehearse(run, seed, marker):
    """One bad day; what happened, as text."""
    rng, story = random.Random(seed), []
    poisoned = rng.random() < 0.4
    poison = f"poison:place={rng.choice(['logits', 'gradient'])},step={rng.randrange(1, STEPS)},once={marker}"
    troubles = rng.randrange(1, 5)
    for attempt in range(troubles + 1):
        trouble = attempt < troubles
        kind = rng.choice(["kill", "stop", "signal", "raise", "exit", "io", "outside"]) if trouble else "none"
        world, stage = rng.randrange(1, 9), rng.randrange(4)
        background = rng.choice(["true", "false"])
        armed = [poison] if poisoned else []
        if kind not in ("none", "outside"):
            armed.append(fault(rng, kind, world, max(run.steps, default=0)))
        story.append(f"W={world} stage={stage} {'; '.join(armed) or kind}")
        command = run.start(
            f"layout.dp={world}", f"layout.zero={stage}", f"checkpoint.background={background}",
            f"limits.stall_seconds={STALL}", armed=";".join(armed), resume=attempt > 0,
        )  # fmt: skip
        if kind == "outside":
            time.sleep(rng.random() * 0.8)
            os.kill(command.pid, rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        code = command.wait(LIMIT)
        # A place that was not passed again: nothing happened, and the run is done.
        assert code in ENDS[kind] | {0} | ({-9} if "parent" in story[-1] else set()), (story, run.errors)
        story[-1] += f" -> {code}"
        if code == 0:
            return story
    raise AssertionError(story)


def rehearsals(new_run, reference, seeds, tmp_path, capsys):
    ended, skipped, commands = 0, 0, 0
    for seed in seeds:
        run = new_run(*SETS)
        story = rehearse(run, seed, tmp_path / f"fired-{seed}")
        given_up = read_manifest(run.checkpoint(STEPS)).skipped
        # Steps d-1 and d gave up batches d-2 and d-1: the same poison at step d, that is with d-1 updates done.
        armed = f"poison:place=logits,step={max(given_up)}" if given_up else ""
        assert run.result() == reference(*SETS, armed=armed), (seed, story)
        ended, skipped, commands = ended + 1, skipped + bool(given_up), commands + len(story)
    with capsys.disabled():
        print(f"\n{ended} of {len(seeds)} rehearsals ended at their digest; {skipped} rolled back, {commands} commands")


def test_a_handful(new_run, reference, tmp_path, capsys):
    rehearsals(new_run, reference, range(3), tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_fifty(new_run, reference, tmp_path, capsys):
    rehearsals(new_run, reference, range(50), tmp_path, capsys)
