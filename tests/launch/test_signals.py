"""SIGTERM and SIGINT to anybody: all ranks agree on a step, save, and the command ends with 75. Nothing hangs."""

import contextlib
import os
import signal
import time

import pytest

from onecurve.errors import Stopped
from onecurve.launch import rank, ranks, run_ranks
from tests.launch.helpers import Command, announce, leftovers, rank_pids, stepping_worker

RUNS = 10


def saved_steps(folder, world):
    return {(folder / f"saved-{rank}").read_text() for rank in range(world)}


@pytest.mark.parametrize("target", ["parent", "rank", "group", "everybody"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_stops_all_at_one_step(tmp_path, target, signum):
    for run in range(RUNS):
        folder = tmp_path / str(run)
        folder.mkdir()
        command = Command(lambda folder=folder: run_ranks(stepping_worker(), 3, folder=folder), folder)
        pids = rank_pids(folder, 3)
        time.sleep(0.01 * run)
        if target == "group":
            os.killpg(command.pid, signum)
        else:
            chosen = {"parent": [command.pid], "rank": [pids[run % 3]], "everybody": [command.pid, *pids]}[target]
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):  # ended already: the first signal was for all
                    os.kill(pid, signum)
        assert command.wait(10) == 75
        assert len(saved_steps(folder, 3)) == 1
        (step,) = saved_steps(folder, 3)
        assert command.outcome == f"stopped at step {step} of 2000"
        assert leftovers(folder) == []


def test_the_same_request_delivered_twice_counts_once(tmp_path):
    """`timeout` and a terminal may reach the process and its group: not a second press."""
    command = Command(lambda: run_ranks(stepping_worker(pause=0.02), 2, folder=tmp_path), tmp_path)
    rank_pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGTERM)
    time.sleep(0.02)
    os.killpg(command.pid, signal.SIGTERM)
    assert command.wait() == 75
    assert command.outcome.startswith("stopped at step")


def test_a_second_signal_ends_at_once(tmp_path):
    def deaf(context):
        announce(context)
        while True:
            time.sleep(0.01)

    command = Command(lambda: run_ranks(deaf, 2, folder=tmp_path), tmp_path)
    rank_pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.4)
    os.kill(command.pid, 0)  # one is not enough for this worker
    os.kill(command.pid, signal.SIGINT)
    started = time.monotonic()
    assert command.wait() == 75
    assert time.monotonic() - started < 1
    assert command.outcome.startswith("ended at once by SIGINT")
    assert leftovers(tmp_path) == []


def test_a_second_signal_when_all_have_stopped_changes_nothing(tmp_path):
    """They wait for each other to leave: one is late."""

    def late(context):
        announce(context)
        while not context.stop_requested:
            time.sleep(0.01)
        raise Stopped("stopped at step 3 of 5")

    def main():
        real = rank._leave_together

        def slowly(setup, board, code):
            if setup.rank == 1:
                (tmp_path / "said").touch()
                time.sleep(60)
            return real(setup, board, code)

        rank._leave_together = slowly
        run_ranks(late, 2, folder=tmp_path)

    command = Command(main, tmp_path)
    rank_pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGTERM)
    time.sleep(0.4)
    assert (tmp_path / "said").exists()
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait(3) == 75
    assert command.outcome == "stopped at step 3 of 5"
    assert leftovers(tmp_path) == []


def test_signals_while_starting(tmp_path):
    """At any moment the signal is taken: by the command's own handler where no rank runs yet, else by all ranks."""
    for run in range(10):
        folder = tmp_path / str(run)
        folder.mkdir()

        def main(folder=folder):
            signal.signal(signal.SIGTERM, lambda *_: os._exit(60))  # what a command does before and after it runs ranks
            run_ranks(stepping_worker(), 2, folder=folder)

        command = Command(main, folder)
        time.sleep(0.004 * run)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(10) in (75, 60, -signal.SIGTERM)
        if list(folder.glob("pid-?")):
            assert leftovers(folder, wait=2) == []


def test_kill_mode_ends_with_the_first_signal(tmp_path):
    command = Command(lambda: run_ranks(stepping_worker(), 2, folder=tmp_path, on_signal="kill"), tmp_path)
    rank_pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait(2) == 75
    assert not list(tmp_path.glob("saved-*"))
    assert leftovers(tmp_path) == []


def test_handlers_are_restored(tmp_path):
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
    run_ranks(lambda context: 1, 2, folder=tmp_path)
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_when_the_ranks_have_just_ended_is_not_lost(tmp_path, monkeypatch):
    """Whoever lets nothing be saved wants to hear of every one: more may come after these ranks."""
    real = ranks._supervise

    def late(*arguments):
        results = real(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return results

    monkeypatch.setattr(ranks, "_supervise", late)
    with pytest.raises(Stopped, match="by SIGTERM"):
        run_ranks(lambda context: context.rank, 1, folder=tmp_path, on_signal="kill")
    assert run_ranks(lambda context: context.rank, 1, folder=tmp_path) == [0]
