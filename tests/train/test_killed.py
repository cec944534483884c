"""Runs that come to grief: the command ends soon with the real cause, nothing is left, and the curve is not changed."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from onecurve import faults
from tests.commands import DEMO, command, curve, digest, environment, events, onecurve, rows, train_here
from tests.processes import MARK, children, kill_tree, marked

LIMIT = 10.0  # seconds between the start of a command that fails and its end
# How a rank may go, and what is said of it.
WAYS = {
    "raise": "rank {rank} failed{where}: InjectedFault: injected at",
    "exit": "rank {rank} vanished without a word{where}: it left with exit code 0",
    "kill": "rank {rank} vanished without a word{where}: killed by SIGKILL",
}
PLACES = {"forward": 0, "exchange": 3, "save": 10}  # the place, and the steps done when it is hit


def expected(way: str, rank: int, step: int, place: str) -> str:
    return WAYS[way].format(rank=rank, where=f" at step {step}, in {place}" if step else f" in {place}")


def is_undisturbed(run: Path, undisturbed: Path) -> bool:
    """The same 20 rows in every bit, and the same last state."""
    return curve(run) == curve(undisturbed) and len(rows(run)) == 20 and digest(run) == digest(undisturbed)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_goes_is_named_and_the_run_goes_on(
    way: str, place: str, tmp_path: Path, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, rank, step, before = tmp_path / "run", 2, PLACES[place], children()
    faults.arm(f"{way}:rank={rank},step={step},place={place}")
    begun = time.monotonic()
    assert train_here(run) == 3
    assert time.monotonic() - begun < LIMIT
    assert children() == before
    said = capfd.readouterr().err
    assert expected(way, rank, step, place) in said
    assert [e["text"] for e in events(run) if e["event"] == "error"] == [line_of(said)]
    faults.disarm()
    assert train_here(run, flags=("--resume",)) == 0
    assert is_undisturbed(run, undisturbed)


def line_of(said: str) -> str:
    return next(line for line in said.splitlines() if "rank 2" in line).removeprefix("onecurve: ")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_from_outside_five_times(way: str, place: str, tmp_path: Path, undisturbed: Path) -> None:
    """A command of its own each time, another rank each time; the fault through the environment, as a user arms it."""
    step = PLACES[place]
    for attempt in range(5):
        run, rank, mark = tmp_path / f"run-{attempt}", attempt % 4, uuid.uuid4().hex
        fault = f"{way}:rank={rank},step={step},place={place}"
        begun = time.monotonic()
        done = onecurve("train", DEMO, "--run", run, **{faults.ENVIRONMENT: fault, MARK: mark})
        took = time.monotonic() - begun
        assert done.returncode == 3, done.stderr
        assert marked(mark) == []
        assert expected(way, rank, step, place) in done.stderr
        assert took < LIMIT + import_seconds()
        done = onecurve("train", DEMO, "--run", run, "--resume")
        assert done.returncode == 0, done.stderr
        assert is_undisturbed(run, undisturbed)


def import_seconds() -> float:
    """What any command that imports torch takes on this machine now: none of it is the failure's."""
    begun = time.monotonic()
    subprocess.run([*command("plan", DEMO)], env=environment(), capture_output=True, check=True)
    return time.monotonic() - begun


@pytest.mark.parametrize("step", [11, 14, 19])
@pytest.mark.parametrize("background", ["true", "false"])
def test_one_rank_killed_late_and_resumed(background: str, step: int, tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    faults.arm(f"kill:rank=3,step={step},place=backward")
    setting = f"checkpoint.background={background}"
    assert train_here(run, setting) == 3
    assert len(rows(run)) in (step - 1, step)  # rank 0 may not have written the last row when rank 3 dies
    faults.disarm()
    assert train_here(run, setting, flags=("--resume",)) == 0
    assert is_undisturbed(run, undisturbed)
    if background == "false":  # in the background the save of step 10 may not have been done yet: then it starts anew
        assert [e["step"] for e in events(run) if e["event"] == "resume"] == [10]


@pytest.mark.parametrize("dp", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_the_whole_tree_killed_and_resumed(dp: int, tmp_path: Path, undisturbed: Path) -> None:
    """Parent and ranks at once, between steps 11 and 19; resumed on as many ranks, or on fewer."""
    run, mark = tmp_path / "run", uuid.uuid4().hex
    fault = "hang:rank=1,step=15,place=forward"  # holds all ranks there while they are killed
    variables = environment(**{faults.ENVIRONMENT: fault, MARK: mark})
    with subprocess.Popen(
        command("train", DEMO, "--run", run), env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        limit = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() or len(rows(run)) < 15:
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.01)
        assert len(marked(mark)) == 5
        kill_tree(mark)
    assert process.returncode == -9 and marked(mark) == [] and len(rows(run)) == 15
    assert train_here(run, f"layout.dp={dp}", flags=("--resume",)) == 0
    assert is_undisturbed(run, undisturbed)


@pytest.mark.parametrize("place", ["save.begin", "save.write", "save.written", "save.commit", "save.rename"])
@pytest.mark.parametrize("background", ["true", "false"])
def test_killed_inside_a_save(background: str, place: str, tmp_path: Path, undisturbed: Path) -> None:
    """Rank 0 does each of these steps. What the kill leaves is passed over, and the run goes through there again."""
    run = tmp_path / "run"
    faults.arm(f"kill:rank=0,place={place}")
    setting = f"checkpoint.background={background}"
    assert train_here(run, setting) == 3
    assert not (run / "checkpoints" / "step-00000010" / "manifest.json").exists()
    faults.disarm()
    assert train_here(run, setting, flags=("--resume",)) == 0
    assert is_undisturbed(run, undisturbed)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000010", "step-00000020"]


def test_killed_and_restarted_by_itself(tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    faults.arm(f"kill:rank=1,step=12,place=forward,once={tmp_path / 'fired'}")
    assert train_here(run, "checkpoint.background=false", flags=("--restarts", "1")) == 0
    assert is_undisturbed(run, undisturbed)
    assert [e["event"] for e in events(run) if e["event"] in ("start", "restart", "resume", "end")] == [
        "start", "restart", "resume", "end",
    ]  # fmt: skip


def test_a_row_that_a_kill_left_torn_is_written_again(tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    faults.arm("kill:rank=0,step=14,place=forward")
    assert train_here(run) == 3
    faults.disarm()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(rows(undisturbed)[14])[:57])
    assert train_here(run, flags=("--resume",)) == 0
    assert is_undisturbed(run, undisturbed)


def test_a_damaged_row_is_the_only_one_that_is_lost(
    tmp_path: Path, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    faults.arm("kill:rank=0,step=14,place=forward")
    assert train_here(run, "checkpoint.background=false") == 3
    faults.disarm()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:3], "?", *lines[4:], ""]))
    capfd.readouterr()
    assert train_here(run, flags=("--resume",)) == 0
    said = "metrics.jsonl was changed from outside: lines that are no rows, moved to metrics.removed.jsonl: 1; "
    assert f"{said}steps without a row, of the first 10: 1" in capfd.readouterr().err
    assert [row["step"] for row in rows(run)] == [1, 2, 3, *range(5, 21)]
    assert [row["loss_hex"] for row in rows(run)[3:]] == [row["loss_hex"] for row in rows(undisturbed)[4:]]
    assert (run / "metrics.removed.jsonl").read_text() == "?\n"
    (event,) = [event for event in events(run) if event["event"] == "metrics_lost"]
    assert (event["rows"], event["removed"]) == (1, 1)
