"""One rank fails in any way, anywhere: the right one is named each time, quickly, and nothing is left."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from onecurve.errors import CheckFailed, GaveUp, InputError, OnecurveError, PeerLost, RunFailed, Stopped
from onecurve.launch import run_ranks
from tests.launch.helpers import announce, leftovers

RUNS = 5
SAYS = {"raise": "ValueError: boom", "exit": "exit code 0 before it returned a result", "kill": "killed by SIGKILL"}


def die(kind):
    if kind == "raise":
        raise ValueError("boom")
    if kind == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def failing_worker(kind, place, victim):
    def worker(context):
        announce(context)
        data = torch.ones(50_000)
        for step in range(1, 6):
            context.progress(step, 5)
            for here in ("compute", "exchange", "save"):
                context.place(here)
                hit = step == 3 and here == place and context.rank == victim
                if hit and (here != "exchange" or kind == "raise"):
                    die(kind)
                elif hit:  # while the collective is under way: the next rank comes late to it
                    threading.Timer(0.03, die, [kind]).start()
                if here == "exchange":
                    if step == 3 and place == here and context.rank == (victim + 1) % context.world:
                        time.sleep(0.3)
                    dist.all_reduce(data)
                if here == "save":
                    dist.barrier()
        return "done"

    return worker


@pytest.mark.parametrize("place", ["compute", "exchange", "save"])
@pytest.mark.parametrize("kind", ["raise", "exit", "kill"])
def test_the_failing_rank_is_named_every_time(tmp_path, kind, place):
    for run in range(RUNS):
        folder = tmp_path / str(run)
        folder.mkdir()
        victim = run % 4
        started = time.monotonic()
        with pytest.raises(RunFailed) as caught:
            run_ranks(failing_worker(kind, place, victim), 4, folder=folder, stall_seconds=30)
        assert time.monotonic() - started < 5
        assert caught.value.rank == victim
        first_line = str(caught.value).splitlines()[0]
        assert first_line.startswith(f"rank {victim} ") and SAYS[kind] in first_line, first_line
        assert f"at step 3, in {place}" in first_line
        assert leftovers(folder) == []


def test_without_a_fault_nobody_is_blamed(tmp_path):
    assert run_ranks(failing_worker("kill", "nowhere", 3), 4, folder=tmp_path) == ["done"] * 4
    assert leftovers(tmp_path) == []
    assert not list(tmp_path.glob("errors/*"))


def test_traceback_and_record_of_the_first_error(tmp_path):
    with pytest.raises(RunFailed) as caught:
        run_ranks(failing_worker("raise", "compute", 2), 3, folder=tmp_path)
    assert "Traceback" in str(caught.value) and "in die" in str(caught.value)
    assert '"type": "ValueError"' in (tmp_path / "errors/rank-2.json").read_text()
    assert not list(tmp_path.glob("errors/*.tmp"))


def test_records_of_an_earlier_attempt_are_removed(tmp_path):
    with pytest.raises(RunFailed):
        run_ranks(failing_worker("raise", "compute", 2), 3, folder=tmp_path)
    run_ranks(lambda context: 1, 2, folder=tmp_path)
    assert not list(tmp_path.glob("errors/rank-*"))


def test_a_folder_that_takes_no_records_does_not_hide_the_cause(tmp_path):
    (tmp_path / "errors").write_text("a file where the folder should be")
    with pytest.raises(RunFailed, match="ValueError: boom"):
        run_ranks(failing_worker("raise", "compute", 1), 2, folder=tmp_path)


@pytest.mark.parametrize("kind", [CheckFailed, GaveUp, InputError, Stopped])
def test_errors_raised_on_purpose_keep_type_code_and_line(tmp_path, kind):
    def worker(context):
        dist.barrier()
        raise kind("one line that says it")

    with pytest.raises(OnecurveError) as caught:
        run_ranks(worker, 2, folder=tmp_path)
    assert type(caught.value) is kind
    assert str(caught.value) == "one line that says it"


def test_an_error_type_of_ones_own_keeps_its_exit_code(tmp_path):
    class LossRose(CheckFailed):
        pass

    def worker(context):
        if context.rank == 1:
            raise LossRose("loss rose at step 3")
        dist.barrier()

    with pytest.raises(CheckFailed, match=r"^loss rose at step 3$"):
        run_ranks(worker, 2, folder=tmp_path)


def test_peer_lost_is_not_blamed(tmp_path):
    def worker(context):
        if context.rank == 1:
            time.sleep(0.2)
            raise ValueError("boom")
        raise PeerLost("rank 1 is silent")  # noticed, here, before the real one is reported

    with pytest.raises(RunFailed, match="rank 1 failed: ValueError: boom"):
        run_ranks(worker, 2, folder=tmp_path)


def test_peer_lost_alone_is_named(tmp_path):
    def worker(context):
        if context.rank == 0:
            raise PeerLost("rank 1 is silent")
        time.sleep(0.1)

    with pytest.raises(RunFailed, match="rank 0 failed: PeerLost: rank 1 is silent"):
        run_ranks(worker, 2, folder=tmp_path)


def test_death_before_the_worker_runs(tmp_path, monkeypatch):
    from onecurve.launch import rank as rank_module

    joined = rank_module._join

    def dying(seat):
        if seat.rank == 0:  # it serves the store: the others wait for it
            os.kill(os.getpid(), signal.SIGKILL)
        joined(seat)

    monkeypatch.setattr(rank_module, "_join", dying)
    started = time.monotonic()
    with pytest.raises(RunFailed, match="rank 0 vanished without a word in start-up: killed by SIGKILL"):
        run_ranks(lambda context: 1, 4, folder=tmp_path)
    assert time.monotonic() - started < 5


def test_a_crash_in_native_code_brings_its_stack(tmp_path):
    def worker(context):
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.barrier()

    with pytest.raises(RunFailed, match=r"(?s)rank 1 vanished.*SIGSEGV.*Fatal Python error.*in worker"):
        run_ranks(worker, 2, folder=tmp_path)


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", torch.ones(1)])
def test_a_result_that_is_not_json_is_an_error_of_that_rank(tmp_path, value):
    with pytest.raises(RunFailed, match="rank 1 failed: TypeError"):
        run_ranks(lambda context: value if context.rank else 0, 2, folder=tmp_path)


def test_sys_exit_is_no_result(tmp_path):
    def worker(context):
        raise SystemExit(0)

    with pytest.raises(RunFailed, match="SystemExit"):
        run_ranks(worker, 2, folder=tmp_path)
