"""Training on prepared text: evaluation, kill and resume at other widths, epochs, and the rate are the curve's own."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from onecurve import faults
from onecurve.data.evaluation import EvaluationSet
from onecurve.data.loader import Loader
from onecurve.data.prepare import prepare
from onecurve.data.text import open_corpus
from onecurve.report.compare import compare_runs
from tests.commands import DEMO, Complain, complaint, curve, rows, train_here

STEPS = 12
SETTINGS = [
    "model.layers=2", "model.width=16", "model.heads=2", "model.context=16", "model.vocab=257", "model.dropout=0.1",
    "train.micro_batch=2", "train.accumulate=2", f"train.steps={STEPS}", "optimizer.clip=1.0",
    "optimizer.warmup_steps=3", "optimizer.decay=cosine", "optimizer.min_lr=1e-4", "optimizer.weight_decay=0.1",
    "checkpoint.every_steps=4", "observe.eval_every=6", "observe.log_every=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(24):
        words = (draw.choice(["river", "the", "of", "return", "größe", "\n"]) for _ in range(draw.randrange(60, 120)))
        (folder / f"{i}.txt").write_text(" ".join(words))
    prepare([folder], folder / "corpus", val_fraction=0.2)
    return folder / "corpus"


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    assert train_here(run, *SETTINGS, f"data.source={corpus}") == 0
    return run


def evaluations(run: Path) -> dict[int, str]:
    return {row["step"]: float(row["val_loss"]).hex() for row in rows(run) if "val_loss" in row}


def test_it_is_evaluated_every_so_many_steps_and_learns(reference: Path) -> None:
    losses = [row["val_loss"] for row in rows(reference) if "val_loss" in row]
    assert list(evaluations(reference)) == [6, 12]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (2, 1), (4, 2), (3, 3)])
def test_evaluation_has_the_same_bits_at_any_width_and_stage(
    dp: int, zero: int, corpus: Path, reference: Path, tmp_path: Path
) -> None:
    layout = [f"layout.dp={dp}", f"layout.zero={zero}"]
    assert train_here(tmp_path / "run", *SETTINGS, f"data.source={corpus}", *layout) == 0
    assert evaluations(tmp_path / "run") == evaluations(reference) and curve(tmp_path / "run") == curve(reference)


def test_losses_added_in_the_order_of_ranks_would_be_seen(
    corpus: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a sum in fp32, in whatever order the ranks give, has other bits at some width."""

    def in_turn(self: EvaluationSet, parts: object) -> float:
        total, tokens = 0.0, 0
        for _, loss_sum, count in parts:  # type: ignore[attr-defined]
            total, tokens = np.float32(total + loss_sum), tokens + count
        return float(total) / tokens

    monkeypatch.setattr(EvaluationSet, "combine", in_turn)
    found = set()
    for dp in (1, 3, 4):
        run = tmp_path / str(dp)
        assert train_here(run, *SETTINGS, f"data.source={corpus}", "train.steps=3", f"layout.dp={dp}") == 0
        found.add(evaluations(run)[3])
    assert len(found) > 1


