"""A `data.source` that can't be trained on: commands refuse it alike, before anything is made. Cases 24 and 25."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onecurve.data.prepare import write_corpus
from tests.commands import DEMO, Complain, complaint, rows, train_here

Said = Callable[[Path], str]


@pytest.fixture(params=["train", "plan", "verify"])
def no_corpus(request: pytest.FixtureRequest, tmp_path: Path, capfd: Complain, monkeypatch) -> Said:
    """What a command says of `data.source`; it makes nothing."""

    def said(source: Path) -> str:
        empty = tmp_path / "empty place"
        empty.mkdir(exist_ok=True)
        monkeypatch.chdir(empty)
        line = complaint(capfd, request.param, DEMO, "--set", f"data.source={source}")
        assert list(empty.iterdir()) == []
        return line

    return said


def ids(count: int, below: int = 64) -> np.ndarray:
    return np.arange(count, dtype=np.int64) % below


def corpus(folder: Path, tokens: np.ndarray, vocab: int) -> Path:
    write_corpus(folder, train=[tokens], vocab=vocab)
    return folder


def test_a_corpus_that_is_not_there(tmp_path: Path, no_corpus: Said) -> None:
    said = no_corpus(tmp_path / "nowhere")
    assert "nowhere" in said and "no such folder" in said and "onecurve prepare" in said
    assert "~no such user/corpus: there is no such home folder" in no_corpus(Path("~no such user/corpus"))


def test_an_empty_corpus(tmp_path: Path, no_corpus: Said) -> None:
    made = corpus(tmp_path / "empty", ids(0), 64)
    said = no_corpus(made)
    assert "empty" in said


@pytest.mark.parametrize("count", [1, 16])
def test_a_corpus_shorter_than_a_window(count: int, tmp_path: Path, no_corpus: Said) -> None:
    made = corpus(tmp_path / "short", ids(count), 64)
    said = no_corpus(made)
    assert f"its {count} token" in said and "context + 1 = 17" in said


def test_a_corpus_with_fewer_windows_than_a_step_draws(tmp_path: Path, no_corpus: Said) -> None:
    made = corpus(tmp_path / "short", ids(15 * 16 + 1), 64)
    assert "16" in no_corpus(made)


@pytest.mark.parametrize("kind", ["a file", "an empty folder", "a folder of texts"])
def test_what_is_no_corpus(kind: str, tmp_path: Path, no_corpus: Said) -> None:
    """Case 24: a directory, or a file, where a corpus is expected."""
    place = tmp_path / "place"
    if kind == "a file":
        place.write_text("text")
    else:
        place.mkdir()
    if kind == "a folder of texts":
        (place / "a.txt").write_text("text")
    said = no_corpus(place)
    assert "place" in said and "onecurve prepare" in said


def test_a_token_file_of_another_vocabulary(tmp_path: Path, no_corpus: Said) -> None:
    """Case 25: it would be looked up beyond the embedding, or mean other words."""
    for vocab in (32, 65, 70_000):
        made = corpus(tmp_path / f"v{vocab}", ids(4096, min(vocab, 64)), vocab)
        said = no_corpus(made)
        assert str(vocab) in said and "64" in said and "model.vocab" in said


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_corpus_without_a_held_out_part(command: str, tmp_path: Path, capfd: Complain, monkeypatch) -> None:
    made = corpus(tmp_path / "corpus", ids(4096), 64)
    monkeypatch.chdir(tmp_path)
    said = complaint(capfd, command, DEMO, "--set", f"data.source={made}", "--set", "observe.eval_every=1")
    assert "held-out part has 0 tokens" in said and [p.name for p in tmp_path.iterdir()] == ["corpus"]


def test_a_token_id_that_the_vocabulary_does_not_have(tmp_path: Path, capfd: Complain) -> None:
    """Case 25, in a file whose manifest and hash were made to fit."""
    made = corpus(tmp_path / "corpus", ids(4096), 64)
    tokens = np.fromfile(made / "train.bin", np.uint8)
    tokens[1234] = 64
    tokens.tofile(made / "train.bin")
    from onecurve.data.text import CorpusManifest, Part, read_manifest

    old = read_manifest(made)
    part = old.parts["train"]
    new = Part(part.tokens, part.documents, part.text_bytes, hashlib.sha256(tokens.tobytes()).hexdigest())
    manifest = CorpusManifest(old.vocab, old.tokenizer, old.tokenizer_sha256, {**old.parts, "train": new}, old.made)
    (made / "manifest.json").write_text(manifest.to_json())
    said = complaint(capfd, "train", DEMO, "--set", f"data.source={made}", "--run", tmp_path / "run")
    assert "token id 64" in said and "0 … 63" in said and not (tmp_path / "run").exists()


def test_ids_beyond_16_bits_are_trained_on_as_they_are(tmp_path: Path) -> None:
    """Case 25: 65,535 is no limit."""
    made = corpus(tmp_path / "corpus", ids(4096, 64) + 65_536, 65_600)
    sets = (f"data.source={made}", "model.vocab=65600", "train.steps=2", "model.width=8", "layout.dp=2")
    assert train_here(tmp_path / "run", *sets) == 0
    assert len(rows(tmp_path / "run")) == 2
