"""The transport for ranks on one host: memory that the others map, and small messages over Unix sockets.

An operation is one round of messages. Each rank tells every other where its part lies (segment, offset) and reads the
parts of the others in place, so an exchange copies nothing and an all-gather copies once. The kernel wakes whoever
waits; a peer's death closes its sockets, so it is seen at once; every wait has a limit.

    rank 0  --[#17 exchange: segment 2, offset 0]-->  rank 1, 2, 3     then read theirs in place
    rank 0  --[#18 all-gather of 48 bytes]-------->  rank 1, 2, 3   all have read #17 when this has arrived

Memory is anonymous (memfd), passed by descriptor: nothing is left behind, whoever dies, and /dev/shm is not used.
Linux only. The promise that a part stays as it is until the next operation is what `Transport.exchange` states.
"""

import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onecurve.errors import PeerLost
from onecurve.parallel.transports import Route

HEADER = struct.Struct("<QB")  # operation number, kind
PLACE = struct.Struct("<IQ")  # segment, offset in bytes
DESCRIPTOR = struct.Struct("@i")
ONE_DESCRIPTOR = socket.CMSG_SPACE(DESCRIPTOR.size)  # room for it beside a message
SEGMENT, EXCHANGE, GATHER, BYTES, HELLO = range(5)
KINDS = ("segment", "exchange", "all-gather", "all-gather of bytes", "hello")
LARGEST = 1 << 15  # bytes of one message, well below a socket's buffer: a send never waits for the receiver


