"""The same worker under torchrun: same results, same records, same way to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import onecurve

PROGRAM = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from onecurve.launch import context_from_torchrun
folder = Path(sys.argv[1])
with context_from_torchrun(folder, stall_seconds=20) as context:
    for step in range(1, int(sys.argv[2]) + 1):
        context.progress(step)
        context.place("exchange")
        stop = torch.tensor([int(context.stop_requested)])
        dist.all_reduce(stop)
        (folder / f"started-{context.rank}").touch()
        if stop.item():
            (folder / f"stopped-{context.rank}").write_text(str(step))
            break
        time.sleep(0.002)
(folder / f"threads-{context.rank}").write_text(str(torch.get_num_threads()))
"""


def torchrun(folder, steps, faults=""):
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "ONECURVE_FAULTS": faults,
        "PYTHONPATH": str(Path(onecurve.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, str(program), str(folder), str(steps)], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_runs_to_the_end(tmp_path):
    process = torchrun(tmp_path, 5)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in range(2)] == ["1", "1"]


@pytest.mark.slow
def test_an_error_is_recorded_and_blamed(tmp_path):
    process = torchrun(tmp_path, 5, "raise:rank=1,step=3")
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    record = json.loads((tmp_path / "errors/rank-1.json").read_text())
    assert (record["type"], record["step"], record["place"]) == ("InjectedFault", 3, "exchange")
    assert not record["secondary"]
    other = tmp_path / "errors/rank-0.json"
    assert not other.exists() or json.loads(other.read_text())["secondary"]
    assert "InjectedFault: injected at rank=1" in errors.partition("Root Cause")[2]


@pytest.mark.slow
def test_sigterm_to_torchrun_stops_all_at_one_step(tmp_path):
    process = torchrun(tmp_path, 100_000)
    limit = time.monotonic() + 40
    while not all((tmp_path / f"started-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=40)
    steps = {(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)}
    assert len(steps) == 1
    assert not list(tmp_path.glob("errors/*"))


def test_outside_torchrun_it_says_so(tmp_path):
    from onecurve.errors import InputError
    from onecurve.launch import context_from_torchrun

    with pytest.raises(InputError, match="RANK"), context_from_torchrun(tmp_path):
        pass
