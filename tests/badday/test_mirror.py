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


def test_a_folder(new_run, reference, tmp_path):
    loses_its_disk(new_run("checkpoint.background=false"), reference, f"file://{tmp_path}/second place")


def test_a_copy_slower_than_the_watchdog_is_waited_for(new_run, tmp_path):
    """The last copy is made when the ranks have nothing else to do; that is no hang."""
    from onecurve.checkpoint.mirror import Remote

    real = Remote.put

    def slow(remote, local):
        if local.name == "step-00000020":
            time.sleep(5)
        return real(remote, local)

    run = new_run(f"checkpoint.mirror=file://{tmp_path}/there", "limits.stall_seconds=3.0")
    assert run.train(before=lambda: setattr(Remote, "put", slow)) == 0, run.errors
    assert (tmp_path / "there" / "step-00000020" / "manifest.sha256").exists()


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
