import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from onecurve.data import prepare as module
from onecurve.data.loader import Loader
from onecurve.data.prepare import prepare, split_documents
from onecurve.data.sources import Document
from onecurve.data.text import MANIFEST, load_tokenizer, open_corpus, read_manifest
from onecurve.errors import InputError


@pytest.fixture
def texts(tmp_path):
    draw = random.Random(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(30):
        words = " ".join(
            draw.choice(["river", "the", "of", "return", "größe", "\n"]) for _ in range(draw.randrange(5, 90))
        )
        (folder / f"{i}.txt").write_text(words)
    return folder


def documents_of(folder, split):
    """The texts of a part, as bytes, in order."""
    tokenizer = load_tokenizer(folder)
    ids = np.array(open_corpus(folder, vocab=tokenizer.vocab, context=1, seed=0, split=split).tokens)
    ends = np.flatnonzero(ids == tokenizer.end_of_document)
    assert ends[-1] == len(ids) - 1
    return [
        tokenizer.decode_bytes(part[part != tokenizer.end_of_document].tolist())
        for part in np.split(ids, ends[:-1] + 1)
    ]


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("kind, vocab", [("byte", None), ("bpe", 320)])
def test_every_document_is_there_once(texts, tmp_path, kind, vocab):
    result = prepare([texts], tmp_path / "c", tokenizer=kind, vocab=vocab, val_fraction=0.2)
    train, val = documents_of(tmp_path / "c", "train"), documents_of(tmp_path / "c", "val")
    assert sorted(train + val) == sorted(file.read_bytes() for file in texts.iterdir())
    assert 1 <= len(val) <= 15
    assert result.manifest == read_manifest(tmp_path / "c")
    parts = result.manifest.parts
    assert (parts["train"].documents, parts["val"].documents) == (len(train), len(val))
    assert parts["train"].text_bytes == sum(map(len, train))
    assert sorted(files_of(tmp_path / "c")) == sorted(
        [MANIFEST, "train.bin", "val.bin"] + (["tokenizer.json"] if kind == "bpe" else [])
    )
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("kind, vocab", [("byte", None), ("bpe", 320)])
def test_order_and_names_change_nothing(texts, tmp_path, kind, vocab):
    names = sorted(texts.iterdir())
    random.Random(1).shuffle(names)
    one = prepare([texts], tmp_path / "one", tokenizer=kind, vocab=vocab)
    two = prepare(names, tmp_path / "two", tokenizer=kind, vocab=vocab)
    for i, file in enumerate(names):
        file.rename(texts / f"renamed {i}.txt")
    three = prepare([texts, texts], tmp_path / "three", tokenizer=kind, vocab=vocab)
    assert files_of(one.folder) == files_of(two.folder) == files_of(three.folder)


def test_another_hash_seed_changes_nothing(texts, tmp_path):
    code = (
        "import sys; from onecurve.data.prepare import prepare\n"
        "prepare([sys.argv[1]], sys.argv[2], tokenizer='bpe', vocab=320)"
    )
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, texts, tmp_path / seed], env=environment, check=True)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_prepare_needs_no_torch():
    code = "import sys, onecurve.data.prepare; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def document(text):
    return Document(None, len(text), hashlib.sha256(text.encode()).hexdigest())


def test_the_split_is_of_contents():
    documents = [document(f"text {i}") for i in range(400)]
    train, val = split_documents(documents, 0.25)
    assert 60 < len(val) < 140
    more_train, more_val = split_documents([*documents, *(document(f"more {i}") for i in range(100))], 0.25)
    assert set(val) <= set(more_val) and set(train) <= set(more_train)
    _, doubled = split_documents(documents * 2, 0.25)
    assert len(doubled) == 2 * len(val)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_two_documents_make_two_parts(fraction):
    for i in range(20):
        train, val = split_documents([document(f"a{i}"), document(f"b{i}")], fraction)
        assert len(train) == len(val) == 1


def test_one_document_has_no_held_out_part_and_it_is_said(texts, tmp_path):
    result = prepare([texts / "1.txt"], tmp_path / "c")
    assert any("no held-out part" in note for note in result.notes)
    assert result.manifest.parts["val"].tokens == 0
    copies = [document("same"), document("same")]
    assert split_documents(copies, 0.5) == (copies, [])
    assert prepare([texts], tmp_path / "d", val_fraction=0).notes == []


