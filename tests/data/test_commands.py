"""Text of all kinds from outside: the commands handle it, or refuse it by name in one line."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from onecurve.cli import main
from onecurve.data.prepare import write_corpus
from onecurve.data.text import load_tokenizer, open_corpus
from tests.commands import DEMO, command, environment, onecurve, rows

CONTEXT = 16
TINY = {"model.layers": 1, "model.width": 8, "model.heads": 2, "model.context": CONTEXT, "train.steps": 2}


def complaint(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that refuses its input."""
    capfd.readouterr()
    assert main([str(a) for a in arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("onecurve: ") and err[:-1].isprintable(), err
    return err


def settings(corpus: Path, **more: object) -> list[str]:
    values = TINY | {"data.source": corpus, "model.vocab": 257, "layout.dp": 1, "observe.log_every": 0} | more
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


ODD = [b"one\r\ntwo\r\n" * 30, b"\xef\xbb\xbfwith a mark " * 30, b"nul \0 nul" * 30, b"\xff\xfe\x80 \xe2\x82" * 30, b""]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_bytes_and_names_of_all_kinds(tokenizer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """CRLF, a byte-order mark, NULs, invalid UTF-8, an empty file; names with spaces, non-ASCII, undecodable bytes."""
    source = tmp_path / "日本語 mit Leerzeichen"
    source.mkdir()
    for i, data in enumerate(ODD):
        (source / f"größe {i}.txt").write_bytes(data)
    (source / os.fsdecode(b"\xff\xfe.txt")).write_bytes(b"undecodable name " * 9)
    out = tmp_path / "der Körper"
    kind = ["--tokenizer", "bpe", "--vocab", "300"] if tokenizer == "bpe" else []
    assert main(["prepare", str(source), "--out", str(out), "--val-fraction", "0.2", *kind]) == 0
    said = capfd.readouterr()
    assert "der Körper" in said.out and "1 empty file was left out" in said.err
    assert ("not valid UTF-8" in said.err) == (tokenizer == "bpe")
    reader = load_tokenizer(out)
    parts = [open_corpus(out, vocab=reader.vocab, context=1, seed=0, split=split) for split in ("train", "val")]
    found = b"".join(reader.decode_bytes(part.tokens.tolist()) for part in parts)
    for data in ODD:
        assert (data if tokenizer == "byte" else data.decode("utf-8", "replace").encode()) in found
    more = {"model.vocab": reader.vocab, "observe.eval_every": 1, "train.micro_batch": 1}
    assert main(["train", str(DEMO), "--run", str(tmp_path / "ein Lauf"), *settings(out, **more)]) == 0
    assert all(np.isfinite(row["val_loss"]) for row in rows(tmp_path / "ein Lauf"))


def test_sources_that_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts, out = tmp_path / "texts", tmp_path / "new" / "c"
    texts.mkdir()
    (texts / "a.txt").write_text("words " * 50)
    (texts / "empty").touch()
    (texts / "unreadable.md").symlink_to("/proc/self/mem")  # reading its beginning fails for every user, root too
    os.mkfifo(texts / "pipe.rst")
    for arguments, words in {
        (texts, "--glob", "*.py"): ("'*.py'", "1 with .txt", "--glob"),
        (texts, "--glob", "empty"): ("empty", "no text"),
        (texts, "--glob", "*.md"): ("unreadable.md", "can't be read"),
        (texts, "--glob", "*.rst"): ("pipe.rst", "not a regular file"),
        (texts / "nowhere",): ("nowhere", "No such file"),
        (texts, "--tokenizer", "bpe"): ("--vocab",),
        (texts, "--val-fraction", "1"): ("--val-fraction",),
    }.items():
        said = complaint(capfd, "prepare", *arguments, "--out", out)
        assert all(word in said for word in words), said
        assert not out.parent.exists()
    assert "exists already" in complaint(capfd, "prepare", texts, "--out", texts)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    assert "Permission denied" in complaint(capfd, "prepare", tmp_path, "--out", tmp_path / "c")


@pytest.mark.parametrize(
    ("tokens", "more", "words"),
    [
        (0, {}, ("it is empty (0 tokens)", "at least 17")),
        (1, {}, ("1 token is shorter than one window", "17")),
        (CONTEXT, {}, ("16 tokens are shorter than one window", "at most 15")),
        (CONTEXT + 1, {}, ("17 tokens make 1 window", "one step draws 4", "at least 65")),
        (3 * CONTEXT + 1, {}, ("make 3 windows", "one step draws 4", "at least 65")),  # fewer windows than ranks
        (500, {"model.vocab": 256}, ("vocabulary of 257, model.vocab is 256",)),
        (500, {"observe.eval_every": 1}, ("held-out part has 0 tokens", "observe.eval_every = 0")),
    ],
)
def test_corpora_too_small_to_train_on(
    tokens: int, more: dict[str, object], words: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "c", train=[np.arange(tokens) % 257], vocab=257)
    four = {"train.micro_batch": 1, "layout.dp": 4}
    said = complaint(capfd, "train", DEMO, "--run", tmp_path / "run", *settings(tmp_path / "c", **four, **more))
    assert str(tmp_path / "c") in said and all(word in said for word in words), said
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(("held_out", "refused"), [(0, True), (1, True), (2, False), (CONTEXT, False)])
def test_the_smallest_corpora_that_serve(
    held_out: int, refused: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One window, on one rank with one leaf; a held-out part of two tokens, shorter than a window."""
    write_corpus(tmp_path / "c", train=[np.arange(CONTEXT + 1)], val=[np.arange(held_out)], vocab=257)
    one = {"train.leaves": 1, "train.micro_batch": 1, "observe.eval_every": 1}
    arguments = ["train", DEMO, "--run", tmp_path / "run", *settings(tmp_path / "c", **one)]
    if refused:
        assert f"held-out part has {held_out} tokens" in complaint(capfd, *arguments)
    else:
        assert main([str(a) for a in arguments]) == 0
        assert [np.isfinite(row["val_loss"]) for row in rows(tmp_path / "run")] == [True, True]


def test_a_token_beyond_the_vocabulary_is_refused_before_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "c", train=[np.arange(500) % 257], val=[np.arange(40)], vocab=257)
    for part in ("train", "val"):
        file = tmp_path / "c" / f"{part}.bin"
        whole = file.read_bytes()
        file.write_bytes(whole[:-2] + b"\x01\x01")  # id 257
        more = {"observe.eval_every": 1, "train.micro_batch": 1}
        said = complaint(capfd, "train", DEMO, "--run", tmp_path / "run", *settings(tmp_path / "c", **more))
        assert f"{part}.bin" in said and "token id 257" in said
        file.write_bytes(whole)


class Watched:
    """A command whose stderr is a terminal."""

    def __init__(self, *arguments: object) -> None:
        ours, theirs = pty.openpty()
        self.text, self._terminal = "", ours
        self.process = subprocess.Popen(
            command(*arguments), env=environment(TERM="xterm", COLUMNS="120"), stderr=theirs, stdout=subprocess.DEVNULL
        )
        os.close(theirs)

    def read_until(self, word: str = "") -> str:
        """What it wrote, until `word` is there or it ended."""
        limit = time.monotonic() + 60
        with contextlib.suppress(OSError):  # the terminal's other side was closed
            while not word or word not in self.text:
                assert time.monotonic() < limit, self.text
                self.text += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return self.text

    def close(self) -> int:
        self.read_until()
        os.close(self._terminal)
        return self.process.wait(timeout=30)


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words of a text\n" * 5000)
    (tmp_path / "b.txt").write_text("other words\n" * 500)
    watched = Watched("prepare", tmp_path, "--tokenizer", "bpe", "--vocab", "300", "--out", tmp_path / "c")
    assert watched.close() == 0
    for word in ("reading", "training the tokenizer", "writing", "\N{BOX DRAWINGS HEAVY HORIZONTAL}", "KiB of"):
        assert word in watched.text


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("place", ["reading", "training the tokenizer", "writing"])
def test_asked_to_end_it_leaves_nothing(place: str, signum: int, tmp_path: Path) -> None:
    kind = ["--tokenizer", "bpe", "--vocab", "30000"] if place == "training the tokenizer" else []
    if kind:  # words that never come twice keep the library busy for many seconds
        random_words = random.Random(0).randbytes(1 << 21).hex(" ", 32)
        (tmp_path / "a.txt").write_text(random_words)
    else:
        with (tmp_path / "a.txt").open("wb") as file:
            file.truncate(1 << 33 if place == "reading" else 3 << 27)
    watched = Watched("prepare", tmp_path, *kind, "--out", tmp_path / "out" / "c")
    watched.read_until(place)
    time.sleep(0.2)
    assert watched.process.poll() is None
    begun = time.monotonic()
    watched.process.send_signal(signum)
    assert watched.close() == 75
    assert time.monotonic() - begun < 5
    assert "onecurve: interrupted" in watched.text and "Traceback" not in watched.text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_file_of_200_mb(tmp_path: Path) -> None:
    line = b"the return of the river, r\xc3\xbcckw\xc3\xa4rts " * 25 + b"\n"
    with (tmp_path / "big one.txt").open("wb") as file:
        for _ in range(200_000_000 // len(line)):
            file.write(line)
    done = onecurve("prepare", tmp_path / "big one.txt", "--out", tmp_path / "c", seconds=300)
    assert done.returncode == 0 and "no held-out part" in done.stderr
    done = onecurve("train", DEMO, "--run", tmp_path / "run", *settings(tmp_path / "c"), seconds=300)
    assert done.returncode == 0 and len(rows(tmp_path / "run")) == 2
