"""Which layouts `verify` runs: widths x ZeRO stages, transports, and kills with a change of layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onecurve.config import Config, LayoutConfig
from onecurve.errors import InputError

STEPS = 6  # of the curve, from its first
SAVE_EVERY = 2
WIDTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Kill:
    """SIGKILL to `rank` the first time it is at `place` with `step` steps done."""

    rank: int
    step: int
    place: str

    @property
    def fault(self) -> str:
        return f"kill:rank={self.rank},step={self.step},place={self.place}"


@dataclass(frozen=True)
class Leg:
    """A part of a run on one layout; it ends with the run, or with a kill."""

    layout: LayoutConfig
    kill: Kill | None = None

    def __str__(self) -> str:
        transport = "" if self.layout.transport == "auto" else f" {self.layout.transport}"
        killed = f", killed in {self.kill.place} of step {self.kill.step + 1}" if self.kill else ""
        return f"dp {self.layout.dp} zero {self.layout.zero}{transport}{killed}"


@dataclass(frozen=True)
class Combination:
    """A run: the first leg starts it, each later one resumes it on another layout."""

    legs: tuple[Leg, ...]

    def __str__(self) -> str:
        return " -> ".join(map(str, self.legs))


def reference(config: Config) -> Combination:
    """One rank that holds everything: nothing is cut, nothing is exchanged."""
    return Combination((_leg(config, 1, 0),))


def full_matrix(config: Config) -> list[Combination]:
    """Every width up to `leaves` x every stage, the other transports, and a kill at each of five places."""
    widths = [width for width in WIDTHS if width <= config.train.leaves]
    found = [_run(config, width, zero) for width in widths for zero in range(4) if (width, zero) != (1, 0)]
    wide = main_width(config)
    if wide > 1:
        found += [
            Combination((_leg(config, wide, zero, transport),))
            for transport in ("shm", "p2p", "alltoall")
            for zero in (1, 3)
        ]
    return found + list(_kills(config, widths))


def quick_matrix(config: Config) -> list[Combination]:
    """All stages at one width, a width that cuts leaves unevenly, and one kill with a change of layout."""
    wide, leaves = main_width(config), config.train.leaves
    uneven = next((width for width in (3, 2) if width <= leaves and width != wide), 1)
    found = [_run(config, wide, zero) for zero in range(4)]
    found += [_run(config, uneven, zero) for zero in (1, 2, 3)]
    if leaves > wide and leaves <= WIDTHS[-1]:
        found += [_run(config, leaves, zero) for zero in (1, 3)]
    start, end = (_leg(config, wide, 1, kill=_kill(config, wide - 1, "exchange")), _leg(config, uneven, 3))
    return [run for run in found if run != reference(config)] + [Combination((start, end))]


def main_width(config: Config) -> int:
    """4 where the leaves allow it: no order of adding two numbers differs, and at W = leaves some faults hide."""
    return min(4, config.train.leaves)


def last_step(config: Config) -> int:
    return min(STEPS, config.train.steps)


def _kills(config: Config, widths: Sequence[int]) -> Iterator[Combination]:
    """A kill at each of five places, from wide layouts to all others."""
    places = {"forward": (1, 3), "backward": (3, 0), "exchange": (0, 2), "save": (2, 1), "save.rename": (3, 1)}
    for number, (place, (before, after)) in enumerate(places.items()):
        start, end = widths[-1 - number % 2 % len(widths)], widths[number % len(widths)]
        kill = _kill(config, 0 if place == "save.rename" else start - 1, place)
        yield Combination((_leg(config, start, before, kill=kill), _leg(config, end, after)))


def _kill(config: Config, rank: int, place: str) -> Kill:
    """In the middle of a step; or in the last save, so that the one before must serve."""
    last = last_step(config)
    return Kill(rank, last if place.startswith("save") else last // 2, place)


def _run(config: Config, width: int, zero: int) -> Combination:
    return Combination((_leg(config, width, zero),))


def _leg(config: Config, width: int, zero: int, transport: str | None = None, kill: Kill | None = None) -> Leg:
    layout = config.layout
    if layout.tp * layout.pp != 1:
        raise InputError(f"verify: layout.tp = {layout.tp}, layout.pp = {layout.pp}: only data parallel is built")
    changed = {"dp": width, "zero": zero} | ({"transport": transport} if transport else {})
    return Leg(LayoutConfig(**layout.model_dump() | changed), kill)
