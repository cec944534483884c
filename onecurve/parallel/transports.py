"""Moving bytes between the data-parallel ranks. No transport adds: the owner of a range adds what it receives.

Two of the three transports are here, over torch.distributed; `shared.py` holds the third, for ranks on one host. All
offer the four operations of `Transport`; every operation is a collective, entered by all ranks in the same order.
Tensors travel as raw bytes (uint8), so that a backend needs to know no dtype.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it; 2.9 has only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Route = tuple[int, int]  # [start, stop) in the sender's buffer


class Transport(Protocol):
    """Byte movement between `size` ranks; this one is `rank`."""

    rank: int
    size: int
    zero_copy: bool  # True: `exchange` hands out other ranks' memory, to be read only

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised 1-D tensor that may be passed to `exchange` and `all_gather` as this rank's own."""
        ...

    def exchange(self, mine: Sequence[Tensor], counts: Sequence[int], routes: Sequence[Route]) -> list[list[Tensor]]:
        """Send part `routes[j]` of each 1-D fp32 tensor in `mine` to rank j; `counts[r]` = how many rank r sends.

        Returns, by sending rank, the parts sent to this rank. With `zero_copy` they are valid until the next operation,
        and what this rank passed in must stay as it is until its next operation has returned.
        """
        ...

    def all_gather(self, out: Tensor, own: Tensor) -> Callable[[], None]:
        """Begin to fill `out` (size · n elements) with every rank's `own` (n elements), in rank order; the call that
        is returned waits for the end. `own` may be this rank's part of `out`."""
        ...

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's small payload, all of one length, in rank order."""
        ...


class Solo:
    """One rank: nothing moves."""

    rank, size, zero_copy = 0, 1, True

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def exchange(self, mine: Sequence[Tensor], counts: Sequence[int], routes: Sequence[Route]) -> list[list[Tensor]]:
        ((start, stop),) = routes
        return [[t[start:stop] for t in mine]]

    def all_gather(self, out: Tensor, own: Tensor) -> Callable[[], None]:
        if out.data_ptr() != own.data_ptr():
            out.copy_(own)
        return lambda: None

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload]


class PointToPoint:
    """Direct sends and receives between every pair of ranks, straight from and into place, without a staging copy."""

    zero_copy = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def exchange(self, mine: Sequence[Tensor], counts: Sequence[int], routes: Sequence[Route]) -> list[list[Tensor]]:
        length = routes[self.rank][1] - routes[self.rank][0]
        received = [[torch.empty(length) for _ in range(count)] for count in counts]
        received[self.rank] = [t[slice(*routes[self.rank])].clone() for t in mine]
        operations = []
        for peer in self._peers():
            start, stop = routes[peer]
            operations += [dist.P2POp(dist.isend, _bytes(t[start:stop]), peer) for t in mine if stop > start]
            operations += [dist.P2POp(dist.irecv, _bytes(t), peer) for t in received[peer] if length]
        _wait(operations)()
        return received

    def all_gather(self, out: Tensor, own: Tensor) -> Callable[[], None]:
        n = own.numel()
        mine = out[self.rank * n : (self.rank + 1) * n]
        if mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        operations = []
        for peer in self._peers():
            operations.append(dist.P2POp(dist.isend, _bytes(own), peer))
            operations.append(dist.P2POp(dist.irecv, _bytes(out[peer * n : (peer + 1) * n]), peer))
        return _wait(operations)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return _all_gather_bytes(payload, self.size)

    def _peers(self) -> list[int]:
        """Every other rank, each rank beginning with its successor, so that no rank is everyone's first target."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]


class AllToAll(PointToPoint):
    """`all_to_all_single` for the exchange and the backend's own all-gather: fewer, larger operations.

    Needs the parts for each rank to lie one after another: a staging copy where they do not.
    """

    def exchange(self, mine: Sequence[Tensor], counts: Sequence[int], routes: Sequence[Route]) -> list[list[Tensor]]:
        length = routes[self.rank][1] - routes[self.rank][0]
        lengths = [stop - start for start, stop in routes]
        in_order = all(a[1] == b[0] for a, b in itertools.pairwise(routes))
        if len(mine) == 1 and in_order:
            send = mine[0][routes[0][0] : routes[-1][1]]
        else:
            parts = [t[start:stop] for start, stop in routes for t in mine]
            send = torch.cat(parts) if parts else torch.empty(0)
        receive = torch.empty(length * sum(counts))
        sent_bytes = [4 * n * len(mine) for n in lengths]
        received_bytes = [4 * length * count for count in counts]
        dist.all_to_all_single(_bytes(receive), _bytes(send), received_bytes, sent_bytes)
        arrived = iter(receive.split(length) if length else [receive] * sum(counts))
        return [[next(arrived) for _ in range(count)] for count in counts]

    def all_gather(self, out: Tensor, own: Tensor) -> Callable[[], None]:
        work = _all_gather(_bytes(out), _bytes(own.clone()), async_op=True)
        return work.wait


def all_gather_any(payload: bytes, all_gather: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Every rank's payload, of any length, in rank order: two rounds of a transport's `all_gather_bytes`."""
    lengths = [int.from_bytes(p, "little") for p in all_gather(len(payload).to_bytes(8, "little"))]
    longest = max(lengths)
    padded = all_gather(payload.ljust(longest, b"\0")) if longest else [b""] * len(lengths)
    return [p[:n] for p, n in zip(padded, lengths, strict=True)]


def broadcast(tensors: Sequence[Tensor], source: int = 0) -> None:
    """Overwrite `tensors` (any shapes and dtypes, contiguous) with those of rank `source`, in one message."""
    flat = torch.cat([_bytes(t.detach()) for t in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)
    if flat.numel():
        dist.broadcast(flat, source)
    position = 0
    for tensor in tensors:
        view = _bytes(tensor.detach())
        view.copy_(flat[position : position + view.numel()])
        position += view.numel()


def _all_gather_bytes(payload: bytes, size: int) -> list[bytes]:
    out = torch.empty(size * len(payload), dtype=torch.uint8)
    _all_gather(out, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    whole = out.numpy().tobytes()
    return [whole[r * len(payload) : (r + 1) * len(payload)] for r in range(size)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _wait(operations: list) -> Callable[[], None]:
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> None:
        for work in works:
            work.wait()

    return wait
