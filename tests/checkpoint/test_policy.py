"""When to save and what to keep."""

import random

import pytest

from onecurve.checkpoint import latest_checkpoint, read_manifest, save_checkpoint
from onecurve.checkpoint.lock import Fence
from onecurve.checkpoint.policy import Candidate, apply_retention, due_by_clock, due_by_step, to_remove
from onecurve.errors import InputError
from tests.checkpoint.fakes import all_good, make, on_ranks
from tests.checkpoint.test_layouts import save


@pytest.mark.parametrize(
    "step, every_steps, expected",
    [(20, 0, True), (10, 0, False), (10, 5, True), (11, 5, False), (20, 7, True), (14, 7, True)],
)
def test_due_by_step(step, every_steps, expected):
    assert due_by_step(step, total=20, every_steps=every_steps) is expected


@pytest.mark.parametrize(
    "seconds, every_minutes, expected", [(1e9, 0.0, False), (119.9, 2.0, False), (120.0, 2.0, True)]
)
def test_due_by_clock(seconds, every_minutes, expected):
    assert due_by_clock(seconds, every_minutes=every_minutes) is expected


def candidates(*steps, nan=(), damaged=()):
    return [Candidate(s, s not in damaged, s not in nan) for s in steps]


@pytest.mark.parametrize(
    "found, current, keep, protect, removed",
    [
        (candidates(1, 2, 3), 3, 2, None, [1]),
        (candidates(1, 2, 3), 3, 3, None, []),
        (candidates(1, 2, 3, 4), 4, 2, 1, [2]),
        (candidates(1, 2, 3, 4), 4, 2, 0, [1, 2]),  # nothing is that old
        (candidates(1, 2, 3, 4), 4, 2, 3, [1, 2]),
        (candidates(1, 2, 3, 4, nan=(2, 3, 4)), 4, 2, None, [2]),  # not 1: the last healthy one
        (candidates(1, 2, 3, 4, nan=(1, 3, 4)), 4, 2, None, [1]),
        (candidates(1, 2, 3, 4, nan=(1,)), 4, 2, 1, [1, 2]),
        (candidates(1, 2, 3, 4, damaged=(3, 4)), 4, 2, None, []),
        (candidates(1, 2, 3, 4, 5, damaged=(1,)), 5, 2, None, [1, 2, 3]),
        (candidates(5, 8, 9, 20, 30), 9, 2, None, [5]),  # 20 and 30 will be passed again
        ([], 1, 2, None, []),
    ],
)
def test_to_remove(found, current, keep, protect, removed):
    assert to_remove(found, current, keep, protect) == removed


@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_at_least_two_are_kept(keep):
    with pytest.raises(InputError, match="at least 2"):
        to_remove([], 1, keep)


def test_whatever_happens_a_healthy_one_is_left():
    rng = random.Random(7)
    for _ in range(2000):
        steps = rng.sample(range(1, 30), rng.randrange(1, 10))
        found = candidates(*steps, nan=rng.sample(steps, rng.randrange(len(steps) + 1)))
        current, keep, protect = rng.choice(steps), rng.randrange(2, 5), rng.randrange(0, 30)
        gone = to_remove(found, current, keep, protect)
        left = [c for c in found if c.step not in gone]
        old = [c for c in found if c.step <= current]
        assert current not in gone and len([c for c in left if c.step <= current]) >= min(keep, len(old))
        for limit in (current, protect):
            if healthy := [c.step for c in found if c.finite and c.step <= min(limit, current)]:
                assert max(healthy) in {c.step for c in left}


def test_retention_touches_only_what_it_can_read_as_its_own(tmp_path):
    info = {"curve_id": "mine"}
    for step in range(1, 7):
        save(tmp_path, world=1, step=step, info={"curve_id": "other"} if step == 2 else info)
    (tmp_path / "step-00000001" / "manifest.sha256").write_text("")
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "step-00000000" / "thesis.txt").write_text("")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "best").mkdir()
    assert apply_retention(tmp_path, read_manifest(tmp_path / "step-00000006"), 2) == []
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-3", "best", *(f"step-{n:08d}" for n in (0, 1, 2, 5, 6))}


def test_a_run_that_lost_its_folder_removes_nothing_there(tmp_path):
    """It was stopped between its commit and this, and another run, which may keep more, has the folder now."""
    for step in range(1, 5):
        save(tmp_path, world=1, step=step)
    fence = Fence(tmp_path / "run.fence", "ours")
    fence.path.write_text('{"token": "another", "pid": 1, "host": "h"}')
    notes = apply_retention(tmp_path, read_manifest(tmp_path / "step-00000004"), 2, fence=fence)
    assert len(notes) == 2 and all("taken over" in note for note in notes)
    fence.path.write_text('{"token": "ours", "pid": 1, "host": "h"}')
    assert apply_retention(tmp_path, read_manifest(tmp_path / "step-00000004"), 2, fence=fence) == []
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


def test_a_removal_that_fails_is_told_and_the_rest_goes_on(tmp_path):
    for step in range(1, 5):
        save(tmp_path, world=1, step=step)
    manifest = read_manifest(tmp_path / "step-00000004")
    from onecurve.checkpoint import policy

    original = policy.remove_checkpoint

    def fail(path):
        if path.name.endswith("1"):
            raise PermissionError(1, "Operation not permitted")
        original(path)

    policy.remove_checkpoint = fail
    try:
        notes = apply_retention(tmp_path, manifest, 2)
    finally:
        policy.remove_checkpoint = original
    assert len(notes) == 1 and "step-00000001: Operation not permitted" in notes[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:08d}" for n in (1, 3, 4)]


def test_nan_weights_never_rotate_out_the_last_healthy_checkpoint(tmp_path):
    from onecurve.checkpoint.background import Checkpointer

    def work(mesh):
        optimizer = make(mesh, seed=1)
        saves = Checkpointer(tmp_path, optimizer, keep=2)
        saves.save(1)
        saves.save(2)
        optimizer.exp_avg_sq[0] = float("inf")
        for step in range(3, 7):
            saves.save(step)

    all_good(on_ranks(2, work))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:08d}" for n in (2, 5, 6)]
    assert latest_checkpoint(tmp_path, finite=True)[0] == tmp_path / "step-00000002"
    assert save_checkpoint.__doc__
