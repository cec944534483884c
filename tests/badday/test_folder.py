"""The run folder on a bad day: in use, full, read-only, or a save in it that fails. A clear line, the older checkpoint
whole, and the run goes on once the trouble is gone."""

import ctypes
import itertools
import os
import subprocess

import pytest

from onecurve.checkpoint import latest_checkpoint
from tests.badday.commands import Run, small


@pytest.fixture
def disk(tmp_path):
    """Mounts a tmpfs: disk("size=2m") is its folder."""
    mounted = []

    def mount(options):
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"can't mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def one_line(run, code=2):
    assert run.errors.count("\n") == 1, run.errors
    return run.errors


def whole(run, step):
    path, reasons = latest_checkpoint(run.folder / "checkpoints")
    assert path == run.checkpoint(step) and reasons == []
    assert not [p for p in (run.folder / "checkpoints").iterdir() if p.name.startswith(".")]


def test_two_commands_on_one_folder(new_run, reference):
    run = new_run()
    first = run.start(armed="hang:rank=0,step=12,place=forward")
    run.wait_for_row(12)
    second = Run(run.folder, run.config, output="second")
    for resume in (False, True):
        assert second.train(resume=resume) == 2
        assert f"in use by process {first.pid} on " in one_line(second)
    os.kill(first.pid, 9)
    assert first.wait() == -9
    assert second.train(resume=True) == 0
    assert run.result() == reference()


PLACES = ["save.begin", "save.write", "save.written", "save.commit", "save.rename"]
ERRORS = {"ENOSPC": "No space left on device", "EIO": "Input/output error", "EROFS": "Read-only file system"}


def save_fails(run, place, error, background):
    rank = 0 if place in PLACES[3:] else 2
    armed = f"io:rank={rank},step=10,place={place},error={error}"
    assert run.train(f"checkpoint.background={background}", armed=armed) == 3
    assert f"onecurve: rank {rank}: can't " in run.errors and ERRORS[error] in run.errors
    assert "Traceback" not in run.errors
    last = run.errors.splitlines()[-1]
    assert last.startswith("the newest checkpoint is that of step 5; resume with: onecurve train ")
    (event,) = run.events("error")
    assert ERRORS[error] in event["text"]
    whole(run, 5)


@pytest.mark.parametrize(
    ("place", "error", "background"), [("save.write", "ENOSPC", "true"), ("save.rename", "EIO", "false")]
)
def test_a_failed_save_ends_the_run_and_leaves_the_older_checkpoint(new_run, reference, place, error, background):
    """Case 8 and 9. keep = 2."""
    run = new_run()
    save_fails(run, place, error, background)
    assert run.train("layout.dp=3", resume=True) == 0
    assert run.result() == reference()


@pytest.mark.slow
@pytest.mark.parametrize(("place", "error", "background"), [*itertools.product(PLACES, ERRORS, ["true", "false"])])
def test_a_failed_save_in_full(new_run, reference, place, error, background):
    test_a_failed_save_ends_the_run_and_leaves_the_older_checkpoint(new_run, reference, place, error, background)


def test_a_save_that_fails_once_is_what_restarts_are_for(new_run, reference, tmp_path):
    run = new_run()
    armed = f"io:rank=2,step=10,place=save.write,error=EIO,once={tmp_path / 'fired'}"
    assert run.train(armed=armed, flags=("--restarts", "1")) == 0
    assert [event["step"] for event in run.events("restart")] == [5]
    assert run.result() == reference()


LONG = ("train.steps=200", "checkpoint.every_steps=20")


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 24], ids=["nothing left", "24 KiB left"])
def test_case_8_a_disk_that_fills(disk, tmp_path, reference, left):
    """Case 8. A tmpfs of 2 MiB; something else takes the room while the run trains."""
    folder = disk("size=2m")
    run = Run(folder / "run", small(tmp_path), LONG)
    command = run.start()
    run.wait_for_row(50)
    with (folder / "ballast").open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError:
            ballast.truncate(ballast.tell() - 1024 * left)
    assert command.wait() == 3
    assert "No space left on device" in run.errors and "Traceback" not in run.errors
    path, reasons = latest_checkpoint(run.folder / "checkpoints")
    newest = run.steps[-1]
    assert path == run.checkpoint(newest) and reasons == []
    assert f"the newest checkpoint is that of step {newest}; resume with: " in run.errors
    if not left:
        assert run.train(resume=True) == 2, run.errors
        assert "No space left" in run.errors or "free some space" in one_line(run)
        assert list(run.folder.glob("run.fence.*")) == []
    (folder / "ballast").unlink()
    assert run.train(resume=True) == 0
    assert run.result() == reference(*LONG)


def test_no_room_for_keep_plus_one(disk, tmp_path):
    folder = disk("size=128k")
    run = Run(folder / "run", small(tmp_path))
    assert run.train() == 2
    assert "checkpoint.keep + 1 = 3 checkpoints" in one_line(run) and " free, but " in run.errors


def test_a_read_only_folder(disk, tmp_path):
    folder = disk("size=2m")
    run = Run(folder / "run", small(tmp_path))
    assert run.train() == 0
    before = sorted(p.name for p in run.folder.rglob("*"))
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    for command, resume in ((run, True), (Run(folder / "other", run.config), False)):
        assert command.train(resume=resume) == 2
        assert "Read-only file system" in one_line(command)
    assert sorted(p.name for p in run.folder.rglob("*")) == before


def small_shared_memory():
    """In this process and its children alone, /dev/shm is 64 MiB."""
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        os._exit(77)
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"]):
        if subprocess.run(["mount", *command], capture_output=True).returncode:
            os._exit(77)


@pytest.mark.parametrize(
    "sets",
    [
        (),
        pytest.param(
            ("model.vocab=32768", "model.width=128", "train.steps=2", "optimizer.warmup_steps=0"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["small", "500 MiB of buffers"],
)
def test_64_mib_of_dev_shm(new_run, reference, sets):
    """Gradients and weights travel through anonymous memory, which /dev/shm does not limit."""
    run = new_run(*sets)
    code = run.train("layout.transport=shm", before=small_shared_memory)
    if code == 77:
        pytest.skip("can't mount in a namespace of its own here")
    assert code == 0, run.errors
    assert run.result() == reference(*sets)


@pytest.mark.parametrize("found_by", ["save", "restart"])
def test_a_folder_that_is_moved_is_not_made_again(new_run, tmp_path, reference, found_by):
    """Its next save or restart says so; the run goes on where the folder is now."""
    run = new_run()
    fault = "kill:place=forward,step=4,rank=1;" * (found_by == "restart")
    command = run.start(armed=f"{fault}slow:place=forward,seconds=0.03,times=0,rank=0", flags=("--restarts", "1"))
    run.wait_for_row(2)
    run.folder.rename(tmp_path / "moved")
    assert command.wait() == 3
    assert f"{run.folder}: is gone, moved or removed while the run went on; resume it where it is" in run.errors
    assert not run.folder.exists() and "resume with" not in run.errors and "Traceback" not in run.errors
    run.folder = tmp_path / "moved"
    assert run.train(resume=True) == 0
    assert run.result() == reference()
