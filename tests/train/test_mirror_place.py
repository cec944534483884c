"""A mirror that is no place of its own is refused before step 1, and what is there stays."""

import shutil

import pytest

from onecurve.checkpoint import list_steps
from onecurve.checkpoint.mirror import MirrorFailed, Remote
from tests.commands import DEMO, complaint, digest, train_here

SHORT = ("train.steps=4", "checkpoint.every_steps=2", "layout.dp=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    assert train_here(run, *SHORT) == 0
    return run


def refused(capfd, run, mirror, *sets, flags=()):
    settings = [part for text in (*SHORT, *sets, f"checkpoint.mirror={mirror}") for part in ("--set", text)]
    return complaint(capfd, "train", DEMO, "--run", run, *settings, *flags)


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("run/checkpoints", "it lies in the folder of this run"),
        ("run", "it is the folder of this run"),
        ("", "it holds the folder of this run"),
        ("link", "it lies in the folder of this run"),
        ("run/../run/copies/more", "it lies in the folder of this run"),
    ],
)
def test_the_runs_own_folder(tmp_path, capfd, prefix, place, says):
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    said = refused(capfd, tmp_path / "run", f"{prefix}{tmp_path}/{place}")
    assert says in said and "outside of every run" in said
    assert not (tmp_path / "run").exists()


def test_its_own_checkpoints_on_resume(finished, tmp_path, capfd):
    run = shutil.copytree(finished, tmp_path / "run")
    before = digest(run, 4)
    assert "lies in the folder of this run" in refused(capfd, run, run / "checkpoints", flags=("--resume",))
    assert digest(run, 4) == before and len(list_steps(run / "checkpoints")) == 2


@pytest.mark.parametrize(("place", "how"), [("checkpoints", "lies in"), ("", "is")])
def test_another_runs_folder(finished, tmp_path, capfd, place, how):
    said = refused(capfd, tmp_path / "run", finished / place)
    assert f"it {how} the folder of another run, {finished}" in said


@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_copies_of_another_curve(finished, tmp_path, capfd, flags):
    shutil.copytree(finished / "checkpoints", tmp_path / "copies")
    said = refused(capfd, tmp_path / "run", f"file://{tmp_path}/copies", "train.seed=42", flags=flags)
    assert "holds checkpoints of curve " in said and "this run's is " in said and "a folder of its own below" in said
    assert not (tmp_path / "run").exists()


def test_copies_of_the_same_curve_are_no_strangers(finished, tmp_path):
    shutil.copytree(finished / "checkpoints", tmp_path / "copies")
    assert train_here(tmp_path / "run", *SHORT, f"checkpoint.mirror={tmp_path}/copies") == 0


def test_a_copy_never_removes_its_source(finished, tmp_path):
    """Whatever was looked at before: links may be made later."""
    run = shutil.copytree(finished, tmp_path / "run")
    source = run / "checkpoints" / "step-00000004"
    (tmp_path / "link").symlink_to(run / "checkpoints")
    with pytest.raises(MirrorFailed, match="the run's own folder"):
        Remote(str(tmp_path / "link")).put(source)
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "step-00000004").symlink_to(source)
    with pytest.raises(MirrorFailed, match="is a link"):
        Remote(str(tmp_path / "copies")).put(source)
    assert digest(run, 4) == digest(finished, 4)
