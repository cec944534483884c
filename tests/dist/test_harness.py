import time

import pytest
import torch
import torch.distributed as dist

from onecurve.errors import RunFailed
from tests.dist.harness import run_dist


def test_results_come_back_in_rank_order():
    def fn(context, factor):
        total = torch.tensor([context.rank * factor])
        dist.all_reduce(total)
        return [context.rank, total.item()]

    assert run_dist(fn, 3, 2) == [[0, 6], [1, 6], [2, 6]]


def test_one_rank_has_a_group_too():
    assert run_dist(lambda context: dist.get_world_size(), 1) == [1]


def test_limit_ends_the_call(capfd):
    started = time.monotonic()
    with pytest.raises(RunFailed, match="longer than 1 s"):
        run_dist(lambda context: time.sleep(60), 2, seconds=1)
    assert time.monotonic() - started < 4
