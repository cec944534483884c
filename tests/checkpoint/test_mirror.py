"""Copies elsewhere: verified when made, verified when fetched, and never a reason to stop."""

import uuid

import pytest

from onecurve.checkpoint import latest_checkpoint, verify_checkpoint
from onecurve.checkpoint import mirror as mirror_module
from onecurve.checkpoint.background import Checkpointer
from onecurve.checkpoint.errors import MirrorFailed
from onecurve.checkpoint.mirror import Mirror, Remote, fetch_latest, without_secrets
from tests.checkpoint.fakes import all_good, make, on_ranks
from tests.checkpoint.test_layouts import save


@pytest.fixture(params=["folder", "memory"])
def url(request, tmp_path):
    return f"file://{tmp_path}/there" if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def train(folder, url, steps=range(1, 6), keep=2, background=True):
    def work(mesh):
        mirror = Mirror(url, keep=keep, pause=0.01) if mesh.rank == 0 else None
        saves = Checkpointer(folder, make(mesh, seed=1), background=background, keep=keep, mirror=mirror)
        for step in steps:
            saves.save(step, {"curve_id": "c"})
            if mirror is not None:
                mirror.drain()
        saves.close()
        return saves.take_notes()

    return all_good(on_ranks(2, work))[0]


def test_copied_kept_and_fetched(tmp_path, url):
    assert train(tmp_path / "here", url) == []
    assert Remote(url).steps() == ["step-00000005", "step-00000004"]
    path, reasons = fetch_latest(url, tmp_path / "back", curve_id="c")
    assert path == tmp_path / "back" / "step-00000005" and reasons == [] and verify_checkpoint(path) == []
    for file in (tmp_path / "here" / "step-00000005").iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()
    assert latest_checkpoint(tmp_path / "back") == (path, [])


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "rank-0001.safetensors", "manifest.json", "manifest.sha256"])
@pytest.mark.parametrize("damage", ["flipped", "longer", "removed"])
def test_a_damaged_copy_is_passed_over(tmp_path, name, damage):
    url = f"memory://{uuid.uuid4().hex}"
    train(tmp_path / "here", url)
    remote = Remote(url)
    path = remote.path("step-00000005", name)
    data = bytearray(remote.fs.cat_file(path))
    data[len(data) // 2] ^= 4
    if damage == "removed":
        remote.fs.rm_file(path)
    else:
        remote.fs.pipe_file(path, bytes(data if damage == "flipped" else data + b"x"))
    found, reasons = fetch_latest(url, tmp_path / "back", curve_id="c")
    assert found == tmp_path / "back" / "step-00000004" and len(reasons) == 1 and name.split(".")[0] in reasons[0]
    assert [p.name for p in (tmp_path / "back").iterdir()] == ["step-00000004"]


def test_another_curves_copies_are_neither_fetched_nor_removed(tmp_path, url):
    train(tmp_path / "a", url, steps=range(1, 3))
    save(tmp_path / "b", step=7, info={"curve_id": "d"})
    Remote(url).put(tmp_path / "b" / "step-00000007")
    train(tmp_path / "a", url, steps=range(8, 10))
    assert Remote(url).steps() == [f"step-{n:08d}" for n in (9, 8, 7)]
    path, reasons = fetch_latest(url, tmp_path / "back", curve_id="d")
    assert path.name == "step-00000007" and "is of curve c, expected d" in reasons[0]


def test_values_that_are_not_finite_push_out_nothing_and_are_passed_over_on_request(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"

    def work(mesh):
        optimizer = make(mesh, seed=1)
        saves = Checkpointer(tmp_path / "here", optimizer, keep=2, mirror=(mirror := Mirror(url, keep=2)))
        for step in range(1, 6):
            saves.save(step)
            mirror.drain()
            optimizer.master[0] = float("nan")

    all_good(on_ranks(1, work))
    assert Remote(url).steps() == [f"step-{n:08d}" for n in (5, 4, 1)]
    path, reasons = fetch_latest(url, tmp_path / "back", finite=True)
    assert path.name == "step-00000001" and len(reasons) == 2 and all("not finite" in r for r in reasons)
    assert fetch_latest(url, tmp_path / "all")[0].name == "step-00000005"


def test_a_mirror_that_is_empty_absent_or_unknown(tmp_path):
    assert fetch_latest(f"file://{tmp_path}/none", tmp_path / "back") == (None, [])
    with pytest.raises(MirrorFailed, match="nosuch"):
        fetch_latest("nosuch://bucket/x", tmp_path / "back")
    (tmp_path / "file").write_text("")
    path, reasons = fetch_latest(f"file://{tmp_path}/file", tmp_path / "back")
    assert path is None and reasons == []


def test_a_mirror_that_fails_is_told_and_training_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    notes = train(tmp_path / "here", f"file://{tmp_path}/file/x", steps=[1, 2])
    assert len(notes) == 2 and all(note.startswith("mirror: ") and "step-0000000" in note for note in notes), notes
    assert verify_checkpoint(tmp_path / "here" / "step-00000002") == []


def test_a_copy_that_fails_once_is_tried_again(tmp_path, monkeypatch):
    tries = []
    put = Remote.put

    def flaky(self, local):
        tries.append(local.name)
        if len(tries) == 1:
            raise ConnectionResetError("reset by peer")
        return put(self, local)

    monkeypatch.setattr(Remote, "put", flaky)
    assert train(tmp_path / "here", f"file://{tmp_path}/there", steps=[1]) == [] and len(tries) == 2
    assert (tmp_path / "there" / "step-00000001" / "manifest.sha256").exists()


def test_a_copy_that_reads_back_other_bytes_is_no_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(Remote, "_hash", lambda self, path: "0" * 64)
    notes = train(tmp_path / "here", f"file://{tmp_path}/there", steps=[1])
    assert len(notes) == 1 and "reads back other bytes" in notes[0]
    assert fetch_latest(f"file://{tmp_path}/there", tmp_path / "back")[0] is None


def test_the_newest_waiting_one_wins_and_retention_spares_what_is_being_copied(tmp_path, monkeypatch):
    import threading

    gate, started = threading.Event(), threading.Event()
    put = Remote.put

    def gated(self, local):
        started.set()
        assert gate.wait(20)
        return put(self, local)

    monkeypatch.setattr(Remote, "put", gated)

    def work(mesh):
        mirror = Mirror(f"file://{tmp_path}/there")
        saves = Checkpointer(tmp_path / "here", make(mesh, seed=1), keep=2, mirror=mirror)
        saves.save(1)
        assert started.wait(20)
        for step in range(2, 6):
            saves.save(step)
        assert mirror.waiting == {1, 5}
        left = sorted(int(p.name[5:]) for p in (tmp_path / "here").iterdir())
        gate.set()
        saves.close()
        return left, saves.take_notes()

    left, notes = all_good(on_ranks(1, work))[0]
    assert left == [1, 4, 5] and [note.split()[1] for note in notes] == [f"step-0000000{n}" for n in (2, 3, 4)]
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["step-00000001", "step-00000005"]


def test_secrets_are_not_shown(tmp_path):
    assert without_secrets("s3://key:secret@bucket/x?token=t") == "s3://bucket/x"
    assert without_secrets("/a/folder@home") == "/a/folder@home"
    with pytest.raises(MirrorFailed) as info:
        Remote("nosuch://user:hunter2@host/x")
    assert "hunter2" not in str(info.value)


@pytest.mark.slow
def test_s3(tmp_path, s3):
    assert train(tmp_path / "here", s3) == []
    assert Remote(s3).steps() == ["step-00000005", "step-00000004"]
    remote = Remote(s3)
    data = bytearray(remote.fs.cat_file(remote.path("step-00000005", "rank-0001.safetensors")))
    data[-1] ^= 1
    path, reasons = fetch_latest(s3, tmp_path / "back", curve_id="c")
    assert path == tmp_path / "back" / "step-00000005" and reasons == [] and verify_checkpoint(path) == []
    remote.fs.pipe_file(remote.path("step-00000005", "rank-0001.safetensors"), bytes(data))
    path, reasons = fetch_latest(s3, tmp_path / "again", curve_id="c")
    assert path == tmp_path / "again" / "step-00000004" and "rank-0001.safetensors" in reasons[0]
    assert mirror_module.ATTEMPTS > 1
