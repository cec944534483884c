"""All transports move the same bytes: odd sizes, empty parts, any counts; and a dead rank ends the wait."""

import os
import time

import pytest
import torch

from onecurve.errors import InputError, PeerLost, RunFailed
from onecurve.parallel import Mesh
from onecurve.parallel.transports import broadcast, all_gather_any
from tests.dist.harness import run_dist

TRANSPORTS = ["shm", "p2p", "alltoall"]


def sent(rank: int, index: int, numel: int = 23) -> torch.Tensor:
    return torch.arange(numel) * 1.0 + 1000 * rank + 100 * index


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("width", [2, 4])
def test_it_moves_what_was_asked(transport, width):
    routes_of = {
        "odd": [(0, 7), (7, 8), (8, 22), (22, 23)],
        "with empty parts": [(3, 3), (3, 20), (20, 20), (20, 23)],
        "all empty": [(5, 5)] * 4,
        "not one after another": [(10, 12), (0, 3), (20, 20), (4, 9)],
    }
    counts = [2, 0, 1, 3]

    def work(context):
        mesh = Mesh(dp=width, transport=transport, limit=20.0)
        t, rank = mesh.transport, mesh.rank
        assert (mesh.transport_name, t.rank, t.size) == (transport, rank, width)
        mine = []
        for index in range(counts[rank]):
            mine.append(t.empty(23, torch.float32).copy_(sent(rank, index)))
        for name, routes in routes_of.items():
            received = t.exchange(mine, counts[:width], routes[:width])
            start, stop = routes[rank]
            expected = [[sent(r, i)[start:stop].tolist() for i in range(counts[r])] for r in range(width)]
            assert [[part.tolist() for part in parts] for parts in received] == expected, name
            t.all_gather_bytes(b".")
        for numel, dtype in [(0, torch.float32), (1, torch.bfloat16), (5, torch.float32), (1001, torch.uint8)]:
            whole = torch.cat([(torch.arange(numel) + r).to(dtype) for r in range(width)])
            out, own = torch.zeros(width * numel, dtype=dtype), t.empty(numel, dtype)
            own.copy_(whole[rank * numel : (rank + 1) * numel])
            wait = t.all_gather(out, own)
            wait()
            assert torch.equal(out, whole), (numel, dtype)
            inside = t.empty(width * numel, dtype).zero_()  # `own` as this rank's part of `out`
            part = inside[rank * numel : (rank + 1) * numel].copy_(own)
            t.all_gather(inside, part)()
            assert torch.equal(inside, whole), (numel, dtype)
        assert t.all_gather_bytes(bytes([rank] * 48)) == [bytes([r] * 48) for r in range(width)]
        for size in (100, 40_000):  # the larger one is more than one message of a socket
            assert mesh.all_gather_bytes(b"x" * rank * size) == [b"x" * r * size for r in range(width)]
        assert all_gather_any(b"", t.all_gather_bytes) == [b""] * width
        tensors = [torch.full((3,), float(rank)), torch.full((2, 2), rank, dtype=torch.int64), torch.empty(0)]
        broadcast(tensors, source=1)
        assert tensors[0].tolist() == [1.0] * 3 and tensors[1].tolist() == [[1, 1], [1, 1]]
        return True

    assert run_dist(work, width) == [True] * width


def test_a_begun_gather_lets_other_operations_pass(tmp_path):
    """Prefetching begins a gather and waits for it later, with other operations in between."""

    def work(context):
        t = Mesh(dp=2).transport
        own = t.empty(3, torch.float32).fill_(context.rank + 1.0)
        out = torch.zeros(6)
        wait = t.all_gather(out, own)
        said = t.all_gather_bytes(b"%d" % context.rank)
        wait()
        return [out.tolist(), [part.decode() for part in said]]

    assert run_dist(work, 2) == [[[1, 1, 1, 2, 2, 2], ["0", "1"]]] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_ends_the_wait_and_is_blamed(transport, tmp_path):
    def work(context):
        t = Mesh(dp=3, transport=transport, limit=30.0).transport
        t.all_gather_bytes(b".")
        if context.rank == 1:
            os._exit(0)
        try:
            t.all_gather_bytes(b".")
        except PeerLost:
            (tmp_path / f"lost-{context.rank}").touch()
            raise

    began = time.monotonic()
    with pytest.raises(RunFailed, match="rank 1 vanished"):
        run_dist(work, 3, folder=tmp_path)
    assert time.monotonic() - began < 10
    if transport == "shm":
        assert list(tmp_path.glob("lost-*"))  # at least one saw it before the launcher ended it


def test_a_mesh_that_does_not_fit_the_ranks_is_refused():
    with pytest.raises(InputError, match=r"dp 2 x tp 1 x pp 1 = 2 ranks, but 1 are running"):
        Mesh(dp=2)
    with pytest.raises(InputError, match=r"layout\.transport = 'pigeon'"):
        Mesh(dp=1, transport="pigeon")
