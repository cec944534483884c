"""Commands as a user types them, on this checkout whatever else is installed; the line that they say of bad input; and
what a run leaves behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onecurve import cli
from onecurve.checkpoint import read_manifest

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "configs" / "demo.toml"
CAPSTONE = ROOT / "code" / "main.py"
Complain = pytest.CaptureFixture[str]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1", **variables}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "onecurve.cli", *map(str, arguments)]


def onecurve(*arguments: object, seconds: float = 60.0, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(**variables), capture_output=True, text=True, timeout=seconds, check=False
    )


def train(run: Path, *sets: str, flags: tuple[str, ...] = (), config: Path = DEMO, **variables: str) -> Any:
    """`onecurve train CONFIG --run RUN --set …`."""
    settings = [part for setting in sets for part in ("--set", setting)]
    return onecurve("train", config, "--run", run, *settings, *flags, **variables)


def load_capstone() -> ModuleType:
    """`code/main.py` as a fresh module, to be looked at or tampered with."""
    spec = importlib.util.spec_from_file_location("capstone_under_test", CAPSTONE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def curve(run: Path) -> list[tuple[str, float, float]]:
    """Per step, to the last bit: loss, gradient norm, parameter norm. Each step 1 … N must be there once."""
    found = rows(run)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    return [(row["loss_hex"], row["grad_norm"], row["param_norm"]) for row in found]


def digest(run: Path, step: int = 20) -> str:
    """The state digest of the checkpoint of `step`."""
    return read_manifest(run / "checkpoints" / f"step-{step:08d}").state_digest


def train_here(run: Path, *sets: str, flags: tuple[str, ...] = (), config: Path = DEMO) -> int:
    """As `train`, in this process: a second where a fresh interpreter takes three. Returns the exit code."""
    settings = [part for setting in sets for part in ("--set", setting)]
    return cli.main(["train", str(config), "--run", str(run), *settings, *flags])


def complaint(capfd: Complain, *arguments: object) -> str:
    """The one line."""
    capfd.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    assert code == 2, (code, out, err)
    assert out == "" and err.count("\n") == 1 and err.endswith("\n") and err.startswith("onecurve: "), err
    return err


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to write and read everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