class SharedMemory:
    """See the module's text. `all_gather_any` is used once, to let the ranks find each other; `limit` in seconds."""

    zero_copy = True

    def __init__(self, rank: int, size: int, all_gather_any: Callable[[bytes], list[bytes]], limit: float) -> None:
        self.rank, self.size = rank, size
        self._limit = limit
        self._count = 0
        self._segments: list[tuple[Tensor, int, int]] = []  # own: (bytes, descriptor, address)
        self._announced = 0
        self._mapped: dict[tuple[int, int], Tensor] = {}  # (rank, segment) -> bytes of another rank
        self._views: dict[tuple, Tensor] = {}  # of what was read there: the same places come at every step
        self._inbox: dict[int, dict[int, tuple[int, bytes]]] = {peer: {} for peer in self._others()}
        self._peers = self._connect(all_gather_any)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = max(numel * dtype.itemsize, 1)
        descriptor = os.memfd_create("onecurve")
        os.ftruncate(descriptor, nbytes)
        whole = _map(descriptor, nbytes)
        self._segments.append((whole, descriptor, whole.data_ptr()))
        return whole[: numel * dtype.itemsize].view(dtype)

    def exchange(self, mine: Sequence[Tensor], counts: Sequence[int], routes: Sequence[Route]) -> list[list[Tensor]]:
        number = self._send(EXCHANGE, b"".join(self._place(t) for t in mine))
        start, stop = routes[self.rank]
        received: list[list[Tensor]] = []
        for peer in range(self.size):
            if peer == self.rank:
                received.append([t[start:stop] for t in mine])
                continue
            places = PLACE.iter_unpack(self._receive(peer, number, EXCHANGE))
            received.append([self._read(peer, place, torch.float32, start, stop) for place in places])
        return received

    def all_gather(self, out: Tensor, own: Tensor) -> Callable[[], None]:
        number = self._send(GATHER, self._place(own))
        shards = out.view(self.size, own.numel()).unbind()
        if shards[self.rank].data_ptr() != own.data_ptr():
            shards[self.rank].copy_(own)

        def wait() -> None:
            for peer in self._others():
                (place,) = PLACE.iter_unpack(self._receive(peer, number, GATHER))
                shards[peer].copy_(self._read(peer, place, own.dtype, 0, own.numel()))

        return wait

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        found = [bytearray() for _ in range(self.size)]
        for part in range(0, max(len(payload), 1), LARGEST - HEADER.size):
            piece = payload[part : part + LARGEST - HEADER.size]
            number = self._send(BYTES, piece)
            for r in range(self.size):
                found[r] += piece if r == self.rank else self._receive(r, number, BYTES)
        return [bytes(f) for f in found]

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        for _, descriptor, _ in self._segments:
            os.close(descriptor)
        self._segments.clear()

    def _others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def _place(self, tensor: Tensor) -> bytes:
        if tensor.numel() == 0:
            return PLACE.pack(0, 0)  # it has no address, and nobody reads it
        address = tensor.data_ptr()
        for index, (whole, _, base) in enumerate(self._segments):
            if base <= address < base + whole.numel():
                return PLACE.pack(index, address - base)
        raise ValueError("a tensor given to the shared-memory transport was not made by its empty()")

    def _read(self, peer: int, place: tuple[int, int], dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Elements [start, stop) behind a place in a peer's memory."""
        key = (peer, place, dtype, start, stop)
        if key not in self._views:
            segment, offset = place
            first, last = (offset + i * dtype.itemsize for i in (start, stop))
            self._views[key] = self._mapped[peer, segment][first:last].view(dtype)
        return self._views[key]

    def _send(self, kind: int, payload: bytes) -> int:
        """Send one message to every peer, new segments first; returns the operation's number."""
        for index in range(self._announced, len(self._segments)):
            whole, descriptor, _ = self._segments[index]
            frame = HEADER.pack(0, SEGMENT) + PLACE.pack(index, whole.numel())
            for peer in self._others():
                self._write(peer, frame, descriptor)
        self._announced = len(self._segments)
        self._count += 1
        frame = HEADER.pack(self._count, kind) + payload
        if len(frame) > LARGEST:
            raise ValueError(f"a message of {len(frame)} bytes; the shared-memory transport takes {LARGEST}")
        for peer in self._others():
            self._write(peer, frame)
        return self._count

    def _write(self, peer: int, frame: bytes, descriptor: int | None = None) -> None:
        try:
            if descriptor is None:
                self._peers[peer].send(frame)
            else:
                socket.send_fds(self._peers[peer], [frame], [descriptor])
        except OSError as error:
            raise self._lost(peer, f"could not send to rank {peer}", error) from error

    def _receive(self, peer: int, number: int, kind: int) -> bytes:
        """The payload of operation `number` from `peer`. Messages of operations begun later are kept for later."""
        inbox = self._inbox[peer]
        while number not in inbox:
            try:
                frame, ancillary, _, _ = self._peers[peer].recvmsg(LARGEST, ONE_DESCRIPTOR)
            except OSError as error:
                raise self._lost(peer, f"waited for rank {peer} in {KINDS[kind]} #{number}", error) from error
            if not frame:
                raise PeerLost(f"rank {peer} closed its connection while rank {self.rank} waited in {KINDS[kind]}")
            found, its_kind = HEADER.unpack_from(frame)
            payload = frame[HEADER.size :]
            if its_kind == SEGMENT:
                segment, nbytes = PLACE.unpack(payload)
                (descriptor,) = DESCRIPTOR.unpack(ancillary[0][2])
                self._mapped[peer, segment] = _map(descriptor, nbytes)
                os.close(descriptor)
            else:
                inbox[found] = (its_kind, payload)
        its_kind, payload = inbox.pop(number)
        if its_kind != kind:
            raise RuntimeError(
                f"ranks are out of step: operation #{number} is {KINDS[kind]} on rank {self.rank}, "
                f"{KINDS[its_kind]} on rank {peer}; at ZeRO-3 all ranks must call the same units in the same order, "
                "and a forward that is not part of a leaf belongs under torch.no_grad()"
            )
        return payload

    def _lost(self, peer: int, what: str, error: OSError) -> PeerLost:
        timed_out = isinstance(error, BlockingIOError)
        return PeerLost(f"rank {self.rank} {what}" + (f" for {self._limit:g} s" if timed_out else f": {error}"))

    def _connect(self, all_gather_any: Callable[[bytes], list[bytes]]) -> dict[int, socket.socket]:
        """One socket to each peer: every rank listens under an abstract name and calls those before it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel picks a free abstract name
            listener.listen(self.size)
            names = all_gather_any(listener.getsockname())
            peers = {}
            for peer in range(self.rank):
                peers[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peers[peer].connect(names[peer])
                peers[peer].send(HEADER.pack(self.rank, HELLO))
            listener.settimeout(self._limit)
            for _ in range(self.rank + 1, self.size):
                caller, _ = listener.accept()
                peer, _ = HEADER.unpack(caller.recv(LARGEST))
                peers[peer] = caller
        whole, fraction = divmod(self._limit, 1)
        timeout = struct.pack("@ll", int(whole), int(fraction * 1e6))
        for peer_socket in peers.values():
            peer_socket.settimeout(None)  # the kernel's own limit costs no extra call
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        return peers


def _map(descriptor: int, nbytes: int) -> Tensor:
    """The bytes behind a descriptor as a uint8 tensor that shares them."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
