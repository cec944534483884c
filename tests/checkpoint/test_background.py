"""Saves behind the training: the state at the moment of `save`, one at a time, failures told, all ranks alike."""

import threading

import pytest

from onecurve import faults
from onecurve.checkpoint import latest_checkpoint, read_manifest, state_digest, verify_checkpoint
from onecurve.checkpoint.background import Checkpointer
from onecurve.checkpoint.errors import DiskFull
from onecurve.checkpoint.save import PendingSave
from tests.checkpoint.fakes import all_good, make, on_ranks
from tests.checkpoint.test_layouts import save


@pytest.fixture(autouse=True)
def no_faults():
    yield
    faults.disarm()


@pytest.fixture
def slow(monkeypatch):
    """Threads that write only once `gate` is set."""
    gate = threading.Event()
    write = PendingSave.write

    def gated(self):
        if self.background:
            assert gate.wait(30)
        write(self)

    monkeypatch.setattr(PendingSave, "write", gated)
    return gate


def test_training_goes_on_and_the_snapshot_is_what_is_saved(tmp_path, slow):
    def work(mesh):
        extras = {"counter": make(mesh).master[:1].clone()}
        optimizer = make(mesh, seed=1, extras=extras)
        digest = state_digest(optimizer)
        saves = Checkpointer(tmp_path, optimizer, background=True)
        assert saves.save(10, {"curve_id": "c"}) == [] and saves.in_flight == 10
        for vector in optimizer.vectors():
            vector.add_(1)
        extras["counter"].fill_(9)
        optimizer.updates += 1
        assert saves.poll() == [] and not saves.ready and not (tmp_path / "step-00000010").exists()
        if mesh.rank == 0:
            slow.set()
        (manifest,) = saves.drain()
        assert manifest.state_digest == digest != state_digest(optimizer) and manifest.updates == 8
        assert saves.in_flight is None and saves.poll() == [] and saves.drain() == []
        assert saves.scratch_bytes == 12 * sum(r.length for r in optimizer.held())
        return manifest.model_dump()

    told = all_good(on_ranks(3, work))
    assert told[0] == told[1] == told[2] == read_manifest(tmp_path / "step-00000010").model_dump()
    assert verify_checkpoint(tmp_path / "step-00000010") == []


def test_foreground_and_background_write_the_same_files(tmp_path):
    def work(mesh, background):
        saves = Checkpointer(tmp_path / str(background), make(mesh, seed=1), background=background)
        return [m.step for m in [*saves.save(1), *saves.close()]]

    for background in (False, True):
        assert all_good(on_ranks(3, lambda mesh, b=background: work(mesh, b))) == [[1]] * 3
    for file in (tmp_path / "False" / "step-00000001").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "True" / "step-00000001" / file.name).read_bytes()


def test_it_is_committed_only_when_all_ranks_are_done(tmp_path, monkeypatch):
    gate = threading.Event()
    write = PendingSave.write
    monkeypatch.setattr(PendingSave, "write", lambda self: (self.rank != 1 or gate.wait(30)) and write(self))

    def work(mesh):
        saves = Checkpointer(tmp_path, make(mesh, seed=1), background=True)
        saves.save(10)
        while mesh.rank != 1 and not saves.ready:
            pass
        mesh.all_gather_bytes(b"")
        assert saves.poll() == [] and saves.ready == (mesh.rank != 1)
        assert saves.poll(False) == []  # a vote held elsewhere
        if mesh.rank == 1:
            gate.set()
        while not saves.ready:
            pass
        mesh.all_gather_bytes(b"")
        assert saves.poll(True) == []  # all have told what they wrote; rank 0 commits, behind
        while not saves.ready:
            pass
        mesh.all_gather_bytes(b"")
        return [m.step for m in saves.poll(True)]

    assert all_good(on_ranks(3, work)) == [[10]] * 3


def test_at_most_one_is_in_flight(tmp_path):
    def work(mesh):
        saves = Checkpointer(tmp_path, make(mesh, seed=1), background=True, keep=2)
        committed = [[m.step for m in saves.save(step)] for step in (1, 2, 3, 4)]
        assert saves.in_flight == 4
        return committed, [m.step for m in saves.close()]

    assert all_good(on_ranks(2, work)) == [([[], [1], [2], [3]], [4])] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("call", ["poll", "save", "drain"])
def test_a_failure_behind_is_raised_by_the_next_call_on_all_ranks(tmp_path, call):
    save(tmp_path, step=1, world=3)
    faults.arm("io:rank=2,place=save.write")

    def work(mesh):
        optimizer = make(mesh, seed=2)
        saves = Checkpointer(tmp_path, optimizer, background=True)
        saves.save(10)
        with pytest.raises(DiskFull, match="rank 2: can't write") as info:
            if call == "poll":
                while True:
                    saves.poll()
            saves.save(11) if call == "save" else saves.drain()
        assert saves.in_flight is None and saves.poll() == []
        return str(info.value), [m.step for m in [*saves.save(12), *saves.drain()]]

    told = all_good(on_ranks(3, work))
    assert told == [told[0]] * 3 and told[0][1] == [12]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000012"]
    assert latest_checkpoint(tmp_path)[0] == tmp_path / "step-00000012"


def test_retention_keeps_what_a_rollback_may_need(tmp_path):
    def work(mesh, background):
        folder = tmp_path / str(background)
        saves = Checkpointer(folder, make(mesh, seed=1), background=background, keep=2)
        for step in range(1, 8):
            saves.save(step, protect=4 if step > 4 else None)
        saves.close()
        return sorted(int(p.name[5:]) for p in folder.iterdir())

    for background in (False, True):
        assert on_ranks(1, lambda mesh, b=background: work(mesh, b)) == [[4, 6, 7]]


def test_the_snapshot_memory_is_used_again(tmp_path):
    def work(mesh):
        saves = Checkpointer(tmp_path, make(mesh, seed=1), background=True)
        saves.save(1)
        first = [buffer.ctypes.data for buffer in saves._scratch]
        saves.save(2)
        return first == [buffer.ctypes.data for buffer in saves._scratch], saves.close() and saves.take_notes()

    assert all_good(on_ranks(2, work)) == [(True, [])] * 2
