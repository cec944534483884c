"""One run per folder: the lock dies with its owner, and is not inherited."""

import os
import signal
import time

import pytest

from onecurve.checkpoint.errors import FolderInUse, NotWritable, Superseded
from onecurve.checkpoint.lock import Fence, RunLock


def in_child(work):
    """Run `work` in a forked child; its text result."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                text = work() or "nothing"
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            os.write(write, text.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def holder(folder, release=False):
    """A child that takes the lock and keeps it until it is killed; (pid)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        RunLock(folder).acquire()
        os.write(write, b"x")
        while True:
            time.sleep(60)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    return pid


def test_a_second_process_is_refused_by_name(tmp_path):
    with RunLock(tmp_path / "run"):
        text = in_child(lambda: RunLock(tmp_path / "run").acquire().token)
    assert text.startswith("FolderInUse") and "this process holds it" in text  # a fork remembers what its parent holds
    pid = holder(tmp_path / "run")
    try:
        with pytest.raises(FolderInUse, match=f"in use by process {pid} on "):
            RunLock(tmp_path / "run").acquire()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_lock_in_one_process_is_refused_and_does_not_free_the_first(tmp_path):
    with RunLock(tmp_path):
        with pytest.raises(FolderInUse, match="this process"):
            RunLock(tmp_path / "." / "").acquire()
        link = tmp_path.with_name("link")
        link.symlink_to(tmp_path)
        with pytest.raises(FolderInUse):
            RunLock(link).acquire()
    RunLock(tmp_path).acquire()


def test_the_lock_frees_itself_when_its_owner_is_killed(tmp_path):
    pid = holder(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with RunLock(tmp_path) as fence:
        fence.check()


def test_a_forked_rank_that_outlives_the_owner_does_not_hold_the_lock_but_can_not_commit(tmp_path):
    read, write = os.pipe()
    owner = os.fork()
    if owner == 0:  # the run: takes the lock, forks a rank, dies
        fence = RunLock(tmp_path).acquire()
        if os.fork() == 0:
            os.close(write)
            time.sleep(0.3)  # until the new owner is there
            try:
                fence.check()
                code = b"allowed"
            except Superseded:
                code = b"superseded"
            (tmp_path / "verdict").write_bytes(code)
            os._exit(0)
        os._exit(0)
    os.waitpid(owner, 0)
    os.close(write)
    with RunLock(tmp_path):
        deadline = time.monotonic() + 10
        while not (tmp_path / "verdict").exists() or not (tmp_path / "verdict").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    os.close(read)
    assert (tmp_path / "verdict").read_bytes() == b"superseded"


def test_a_child_that_exits_does_not_free_the_parents_lock(tmp_path):
    """With POSIX locks, closing any descriptor frees them; but only those of the process that closes."""
    with RunLock(tmp_path) as fence:
        in_child(lambda: fence.check())
        assert in_child(lambda: __import__("subprocess").run(["true"]) and None) == "nothing"
        script = (
            "import sys; from pathlib import Path; from onecurve.checkpoint.lock import RunLock; "
            "RunLock(Path(sys.argv[1])).acquire()"
        )
        import subprocess
        import sys

        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
        assert "FolderInUse" in done.stderr


def test_each_owner_has_a_token_of_its_own(tmp_path):
    lock = RunLock(tmp_path)
    first = lock.acquire()
    first.check()
    lock.release()
    lock.release()
    first.check()  # nobody came after it
    with RunLock(tmp_path) as second:
        second.check()
        with pytest.raises(Superseded, match=r"taken over by process \d+ on"):
            first.check()
    for content in (b"", b"[]", b"{", b'{"token": 1}'):
        (tmp_path / "run.fence").write_bytes(content)
        with pytest.raises(Superseded):
            second.check()


def test_a_place_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match="file: it is a file, not a folder"):
        RunLock(tmp_path / "file").acquire()
    assert NotWritable.exit_code == FolderInUse.exit_code == 2


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "run.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotWritable):
        RunLock(tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()
    Fence(tmp_path, "x")
