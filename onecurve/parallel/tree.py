"""The one order in which partial sums are added: a binary tree over leaves 0 … L-1, neighbours in pairs.

    (0+1) + (2+3)        L = 4
    ((0+1) + (2+3)) + 4  L = 5: what is left over is folded from the right

A `TreeSum` is the binary counter that walks this tree with at most log2(L) + 1 buffers alive. It takes partial sums of
aligned ranges of leaves, in leaf order, whoever computed them; so a rank can run its own leaves through one counter and
hand over what is left, and the owner of the elements finishes the very same tree with another.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """The sum of leaves [start, start + size), size a power of two and start a multiple of it (the last may be cut)."""

    start: int
    size: int
    tensor: Tensor


class TreeSum:
    """Adds 1-D tensors of one shape in the fixed tree.

    A pushed tensor with `writable` becomes the counter's own and may be overwritten or passed to `recycle` once it was
    added into another; one without stays as it is (it may be another rank's memory). `scratch` makes a tensor where
    neither operand may be written.
    """

    def __init__(self, scratch: Callable[[Tensor], Tensor], recycle: Callable[[Tensor], None] = lambda _: None) -> None:
        self._scratch = scratch
        self._recycle = recycle
        self._stack: list[tuple[Partial, bool]] = []

    def push(self, start: int, size: int, tensor: Tensor, *, writable: bool) -> None:
        """Take the sum of leaves [start, start + size); merge while the left neighbour has the same size."""
        while self._stack:
            left = self._stack[-1][0]
            siblings = left.size == size and left.start % (2 * size) == 0 and left.start + size == start
            if not siblings:
                break
            _, left_writable = self._stack.pop()
            tensor, writable = self._add(left.tensor, left_writable, tensor, writable), True
            start, size = left.start, 2 * size
        self._stack.append((Partial(start, size, tensor), writable))

    def partials(self) -> list[Partial]:
        """What the counter holds now, in leaf order: the aligned partial sums that an owner can go on with."""
        return [partial for partial, _ in self._stack]

    def settle(self) -> None:
        """Copy what the counter may not keep (tensors pushed without `writable`) into scratch of its own."""
        for i, (partial, writable) in enumerate(self._stack):
            if not writable:
                kept = self._scratch(partial.tensor).copy_(partial.tensor)
                self._stack[i] = (partial._replace(tensor=kept), True)

    def clear(self) -> None:
        self._stack.clear()

    def total(self) -> Tensor:
        """The sum of everything pushed, folded from the right; the counter is empty afterwards."""
        (_, _, tensor), writable = self._stack.pop()
        while self._stack:
            left, left_writable = self._stack.pop()
            tensor, writable = self._add(left.tensor, left_writable, tensor, writable), True
        return tensor

    def _add(self, left: Tensor, left_writable: bool, right: Tensor, right_writable: bool) -> Tensor:
        out = left if left_writable else right if right_writable else self._scratch(left)
        torch.add(left, right, out=out)
        if left_writable and right_writable:
            self._recycle(right)
        return out


def tree_sum(values: Iterable[float]) -> float:
    """The same tree over Python floats (fp64)."""
    stack: list[tuple[int, float]] = []
    for value in values:
        size = 1
        while stack and stack[-1][0] == size:
            value = stack.pop()[1] + value
            size *= 2
        stack.append((size, value))
    total = stack.pop()[1] if stack else 0.0
    while stack:
        total = stack.pop()[1] + total
    return total


def contiguous_leaves(leaves: int, width: int, rank: int) -> range:
    """The leaves of `rank` where each rank takes a contiguous range (ZeRO-0 and 1); sizes differ by at most one."""
    return range(leaves * rank // width, leaves * (rank + 1) // width)


def strided_leaves(leaves: int, width: int, rank: int) -> range:
    """The leaves of `rank` where one leaf of each rank is exchanged per tick (ZeRO-2 and 3)."""
    return range(rank, leaves, width)


def counter_states(run: range) -> Iterator[list[tuple[int, int]]]:
    """The (start, size) of the partial sums that a counter holds after each of the contiguous leaves `run`."""
    stack: list[tuple[int, int]] = []
    for leaf in run:
        start, size = leaf, 1
        while stack and stack[-1][1] == size and stack[-1][0] % (2 * size) == 0:
            start, size = stack.pop()[0], 2 * size
        stack.append((start, size))
        yield stack


def aligned_partials(run: range) -> list[tuple[int, int]]:
    """What a counter holds after the contiguous leaves `run`: the partial sums that an owner can go on with."""
    *_, last = [], *counter_states(run)
    return last
