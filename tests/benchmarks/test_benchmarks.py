"""Every benchmark runs at a tiny size, prints its table and writes its figures; what it compares is the same work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure

ROOT = Path(__file__).parent.parent.parent


def run(tmp_path: Path, module: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """stdout and figures of `python -m benchmarks.<module>`."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


@pytest.mark.slow
def test_step_does_the_same_work_in_every_system(tmp_path: Path) -> None:
    out, figures = run(tmp_path, "step", "--model", "demo", "--width", "2", "--rounds", "2", "--steps", "5")
    (one,) = figures["runs"]
    systems = {s["system"]: s for s in one["systems"]}
    expected = {"DDP", "DDP+ZeRO", "FSDP2 ZeRO-2", "FSDP2 ZeRO-3", *(f"onecurve ZeRO-{n}" for n in range(4))}
    assert expected <= set(systems)
    assert all(name in out for name in systems)
    for system in systems.values():
        assert system["apart"] < 1e-5
        assert len(system["seconds"]) == 2 and min(system["seconds"]) > 0
    assert len({s["last_loss"] for name, s in systems.items() if name.startswith("onecurve")}) == 1
    assert systems["DDP+ZeRO"]["ratio"] == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_step_with_accumulation_is_the_same_work_too(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--steps", "5", "--width", "2", "--accumulate", "2", "--micro-batch", "2"]
    _, figures = run(tmp_path, "step", "--model", "demo", *few, "--only", "DDP", "FSDP2 ZeRO-2", "ZeRO-1", "ZeRO-3")
    assert max(system["apart"] for system in figures["runs"][0]["systems"]) < 1e-5


@pytest.mark.slow
def test_step_says_where_the_work_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The control: with another learning rate in one system, its losses tell."""
    from benchmarks import step  # imports the peers, which takes its time

    honest = step.onecurve
    monkeypatch.setattr(step, "onecurve", lambda work, world, stage: honest(work.resized(lr=6e-3), world, stage=stage))
    few = ["--model", "demo", "--width", "2", "--rounds", "1", "--steps", "5", "--only", "DDP+ZeRO", "onecurve ZeRO-1"]
    assert step.main(few) == 1
    assert "not the same work" in capsys.readouterr().err


@pytest.mark.slow
def test_transports(tmp_path: Path) -> None:
    out, figures = run(tmp_path, "transports", "--width", "2", "--sizes", "1024", "--rounds", "2")
    assert {(o["operation"], o["over"]) for o in figures["operations"]} == {
        (operation, over) for operation in ("reduce", "all-gather") for over in ("backend", "shm", "p2p", "alltoall")
    }
    assert "1,024 fp32 elements, W = 2" in out


@pytest.mark.slow
def test_price_compares_twins_that_agree_until_rounding_parts_them(tmp_path: Path) -> None:
    out, figures = run(tmp_path, "price", "--model", "demo", "--width", "3", "--rounds", "2", "--steps", "5")
    losses = figures["losses"]
    for name in ("shm", "p2p", "alltoall"):
        assert losses[f"ordered, {name}"] == losses["ordered, shm"]
        assert losses[f"unordered, {name}"] == pytest.approx(losses["ordered, shm"], rel=1e-4)
        assert name in out


def test_profile(tmp_path: Path) -> None:
    out, figures = run(tmp_path, "profile", "--stage", "3", "--width", "2", "--rounds", "3")
    for rank in figures["by_rank"]:
        assert rank["step"][0] > 0 and {"compute", "  forward", "  backward", "  update"} <= set(rank)
    assert "all-gather, waiting included" in out


def test_spread_is_the_median_and_the_quartiles() -> None:
    assert measure.Spread.of([3.0]) == (3.0, 3.0, 3.0)
    assert measure.Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0, 4.0)
    assert measure.speed_up([2.0, 4.0], [1.0, 1.0]) == (3.0, 2.5, 3.5)


def test_ranks_are_put_together_by_the_slowest_and_the_sum() -> None:
    ranks = [({"a": [1.0, 4.0]}, {"a": [0.5, 0.5]}), ({"a": [3.0, 2.0]}, {"a": [1.5, 0.5]})]
    assert measure.together(ranks, steps=2) == ({"a": [1.5, 2.0]}, {"a": [1.0, 0.5]})


@pytest.mark.slow
def test_checkpoint(tmp_path: Path) -> None:
    few = ["--rounds", "1", "--elements", "65536", "--ranks", "2"]
    out, figures = run(tmp_path, "checkpoint", *few)
    assert "torch.distributed.checkpoint" in out
    ours = [f for f in figures["figures"] if f["system"] == "onecurve"]
    assert [f["what"] for f in ours] == ["save", "load", "stall"] and ours[0]["bytes"] > 12 * 65536
    assert all(min(f["seconds"]) > 0 for f in figures["figures"])


@pytest.mark.slow
def test_saves(tmp_path: Path) -> None:
    out, figures = run(tmp_path, "saves", "--model", "demo", "--rounds", "1", "--every", "3", "--width", "2")
    assert "background" in out and len(figures["twins"]) == 3
