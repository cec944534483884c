"""Runs to export: small, of every kind of corpus, tied and not."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecurve.data.prepare import prepare
from tests.commands import train_here

SMALL = (
    "model.layers=2", "model.width=16", "model.heads=2", "model.context=24", "model.dropout=0.1", "train.steps=6",
    "train.micro_batch=2", "checkpoint.every_steps=2", "checkpoint.background=false", "observe.log_every=0",
)  # fmt: skip
ALONE = ("layout.dp=1", "layout.zero=0")


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`byte` (tied) trained on 4 ranks with ZeRO-3, `byte-alone` the same curve on one; `bpe`, whose text has fewer
    merges than its vocabulary has room for; `cycle`."""
    folder = tmp_path_factory.mktemp("runs to export")
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"the river {i} returns, größer than <|endoftext|> before\r\n" * 20)
    prepare([folder], folder / "bytes")
    prepare([folder], folder / "merges", tokenizer="bpe", vocab=400)
    text = (f"data.source={folder / 'bytes'}", "model.vocab=257", "model.tied=true")
    merges = (f"data.source={folder / 'merges'}", "model.vocab=400")
    made = {}
    for name, sets in {
        "byte": (*text, "layout.dp=4", "layout.zero=3"),
        "byte-alone": (*text, *ALONE),
        "bpe": (*merges, *ALONE),
        "cycle": ALONE,
    }.items():
        made[name] = folder / name
        assert train_here(made[name], *SMALL, *sets) == 0
    return made
