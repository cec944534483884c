"""The commands from outside: exit codes, one line for bad input, and a `--help` that loads nothing heavy."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from onecurve.capstone import load_capstone
from onecurve.cli import main
from onecurve.errors import CheckFailed, OnecurveError, RunFailed, Stopped
from onecurve.exits import BROKEN_PIPE, USAGE_ERRORS

ROOT = Path(__file__).parent.parent
DEMO = str(ROOT / "configs" / "demo.toml")
COMMANDS = ["demo", "train", "plan", "verify", "compare", "inspect", "prepare", "sample", "report", "export"]


def run(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "onecurve.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False, **settings)  # type: ignore[call-overload,no-any-return]


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line on stderr of a command that ends with `code` and says nothing on stdout."""
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("onecurve: "), err
    return err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name}" not in text] == []
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: onecurve {name}")


FLAGS = {
    "demo": ["--run"],
    "train": ["--set", "--run", "--resume", "--from", "--restarts"],
    "verify": ["--quick"],
    "inspect": ["--check"],
    "prepare": ["--out", "--glob", "--tokenizer", "--vocab"],
    "export": ["--out", "--format"],
    "sample": ["--prompt", "--tokens", "--temperature", "--top-k", "--seed"],
}


@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    text = capsys.readouterr().out
    assert [flag for flag in FLAGS[command] if flag not in text] == []


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from onecurve.cli import main; main(['--help']);"
        "sys.exit(' '.join({'torch', 'pydantic', 'rich', 'numpy', 'tokenizers', 'blake3'} & set(sys.modules)) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_help_takes_a_fifth_of_importing_torch() -> None:
    def best(command: list[str]) -> float:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
            times.append(time.perf_counter() - begun)
        return min(times)

    torch = best([sys.executable, "-c", "import torch, torch.distributed"])
    assert best([sys.executable, "-m", "onecurve.cli", "--help"]) <= 0.2 * torch


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("onecurve 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing command"),
        (["trian"], "trian"),
        (["train"], "CONFIG"),
        (["train", DEMO, "--resum"], "--resum"),
        (["train", DEMO, "--restarts", "-1"], "--restarts"),
        (["train", DEMO, "--restarts", "many"], "--restarts"),
        (["train", DEMO, "--resume", "--from", "x"], "--from"),
        (["train", DEMO, "--set"], "--set"),
        (["compare", "one"], "RUN"),
        (["plan", "none.toml"], "no such file"),
        (["plan", "none\n\x1b[31m.toml"], "none\\n\\x1b[31m.toml"),
        (["plan", DEMO, "--set", "train.leafs=3"], "train.leaves"),
        (["plan", DEMO, "--set", "layout.dp=5"], "train.leaves = 4"),
        (["train", DEMO, "--set", "model.heads=5"], "1, 2, 4, 8, 16, 32"),
        (["train", DEMO, "--set", "optimizer.lr=nan"], "finite"),
        (["compare", "none", "nothing"], "none: no such folder"),
        (["inspect", "none"], "none"),
        (["prepare", "none", "--out", "/dev/null/x"], "/dev/null"),
        (["report", "none"], "not built yet"),
        (["export", "none"], "--out"),
        (["export", "none", "--out", "new"], "none: no run there"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in complaint(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []  # and nothing was begun


def test_plan_prints_a_plan_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", DEMO, "--set", "layout.dp=2"]) == 0
    out, err = capsys.readouterr()
    assert "29,824 parameters" in out and "2 ranks" in out and err == ""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (CheckFailed("no"), 1, "no"),
        (OnecurveError("why"), 3, "why"),
        (RunFailed("rank 3: ValueError\n  line"), 3, "rank 3: ValueError\n  line"),
        (Stopped("resume with: x"), 75, "resume with: x"),
        (KeyboardInterrupt(), 75, "interrupted"),
        (ZeroDivisionError("bug"), 3, "Traceback"),  # our own mistake: never the code of a failed check
    ],
)
def test_an_error_becomes_its_exit_code(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run: Path | None) -> int:
        raise error

    capstone = type("Capstone", (), {"main": staticmethod(fail)})
    monkeypatch.setattr("onecurve.capstone.load_capstone", lambda: capstone)
    assert main(["demo"]) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err


@pytest.mark.parametrize(("result", "code"), [(0, 0), (1, 1), (None, 0)])
def test_the_demos_result_is_the_exit_code(result: int | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    capstone = type("Capstone", (), {"main": staticmethod(lambda run: seen.append(run) or result)})
    monkeypatch.setattr("onecurve.capstone.load_capstone", lambda: capstone)
    assert main(["demo", "--run", "here"]) == code and seen == [Path("here")]


def test_a_reader_that_goes_away_is_met_quietly() -> None:
    plan = shlex.join([sys.executable, "-m", "onecurve.cli", "plan", str(DEMO)])
    command = f"{plan} | sleep 0; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, BROKEN_PIPE) and done.stderr == ""


def test_it_writes_to_a_terminal_that_knows_ascii_only() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "onecurve.cli", "plan", "nöne.toml"]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 2 and b"ne.toml: no such file" in done.stderr


def test_a_module_run_ends_with_the_exit_code() -> None:
    done = run("plan", DEMO, "--set", "train.steps=0")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_a_caller_keeps_its_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--version"]) == 0 and signal.getsignal(signal.SIGTERM) == before


def test_usage_errors_are_caught_whatever_typer_carries() -> None:
    assert issubclass(typer.BadParameter, USAGE_ERRORS)


def test_the_demo_is_the_one_file_of_the_source_tree() -> None:
    capstone = load_capstone()
    assert Path(str(capstone.__file__)) == ROOT / "code" / "main.py"
    names = ["MiniGPT", "make_corpus", "_train_worker", "verify_resume", "main"]
    assert [name for name in names if not hasattr(capstone, name)] == []


def test_closed_streams_are_no_failure():
    """As daemons and cron start programs: what would be written goes nowhere."""
    command = [sys.executable, "-m", "onecurve.cli", "plan", str(ROOT / "configs" / "demo.toml")]
    closing = "import os, sys; os.closerange(0, 3); os.execv(sys.argv[1], sys.argv[1:])"
    assert subprocess.run([sys.executable, "-c", closing, *command], timeout=60).returncode == 0
