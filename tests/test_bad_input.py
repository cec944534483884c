"""Bad input at the command: exit code 2, exactly one line on stderr that names it, and nothing begun or lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from onecurve import cli
from tests.commands import DEMO, Complain, as_nobody, complaint, environment, train_here


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the demo's first steps."""
    run = tmp_path_factory.mktemp("started") / "run"
    assert train_here(run, "train.steps=4", "checkpoint.every_steps=2") == 0
    return run


@pytest.fixture
def run(started: Path, tmp_path: Path) -> Path:
    """A copy of it, to be ill-treated."""
    return Path(shutil.copytree(started, tmp_path / "run"))


def checksums(folder: Path) -> dict[str, str]:
    """Every file of a run with its hash, but for the names of the last owner of the lock."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("run.lock", "run.fence")]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


VALUES = [
    ("train.leafs=3", ["train.leafs", "train.leaves"]),
    ("trian.leaves=3", ["trian", "train"]),
    ("layout.dp=5", ["layout.dp = 5", "train.leaves = 4"]),
    ("model.heads=5", ["model.heads = 5", "model.width = 32", "4, 8"]),
    ("model.width=30", ["model.heads = 4", "model.width = 30"]),
    ("train.leaves=0", ["train.leaves", "0", "1"]),
    ("optimizer.lr=-1e-3", ["optimizer.lr", "-0.001", "0"]),
    ("optimizer.lr=nan", ["optimizer.lr", "nan", "finite"]),
    ("optimizer.lr=inf", ["optimizer.lr", "inf", "finite"]),
    ("optimizer.lr=fast", ["optimizer.lr", "fast"]),
    ("optimizer.lr='5e-3'", ["optimizer.lr", "5e-3"]),
    ("optimizer.weight_decay=-0.1", ["optimizer.weight_decay"]),
    ("optimizer.min_lr=nan", ["optimizer.min_lr"]),
    ("optimizer.betas=[0.9,1.0]", ["optimizer.betas"]),
    ("optimizer.eps=0.0", ["optimizer.eps"]),
    ("train.steps=many", ["train.steps", "many"]),
    ("train.steps=2.5", ["train.steps", "2.5"]),
    ("train.seed=true", ["train.seed"]),
    ("model.tied=1", ["model.tied"]),
    ("layout.zero=4", ["layout.zero", "4"]),
    ("data.source=", ["data.source"]),
    ("model.vocab=1", ["model.vocab"]),
    ("checkpoint.keep=1", ["checkpoint.keep", "1", "2"]),
]


@pytest.mark.parametrize(("setting", "words"), VALUES, ids=[setting for setting, _ in VALUES])
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_bad_value(
    command: str, setting: str, words: list[str], tmp_path: Path, capfd: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = complaint(capfd, command, DEMO, "--set", setting)
    assert [word for word in words if word not in said] == [], said
    assert list(tmp_path.iterdir()) == []


# --- texts and configs: case 24 --------------------------------------------------------------------------------------


def test_a_config_with_crlf_and_a_byte_order_mark(tmp_path: Path) -> None:
    config = tmp_path / "demo.toml"
    config.write_bytes(b"\xef\xbb\xbf" + DEMO.read_bytes().replace(b"\n", b"\r\n"))
    assert train_here(tmp_path / "run", "train.steps=1", config=config) == 0


@pytest.mark.parametrize("kind", ["missing", "a folder", "not TOML", "binary"])
def test_a_config_that_is_none(kind: str, tmp_path: Path, capfd: Complain) -> None:
    config = tmp_path / "c.toml"
    if kind == "a folder":
        config.mkdir()
    elif kind != "missing":
        config.write_bytes(b"\xff\xfe\0" if kind == "binary" else b"[train\nsteps = 3")
    assert "c.toml" in complaint(capfd, "train", config, "--run", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_texts_of_all_kinds_are_prepared_and_trained_on(tmp_path: Path, capfd: Complain) -> None:
    """CRLF, a byte-order mark, and a text shorter than a window among others; an empty file is left out, and said."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "crlf.txt").write_bytes(b"one line\r\nand another\r\n" * 40)
    (texts / "mark.txt").write_bytes(b"\xef\xbb\xbf" + b"with a mark in front " * 40)
    (texts / "short.txt").write_bytes(b"x")
    (texts / "empty.txt").write_bytes(b"")
    assert cli.main(["prepare", str(texts), "--out", str(tmp_path / "corpus"), "--val-fraction", "0"]) == 0
    assert "1 empty file was left out" in capfd.readouterr().err
    sets = (f"data.source={tmp_path / 'corpus'}", "model.vocab=257", "train.steps=1")
    assert train_here(tmp_path / "run", *sets) == 0


@pytest.mark.parametrize("kind", ["missing", "empty", "a folder without texts", "no permission"])
def test_texts_that_can_not_be_prepared(kind: str, tmp_path: Path, capfd: Complain) -> None:
    place = tmp_path / "place.txt"
    if kind == "a folder without texts":
        place.mkdir()
    elif kind != "missing":
        place.write_text("" if kind == "empty" else "text")
    with as_nobody() if kind == "no permission" else contextlib.nullcontext():
        out = Path(tempfile.gettempdir()) / f"onecurve-{os.getpid()}-out" if kind == "no permission" else tmp_path / "o"
        said = complaint(capfd, "prepare", place, "--out", out)
    assert "place.txt" in said and not out.exists()


