"""Every path that a command takes, with everything that may be there instead of what it should be: refused in one line
that names it (exit 2), at once, and left as it was."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onecurve import cli, faults
from onecurve.errors import InputError
from onecurve.paths import FILE, FOLDER, need, need_place, read_bytes, refusal
from tests.commands import DEMO, Complain, as_nobody, complaint, train_here


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paths") / "run"
    assert train_here(folder, "train.steps=1") == 0
    return folder


@pytest.fixture
def place() -> Iterator[Path]:
    """A short one (a socket's name has to be), for everybody."""
    with tempfile.TemporaryDirectory(prefix="onecurve-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def make(kind: str, place: Path) -> Path:
    """Something that no command can use, and its path."""
    path = place / "given"
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a link to a pipe":
        os.mkfifo(place / "pipe")
        path.symlink_to("pipe")
    elif kind == "a device":
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # zeros without an end
        except PermissionError:
            pytest.skip("only root can make a device")
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "a link to nowhere":
        path.symlink_to("nowhere")
    elif kind == "links in a circle":
        path.symlink_to("given")
    elif kind == "below a file":
        path.write_text("a file")
        path /= "run"
    elif kind == "too long a name":
        path = place / ("given" * 60)
    return path


KINDS = {
    "a named pipe": "it is a named pipe",
    "a link to a pipe": "it is a named pipe",
    "a device": "it is a device",
    "a socket": "it is a socket",
    "a link to nowhere": "link to nowhere",
    "links in a circle": "its links lead in a circle",
    "below a file": "given is not a folder",
    "too long a name": "longer than a name may be",
}
COMMANDS = {
    "train CONFIG": lambda path, run: ("train", path),
    "train --run": lambda path, run: ("train", DEMO, "--run", path),
    "train --resume": lambda path, run: ("train", DEMO, "--run", path, "--resume"),
    "train --from": lambda path, run: ("train", DEMO, "--from", path),
    "train --from @": lambda path, run: ("train", DEMO, "--from", f"{path}@1"),
    "train data.source": lambda path, run: ("train", DEMO, "--set", f"data.source={path}"),
    "plan CONFIG": lambda path, run: ("plan", path),
    "verify CONFIG": lambda path, run: ("verify", path),
    "verify --out": lambda path, run: ("verify", DEMO, "--out", path),
    "verify data.source": lambda path, run: ("verify", DEMO, "--set", f"data.source={path}"),
    "compare A": lambda path, run: ("compare", path, run),
    "compare B": lambda path, run: ("compare", run, path),
    "inspect": lambda path, run: ("inspect", path),
    "inspect --check": lambda path, run: ("inspect", path, "--check"),
    "sample": lambda path, run: ("sample", path),
    "export RUN": lambda path, run: ("export", path, "--out", "new"),
    "export --out": lambda path, run: ("export", run, "--out", path),
    "prepare --out": lambda path, run: ("prepare", DEMO, "--out", path),
    "demo --run": lambda path, run: ("demo", "--run", path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_no_command_can_use(
    command: str, kind: str, run: Path, place: Path, tmp_path: Path, capfd: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = make(kind, place)
    before = sorted((entry, entry.lstat().st_mode) for entry in place.iterdir())
    said = complaint(capfd, *COMMANDS[command](path, run))
    if command not in ("prepare --out", "export --out"):  # whatever is there, they take a new name only
        assert KINDS[kind] in said and len(said) < 900, said
    assert "given" in said
    assert sorted((entry, entry.lstat().st_mode) for entry in place.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("compare B", "export --out")])
def test_no_permission(command: str, run: Path, place: Path, capfd: Complain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    (closed / "given").mkdir()
    closed.chmod(0)
    with as_nobody():
        said = complaint(capfd, *COMMANDS[command](closed / "given", run))
    assert str(closed) in said and ("Permission denied" in said or "is not readable" in said)


@pytest.mark.parametrize("words", [("train", ""), ("train", DEMO, "--run", ""), ("train", DEMO, "--run="), ("",)])
def test_an_empty_argument(words: tuple[object, ...], tmp_path: Path, capfd: Complain, monkeypatch) -> None:
    """A shell's variable that is not set is not the folder where the command runs."""
    monkeypatch.chdir(tmp_path)
    assert "is empty" in complaint(capfd, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_removed_under_the_command(tmp_path: Path, capfd: Complain, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "was removed; cd to" in complaint(capfd, "plan", DEMO)


def test_a_line_break_in_a_runs_name(tmp_path: Path, capfd: Complain) -> None:
    assert train_here(tmp_path / "a\nb", "train.steps=1") == 0
    assert "run folder " in (said := capfd.readouterr().err) and "a\\nb\n" in said
    assert cli.main(["compare", str(tmp_path / "a\nb"), str(tmp_path / "a\nb")]) == 0
    assert capfd.readouterr().out.splitlines()[1].endswith("a\\nb")


@pytest.mark.parametrize("name", ["run.json", "config.toml", "metrics.jsonl"])
def test_a_pipe_within_a_run_folder(name: str, place: Path, capfd: Complain) -> None:
    made = place / "run"
    faults.arm("kill:rank=2,step=2,place=forward")
    assert train_here(made, "checkpoint.every_steps=1", "checkpoint.background=false") == 3
    faults.disarm()
    for entry in (name, "run.fence"):
        (made / entry).unlink()
        os.mkfifo(made / entry)
    capfd.readouterr()
    assert train_here(made, flags=("--resume",)) == 2
    assert f"{name}: it is a named pipe" in capfd.readouterr().err


def test_a_path_on_one_line_and_not_longer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; cure") as caught:
        need(tmp_path / "a\nb" / ("x" * 200) / ("y" * 200), FILE, "config", "cure")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_places_for_what_is_to_be_made(tmp_path: Path, place: Path) -> None:
    (tmp_path / "file").touch()
    need_place(tmp_path / "file", FILE, "", "")
    need_place(tmp_path, FOLDER, "", "")
    need_place(tmp_path / "a" / "b", FOLDER, "", "")
    (place / "others").mkdir(mode=0o755)
    (place / "others" / "file").touch()
    with as_nobody():
        for path, wanted in (("file", FILE), ("new", FILE), ("a/b", FOLDER), (".", FOLDER)):
            with pytest.raises(InputError, match="others may not be written to"):
                need_place(place / "others" / path, wanted, "", "")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match="link: it is a link to nowhere"):
        need_place(tmp_path / "link" / "x", FOLDER, "--run", "")


def test_a_file_of_more_bytes_than_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert read_bytes(tmp_path / "f", "record", "", 5) == read_bytes(tmp_path / "f", "record", "") == b"12345"
    with pytest.raises(InputError, match="more than 4 bytes, so it is no record"):
        read_bytes(tmp_path / "f", "record", "", 4)


def test_other_errors_keep_their_traceback() -> None:
    assert refusal(PermissionError(13, "Permission denied", "/a")) == (
        "/a: Permission denied; name another place, or change its permissions"
    )
    assert (
        refusal(FileNotFoundError(2, "no", "/a")) == refusal(PermissionError(13, "x")) == refusal(KeyError("a")) == ""
    )
