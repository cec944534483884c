"""`torchrun -m -- onecurve.cli train CONFIG --run DIR`: the same run, folder, errors and stops as `onecurve train`.

(`--` keeps torchrun's own parser, which knows a `--run-path`, from reading `--run`.)
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import onecurve

ROOT = Path(onecurve.__file__).parents[1]


def torchrun(run, *sets, ranks=2, agent=(), resume=False, flags=(), armed="", wait=True):
    settings = [part for text in (*run.sets, *sets) for part in ("--set", text)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *agent]
    command += ["-m", "--", "onecurve.cli", "train", run.config]
    command += ["--run", run.folder, *settings, *(["--resume"] if resume else []), *flags]
    environment = {**os.environ, "ONECURVE_FAULTS": armed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([str(c) for c in command], env=environment, stderr=subprocess.PIPE, text=True)
    if not wait:
        return process
    _, errors = process.communicate(timeout=110)
    return process.returncode, errors


def ours(errors):
    return [line for line in errors.splitlines() if line.startswith("onecurve: ")]


@pytest.mark.slow
def test_its_restarts_resume(new_run, reference, tmp_path):
    """Without --resume: the second attempt resumes by itself. One lock, one set of records, the reference's bits."""
    run = new_run("layout.dp=2", "checkpoint.background=false")
    armed = f"kill:rank=1,step=8,place=forward,once={tmp_path / 'fired'}"
    code, errors = torchrun(run, agent=("--max-restarts", "1"), armed=armed)
    assert code == 0, errors
    assert (tmp_path / "fired").exists() and "onecurve: resumed at step 5 of 20" in errors
    assert sum(line.startswith("onecurve: done: 20 steps, loss ") for line in ours(errors)) == 1, "rank 0 alone says it"
    assert run.result() == reference()
    assert run.events("end") and not list(run.folder.glob("errors/*"))


@pytest.mark.slow
def test_four_ranks_then_local_ones(new_run, reference):
    run = new_run()
    code, errors = torchrun(run, "layout.zero=3", ranks=4, armed="raise:rank=2,step=13,place=exchange")
    assert code == 1
    assert "InjectedFault: injected at rank=2, step=13" in errors.partition("Root Cause")[2]
    assert "exitcode  : 3" in errors.partition("Root Cause")[2]
    assert run.train("layout.dp=3", resume=True) == 0
    assert run.result() == reference()


@pytest.mark.slow
def test_refused_in_one_line_with_its_exit_code(new_run, reference):
    run = new_run()
    assert run.train() == 0
    code, errors = torchrun(run, ranks=4)
    assert code == 1 and "exitcode  : 2" in errors.partition("Root Cause")[2]
    assert ours(errors) == [
        f"onecurve: {run.folder} holds a run already; go on with it by --resume, or give another --run"
    ]
    code, errors = torchrun(run, ranks=4, resume=True)
    assert code == 0 and "is finished" in errors
    other = type(run)(run.folder.with_name("other"), run.config)
    code, errors = torchrun(other, ranks=2)
    (line,) = ours(errors)
    assert code == 1 and "layout.dp = 4, but torchrun started 2 ranks; start 4, or --set layout.dp=2" in line
    code, errors = torchrun(other, "layout.dp=2", flags=("--restarts", "1"))
    assert code == 1 and "--max-restarts does the same" in errors


@pytest.mark.slow
def test_a_folder_in_use(new_run):
    run = new_run("train.steps=100000", "layout.dp=2")
    command = run.start()
    run.wait_for_row(3)
    code, errors = torchrun(run)
    (line,) = ours(errors)
    assert code == 1 and f"in use by process {command.pid}" in line
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 75


@pytest.mark.slow
def test_sigterm_to_torchrun(new_run, reference):
    sets = ("train.steps=300", "checkpoint.every_steps=100")
    run = new_run(*sets, "layout.dp=2")
    process = torchrun(run, wait=False)
    run.wait_for_row(3, seconds=90)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    stopped = [line for line in ours(errors) if "stopped at step" in line]
    assert len(stopped) == 1, errors
    assert "resume with: torchrun --nproc-per-node 2 -m -- onecurve.cli train " in stopped[0]
    assert run.train("layout.dp=4", resume=True) == 0
    assert run.result() == reference(*sets)