def test_how_often_it_is_evaluated_changes_no_bit(corpus: Path, reference: Path, tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", *SETTINGS, f"data.source={corpus}", "observe.eval_every=0") == 0
    assert curve(tmp_path / "run") == curve(reference) and not evaluations(tmp_path / "run")


@pytest.mark.parametrize(("dp", "place", "step"), [(4, "forward", 6), (2, "save", 8), (3, "evaluation", 6)])
def test_killed_in_the_middle_and_resumed_at_another_width(
    dp: int, place: str, step: int, corpus: Path, reference: Path, tmp_path: Path
) -> None:
    """`compare` says that the curve is the one that was not killed, validation losses included."""
    run, settings = tmp_path / "run", [*SETTINGS, f"data.source={corpus}", "checkpoint.background=false"]
    faults.arm(f"kill:rank=1,step={step},place={place}")
    assert train_here(run, *settings) == 3
    faults.disarm()
    assert len(rows(run)) in (5, 6, 7, 8)
    assert train_here(run, *settings, f"layout.dp={dp}", flags=("--resume",)) == 0
    result = compare_runs(reference, run)
    assert result.same and result.steps == STEPS and len(evaluations(run)) == 2
    assert f"SAME CURVE  {STEPS} steps, 2 validation losses" in "\n".join(result.lines())


def test_compare_sees_one_bit_of_a_validation_loss(reference: Path, tmp_path: Path) -> None:
    found = rows(reference)
    found[5]["val_loss"] += 2**-50
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    assert [(d.step, d.name) for d in compare_runs(reference, tmp_path).first] == [(6, "val_loss")]


@pytest.mark.parametrize("dp", [2, 1])
@pytest.mark.parametrize("share", [0.9, 1.0], ids=["at 90 % of an epoch", "at its end"])
def test_every_epoch_sees_every_window_once(
    share: float, dp: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases 3: killed there, resumed, and run on for two more epochs; the ranks write down what they draw."""
    log, parent, draw = tmp_path / "drawn", os.getpid(), Loader.micro_batches

    def noted(self, data_step, leaves):  # type: ignore[no-untyped-def]
        for leaf in (leaves := list(leaves)):
            if os.getpid() != parent:  # not pre-flight's dry batch
                with log.open("a") as file:
                    file.write(json.dumps([data_step, leaf, self.window_indices(data_step, leaf).ravel().tolist()]))
                    file.write("\n")
        return draw(self, data_step, leaves)

    monkeypatch.setattr(Loader, "micro_batches", noted)
    settings = [*SETTINGS, f"data.source={corpus}", "train.accumulate=1", "train.leaves=2", "train.micro_batch=25"]
    windows = Loader(
        open_corpus(corpus, vocab=257, context=16, seed=0),
        context=16, micro_batch=25, leaves=2, accumulate=1, seed=0,
    ).windows  # fmt: skip
    stop, steps = int(share * windows / 50), -(-3 * windows // 50)
    assert windows % 50  # the first epoch ends within a step
    settings += [f"train.steps={steps}", f"checkpoint.every_steps={stop}", "checkpoint.background=false", "layout.dp=2"]
    faults.arm(f"kill:rank=1,step={stop},place=forward")
    assert train_here(tmp_path / "run", *settings, "observe.eval_every=0") == 3
    faults.disarm()
    before = {s: r for s, r in _drawn(log).items() if s < stop}
    log.unlink()
    assert train_here(tmp_path / "run", *settings, f"layout.dp={dp}", "observe.eval_every=0", flags=("--resume",)) == 0
    after = _drawn(log)
    assert min(after) == stop and sorted(before | after) == list(range(steps))
    seen = [window for step in sorted(before | after) for window in (before | after)[step]]
    for first in range(0, 3 * windows, windows):
        assert Counter(seen[first : first + windows]) == Counter(range(windows))


def _drawn(log: Path) -> dict[int, list[int]]:
    """step -> its windows in leaf order."""
    entries = sorted(map(json.loads, log.read_text().splitlines()))
    return {step: [w for s, _, windows in entries if s == step for w in windows] for step in {s for s, _, _ in entries}}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("dp", [1, 4])
def test_the_rate_depends_on_neither_ranks_nor_accumulation(
    dp: int, accumulate: int, corpus: Path, reference: Path, tmp_path: Path
) -> None:
    """Cases 18: the rate used at each optimizer step, through warm-up and decay."""
    changed = [f"train.accumulate={accumulate}", "train.micro_batch=1", f"layout.dp={dp}", "observe.eval_every=0"]
    assert train_here(tmp_path / "run", *SETTINGS, f"data.source={corpus}", *changed) == 0
    assert [row["lr"] for row in rows(tmp_path / "run")] == [row["lr"] for row in rows(reference)]
    assert {row["tokens"] for row in rows(tmp_path / "run")} == {4 * accumulate * 16}


def test_a_resume_tells_an_edited_config_from_another_corpus(
    corpus: Path, reference: Path, tmp_path: Path, capfd: Complain
) -> None:
    run = Path(shutil.copytree(reference, tmp_path / "run"))
    settings = [part for text in (*SETTINGS, f"data.source={corpus}") for part in ("--set", text)]
    words = ("train", DEMO, "--run", run, "--resume", *settings)
    config = run / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("weight_decay = 0.1", "weight_decay = 0.2"))
    said = complaint(capfd, *words)
    assert "its config.toml was edited; put back what it said (optimizer.weight_decay: not as in the config" in said
    (tmp_path / "texts").mkdir()
    for name in "abcdefgh":
        (tmp_path / "texts" / name).with_suffix(".txt").write_text(f"another river {name} " * 90)
    prepare([tmp_path / "texts"], tmp_path / "other", val_fraction=0.2)
    config.write_text(text.replace(str(corpus), str(tmp_path / "other")))
    said = complaint(capfd, *words[:-1], f"data.source={tmp_path / 'other'}")
    assert "the corpus " in said and "/other has the fingerprint " in said and "bring the corpus back" in said
