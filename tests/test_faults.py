"""The fault tool: each action at its (rank, step, place) and nowhere else."""

import errno
import re
import time

import pytest
import torch
import torch.distributed as dist

from onecurve import faults
from onecurve.errors import InputError, RunFailed
from onecurve.launch import run_ranks, with_restarts
from tests.commands import DEMO, ROOT, complaint


@pytest.fixture(autouse=True)
def nothing_armed():
    yield
    faults.disarm()
    faults.here(None, None)


def test_nothing_armed_does_nothing():
    tensor = torch.zeros(3)
    faults.at("save", rank=0, step=1)
    assert faults.poison(tensor, "gradient", rank=0, step=1) is tensor
    assert tensor.tolist() == [0, 0, 0]


def test_filters_rank_step_and_place():
    faults.arm("raise:rank=3,step=12,place=save")
    for rank, step, place in ((3, 12, "exchange"), (3, 11, "save"), (2, 12, "save")):
        faults.at(place, rank=rank, step=step)
    with pytest.raises(faults.InjectedFault, match="rank=3, step=12, place=save"):
        faults.at("save", rank=3, step=12)
    faults.at("save", rank=3, step=12)  # once by default


def test_rank_and_step_default_to_where_the_process_is():
    faults.arm(["raise:rank=1,step=2"])
    faults.here(1, 1)
    faults.at("forward")
    faults.here(1, 2)
    with pytest.raises(faults.InjectedFault):
        faults.at("forward")


def test_after_and_times():
    faults.arm("io:place=write,after=2,times=2,error=EIO")
    hit = []
    for _ in range(6):
        try:
            faults.at("write")
            hit.append(0)
        except OSError as error:
            hit.append(error.errno)
    assert hit == [0, 0, errno.EIO, errno.EIO, 0, 0]


def test_io_is_a_full_disk_by_default():
    faults.arm("io:place=write")
    with pytest.raises(OSError, match="No space left") as caught:
        faults.at("write")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e30"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poison_one_element_of_any_layout(value, dtype):
    faults.arm(f"poison:place=gradient,value={value},index=4")
    tensor = torch.zeros(2, 3, dtype=dtype).t().requires_grad_()  # [3, 2], not contiguous
    faults.poison(tensor, "loss")
    assert not tensor.any()
    faults.poison(tensor, "gradient")
    expected = torch.zeros(3, 2, dtype=dtype)
    expected.view(-1)[4] = float(value)
    assert torch.equal(tensor.detach().nan_to_num(7), expected.nan_to_num(7))
    faults.at("gradient")  # a poison has no effect at a plain point


def test_poison_spares_an_empty_tensor_and_waits_for_the_next():
    faults.arm("poison:place=gradient")
    faults.poison(torch.zeros(0), "gradient")
    assert faults.poison(torch.zeros(1), "gradient").isnan().all()


def test_once_over_processes(tmp_path):
    marker = tmp_path / "fired"
    faults.arm([f"raise:once={marker}", f"raise:once={marker}"])
    with pytest.raises(faults.InjectedFault):
        faults.at("anywhere")
    faults.arm(f"raise:once={marker}")
    faults.at("anywhere")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("explode:rank=1", "allowed: kill, stop"),
        ("kill:rnak=1", "'rnak=1'; allowed for kill: rank"),
        ("kill:rank", "unknown option 'rank'"),
        ("kill:rank=three", "rank must be a number, not 'three'"),
        ("raise:value=1", "unknown option 'value=1'"),
        ("io:error=EVERYTHING", "a name from errno"),
        ("kill:signal=NOW", "a name such as KILL"),
        ("slow:seconds=-1", "seconds must be from 0"),
        ("slow:seconds=nan", "seconds must be from 0"),
        ("slow:seconds=inf", "seconds must be from 0"),
    ],
)
def test_bad_specs_are_refused_by_name(spec, says):
    with pytest.raises(InputError, match=says):
        faults.arm(spec)
    assert not faults.armed


def stepping(context):
    for step in range(1, 6):
        context.progress(step)
        context.place("exchange")
        dist.barrier()
    return "done"