def test_bytes_are_kept_as_they_are(tmp_path):
    """Cases 24: CRLF, a byte-order mark, NULs, invalid UTF-8, an empty file, a name with spaces and non-ASCII."""
    data = [b"one\r\ntwo\r\n", b"\xef\xbb\xbfwith a mark", b"nul \0 nul", b"\xff\xfe\x80 broken \xe2\x82", b"x"]
    for i, content in enumerate([*data, b"", b""]):
        (tmp_path / f"日本 {i} ñ.txt").write_bytes(content)
    result = prepare([tmp_path], tmp_path / "byte")
    assert sorted(documents_of(result.folder, "train") + documents_of(result.folder, "val")) == sorted(data)
    assert result.notes == ["2 empty files were left out"]
    result = prepare([tmp_path], tmp_path / "bpe", tokenizer="bpe", vocab=300)
    replaced = sorted(content.decode("utf-8", "replace").encode() for content in data)
    assert sorted(documents_of(result.folder, "train") + documents_of(result.folder, "val")) == replaced
    assert result.manifest.made["replaced"] == 4
    assert any(note.startswith("4 byte sequences that are not valid UTF-8") for note in result.notes)


def refused(*words, call):
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message, message


def test_refusals_leave_nothing_behind(texts, tmp_path):
    out = tmp_path / "new" / "c"
    (tmp_path / "empty.txt").touch()
    refused("empty", call=lambda: prepare([tmp_path / "empty.txt"], out))
    refused("nowhere", call=lambda: prepare([texts, tmp_path / "nowhere"], out))
    refused("'*.rst'", "30 with .txt", call=lambda: prepare([texts], out, glob="*.rst"))
    refused("--vocab 100", "257", call=lambda: prepare([texts], out, vocab=100))
    refused("--vocab", call=lambda: prepare([texts], out, tokenizer="bpe"))
    refused("--vocab 256", "257", call=lambda: prepare([texts], out, tokenizer="bpe", vocab=256))
    refused("wordpiece", "byte and bpe", call=lambda: prepare([texts], out, tokenizer="wordpiece"))
    for fraction in (1.0, -0.1, float("nan")):
        refused("--val-fraction", call=lambda f=fraction: prepare([texts], out, val_fraction=f))
    (texts / "memory.txt").symlink_to("/proc/self/mem")
    refused("memory.txt", "can't be read", call=lambda: prepare([texts], out))
    assert not out.parent.exists()


def test_an_existing_out_is_refused(texts, tmp_path):
    (tmp_path / "c").mkdir()
    refused("c: it exists already", call=lambda: prepare([texts], tmp_path / "c"))
    (tmp_path / "link").symlink_to("nothing")
    refused("link: it exists already", call=lambda: prepare([texts], tmp_path / "link"))
    refused("1.txt is not a folder", call=lambda: prepare([texts], texts / "1.txt" / "c"))
    refused("can't be written", call=lambda: prepare([texts], "/proc/c"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), ValueError("x")])
def test_failed_or_interrupted_it_leaves_nothing(texts, tmp_path, monkeypatch, error):
    written = []

    def write(self, ids):
        written.append(ids)
        if len(written) == 20:
            raise error

    monkeypatch.setattr(module.TokenWriter, "write", write)
    with pytest.raises(InputError if isinstance(error, OSError) else type(error)) as caught:
        prepare([texts], tmp_path / "out" / "c")
    assert not (tmp_path / "out").exists()
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)


