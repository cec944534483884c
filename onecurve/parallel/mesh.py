"""The ranks and their axes: data, tensor, pipeline."""

import socket
import sys

import torch.distributed as dist

from onecurve.errors import InputError
from onecurve.parallel.shared import SharedMemory
from onecurve.parallel.transports import AllToAll, PointToPoint, Solo, Transport, all_gather_any

TRANSPORTS = ("auto", "shm", "alltoall", "p2p")


class Mesh:
    """A grid of `dp` x `tp` x `pp` ranks; global rank = (pp_rank · dp + dp_rank) · tp + tp_rank.

    Reads this process's rank from torch.distributed, which must be initialised where there is more than one rank.
    `transport` moves the bytes of the data axis: "shm" (ranks on one Linux host), "alltoall", "p2p", or "auto": shm
    where all ranks are on one host, else p2p. `limit`: seconds that a rank waits for another.
    Raises InputError if the axes do not multiply to the number of ranks, or for an axis that is not built yet.
    """

    def __init__(self, dp: int = 1, tp: int = 1, pp: int = 1, *, transport: str = "auto", limit: float = 300.0) -> None:
        if tp != 1 or pp != 1:
            raise InputError(f"mesh: tp = {tp}, pp = {pp}: only data parallelism is built yet; both must be 1")
        self.dp, self.tp, self.pp = dp, tp, pp
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        if dp * tp * pp != self.world:
            raise InputError(
                f"layout: dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp} ranks, but {self.world} are running"
            )
        self.tp_rank = self.rank % tp
        self.dp_rank = self.rank // tp % dp
        self.pp_rank = self.rank // (tp * dp)
        self.transport: Transport = PointToPoint(
            self.rank, self.world
        )  # needs nothing yet; `all_gather_bytes` below goes over it
        self.transport_name, self.transport = self._make_transport(transport, limit)

    def _make_transport(self, name: str, limit: float) -> tuple[str, Transport]:
        if name not in TRANSPORTS:
            raise InputError(f"layout.transport = {name!r}: allowed are {', '.join(TRANSPORTS)}")
        if self.world == 1:
            return "none", Solo()
        local = sys.platform == "linux" and len(set(self.all_gather_bytes(_host()))) == 1
        if name == "shm" and not local:
            raise InputError('layout.transport = "shm" needs all ranks on one Linux host; use "auto"')
        if name == "shm" or (name == "auto" and local):
            return "shm", SharedMemory(self.rank, self.world, self.all_gather_bytes, limit)
        if name == "alltoall":
            return name, AllToAll(self.rank, self.world)
        return "p2p", PointToPoint(self.rank, self.world)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order. Collective over all ranks; for rare, small things."""
        return all_gather_any(payload, self.transport.all_gather_bytes) if self.world > 1 else [payload]

    def barrier(self) -> None:
        self.all_gather_bytes(b".")


def _host() -> bytes:
    """What tells this host from others: its name and, where the kernel gives one, its boot id."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # noqa: PTH123
            boot = file.read()
    except OSError:
        boot = b""
    return socket.gethostname().encode() + boot