def test_a_loop_that_only_reports_steps_can_be_hit(tmp_path):
    def worker(context):
        for step in range(1, 6):
            context.progress(step)
            dist.barrier()

    faults.arm("kill:rank=1,step=4,place=step")
    with pytest.raises(RunFailed, match="rank 1 vanished without a word at step 4: killed by SIGKILL"):
        run_ranks(worker, 2, folder=tmp_path)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("kill:rank=1,step=3,place=exchange", "rank 1 vanished.*at step 3, in exchange: killed by SIGKILL"),
        ("kill:rank=1,step=3,signal=SEGV", "rank 1 vanished.*at step 3, in exchange: killed by SIGSEGV"),
        ("exit:rank=0,step=2", "rank 0 vanished.*exit code 0"),
        ("exit:rank=0,step=2,code=9", "rank 0 vanished.*exit code 9"),
        ("raise:rank=2,step=5", "rank 2 failed at step 5, in exchange: InjectedFault"),
        ("stop:rank=2,step=4", "rank 2 made no progress for 1 s at step 4, in exchange: it is stopped"),
        ("hang:rank=1,step=4", "rank 1 made no progress for 1 s at step 4, in exchange: it hangs"),
    ],
)
def test_from_the_environment(tmp_path, monkeypatch, spec, says):
    monkeypatch.setenv(faults.ENVIRONMENT, spec)
    with pytest.raises(RunFailed, match=says):
        run_ranks(stepping, 3, folder=tmp_path, stall_seconds=1)
    faults.disarm()
    monkeypatch.setenv(faults.ENVIRONMENT, "kill:rank=7")
    assert run_ranks(stepping, 3, folder=tmp_path) == ["done"] * 3


def test_a_bad_spec_in_the_environment_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setenv(faults.ENVIRONMENT, "explode")
    with pytest.raises(InputError):
        run_ranks(stepping, 2, folder=tmp_path)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("kill:rank=1,step=3,place=nowhere", "unknown place 'nowhere'; kill at: step, forward, "),
        ("kill:place=logits", "unknown place 'logits'; kill at: step, forward, "),
        ("hang:place=save;poison:place=forward", "unknown place 'forward'; poison at: logits, gradient"),
        ("kill:rank=99", "no such rank; they are 0 to 3"),
        ("kill:rank=-1", "no such rank; they are 0 to 3"),
        ("slow:seconds=-1", "seconds must be from 0"),
    ],
)
def test_the_commands_refuse_what_could_never_fire(tmp_path, monkeypatch, capfd, spec, says):
    monkeypatch.setenv(faults.ENVIRONMENT, spec)
    assert says in complaint(capfd, "train", DEMO, "--run", tmp_path / "run")
    assert says in complaint(capfd, "verify", DEMO, "--quick", "--out", tmp_path / "proof.json")
    assert list(tmp_path.iterdir()) == []


def test_every_place_of_the_package_is_known():
    source = "".join(path.read_text() for path in (ROOT / "onecurve").rglob("*.py"))
    used = set(re.findall(r"(?:faults\.at|context\.place)\(\"([^\"]+)\"", source))
    assert used == set(faults.PLACES)
    assert set(re.findall(r"faults\.poison\(\w+, \"([^\"]+)\"", source)) == set(faults.POISON_PLACES)


def test_once_lets_a_restart_go_through(tmp_path):
    faults.arm(f"kill:rank=1,step=3,once={tmp_path / 'fired'}")
    attempts = []

    def run(attempt):
        attempts.append(attempt)
        return run_ranks(stepping, 2, folder=tmp_path)

    assert with_restarts(run, 1, lambda: 0) == ["done"] * 2
    assert attempts == [0, 1]


def test_hooks_are_nearly_free():
    tensor = torch.zeros(1)
    started = time.perf_counter()
    for _ in range(10_000):
        faults.at("exchange", rank=0, step=1)
        faults.poison(tensor, "gradient")
    assert (time.perf_counter() - started) / 10_000 < 20e-6  # measured: 0.2 µs
