"""Results, groups, threads, and what a launch costs and leaves untouched."""

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onecurve.errors import InputError, RunFailed
from onecurve.launch import run_ranks


def sum_over_ranks(context, factor=1):
    total = torch.tensor([float(context.rank * factor)])
    dist.all_reduce(total)
    return [total.item(), torch.get_num_threads()]


def test_results_in_rank_order(tmp_path):
    results = run_ranks(lambda context: {"rank": context.rank, "world": context.world}, 3, folder=tmp_path)
    assert results == [{"rank": rank, "world": 3} for rank in range(3)]


def test_results_larger_than_any_pipe(tmp_path):
    results = run_ranks(lambda context: "x" * (3_000_000 + context.rank), 3, folder=tmp_path)
    assert [len(result) for result in results] == [3_000_000, 3_000_001, 3_000_002]


def test_a_full_pipe_stops_nobody(tmp_path):
    """Rank 0's big result is taken while rank 1 still works, and the other way round."""

    def worker(context):
        if context.rank:
            time.sleep(0.3)
        return list(range(300_000))

    assert [len(result) for result in run_ranks(worker, 2, folder=tmp_path)] == [300_000] * 2


def test_floats_arrive_bit_for_bit(tmp_path):
    values = [0.1 + 0.2, 5e-324, -0.0, float("inf"), 1.7976931348623157e308]
    (back,) = run_ranks(lambda context: [*values, float("nan")], 1, folder=tmp_path)
    assert [value.hex() for value in back[:-1]] == [value.hex() for value in values]
    assert back[-1] != back[-1]


def test_one_rank_has_no_group_unless_asked(tmp_path):
    def worker(context):
        return dist.is_initialized()

    assert run_ranks(worker, 1, folder=tmp_path) == [False]
    assert run_ranks(worker, 1, folder=tmp_path, group=True) == [True]


def test_one_thread_in_parent_and_ranks(tmp_path):
    torch.set_num_threads(2)
    assert run_ranks(sum_over_ranks, 2, folder=tmp_path) == [[1.0, 1]] * 2
    assert torch.get_num_threads() == 1


def test_two_threads_start_fresh_interpreters(tmp_path):
    worker = functools.partial(sum_over_ranks, factor=3)
    assert run_ranks(worker, 2, folder=tmp_path, threads=2) == [[3.0, 2]] * 2


def exposed(context, secret):
    """Whether `secret` is in what other users, or the rank's children, can read of this process."""
    return [secret.encode() in Path(f"/proc/self/{name}").read_bytes() for name in ("cmdline", "environ")]


def test_a_workers_arguments_are_not_on_a_command_line(tmp_path):
    """`ps` shows it to everybody, and a mirror's URL may hold a password."""
    assert run_ranks(functools.partial(exposed, secret="hunter2"), 2, folder=tmp_path, threads=2) == [[False] * 2] * 2


@pytest.mark.slow
def test_fresh_interpreters_report_errors_alike(tmp_path):
    with pytest.raises(RunFailed, match="rank 0 failed: ValueError"):
        run_ranks(functools.partial(sum_over_ranks, factor="x"), 1, folder=tmp_path, start="spawn")


def test_a_closure_cannot_reach_a_fresh_interpreter(tmp_path):
    with pytest.raises(InputError, match="top of a module"):
        run_ranks(lambda context: 1, 1, folder=tmp_path, threads=2)
    with pytest.raises(InputError, match="JSON"):
        run_ranks(functools.partial(sum_over_ranks, factor={1}), 1, folder=tmp_path, threads=2)


def test_a_parent_that_trained_can_still_fork(tmp_path):
    torch.set_num_threads(1)
    weight = torch.ones(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()

    def worker(context):
        mine = torch.ones(8, 8, requires_grad=True)
        (mine @ mine).sum().backward()
        return mine.grad.sum().item()

    assert run_ranks(worker, 2, folder=tmp_path) == [1024.0] * 2


def _listening(pid: int) -> list[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # the one that lists the folder
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].rpartition(":")[0])
    return found


def test_ranks_listen_on_loopback_only(tmp_path):
    def worker(context):
        dist.barrier()
        return _listening(os.getpid())

    results = run_ranks(worker, 3, folder=tmp_path)
    assert sum(map(len, results)) >= 1, "nothing listens: the test would see nothing"
    assert {address for result in results for address in result} <= {"0100007F", "0" * 24 + "01000000"}


def test_progress_of_rank_0_reaches_the_parent(tmp_path):
    seen = []

    def worker(context):
        for step in range(1, 4):
            context.progress(step if context.rank == 0 else 99, 3, f"loss {step}.0 ✓")
            time.sleep(0.12)

    run_ranks(worker, 2, folder=tmp_path, progress=lambda *values: seen.append(values))
    assert seen == [(step, 3, f"loss {step}.0 ✓") for step in (1, 2, 3)]


def test_work_left_to_threads_is_waited_for(tmp_path):
    import threading

    def worker(context):
        threading.Thread(target=lambda: (time.sleep(0.2), (tmp_path / "saved").write_text("yes"))).start()

    run_ranks(worker, 1, folder=tmp_path)
    assert (tmp_path / "saved").read_text() == "yes"


def test_four_ranks_start_and_end_quickly(tmp_path):
    best = min(_timed(tmp_path) for _ in range(3))
    assert best < 0.5  # measured: 0.04


def _timed(folder):
    started = time.perf_counter()
    run_ranks(sum_over_ranks, 4, folder=folder)
    return time.perf_counter() - started


def test_output_is_neither_lost_nor_doubled_and_dynamo_stays_out(tmp_path):
    program = """
import sys
from pathlib import Path
from onecurve.launch import run_ranks
def worker(context):
    print("from rank", context.rank)
    return "torch._dynamo" in sys.modules
print("before", end=" ")
print(run_ranks(worker, 2, folder=Path(sys.argv[1])), "torch._dynamo" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = sorted(done.stdout.replace("before ", "before\n").split("\n"))
    assert lines == ["", "[False, False] False", "before", "from rank 0", "from rank 1"]
    assert done.stderr == ""


@pytest.mark.parametrize(("world", "options"), [(0, {}), (1, {"on_signal": "shout"})])
def test_bad_arguments_are_refused(tmp_path, world, options):
    with pytest.raises(InputError):
        run_ranks(lambda context: 1, world, folder=tmp_path, **options)
