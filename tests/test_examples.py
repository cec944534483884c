"""The examples as a user runs them, and the README's own: one digest on every layout, killed or not."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onecurve.checkpoint import list_steps
from tests.commands import ROOT, environment


def run(name: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def lines(name: str, *arguments: object) -> list[str]:
    """What a run prints that must succeed; the last line is the digest."""
    done = run(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch("state digest [0-9a-f]{64}", done.stdout.splitlines()[-1]), done.stdout
    return done.stdout.splitlines()


def own(folder: Path, ranks: int, stage: int, *flags: object) -> tuple[object, ...]:
    return ("--ranks", ranks, "--stage", stage, "--steps", 8, "--run", folder, *flags)


def gpt2(folder: Path, ranks: int, stage: int, steps: int = 4) -> tuple[object, ...]:
    return ("--ranks", ranks, "--stage", stage, "--steps", steps, "--out", folder)


@pytest.fixture(scope="module")
def own_alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    printed = lines("own_module.py", *own(tmp_path_factory.mktemp("own"), 1, 0))
    assert len(printed) == 8 + 2
    return printed


@pytest.fixture(scope="module")
def gpt2_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("gpt2")
    printed = lines("transformers_gpt2.py", *gpt2(folder, 1, 0))
    assert printed[4] == f"saved as {folder}" and len(printed) == 4 + 2
    return folder, printed


@pytest.mark.slow
def test_own_module_killed_and_resumed_on_another_layout_is_the_curve_of_one_rank(
    own_alone: list[str], tmp_path: Path
) -> None:
    killed = run("own_module.py", *own(tmp_path / "killed", 4, 3), ONECURVE_FAULTS="kill:rank=2,step=6")
    assert killed.returncode == 3 and "rank 2 vanished" in killed.stderr
    assert killed.stdout.splitlines() == own_alone[:6]
    again = run("own_module.py", *own(tmp_path / "killed", 2, 1))
    assert again.returncode == 2 and "--resume" in again.stderr, "it would begin anew among older checkpoints"
    resumed = lines("own_module.py", *own(tmp_path / "killed", 2, 1, "--resume"))
    assert resumed == ["resumed after step 5", *own_alone[5:]]


@pytest.mark.slow
def test_a_model_of_transformers_is_one_curve_and_one_file(gpt2_alone: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, alone = gpt2_alone
    four = lines("transformers_gpt2.py", *gpt2(tmp_path, 4, 3))
    assert four == [*alone[:4], f"saved as {tmp_path}", alone[5]]
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [3, 6])
def test_own_module_is_one_curve_on_every_layout(ranks: int, stage: int, own_alone: list[str], tmp_path: Path) -> None:
    assert lines("own_module.py", *own(tmp_path, ranks, stage)) == own_alone


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_model_of_transformers_is_one_curve_on_every_layout(
    ranks: int, stage: int, gpt2_alone: tuple[Path, list[str]], tmp_path: Path
) -> None:
    printed = lines("transformers_gpt2.py", *gpt2(tmp_path, ranks, stage))
    assert printed == [*gpt2_alone[1][:4], f"saved as {tmp_path}", gpt2_alone[1][5]]


@pytest.mark.slow
def test_transformers_loads_what_was_trained(
    gpt2_alone: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved after three steps has the loss that is printed at the fourth."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import transformers_gpt2 as example

    lines("transformers_gpt2.py", *gpt2(tmp_path, 2, 3, steps=3))
    model, info = example.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    with torch.no_grad():
        leaves = [example.loss_of(model, example.batch_of(text, 3, leaf)) for leaf in range(example.LEAVES)]
    loss = sum(float(loss) for loss, _ in leaves) / sum(count for _, count in leaves)
    assert gpt2_alone[1][3] == f"step 4  loss {loss:.6f}"


def test_the_loop_in_the_readme_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the three names that it leaves to the reader."""
    (block,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        if "ZeroOptimizer(" in block
    ]
    assert block.count("model = ...  #") == 1

    def batch_of(step: int, leaf: int) -> torch.Tensor:
        return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + leaf))

    def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(batch) - batch.sum(1, keepdim=True)).square().sum(), len(batch)

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"batch_of": batch_of, "loss_of": loss_of, "make_model": lambda: nn.Linear(3, 1)}
    exec(block.replace("model = ...  #", "model = make_model()  #"), names)
    assert len(names["losses"]) == 4 and len(set(names["losses"])) == 1
    assert [found.step for found in list_steps(tmp_path / "runs" / "mine" / "checkpoints")] == [20]