# --- run folders -----------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run(run: Path, capfd: Complain) -> None:
    before = checksums(run)
    said = complaint(capfd, "train", DEMO, "--run", run)
    assert "holds a run already" in said and "--resume" in said
    assert checksums(run) == before
    (run / "run.json").unlink()  # its checkpoints alone are a run as well
    assert "holds a run already" in complaint(capfd, "train", DEMO, "--run", run)
    assert checksums(run).keys() == before.keys() - {"run.json"}


def test_a_folder_in_use(run: Path, capfd: Complain) -> None:
    before = checksums(run)
    hold = (
        "import sys, time; from pathlib import Path; from onecurve.checkpoint import RunLock\n"
        "with RunLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, run], env=environment(), stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        said = complaint(capfd, "train", DEMO, "--run", run, "--resume")
        holder.kill()
    assert "in use" in said and str(holder.pid) in said
    assert checksums(run) == before


def test_a_checkpoint_of_another_curve(run: Path, tmp_path: Path, capfd: Complain) -> None:
    """In the place of the run's own: refused, where going on without it would end in replacing it."""
    other = tmp_path / "other"
    assert train_here(other, "train.steps=4", "checkpoint.every_steps=2", "train.seed=7") == 0
    name = "step-00000004"
    shutil.rmtree(run / "checkpoints" / name)
    shutil.copytree(other / "checkpoints" / name, run / "checkpoints" / name)
    before = checksums(run)
    said = complaint(capfd, "train", DEMO, "--run", run, "--resume")
    theirs, ours = (json.loads((r / "run.json").read_text())["curve_id"] for r in (other, run))
    assert name in said and theirs in said and ours in said and "--from" in said
    assert checksums(run) == before


def test_a_resume_that_asks_for_another_curve(run: Path, capfd: Complain) -> None:
    before = checksums(run)
    said = complaint(capfd, "train", DEMO, "--run", run, "--resume", "--set", "optimizer.lr=1e-3")
    assert "optimizer.lr" in said and "--from" in said
    assert checksums(run) == before


RECORDS = {
    "no config": ("config.toml", None, "no such file; put the config there that the run was started with"),
    "an empty config": ("config.toml", "", "is empty; put the config there that the run was started with"),
    "no TOML": ("config.toml", "[train", "not valid TOML"),
    "a config with another key": ("config.toml", "[train]\nleafs = 3\n", "unknown key train.leafs"),
    "an empty record": ("run.json", "", "it is empty; remove it and resume with the config"),
    "a record of other things": (
        "run.json",
        "[3]",
        "it is not JSON with curve_id, parent, data_fingerprint; remove it",
    ),
    "a torn record": ("run.json", '{"curve_id": "a', "it is not JSON with curve_id"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_run_that_lost_what_says_what_it_is(kind: str, run: Path, capfd: Complain) -> None:
    name, content, words = RECORDS[kind]
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    before = checksums(run)
    said = complaint(capfd, "train", DEMO, "--set", "train.steps=4", "--run", run, "--resume")
    assert f"{run / name}: " in said and words in said, said
    assert checksums(run) == before
    if name == "run.json":  # the cure cures
        (run / name).unlink()
        assert train_here(run, "train.steps=4", "checkpoint.every_steps=2", flags=("--resume",)) == 0


def test_another_model_than_the_parents(run: Path, tmp_path: Path, capfd: Complain) -> None:
    new = tmp_path / "new"
    said = complaint(capfd, "train", DEMO, "--from", run, "--run", new, "--set", "model.width=64")
    assert "embedding" in said and not new.exists()
    assert "99" in complaint(capfd, "train", DEMO, "--from", f"{run}@99", "--run", new)
    assert "nowhere" in complaint(capfd, "train", DEMO, "--from", "nowhere", "--run", new)
    for step in ("", "x", "-1", "1.5", "²", "9" * 5000):
        assert "is no step" in complaint(capfd, "train", DEMO, "--from", f"{run}@{step}", "--run", new)
    assert "it names no run" in complaint(capfd, "train", DEMO, "--from", "@2", "--run", new)
    assert not new.exists()
    run.rename(tmp_path / "run@home")
    assert train_here(new, "train.steps=1", flags=("--from", f"{tmp_path}/run@home@2")) == 0
    assert train_here(tmp_path / "newer", "train.steps=1", flags=("--from", f"{tmp_path}/run@home")) == 0


def test_a_place_without_permission(capfd: Complain) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        with as_nobody():
            said = complaint(capfd, "train", DEMO, "--run", Path(folder) / "run")
            assert folder in said and "Permission denied" in said
            assert folder in complaint(capfd, "train", DEMO, "--run", folder)
        assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize("name", ["checkpoints", "run.lock"])
def test_a_run_folder_with_something_else_in_the_place_of_its_parts(name: str, tmp_path: Path, capfd: Complain) -> None:
    """Found before the first step, not when the first checkpoint is due."""
    run = tmp_path / "run"
    run.mkdir()
    if name == "run.lock":
        (run / name).mkdir()
    else:
        (run / name).touch()
    assert f"{run / name}: " in complaint(capfd, "train", DEMO, "--run", run)
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("place", ["/proc/run", "/sys/run", "/dev/null/run", "/dev/null"])
def test_a_place_that_takes_no_folder(place: str, capfd: Complain) -> None:
    assert place in complaint(capfd, "train", DEMO, "--run", place)


def test_a_read_only_file_system(started: Path, tmp_path: Path, capfd: Complain) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mounted], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        run = Path(shutil.copytree(started, mounted / "run"))
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        before = checksums(run)
        assert "Read-only" in complaint(capfd, "train", DEMO, "--run", run, "--resume")
        assert "Read-only" in complaint(capfd, "train", DEMO, "--run", mounted / "new")
        assert checksums(run) == before
    finally:
        subprocess.run(["umount", mounted], check=True)
