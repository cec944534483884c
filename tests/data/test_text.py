import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from onecurve.data.cycle import token_dtype
from onecurve.data.loader import Loader
from onecurve.data.prepare import write_corpus
from onecurve.data.text import MANIFEST, CorpusManifest, load_tokenizer, open_corpus, read_manifest
from onecurve.errors import InputError


@pytest.fixture
def folder(tmp_path):
    write_corpus(tmp_path / "corpus", train=[np.arange(100), np.arange(57)], val=[np.arange(40)], vocab=100)
    return tmp_path / "corpus"


def refused(source, *words, vocab=100, context=8, **more):
    with pytest.raises(InputError) as caught:
        open_corpus(source, vocab=vocab, context=context, seed=0, **more)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def rewrite(folder, **changes):
    stored = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(stored | changes))


@pytest.mark.parametrize("vocab", [100, 256, 257, 65_536, 65_537, 200_000])
def test_any_vocabulary_is_stored_as_narrow_as_it_fits(tmp_path, vocab):
    ids = np.arange(vocab - 50, vocab)
    write_corpus(tmp_path / "c", train=[ids], vocab=vocab)
    corpus = open_corpus(tmp_path / "c", vocab=vocab, context=7, seed=0)
    assert isinstance(corpus.tokens, np.memmap) and corpus.tokens.dtype == token_dtype(vocab)
    assert np.array_equal(corpus.tokens, ids)
    assert (tmp_path / "c" / "train.bin").stat().st_size == 50 * token_dtype(vocab).itemsize
    batch = next(Loader(corpus, context=7, micro_batch=2, leaves=1, accumulate=1, seed=0).micro_batches(0, [0]))
    assert int(batch.targets.max()) >= vocab - 50


def test_parts_and_fingerprint(folder):
    train, val = (open_corpus(folder, vocab=100, context=8, seed=0, split=split) for split in ("train", "val"))
    assert (len(train.tokens), len(val.tokens)) == (157, 40)
    assert train.fingerprint == val.fingerprint == read_manifest(folder).fingerprint
    copy = folder.parent / "named otherwise äöü"
    shutil.copytree(folder, copy)
    assert open_corpus(str(copy), vocab=100, context=8, seed=0).fingerprint == train.fingerprint


def test_the_cycle_needs_no_folder():
    train = open_corpus("cycle", vocab=64, context=16, seed=41)
    assert train.windows(16) == 4096
    assert open_corpus("cycle", vocab=64, context=16, seed=41).fingerprint == train.fingerprint
    assert open_corpus("cycle", vocab=64, context=16, seed=42).fingerprint != train.fingerprint
    val = open_corpus("cycle", vocab=64, context=16, seed=41, split="val")
    follows = dict(zip(train.tokens[:-1].tolist(), train.tokens[1:].tolist(), strict=True))
    assert all(follows[a] == b for a, b in zip(val.tokens[:-1].tolist(), val.tokens[1:].tolist(), strict=True))
    # A step of any size has windows enough.
    assert open_corpus("cycle", vocab=64, context=3, seed=41, step_windows=9000).windows(3) == 9000


def test_another_vocabulary_than_the_models_is_refused(folder):
    """Cases 25."""
    refused(folder, "vocabulary of 100", "model.vocab is 64", "set model.vocab = 100", vocab=64)


def test_a_token_id_beyond_the_vocabulary_is_refused(folder):
    """Cases 25: written past the writer, with hashes that fit."""
    tokens = np.fromfile(folder / "train.bin", np.uint8)
    tokens[33] = 200
    tokens.tofile(folder / "train.bin")
    refused(folder, "train.bin", "sha256 differs", "token id 200")
    manifest = read_manifest(folder)
    part = replace(manifest.parts["train"], sha256=hashlib.sha256(tokens.tobytes()).hexdigest())
    forged = CorpusManifest(100, "ids", "", manifest.parts | {"train": part})
    (folder / MANIFEST).write_text(forged.to_json())
    refused(folder, "train.bin", "token id 200", "vocabulary of 100", "0 … 99")


def test_the_writer_refuses_ids_beyond_the_vocabulary(tmp_path):
    for bad in (100, 70_000, -1):
        with pytest.raises(InputError, match=f"token id {bad} is outside the vocabulary of 100"):
            write_corpus(tmp_path / "c", train=[np.array([1, bad])], vocab=100)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "count, words", [(0, ["empty"]), (1, ["shorter"]), (8, ["shorter", "context + 1 = 9", "at most 7"]), (9, [])]
)
def test_sizes_around_one_window(tmp_path, count, words):
    write_corpus(tmp_path / "c", train=[np.zeros(count, int)] if count else [], vocab=100)
    if words:
        refused(tmp_path / "c", "train part", *words)
    else:
        assert open_corpus(tmp_path / "c", vocab=100, context=8, seed=0).windows(8) == 1


def test_fewer_windows_than_a_step_draws(folder):
    refused(folder, "157 tokens make 19 windows of 8", "one step draws 20", "at least 161 tokens", step_windows=20)
    open_corpus(folder, vocab=100, context=8, seed=0, step_windows=19)


def test_what_is_no_corpus(tmp_path, folder):
    refused(tmp_path / "nowhere", "nowhere", "no such folder", "onecurve prepare")
    refused(tmp_path, "holds no corpus")
    refused(folder / "train.bin", "is a file", "prepare")
    for content in (b"", b"{", b"[]", b'{"kind": "something"}', b"\xff\xfe", b"[" * 100_000, b" " * (2 << 20)):
        (folder / MANIFEST).write_bytes(content)
        refused(folder, MANIFEST, "no corpus manifest")
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    refused(folder, MANIFEST, "it is a folder, not a file")


def test_a_changed_manifest_is_refused(folder):
    whole = (folder / MANIFEST).read_text()
    rewrite(folder, schema=2)
    refused(folder, "schema is 2", "this version reads 1")
    for changes in ({"vocab": 64}, {"vocab": "100"}, {"parts": {}}, {"parts": {"train": 1}}, {"tokenizer": "byte"}):
        (folder / MANIFEST).write_text(whole)
        rewrite(folder, **changes)
        refused(folder, "changed after it was made", vocab=64)


@pytest.mark.parametrize("damage", ["missing", "short", "long", "flipped"])
def test_a_damaged_token_file_is_refused(folder, damage):
    file = folder / "train.bin"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        damaged = {"short": data[:-1], "long": data + b"\0", "flipped": data[:50] + b"\x01" + data[51:]}
        file.write_bytes(damaged[damage])
    words = {"missing": "can't be read", "flipped": "sha256 differs"}.get(damage, "its manifest says 157")
    refused(folder, "train.bin", words)
    if damage == "flipped":  # what the cheap check can't see, and why the full one is the default
        open_corpus(folder, vocab=100, context=8, seed=0, full_check=False)


def test_no_held_out_part(tmp_path):
    write_corpus(tmp_path / "c", train=[np.zeros(100, int)], vocab=100)
    refused(tmp_path / "c", "held-out part has 0 tokens", "eval_every = 0", split="val")


def test_ids_have_no_tokenizer(folder):
    with pytest.raises(InputError, match="no tokenizer"):
        load_tokenizer(folder)
