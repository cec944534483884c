"""One curve at every width, and the proof that the test would see a sum in another order."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from onecurve.parallel import contiguous
from onecurve.parallel.tree import TreeSum
from tests.commands import curve, digest, rows, train_here

WIDTHS = (1, 2, 3, 4)
STEPS = 20


def runs_at_every_width(folder: Path, *sets: str) -> dict[int, tuple[list, str]]:
    """Each width's curve, in every bit, and the digest of its last state."""
    found = {}
    for width in WIDTHS:
        run = folder / f"w{width}"
        assert train_here(run, f"layout.dp={width}", *sets) == 0
        assert len(rows(run)) == STEPS
        found[width] = (curve(run), digest(run, STEPS))
    return found


def differing(found: dict[int, tuple[list, str]]) -> list[int]:
    """The widths whose curve or state is not that of width 1."""
    return [width for width in found if found[width] != found[1]]


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param((), id="demo"),
        pytest.param(
            ("train.leaves=8", "train.accumulate=2", "optimizer.clip=1.0", "optimizer.weight_decay=0.1"),
            id="8 leaves of 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_width_draws_the_same_curve(tmp_path: Path, sets: tuple[str, ...]) -> None:
    assert differing(runs_at_every_width(tmp_path, *sets)) == []


class RingSum:
    """What a ring reduce-scatter adds up: the parts in the order of the ring, which ends at the owner of the range."""

    def __init__(self, *_: object) -> None:
        self._parts: list[Tensor] = []

    def push(self, start: int, size: int, tensor: Tensor, *, writable: bool) -> None:
        self._parts.append(tensor)

    def total(self) -> Tensor:
        owner = dist.get_rank() if dist.is_initialized() else 0
        first = (owner + 1) % len(self._parts)
        order = self._parts[first:] + self._parts[:first]
        total = order[0].clone()
        for part in order[1:]:
            total += part
        return total


def test_a_ring_sum_in_place_of_the_tree_is_seen_at_width_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control. At widths 1 and 2 any order gives the same bits; there the ranks' own trees do the rest."""

    def tree_or_ring(scratch: object, *recycle: object) -> object:
        # A rank's own counter is made with `recycle`; the owner's, which ends an exchange, without.
        return TreeSum(scratch, *recycle) if recycle else RingSum()  # type: ignore[arg-type]

    monkeypatch.setattr(contiguous, "TreeSum", tree_or_ring)
    assert 4 in differing(runs_at_every_width(tmp_path))
