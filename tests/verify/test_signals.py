"""`verify` that is told to stop, or is killed: it stops whenever that comes, and nothing of it stays for long."""

import os
import signal
import tempfile
import time

import pytest

from tests.badday.commands import Command
from tests.commands import DEMO


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A quick proof whose folders are made in `tmp_path / "temp"`."""
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    return temp, lambda *more: Command("verify", DEMO, "--quick", "--out", tmp_path / "proof", *more, output=tmp_path)


def wait_for(temp, found):
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        if wanted := found([path.name for path in temp.iterdir()]):
            return wanted
    raise AssertionError("no such folder")


def test_a_signal_stops_the_proof_whenever_it_comes(start, tmp_path):
    """Before, between and while ranks run; from between two folders on at any moment."""
    temp, verify = start
    for delay in (0.0, 0.03, 0.08, 0.15):
        command = verify()
        (first,) = wait_for(temp, lambda names: names)
        wait_for(temp, lambda names, first=first: first not in names)
        time.sleep(delay)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(10) == 75
        how = command.errors.splitlines()[-1]
        assert how in ("onecurve: interrupted", "onecurve: stopped on request; nothing is proved")
        assert not (tmp_path / "proof").exists()
        assert "nothing is proved" not in how or list(temp.iterdir()) == []


def test_what_a_killed_proof_left_is_removed_by_the_next(start):
    temp, verify = start
    command = verify()
    wait_for(temp, lambda names: names)
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    (left,) = temp.iterdir()
    command = verify("--set", "train.steps=1", "--set", "train.leaves=1", "--set", "layout.dp=1")
    assert command.wait() == 0, command.errors
    assert list(temp.iterdir()) == [], left
