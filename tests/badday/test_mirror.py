"""The second place for checkpoints, from the command line: used where the local ones are gone, and it keeps secrets."""

import shutil
import time

import pytest

from onecurve.checkpoint import mirror as mirror_module
from onecurve.checkpoint import read_manifest


def loses_its_disk(run, reference, mirror):
    """Stopped, with a copy of its checkpoint elsewhere; then the local ones are gone, then the whole folder is."""
    run.sets = (*run.sets, f"checkpoint.mirror={mirror}")
    assert run.train(armed="kill:signal=TERM,rank=1,step=12,place=forward") == 75
    (step,) = run.steps[-1:]
    shutil.rmtree(run.folder / "checkpoints")
    assert run.train("layout.dp=2", resume=True) == 0, run.errors
    assert f"no whole checkpoint here: fetched step-{step:08d} from the mirror" in run.errors
    assert run.result() == reference()
    shutil.rmtree(run.folder)
    assert run.train(resume=True) == 0
    assert "fetched step-00000020 from the mirror" in run.errors and "is finished" in run.errors
    assert read_manifest(run.checkpoint(20)).state_digest == reference()[0]


def one_attempt():
    mirror_module.ATTEMPTS = 1


def copies_hang():
    mirror_module.Remote._put = lambda *_: time.sleep(3600)


def test_a_folder(new_run, reference, tmp_path):
    loses_its_disk(new_run("checkpoint.background=false"), reference, f"file://{tmp_path}/second place")


@pytest.mark.slow
def test_a_copy_slower_than_the_watchdog_is_waited_for(new_run, tmp_path):
    """The last copy is made when the ranks have nothing else to do; that is no hang."""
    real = mirror_module.Remote._put

    def slow(remote, local, path):
        time.sleep(0.7)
        return real(remote, local, path)

    run = new_run(f"checkpoint.mirror=file://{tmp_path}/there", "train.steps=5", "limits.stall_seconds=2.0")
    assert run.train(before=lambda: setattr(mirror_module.Remote, "_put", slow)) == 0, run.errors
    assert run.last.took > 6 * 0.7 and (tmp_path / "there" / "step-00000005" / "manifest.sha256").exists()


@pytest.mark.parametrize("end", [0, pytest.param(75, marks=pytest.mark.slow)])
def test_a_copy_that_hangs_is_given_up_in_one_line(new_run, tmp_path, end):
    """Nothing of it moves any more: the run ends as it would have ended, with what it saved here."""
    stop = "kill:signal=TERM,rank=1,step=5,place=forward" * (end == 75)
    run = new_run(f"checkpoint.mirror=file://{tmp_path}/there", "train.steps=7", "limits.stall_seconds=2.0")
    assert run.train(before=copies_hang, armed=stop, seconds=30) == end, run.errors
    (line,) = [line for line in run.errors.splitlines() if "nothing moved for 2 s" in line]
    newest = run.steps[-1]
    assert line.startswith(f"onecurve: mirror: step-00000005, step-{newest:08d} not copied to file://{tmp_path}/there")
    assert line in [f"onecurve: {event['text']}" for event in run.events("note")]
    assert newest == (7 if end == 0 else 6) and len(run.events("end")) == (end == 0)


def test_a_mirror_that_fails_is_said_and_stops_nothing(new_run, reference, tmp_path):
    (tmp_path / "file").touch()
    run = new_run(f"checkpoint.mirror={tmp_path}/file/below")
    assert run.train(before=one_attempt) == 0
    notes = [event["text"] for event in run.events("note")]
    assert notes and all(note.startswith("mirror: ") for note in notes) and notes[0] in run.errors
    assert run.result() == reference()


def test_a_mirror_that_cannot_be_read_is_no_fresh_start(new_run):
    """Local checkpoints are gone and the mirror is out of reach: starting from step 0 would be a wrong guess."""
    run = new_run("checkpoint.mirror=nosuch://user:hunter2@host/x")
    assert run.train(resume=True) == 3
    assert "mirror" in run.errors and "hunter2" not in run.errors


def test_secrets_are_stored_and_shown_nowhere(new_run, tmp_path):
    run = new_run()
    mirror = "checkpoint.mirror=ftp://user:hunter2@127.0.0.1:1/x?token=hunter2&secret=hunter2"
    assert run.train(mirror, armed="kill:signal=TERM,rank=1,step=8,place=forward", before=one_attempt) == 75
    written = [path for path in run.folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert len(written) > 5
    for path in written:
        assert b"hunter2" not in path.read_bytes(), path
    assert "hunter2" not in run.errors and "--set" in run.errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_s3_server(new_run, reference, s3):
    loses_its_disk(new_run("checkpoint.background=false"), reference, s3)