def test_killed_it_leaves_no_corpus_and_the_next_one_tidies_up(texts, tmp_path):
    code = (
        "import sys, time; from onecurve.data.prepare import prepare\n"
        "def wait(what, done, total): print(what, flush=True); time.sleep(60)\n"
        "prepare([sys.argv[1]], sys.argv[2], progress=wait)"
    )
    out = tmp_path / "out" / "c"
    with subprocess.Popen([sys.executable, "-c", code, texts, out], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"reading\n"
        # While its owner lives, nobody takes its folder away.
        prepare([texts], out.parent / "c", glob="1*.txt")
        (out.parent / "c").rename(out.parent / "other")
        assert len([p for p in out.parent.iterdir() if p.name.startswith(".c.partial-")]) == 1
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    prepare([texts], out)
    assert sorted(p.name for p in out.parent.iterdir()) == ["c", "other"]


def test_progress_goes_up_to_the_end(texts, tmp_path):
    seen = []
    prepare([texts], tmp_path / "c", tokenizer="bpe", vocab=300, progress=lambda *values: seen.append(values))
    assert list(dict.fromkeys(what for what, _, _ in seen)) == ["reading", "training the tokenizer", "writing"]
    for what in ("reading", "training the tokenizer", "writing"):
        done = [(d, t) for w, d, t in seen if w == what]
        assert done == sorted(done) and done[-1][0] == done[-1][1]


def test_a_vocabulary_beyond_16_bits(texts, tmp_path):
    """Cases 25: the last id is above 65,535 and comes back."""
    result = prepare([texts], tmp_path / "c", tokenizer="bpe", vocab=70_000)
    assert any("the vocabulary stays 70000" in note for note in result.notes)
    corpus = open_corpus(result.folder, vocab=70_000, context=16, seed=0)
    assert corpus.tokens.dtype == np.uint32 and int(corpus.tokens.max()) == 69_999
    assert documents_of(result.folder, "train")


def test_a_changed_tokenizer_is_refused(texts, tmp_path):
    result = prepare([texts], tmp_path / "c", tokenizer="bpe", vocab=300)
    file = result.folder / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    refused("tokenizer.json", "not the one", call=lambda: load_tokenizer(result.folder))
    file.unlink()
    refused("tokenizer.json", "no such file", call=lambda: load_tokenizer(result.folder))


def test_the_manifest_says_how_it_was_made(texts, tmp_path):
    prepare([texts], tmp_path / "c", glob=["*.txt"], exclude="7*", val_fraction=0.1)
    stored = json.loads((tmp_path / "c" / MANIFEST).read_text())
    assert stored["dtype"] == "uint16" and stored["vocab"] == 257 and stored["tokenizer"] == "byte"
    assert stored["made"]["files"] == 29 and stored["made"]["exclude"] == ["7*"]
    assert str(tmp_path) not in json.dumps(stored)


def test_resume_late_in_an_epoch_of_a_prepared_corpus(texts, tmp_path):
    """Cases 3 on a prepared corpus: from 90 % of an epoch, and from its end, two more epochs see every window once."""
    prepare([texts], tmp_path / "c", val_fraction=0.1)

    def loader():
        corpus = open_corpus(tmp_path / "c", vocab=257, context=16, seed=0)
        return Loader(corpus, context=16, micro_batch=1, leaves=3, accumulate=1, seed=5)

    windows = loader().windows
    steps = 3 * windows // 3
    whole = [loader().window_indices(s, leaf).item() for s in range(steps) for leaf in range(3)]
    for share in (0.9, 1.0):
        resumed_at = int(share * windows) // 3
        after = [loader().window_indices(s, leaf).item() for s in range(resumed_at, steps) for leaf in range(3)]
        assert after == whole[resumed_at * 3 :]
    for epoch in range(3):
        assert sorted(whole[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind, vocab, limit", [("byte", None, 30), ("bpe", 512, 250)])
def test_a_200_mb_file_takes_little_memory(tmp_path, kind, vocab, limit):
    line = b"the return of the river, r\xc3\xbcckw\xc3\xa4rts " * 25 + b"\n"
    with (tmp_path / "big.txt").open("wb") as file:
        for _ in range(200_000_000 // len(line)):
            file.write(line)
    code = (
        "import sys, resource; from onecurve.data.prepare import prepare\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = used(); prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], vocab=eval(sys.argv[4]))\n"
        "print(used() - before)"
    )
    arguments = [sys.executable, "-c", code, tmp_path / "big.txt", tmp_path / "c", kind, str(vocab)]
    started = time.monotonic()
    grown = int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    assert grown < limit, f"{grown} MiB, {time.monotonic() - started:.0f} s"
