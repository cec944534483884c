"""The shared-memory transport: what it moves, and what it says when a peer is gone, silent or out of step."""

import threading
import time

import pytest
import torch

from onecurve.errors import PeerLost
from onecurve.parallel.shared import LARGEST, SharedMemory


class Room:
    """Ranks as threads: enough for a transport of sockets and mapped memory."""

    def __init__(self, size: int, limit: float = 10.0):
        self.size = size
        self._payloads = [b""] * size
        self._barrier = threading.Barrier(size)
        self.ranks = [None] * size
        self.each(lambda rank: self.ranks.__setitem__(rank, SharedMemory(rank, size, self._share_any(rank), limit)))

    def _share_any(self, rank):
        def share(payload):
            self._payloads[rank] = payload
            self._barrier.wait()
            found = list(self._payloads)
            self._barrier.wait()
            return found

        return share

    def each(self, work) -> list:
        """`work(rank)` on all ranks at once; results or errors in rank order."""
        found = [None] * self.size

        def run(rank):
            try:
                found[rank] = work(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def close(self):
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def room():
    made = []

    def make(*args, **options):
        made.append(Room(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 7, LARGEST - 9, LARGEST - 8, 3 * LARGEST + 1])
def test_share_takes_any_length(room, size, length):
    here = room(size)
    payloads = [bytes([65 + rank]) * length for rank in range(size)]
    assert here.each(lambda rank: here.ranks[rank].all_gather_bytes(payloads[rank])) == [payloads] * size


def test_a_peer_that_goes_is_seen_at_once(room):
    here = room(3, limit=60.0)
    began = time.monotonic()

    def work(rank):
        if rank == 1:
            here.ranks[1].close()
            return None
        return here.ranks[rank].all_gather_bytes(b"x")

    found = here.each(work)
    assert time.monotonic() - began < 5
    assert [type(found[rank]) for rank in (0, 2)] == [PeerLost, PeerLost]
    assert all("rank 1" in str(found[rank]) for rank in (0, 2))


def test_silence_has_a_limit_and_is_named(room):
    here = room(2, limit=0.3)
    found = here.each(lambda rank: here.ranks[0].all_gather_bytes(b"x") if rank == 0 else time.sleep(0.6))
    assert isinstance(found[0], PeerLost)
    assert "rank 0 waited for rank 1 in all-gather of bytes #1 for 0.3 s" in str(found[0])


def test_ranks_that_are_out_of_step_are_named(room):
    here = room(2)

    def work(rank):
        mine = here.ranks[rank].empty(4, torch.float32)
        if rank == 0:
            return here.ranks[0].exchange([mine], [1, 1], [(0, 2), (2, 4)])
        return here.ranks[1].all_gather_bytes(b"x")

    found = here.each(work)
    assert all(isinstance(error, RuntimeError) and "out of step" in str(error) for error in found)
    assert "operation #1 is exchange on rank 0, all-gather of bytes on rank 1" in str(found[0])


def test_only_its_own_memory_can_be_sent(room):
    here = room(2)
    errors = here.each(lambda rank: here.ranks[rank].exchange([torch.zeros(4)], [1, 1], [(0, 2), (2, 4)]))
    assert all(isinstance(error, ValueError) and "empty()" in str(error) for error in errors)


def test_an_exchange_hands_out_the_others_memory_without_a_copy(room):
    here = room(2)

    def work(rank):
        transport = here.ranks[rank]
        mine = transport.empty(6, torch.float32)
        mine.copy_(torch.arange(6.0) + 10 * rank)
        received = transport.exchange([mine], [1, 1], [(0, 3), (3, 6)])
        before = [part[0].tolist() for part in received]
        transport.all_gather_bytes(b"a")
        mine.add_(100)  # after the next operation: now it may change, and the peer sees it
        transport.all_gather_bytes(b"b")
        return before, received[1 - rank][0].tolist()

    (first, seen_by_0), (second, seen_by_1) = here.each(work)
    assert first == [[0, 1, 2], [10, 11, 12]] and second == [[3, 4, 5], [13, 14, 15]]
    assert seen_by_0 == [110, 111, 112] and seen_by_1 == [103, 104, 105]
