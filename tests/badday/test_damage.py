"""Whatever happened to the newest checkpoint: it is refused by name, the next older one is used, and that is said; the
run ends with the bits of the undamaged one. (What each damage is called: tests/checkpoint/test_damage.py.)"""

import itertools
import random
import shutil

import pytest

from tests.badday.commands import Run, small

SHARDS = [f"rank-{rank:04d}.safetensors" for rank in range(4)]
FILES = [*SHARDS, "manifest.json", "manifest.sha256"]
SETS = ("train.steps=10",)
DAMAGES = ["truncated", "emptied", "removed", "swapped", "link", "outside"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run with checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("done")
    run = Run(folder / "run", small(folder), SETS)
    assert run.train() == 0 and run.steps == [5, 10]
    return run


@pytest.fixture
def copy(done, tmp_path):
    shutil.copytree(done.folder, tmp_path / "run")
    return Run(tmp_path / "run", done.config, SETS)


def refused_and_resumed(run, name, reference):
    named = [name, "manifest.json"] if name == "manifest.sha256" else [name]
    assert run.train("layout.dp=2", resume=True) == 0, run.errors
    (line,) = [line for line in run.errors.splitlines() if line.startswith("onecurve: passed over ")]
    assert line.startswith("onecurve: passed over step-00000010: ") and any(n in line for n in named), line
    assert "resumed at step 5 of 10" in run.errors
    (event,) = run.events("skipped_checkpoint")
    assert event["reason"] in line
    assert run.result() == reference(*SETS)


def spoil(path, name, damage, tmp_path):
    file = path / name
    data = file.read_bytes()
    if damage == "swapped":
        same = [path / other for other in FILES if other != name and (path / other).stat().st_size == len(data)]
        if not same:
            pytest.skip(f"{name} has no neighbour of its size")
        other = same[0]
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return
    file.unlink()
    if damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "emptied":
        file.touch()
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "outside":
        file.symlink_to("../../../../etc/passwd")


def test_undamaged_it_is_finished(copy):
    assert copy.train(resume=True) == 0 and "is finished: all 10 steps are done" in copy.errors


@pytest.mark.parametrize(("damage", "name"), [*zip(DAMAGES, [*FILES[4:], *SHARDS], strict=True)])
def test_case_8_and_10_a_damaged_file(copy, reference, tmp_path, damage, name):
    """Case 8, 10."""
    name = SHARDS[1] if damage == "swapped" else name
    spoil(copy.checkpoint(10), name, damage, tmp_path)
    refused_and_resumed(copy, name, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "name"), [*itertools.product(DAMAGES, FILES)])
def test_case_8_and_10_in_full(copy, reference, tmp_path, damage, name):
    """Case 8, 10."""
    spoil(copy.checkpoint(10), name, damage, tmp_path)
    refused_and_resumed(copy, name, reference)


def flips(run, reference, count, tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for number in range(count):
        here = Run(tmp_path / f"flipped-{number}", run.config, SETS)
        shutil.copytree(run.folder, here.folder)
        name = rng.choice(FILES)
        data = bytearray((here.checkpoint(10) / name).read_bytes())
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
        (here.checkpoint(10) / name).write_bytes(data)
        refused_and_resumed(here, name, reference)
        shutil.rmtree(here.folder)


def test_case_10_flipped_bits(done, reference, tmp_path):
    """Case 10."""
    flips(done, reference, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_case_10_a_bit_flipped_at_200_random_places(done, reference, tmp_path):
    """Case 10."""
    flips(done, reference, 200, tmp_path)


def test_nothing_whole_is_left(copy, reference):
    """Every checkpoint damaged: both are named, and the curve starts again, which gives the same bits."""
    for step in (5, 10):
        (copy.checkpoint(step) / FILES[2]).write_bytes(b"")
    assert copy.train(resume=True) == 0
    assert copy.errors.count("passed over step-") == 2 and "starting fresh" in copy.errors
    assert copy.result() == reference(*SETS)
