"""A save becomes a whole checkpoint, or an error that is the same on every rank and leaves nothing behind."""

import os
import subprocess

import pytest
import torch

from onecurve import faults
from onecurve.checkpoint import (
    clean_leftovers,
    latest_checkpoint,
    load_checkpoint,
    read_manifest,
    remove_checkpoint,
    save_checkpoint,
    state_digest,
    store,
    verify_checkpoint,
)
from onecurve.checkpoint.errors import CheckpointError, DiskFull, NotWritable, SaveFailed, Superseded
from onecurve.checkpoint.lock import RunLock
from tests.checkpoint.fakes import Param, all_good, make, on_ranks
from tests.checkpoint.test_layouts import save


@pytest.fixture(autouse=True)
def no_faults():
    yield
    faults.disarm()


def same_error(results, kind, *words):
    assert all(type(e) is kind for e in results), results
    assert len({str(e) for e in results}) == 1, results
    assert all(word in str(results[0]) for word in words), results[0]


def failing_save(folder, step=20, world=4, seed=2, **options):
    return on_ranks(world, lambda mesh: save_checkpoint(folder, make(mesh, seed=seed), step, **options))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "fault, kind, words",
    [
        ("io:rank=2,place=save.write", DiskFull, ["rank 2", "rank-0002.safetensors", "No space left"]),
        ("io:rank=0,place=save.write,error=EDQUOT", DiskFull, ["rank 0", "rank-0000.safetensors"]),
        ("io:rank=3,place=save.written,error=EIO", SaveFailed, ["rank 3", "rank-0003.safetensors", "output error"]),
        ("io:rank=0,place=save.begin,error=EACCES", NotWritable, ["rank 0", "Permission denied"]),
        ("io:rank=1,place=save.begin,error=EROFS", NotWritable, ["rank 1", "Read-only"]),
        ("io:rank=0,place=save.commit", DiskFull, ["rank 0", "commit step 20", "No space left"]),
        ("io:rank=0,place=save.rename,error=EIO", SaveFailed, ["rank 0", "commit step 20"]),
        ("raise:rank=1,place=save.write", SaveFailed, ["rank 1", "InjectedFault", "rank-0001.safetensors"]),
    ],
)
def test_an_error_on_one_rank_is_the_error_of_all(tmp_path, fault, kind, words):
    before = save(tmp_path, step=10)
    faults.arm(fault)
    same_error(failing_save(tmp_path), kind, *words)
    assert names(tmp_path) == ["step-00000010"] and verify_checkpoint(tmp_path / "step-00000010") == []
    # the state in memory is as it was: the next save works, and is the one that the failed one would have been
    faults.disarm()
    assert all_good(failing_save(tmp_path))[0].state_digest != before.state_digest
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-00000020", [])


def test_keep_and_a_failing_save_leave_the_old_one(tmp_path):
    from onecurve.checkpoint.background import Checkpointer
    from onecurve.errors import InputError

    save(tmp_path, step=10)
    faults.arm("io:rank=1,place=save.write")
    told = on_ranks(2, lambda mesh: Checkpointer(tmp_path, make(mesh, seed=1), keep=2).save(20))
    same_error(told, DiskFull, "rank 1")
    assert latest_checkpoint(tmp_path)[0] == tmp_path / "step-00000010"
    told = on_ranks(1, lambda mesh: Checkpointer(tmp_path, make(mesh), keep=1))
    assert isinstance(told[0], InputError) and "keep = 1" in str(told[0])


