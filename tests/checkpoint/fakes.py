"""Ranks as threads, and an optimizer that only holds state: checkpoints need no more of either."""

import threading
from dataclasses import dataclass, field

import torch

from onecurve.checkpoint.holdings import OwnedPart


class PeerGone(Exception):
    """Another rank ended without joining: with real ranks, a collective that fails or hangs."""


class _Room:
    def __init__(self, world):
        self.world = world
        self.rounds = []  # one list of payloads for each share
        self.left = set()
        self.changed = threading.Condition()


class ThreadMesh:
    """`share` between threads of this process."""

    tp = pp = 1

    def __init__(self, room, rank):
        self._room, self.rank, self.world, self.dp, self._round = room, rank, room.world, room.world, 0

    def all_gather_bytes(self, payload):
        room = self._room
        with room.changed:
            while len(room.rounds) <= self._round:
                room.rounds.append({})
            told = room.rounds[self._round]
            self._round += 1
            told[self.rank] = bytes(payload)
            room.changed.notify_all()
            room.changed.wait_for(lambda: len(told) == self.world or room.left - told.keys(), timeout=30)
            if len(told) < self.world:
                raise PeerGone(f"rank {self.rank} waits for {set(range(self.world)) - told.keys()}")
        return [told[rank] for rank in range(self.world)]


def on_ranks(world, work):
    """[work(mesh) of each rank]; an exception is returned in its rank's place."""
    room, results = _Room(world), [None] * world

    def one(rank):
        try:
            results[rank] = work(ThreadMesh(room, rank))
        except BaseException as error:
            results[rank] = error
        with room.changed:
            room.left.add(rank)
            room.changed.notify_all()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def all_good(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@dataclass(frozen=True)
class Param:
    name: str
    shape: tuple[int, ...]
    slices: int = 1
    dtype: str = "float32"
    split: int | None = None

    @property
    def numel(self):
        return torch.Size(self.shape).numel()


@dataclass
class FakeTable:
    """Each of `groups` lists of parameter names (default: one of all) is laid out flat and cut into `world` shards of a
    multiple of 16 elements, padded: stage 1 with one group, stage 3 with several."""

    parameters: list[Param]
    world: int
    groups: list[list[str]] | None = None
    shard: int = field(init=False)

    def __post_init__(self):
        by_name = {p.name: p for p in self.parameters}
        self._owned = [[] for _ in range(self.world)]
        local = 0
        for group in self.groups or [list(by_name)]:
            places, end = [], 0
            for p in (by_name[name] for name in group):
                for index in range(p.slices):
                    end += -end % 32
                    places.append((p.name, index, end, p.numel // p.slices))
                    end += p.numel // p.slices
            width = -(-end // (16 * self.world)) * 16
            for rank in range(self.world):
                lo, hi = rank * width, (rank + 1) * width
                for name, index, start, numel in places:
                    a, b = max(lo, start), min(hi, start + numel)
                    if a < b:
                        self._owned[rank].append(OwnedPart(name, index, a - start, b - a, local + a - lo))
            local += width
        self.shard = local

    def owned(self, rank):
        return self._owned[rank]


class FakeOptimizer:
    """State that is a function of the place alone, so that every layout holds the same."""

    def __init__(self, mesh, table, *, stage=1, seed=None, extras=None):
        self.mesh, self.table, self.stage, self.updates, self.refreshed = mesh, table, stage, 0, 0
        self._extras = extras or {}
        ranges = self.held()
        size = table.shard if stage else sum(r.length for r in ranges)
        self.master, self.exp_avg, self.exp_avg_sq = (torch.zeros(size) for _ in range(3))
        if seed is not None:
            self.updates = seed + 7
            for kind, vector in enumerate(self.vectors()):
                whole = whole_state(table.parameters, seed, kind)
                for r in ranges:
                    vector[r.at : r.at + r.length] = whole[r.name, r.slice][r.offset : r.offset + r.length]

    def vectors(self):
        return self.master, self.exp_avg, self.exp_avg_sq

    def held(self):
        if self.stage:
            return self.table.owned(self.mesh.rank)
        at, ranges = 0, []
        for p in self.table.parameters:
            for index in range(p.slices):
                if p.numel:
                    ranges.append(OwnedPart(p.name, index, 0, p.numel // p.slices, at))
                at += p.numel // p.slices
        return ranges

    def extras(self):
        return self._extras

    def refresh(self):
        self.refreshed += 1

    def values(self):
        """{(kind, name, slice): held elements, NaN where not held}."""
        out = {}
        for kind, vector in enumerate(self.vectors()):
            for r in self.held():
                numel = next(p.numel // p.slices for p in self.table.parameters if p.name == r.name)
                whole = out.setdefault((kind, r.name, r.slice), torch.full((numel,), float("nan")))
                whole[r.offset : r.offset + r.length] = vector[r.at : r.at + r.length]
        return out


def whole_state(parameters, seed, kind):
    generator = torch.Generator().manual_seed(1000 * seed + kind)
    return {
        (p.name, index): torch.randn(p.numel // p.slices, generator=generator)
        for p in parameters
        for index in range(p.slices)
    }


# Odd sizes, a chunk boundary inside, an empty and a one-element parameter, one in slices.
PARAMETERS = [
    Param("embed", (257, 36)),
    Param("block.qkv", (108, 40), slices=4, split=0),
    Param("block.proj", (36, 36), slices=2, split=1),
    Param("norm", (36,)),
    Param("empty", (0, 5)),
    Param("one", (1,)),
    Param("head", (257, 200), dtype="bfloat16"),
]
GROUPS = [["embed"], ["block.qkv", "block.proj", "norm"], ["empty", "one", "head"]]


def make(mesh, *, zero3=False, stage=1, seed=None, extras=None, parameters=None):
    parameters = PARAMETERS if parameters is None else parameters
    table = FakeTable(parameters, mesh.world, GROUPS if zero3 else None)
    return FakeOptimizer(mesh, table, stage=3 if zero3 else stage, seed=seed, extras=extras)
