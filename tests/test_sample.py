"""`onecurve sample` from outside, on runs that `onecurve train` made."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from onecurve.checkpoint import list_steps
from onecurve.cli import main
from onecurve.data.prepare import prepare, write_corpus

SMALL = [
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "train.steps=4", "train.micro_batch=2",
    "optimizer.warmup_steps=1", "checkpoint.every_steps=2", "checkpoint.background=false", "layout.dp=1",
    "observe.eval_every=0", "observe.log_every=0",
]  # fmt: skip
DEMO = str(Path(__file__).parent.parent / "configs" / "demo.toml")


def train(run: Path, *settings: str) -> Path:
    options = [option for setting in [*SMALL, *settings] for option in ("--set", setting)]
    assert main(["train", DEMO, "--run", str(run), *options]) == 0
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run per kind of corpus; none of the corpora is there any more."""
    folder = tmp_path_factory.mktemp("runs")
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"the river {i} returns, größer than before\n" * 20)
    prepare([folder], folder / "byte-corpus")
    prepare([folder], folder / "bpe-corpus", tokenizer="bpe", vocab=300)
    write_corpus(folder / "ids-corpus", train=[np.arange(600) % 90], vocab=90)
    made = {
        "byte": train(folder / "byte", f"data.source={folder / 'byte-corpus'}", "model.vocab=257"),
        "bpe": train(folder / "bpe", f"data.source={folder / 'bpe-corpus'}", "model.vocab=300"),
        "ids": train(folder / "ids", f"data.source={folder / 'ids-corpus'}", "model.vocab=90"),
        "cycle": train(folder / "cycle"),
        "tied": train(folder / "tied", "model.tied=true"),
    }
    for kind in ("byte", "bpe", "ids"):
        shutil.rmtree(folder / f"{kind}-corpus")
    return made


def sampled(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["sample", str(run), *options]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "".join(c for c in out if not c.isprintable()).strip("\n\t") == ""
    assert err.startswith("onecurve: ") and "step 4 of" in err
    return out[:-1], err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["sample", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("onecurve: "), err
    return err


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_text_whose_corpus_is_gone(kind: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = sampled(capsys, runs[kind], "--prompt", "größe \x1b[2J", "--tokens", "40", "--seed", "3")
    assert first.startswith(r"größe \x1b[2J")
    again, _ = sampled(capsys, runs[kind], "--prompt", "größe \x1b[2J", "--tokens", "40", "--seed", "3")
    assert again == first
    other, _ = sampled(capsys, runs[kind], "--prompt", "größe \x1b[2J", "--tokens", "40", "--seed", "4")
    assert other != first
    short, _ = sampled(capsys, runs[kind], "--tokens", "8", "--temperature", "0")
    longer, _ = sampled(capsys, runs[kind], "--tokens", "20", "--temperature", "0", "--seed", "9")
    assert longer.startswith(short) and short


@pytest.mark.parametrize("kind", ["cycle", "tied", "ids"])
def test_a_corpus_without_text_gives_ids(kind: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    out, err = sampled(capsys, runs[kind], "--tokens", "30")
    assert len(out.split()) == 31 and all(0 <= int(word) < 90 for word in out.split())
    assert "token ids" in err
    out, _ = sampled(capsys, runs[kind], "--tokens", "3", "--prompt", "5, 6 7")
    assert out.startswith("5 6 7 ") and len(out.split()) == 6
    assert "63" in refused(capsys, str(runs["cycle"]), "--prompt", "3 64")
    assert "'x'" in refused(capsys, str(runs[kind]), "--prompt", "x")


def test_a_prompt_longer_than_the_context_is_said(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    out, err = sampled(capsys, runs["byte"], "--prompt", "x" * 20 + "y" * 16, "--tokens", "5")
    assert "36 tokens, the model sees 16" in err and out.startswith("x" * 20 + "y" * 16)
    same, _ = sampled(capsys, runs["byte"], "--prompt", "z" * 90 + "y" * 16, "--tokens", "5")
    assert same[106:] == out[36:]


def test_the_newest_whole_checkpoint(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(runs["byte"], tmp_path / "run"))
    newest, older = (found.path for found in list_steps(run / "checkpoints"))
    shard = newest / "rank-0000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["sample", str(run), "--tokens", "1"]) == 0
    err = capsys.readouterr().err
    assert "passed over step-00000004" in err and "step 2 of" in err
    (older / "manifest.sha256").unlink()
    assert main(["sample", str(run)]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err


def test_refusals(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run there" in refused(capsys, str(tmp_path / "nowhere"))
    assert "no run there" in refused(capsys, DEMO)
    for wrong in (["--temperature", "nan"], ["--temperature", "-1"], ["--temperature", "inf"], ["--tokens", "0"]):
        assert wrong[0].strip("-") in refused(capsys, str(runs["cycle"]), *wrong)
    run = Path(shutil.copytree(runs["bpe"], tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    assert "no whole checkpoint" in refused(capsys, str(run))
    run = Path(shutil.copytree(runs["bpe"], tmp_path / "bpe"))
    (run / "corpus" / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused(capsys, str(run))
    shutil.rmtree(run / "corpus")
    assert f"/bpe-corpus into {run / 'corpus'}" in refused(capsys, str(run))
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"curve_id": "0" * 64}))
    assert main(["sample", str(run)]) == 2
