"""One tree for every width: any way of handing out leaves gives the bits of the tree written down recursively."""

import random

import pytest
import torch

from onecurve.parallel.tree import (
    TreeSum,
    aligned_partials,
    contiguous_leaves,
    counter_states,
    strided_leaves,
    tree_sum,
)

LEAVES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]


def leaf_values(leaves: int, seed: int = 0) -> list[torch.Tensor]:
    """Values of mixed magnitude, so that every order of adding rounds differently."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(64, generator=g) * 10.0 ** torch.randint(-3, 4, (64,), generator=g) for _ in range(leaves)]


def reference(values: list[torch.Tensor]) -> torch.Tensor:
    """(0+1)+(2+3)…: pairs of neighbours level by level, then what is left over from the right, smallest first."""

    def whole(part: list[torch.Tensor]) -> torch.Tensor:
        half = len(part) // 2
        return part[0] if len(part) == 1 else whole(part[:half]) + whole(part[half:])

    blocks, start = [], 0
    for bit in reversed(range(len(values).bit_length())):
        if len(values) >> bit & 1:
            blocks.append(whole(values[start : start + (1 << bit)]))
            start += 1 << bit
    total = blocks.pop()
    while blocks:
        total = blocks.pop() + total
    return total


def counter() -> TreeSum:
    return TreeSum(torch.empty_like)


def sum_of_cut(values: list[torch.Tensor], cuts: list[int]) -> torch.Tensor:
    """Each holder runs a contiguous range through its own counter; the owner finishes with theirs."""
    owner = counter()
    for start, stop in zip([0, *cuts], [*cuts, len(values)], strict=True):
        mine = counter()
        for leaf in range(start, stop):
            mine.push(leaf, 1, values[leaf].clone(), writable=True)
        assert [(p.start, p.size) for p in mine.partials()] == aligned_partials(range(start, stop))
        for partial in mine.partials():
            owner.push(partial.start, partial.size, partial.tensor, writable=False)
    return owner.total()


@pytest.mark.parametrize("leaves", LEAVES)
def test_any_width_gives_the_reference_tree(leaves):
    values = leaf_values(leaves)
    expected = reference(values)
    for width in range(1, leaves + 1):
        runs = [contiguous_leaves(leaves, width, rank) for rank in range(width)]
        assert [leaf for run in runs for leaf in run] == list(range(leaves))
        assert all(runs) and max(map(len, runs)) - min(map(len, runs)) <= 1
        assert torch.equal(sum_of_cut(values, [run.start for run in runs[1:]]), expected), width


@pytest.mark.parametrize("leaves", LEAVES)
def test_any_contiguous_cut_gives_the_reference_tree(leaves):
    values, rng = leaf_values(leaves, seed=1), random.Random(leaves)
    expected = reference(values)
    for _ in range(30):
        cuts = sorted(rng.choices(range(leaves + 1), k=rng.randint(0, 5)))  # empty ranges too
        assert torch.equal(sum_of_cut(values, cuts), expected), cuts


@pytest.mark.parametrize("leaves", LEAVES)
def test_one_leaf_at_a_time_as_the_strided_ticks_push_them(leaves):
    values = leaf_values(leaves, seed=2)
    for writable in (False, True):
        tree = counter()
        for leaf, value in enumerate(values):
            tree.push(leaf, 1, value.clone() if writable else value, writable=writable)
            tree.settle()
        assert torch.equal(tree.total(), reference(values))


def test_the_values_tell_orders_apart():
    """The control of this file: added one after another, or around a ring, they give other bits."""
    values = leaf_values(8)
    in_sequence = sum(values[1:], values[0])
    around = sum([*values[4:], *values[:3]], values[3])
    assert not torch.equal(in_sequence, reference(values))
    assert not torch.equal(around, reference(values))


@pytest.mark.parametrize("leaves", LEAVES)
def test_floats_add_in_the_same_tree(leaves):
    values = [float(v[0]) for v in leaf_values(leaves, seed=3)]
    assert tree_sum(values) == reference([torch.tensor([v], dtype=torch.float64) for v in values]).item()
    assert tree_sum([]) == 0.0


def test_a_counter_holds_few_buffers_and_gives_back_the_rest():
    made, free, most = [], [], 0
    tree = TreeSum(torch.empty_like, free.append)
    for leaf in range(1000):
        if not free:
            made.append(torch.zeros(1))
            free.append(made[-1])
        tree.push(leaf, 1, free.pop(), writable=True)
        most = max(most, len(tree.partials()))
    tree.total()
    assert most <= 10 and len(made) <= 11  # log2(1000) + 1


def test_what_was_not_writable_stays_as_it_was():
    values = leaf_values(6, seed=4)
    kept = [value.clone() for value in values]
    tree = counter()
    for leaf, value in enumerate(values):
        tree.push(leaf, 1, value, writable=False)
    tree.total()
    assert all(torch.equal(a, b) for a, b in zip(values, kept, strict=True))


def test_leaves_are_cut_as_the_stages_need_them():
    assert [list(contiguous_leaves(8, 3, r)) for r in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert [list(strided_leaves(8, 3, r)) for r in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    for cut in (contiguous_leaves, strided_leaves):
        for width in range(1, 9):
            assert sorted(leaf for r in range(width) for leaf in cut(8, width, r)) == list(range(8))


def test_a_counter_holds_one_partial_for_each_aligned_range():
    assert [len(state) for state in counter_states(range(4))] == [1, 1, 2, 1]
    assert [len(state) for state in counter_states(range(1, 4))] == [1, 2, 2]  # 1 | 2+3: not aligned, two partials
    assert aligned_partials(range(0)) == []
