"""`--from RUN[@STEP]`: a new curve that begins, bit for bit, with another run's state, whatever happens to either."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from onecurve import cli, faults
from onecurve.checkpoint import read_manifest
from onecurve.train import run as run_module
from tests.commands import DEMO, curve, digest, events, train_here

SETS = ("train.steps=6", "checkpoint.every_steps=2", "checkpoint.keep=9", "train.seed=7")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, a checkpoint each."""
    run = tmp_path_factory.mktemp("parent") / "run"
    assert train_here(run, "train.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=4") == 0
    return run


@pytest.fixture
def parent(old: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(old, tmp_path / "parent"))


@pytest.fixture(scope="module")
def child(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every child of the parent's newest state must equal."""
    run = tmp_path_factory.mktemp("child") / "run"
    assert start(run, old) == 0
    return run


def start(run: Path, parent: object, *sets: str) -> int:
    return train_here(run, *SETS, *sets, flags=("--from", str(parent)))


def record(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found


def test_it_begins_with_the_parents_bits(old: Path, child: Path, tmp_path: Path) -> None:
    assert digest(child, 0) == digest(old, 4) and record(child)["parent"] == digest(old, 4)
    files = [sorted((run / "checkpoints" / step).glob("rank-*")) for run, step in [(child, "step-00000000"),
                                                                                   (old, "step-00000004")]]  # fmt: skip
    assert [a.read_bytes() for a in files[0]] == [b.read_bytes() for b in files[1]] and len(files[0]) == 4
    assert read_manifest(child / "checkpoints/step-00000000").updates == 4
    assert train_here(tmp_path / "orphan", *SETS) == 0
    assert curve(tmp_path / "orphan")[0] != curve(child)[0]


def test_the_curves_name_covers_the_parents_state_and_not_its_place(old: Path, child: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(old, tmp_path / "moved")
    assert start(tmp_path / "same", f"{moved}@4", "layout.dp=1") == 0
    assert record(tmp_path / "same")["curve_id"] == record(child)["curve_id"]
    assert curve(tmp_path / "same") == curve(child) and digest(tmp_path / "same", 6) == digest(child, 6)
    assert start(tmp_path / "earlier", f"{old}@2") == 0
    assert record(tmp_path / "earlier")["curve_id"] != record(child)["curve_id"]
    assert digest(tmp_path / "earlier", 0) == digest(old, 2) and curve(tmp_path / "earlier") != curve(child)


@pytest.mark.parametrize("place", ["save.write", pytest.param("save.rename", marks=pytest.mark.slow)])
def test_killed_before_its_first_checkpoint_and_resumed_as_it_says(
    parent: Path, child: Path, tmp_path: Path, place: str, capfd: Captured
) -> None:
    run = tmp_path / "new"
    faults.arm(f"kill:rank=0,step=0,place={place}")
    assert start(run, parent) == 3
    faults.disarm()
    assert not (run / "checkpoints/step-00000000").exists() and not (run / "metrics.jsonl").read_text()
    again = capfd.readouterr().err.splitlines()[-1].partition("resume with: onecurve ")[2]
    assert cli.main(shlex.split(again)) == 0
    assert f"starting again from the parent's state, {parent}" in capfd.readouterr().err
    assert curve(run) == curve(child) and digest(run, 6) == digest(child, 6)
    assert record(run)["curve_id"] == record(child)["curve_id"]


def test_the_checkpoint_of_step_0_is_one(parent: Path, tmp_path: Path, capfd: Captured) -> None:
    faults.arm("kill:rank=1,step=0,place=forward")
    assert start(tmp_path / "new", parent) == 3
    assert "the newest checkpoint is that of step 0; resume with: " in capfd.readouterr().err


@pytest.mark.parametrize("change", ["gone", pytest.param("another state", marks=pytest.mark.slow)])
def test_without_a_checkpoint_or_its_parent_it_is_refused(
    parent: Path, tmp_path: Path, change: str, capfd: Captured
) -> None:
    """All of its checkpoints are damaged, and the parent can't help."""
    run = tmp_path / "new"
    assert start(run, parent) == 0
    for file in (run / "checkpoints").rglob("rank-0001*"):
        file.write_bytes(b"?")
    newest = parent / "checkpoints/step-00000004"
    shutil.rmtree(newest)
    if change == "another state":
        assert train_here(tmp_path / "other", "train.steps=4", "train.seed=5") == 0
        shutil.copytree(tmp_path / "other/checkpoints/step-00000004", newest)
    capfd.readouterr()
    assert train_here(run, flags=("--resume",)) == 2
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "parent" in line]
    assert str(newest) in said and "--from" in said
    assert ("No such file" in said) == (change == "gone")


@pytest.mark.slow
def test_damaged_checkpoints_and_the_parent_is_there(parent: Path, child: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    assert start(run, parent) == 0
    for file in (run / "checkpoints").rglob("rank-0001*"):
        file.write_bytes(b"?")
    assert train_here(run, flags=("--resume",)) == 0
    assert curve(run) == curve(child) and digest(run, 6) == digest(child, 6)


def test_the_parent_may_go_once_the_first_step_is_done(parent: Path, child: Path, tmp_path: Path) -> None:
    """Killed before its first own checkpoint, and resumed on another layout."""
    run = tmp_path / "new"
    faults.arm("kill:rank=1,step=1,place=forward")
    assert start(run, parent) == 3
    faults.disarm()
    shutil.rmtree(parent)
    assert train_here(run, "layout.dp=2", "layout.zero=3", flags=("--resume",)) == 0
    assert [event["step"] for event in events(run) if event["event"] == "resume"] == [0]
    assert curve(run) == curve(child) and digest(run, 6) == digest(child, 6)


def test_a_parent_that_changes_meanwhile(
    parent: Path, tmp_path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went back and took the step again after this run had read its digest."""
    real = run_module.prepare
    assert train_here(tmp_path / "other", "train.steps=4", "train.seed=5") == 0

    def late(*args: Any, **options: Any) -> Any:
        shutil.rmtree(parent / "checkpoints/step-00000004")
        shutil.copytree(tmp_path / "other/checkpoints/step-00000004", parent / "checkpoints/step-00000004")
        return real(*args, **options)

    monkeypatch.setattr(run_module, "prepare", late)
    capfd.readouterr()
    assert start(tmp_path / "new", parent) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert digest(tmp_path / "other", 4)[:16] in said and "--from" in said and str(DEMO) not in said
    assert not (tmp_path / "new/checkpoints/step-00000000").exists()
