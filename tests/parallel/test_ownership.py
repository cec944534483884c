"""The table: every element has one primary owner on every mesh, and every cut lies on the grid."""

import itertools
import random
from collections import Counter

import pytest

from onecurve.parallel.ownership import PIECE_ALIGN, SHARD_ALIGN, OwnershipTable, ParamSpec

MESHES = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2), (3, 4, 2)]


def parameters(pp: int, seed: int = 0) -> list[ParamSpec]:
    """A model-like mix on `pp` stages: cut and uncut parameters, an empty one, one of one element, odd sizes."""
    rng, found = random.Random(seed), []
    for stage in range(pp):
        for unit in range(3):
            name = f"{stage}.{unit}"
            found += [
                ParamSpec(f"{name}.matrix", (8, rng.randint(1, 40)), "float32", name, slices=4, stage=stage),
                ParamSpec(f"{name}.norm", (rng.randint(1, 70),), "float32", name, decay=False, stage=stage),
                ParamSpec(f"{name}.empty", (0, 5), "float32", name, stage=stage),
                ParamSpec(f"{name}.one", (), "float32", name, decay=False, stage=stage),
            ]
    return found


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("dp", "tp", "pp"), MESHES)
def test_every_element_has_exactly_one_primary_owner(dp, tp, pp, stage):
    table = OwnershipTable(parameters(pp), dp=dp, tp=tp, pp=pp, stage=stage)
    owners = Counter()
    for rank in range(dp * tp * pp):
        seen = set()
        for r in table.owned(rank):
            assert r.length > 0
            owners.update((r.name, r.slice, r.offset + i) for i in range(r.length))
            seen.update(range(r.at, r.at + r.length))
            assert r.at + r.length <= table.partition(rank).local
        assert len(seen) == sum(r.length for r in table.owned(rank))  # no two ranges at one local position
    expected = {(p.name, s, i) for p in table.parameters for s in range(p.slices) for i in range(p.numel // p.slices)}
    assert owners.keys() == expected and set(owners.values()) <= {1}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("dp", "tp", "pp"), MESHES)
def test_every_cut_lies_on_the_grid(dp, tp, pp, stage):
    table = OwnershipTable(parameters(pp, seed=1), dp=dp, tp=tp, pp=pp, stage=stage)
    for rank in range(dp * tp * pp):
        for r in table.owned(rank):
            assert r.offset % SHARD_ALIGN == 0 and r.at % SHARD_ALIGN == 0
        partition = table.partition(rank)
        for space in partition.spaces:
            assert space.width % SHARD_ALIGN == 0
        for piece in partition.pieces:
            (space,) = [s for s in partition.spaces if piece.unit in s.units]
            assert (piece.start - space.start) % PIECE_ALIGN == 0


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5])
def test_shards_and_spaces_fit_together(dp, stage):
    table = OwnershipTable(parameters(1), dp=dp, stage=stage)
    partition = table.partition(0)
    assert partition.numel == sum(p.numel for p in table.parameters) <= partition.flat
    assert [s.start for s in partition.spaces[1:]] == [s.start + s.width * dp for s in partition.spaces[:-1]]
    assert len(partition.spaces) == (3 if stage == 3 else 1)
    assert partition.local == (partition.flat if stage == 0 else partition.flat // dp)
    for rank in range(dp):
        held = {(r.name, r.slice, r.offset + i) for r in partition.held(rank) for i in range(r.length)}
        assert len(held) == (partition.numel if stage == 0 else sum(r.length for r in table.owned(rank)))
    for start, stop in [(0, 40), (16, 17), (5, 5)]:
        routes = partition.routes(start, stop)
        assert routes[0][0] == start and routes[-1][1] == stop
        assert all(a[1] == b[0] for a, b in itertools.pairwise(routes))


def test_a_flat_space_pads_less_than_one_grid_step_per_piece_and_rank():
    table = OwnershipTable(parameters(1), dp=4, stage=1)
    partition = table.partition(0)
    assert partition.flat - partition.numel < PIECE_ALIGN * len(partition.pieces) + SHARD_ALIGN * 4


def test_unit_ranges_cover_their_pieces_and_do_not_meet():
    for stage, dp in itertools.product(range(4), (1, 3, 4)):
        partition = OwnershipTable(parameters(1), dp=dp, stage=stage).partition(0)
        ranges = [partition.unit_range(unit) for unit in ("0.0", "0.1", "0.2")]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        for piece in partition.pieces:
            lo, hi = partition.unit_range(piece.unit)
            assert lo <= piece.start and piece.start + piece.numel <= hi <= partition.flat
    assert partition.unit_range("unknown") == (0, 0)
