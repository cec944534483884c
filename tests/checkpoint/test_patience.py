"""Who gives signs of life while the ranks wait for each other's disks, and who does not."""

import threading

import pytest

from onecurve.checkpoint import patience
from onecurve.checkpoint.patience import together
from tests.checkpoint.fakes import all_good, on_ranks


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(patience, "PAUSE", 0.01)


def test_a_rank_that_is_done_lives_and_one_whose_bytes_stand_still_falls_silent():
    stuck, slow, done = signs = [], [], []
    enough = threading.Event()

    def until_enough(count):
        while len(slow) < 10:
            count(1)
            enough.wait(0.001)
        enough.set()

    works = [lambda count: enough.wait(30), until_enough, lambda count: "done"]
    told = all_good(on_ranks(3, lambda mesh: together(mesh, works[mesh.rank], signs[mesh.rank].append, "it")))
    assert told == [True, None, "done"] and {*stuck, *slow, *done} == {"it"}
    assert len(stuck) < 5 < len(done)  # stuck: at the beginning, and when it was done after all


def test_what_the_work_raises_is_raised_where_it_was_waited_for():
    def fails(count):
        raise OSError("no")

    told = on_ranks(2, lambda mesh: together(mesh, fails if mesh.rank else lambda _: 1, lambda _: None, "it"))
    assert told[0] == 1 and isinstance(told[1], OSError)