def test_a_file_system_that_is_full(tmp_path):
    """A real one of 2 MiB: the first checkpoint fits, the second does not."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        parameters = [Param("w", (100, 1000))]  # 1.2 MB each

        def work(mesh, step):
            optimizer = make(mesh, seed=step, parameters=parameters)
            digest = state_digest(optimizer)
            with pytest.raises(DiskFull, match=r"rank \d: can't write .*rank-000\d.safetensors: No space left") as info:
                save_checkpoint(tmp_path, optimizer, step)
            assert state_digest(optimizer) == digest
            return str(info.value)

        all_good(on_ranks(3, lambda mesh: save_checkpoint(tmp_path, make(mesh, seed=1, parameters=parameters), 1)))
        assert len(set(all_good(on_ranks(3, lambda mesh: work(mesh, 2))))) == 1
        assert names(tmp_path) == ["step-00000001"] and verify_checkpoint(tmp_path / "step-00000001") == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_folder_without_permission(tmp_path):
    save(tmp_path, step=10)
    tmp_path.chmod(0o555)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:  # root may write anywhere
                os.setuid(65534)
            same_error(failing_save(tmp_path), NotWritable, "rank 0", "Permission denied")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    tmp_path.chmod(0o755)
    assert names(tmp_path) == ["step-00000010"]


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    same_error(failing_save(tmp_path / "checkpoints"), SaveFailed, "rank 0", "checkpoints")


def test_info_that_has_no_place_is_refused(tmp_path):
    same_error(failing_save(tmp_path, info={"surprise": 1}), SaveFailed, "surprise", "curve_id")
    same_error(failing_save(tmp_path, info={"guard": {"loss": float("nan")}}), SaveFailed, "commit step 20")
    assert not names(tmp_path)


def test_steps_that_the_name_can_not_hold(tmp_path):
    same_error(failing_save(tmp_path, step=10**8), SaveFailed, "100000000")


def test_saving_the_same_step_again_replaces_it(tmp_path):
    first = save(tmp_path, step=10, seed=1)
    second = save(tmp_path, step=10, seed=2, world=2)
    assert first.state_digest != second.state_digest
    assert names(tmp_path) == ["step-00000010"] and read_manifest(tmp_path / "step-00000010") == second
    assert verify_checkpoint(tmp_path / "step-00000010") == []


def test_a_damaged_folder_of_that_step_is_passed_again(tmp_path):
    (tmp_path / "step-00000010").mkdir()
    (tmp_path / "step-00000010" / "rank-0000.safetensors").write_bytes(b"half")
    assert "manifest.json: is missing" in latest_checkpoint(tmp_path)[1][0]
    save(tmp_path, step=10)
    assert verify_checkpoint(tmp_path / "step-00000010") == []


def crash(folder, place, **options):
    """Fork a process that saves and is SIGKILLed at `place`."""
    pid = os.fork()
    if pid == 0:
        try:
            faults.arm(f"kill:place={place},rank=0")
            on_ranks(2, lambda mesh: save_checkpoint(folder, make(mesh, seed=2), 20, **options))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("place", ["save.begin", "save.write", "save.written", "save.commit", "save.rename"])
def test_killed_anywhere_in_a_save(tmp_path, place):
    save(tmp_path, step=10)
    crash(tmp_path, place)
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-00000010", [])
    notes = clean_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000010"] and len(notes) == (place != "save.begin")
    assert all("step-00000020: an unfinished save was removed" in note for note in notes)
    save(tmp_path, step=20)
    assert latest_checkpoint(tmp_path)[0] == tmp_path / "step-00000020"


def test_killed_between_the_renames_of_a_replacement(tmp_path, monkeypatch):
    manifest = save(tmp_path, step=10)

    class Crash(BaseException):
        pass

    def aside(*args):
        original(*args)
        raise Crash

    original = store._aside
    monkeypatch.setattr(store, "_aside", aside)
    told = on_ranks(1, lambda mesh: save_checkpoint(tmp_path, make(mesh, seed=3), 10))
    assert isinstance(told[0], Crash)
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path)[0] is None
    notes = clean_leftovers(tmp_path)
    assert any("put back" in note for note in notes) and names(tmp_path) == ["step-00000010"]
    assert read_manifest(tmp_path / "step-00000010") == manifest


def test_a_removal_that_stops_half_way_leaves_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, step=10)
    monkeypatch.setattr(store, "_delete", lambda folder: (folder / "manifest.sha256").unlink())
    remove_checkpoint(tmp_path / "step-00000010")
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path) == (None, [])
    assert "unfinished removal" in clean_leftovers(tmp_path)[0] and not names(tmp_path)


def test_cleaning_leaves_everything_else_alone(tmp_path):
    save(tmp_path, step=10)
    for name in ("notes", ".tmp-mine", ".tmp-step-00000010-XYZ", "step-1"):
        (tmp_path / name).mkdir()
    (tmp_path / ".gone-step-00000001-00000000").symlink_to(tmp_path / "notes")
    before = names(tmp_path)
    assert clean_leftovers(tmp_path) == [] and names(tmp_path) == before
    assert clean_leftovers(tmp_path / "absent") == []


def test_a_writer_whose_token_was_superseded_may_not_commit(tmp_path):
    folder = tmp_path / "checkpoints"
    lock = RunLock(tmp_path)
    fence = lock.acquire()
    save(folder, step=10, fence=fence)
    lock.release()
    with RunLock(tmp_path) as newer:
        told = failing_save(folder, fence=fence)
        same_error(told, Superseded, "taken over by process", "may not commit")
        assert names(folder) == ["step-00000010"]
        save(folder, step=20, fence=newer)
    (tmp_path / "run.fence").unlink()
    same_error(failing_save(folder, step=30, fence=fence), Superseded, "fence file is gone")


def test_a_writer_that_slept_through_the_takeover_after_its_check(tmp_path, monkeypatch):
    """Stopped between the check of the token and the rename: the new owner's cleaning takes the temp folder away."""
    from onecurve.checkpoint.lock import Fence

    folder = tmp_path / "checkpoints"
    lock = RunLock(tmp_path)
    fence = lock.acquire()
    lock.release()
    check = Fence.check

    def check_then_sleep(self):
        if not folder.exists():
            return check(self)  # the one before anything is made
        monkeypatch.setattr(Fence, "check", check)
        self.check()
        with RunLock(tmp_path):
            assert len(clean_leftovers(folder)) == 1

    monkeypatch.setattr(Fence, "check", check_then_sleep)
    same_error(failing_save(folder, world=1, fence=fence), Superseded, "may not commit")
    assert not names(folder)


def test_an_unreadable_state_is_an_error_on_all_ranks(tmp_path):
    """A bug on one rank (here: a vector that is too short) must not leave the others waiting."""

    def work(mesh):
        optimizer = make(mesh, seed=1)
        if mesh.rank == 1:
            optimizer.exp_avg = torch.zeros(3)
        return save_checkpoint(tmp_path, optimizer, 1)

    told = on_ranks(3, work)
    assert all(isinstance(e, CheckpointError) for e in told) and len({str(e) for e in told}) == 1, told
    assert not names(tmp_path)


def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path):
    save(tmp_path, step=10)
    faults.arm("io:rank=2,place=load.read,error=EIO")
    told = on_ranks(3, lambda mesh: load_checkpoint(tmp_path / "step-00000010", make(mesh)))
    same_error(told, CheckpointError, "rank 2", "output error")
