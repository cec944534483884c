"""What a person sees of a run: a bar on a terminal, plain lines off one."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from tests.commands import DEMO, command, environment, rows, train_here

LINE = re.compile(r"step \d+/20  loss \d\.\d{4}  [\d,]+ tokens/s  \d+:\d\d left")


def done(run: Path, steps: int) -> str:
    """The last line of a run that has done all its steps; the checkpoint that it names is there."""
    checkpoint = run / "checkpoints" / f"step-{steps:08d}"
    assert checkpoint.is_dir()
    return f"onecurve: done: {steps} steps, loss {rows(run)[-1]['loss']:.6f}, checkpoint {checkpoint}"


def test_off_a_terminal_it_is_plain_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train_here(tmp_path / "run", "observe.log_every=5") == 0
    out, err = capfd.readouterr()
    said, *lines, last = err.splitlines()
    assert out == "" and said == f"onecurve: run folder {tmp_path / 'run'}"
    assert last == done(tmp_path / "run", 20)
    assert [bool(LINE.fullmatch(line)) for line in lines] == [True] * 4, lines
    assert [line.split()[1] for line in lines] == ["5/20", "10/20", "15/20", "20/20"]


def test_on_a_terminal_it_is_a_bar(tmp_path: Path) -> None:
    """Redrawn in place: step, loss, speed, time left; no plain line, and stdout stays empty."""
    parent, child = pty.openpty()
    variables = environment(TERM="xterm-256color", COLUMNS="120", LINES="24")
    arguments = command("train", DEMO, "--run", tmp_path / "run", "--set", "train.steps=200")
    with subprocess.Popen(arguments, env=variables, stdin=child, stdout=subprocess.PIPE, stderr=child) as process:
        os.close(child)
        drawn = b""
        while True:
            try:
                chunk = os.read(parent, 1 << 16)
            except OSError:  # what Linux says once the other end is closed
                break
            if not chunk:
                break
            drawn += chunk
        assert process.stdout is not None and process.stdout.read() == b""
    os.close(parent)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())
    assert b"\x1b[2K" in drawn and "step 200/200" in text
    for part in (r"step \d+/200", r"loss \d\.\d{4}", r"[\d,]+ tokens/s", r"\d+:\d\d left"):
        assert re.search(part, text), (part, text)
    assert not re.search(r"(?m)^step \d+/200  loss", text)
    assert text.splitlines()[-1] == done(tmp_path / "run", 200), "below the bar"


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = command("train", DEMO, "--run", run, "--set", "train.steps=40")
    with subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"step 2/40" not in process.stderr.readline():
            assert process.poll() is None
        process.stderr.close()
    assert process.returncode == 0 and len(rows(run)) == 40
