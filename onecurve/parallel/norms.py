"""Norms and the finite check as exact integers, so that no cut, order or backend can change them.

Every x is scaled by the power of two above the global maximum, squared in fp64 (exact: 24-bit significands) and rounded
once to a 48-bit integer. Integer sums are associative, so ranks add theirs in any order:

    1. share the local maximum  (NaN counts as infinity)   -> the common exponent
       and the local sum of integers for the exponent of the last time
    2. only if the exponent moved: share the local sum     -> the same norm on every rank
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 15  # elements handled at once: their fp64 temporaries stay in cache, their sum stays below 2^64
BASE = torch.tensor(2.0**52, dtype=torch.float64)  # numbers in [2^52, 2^53) are integers, their bits count with them
BASE_BITS = 0x433 << 52
MESSAGE = struct.Struct("<d16s")  # largest element, sum of squares


def local_max(x: Tensor) -> float:
    """The largest magnitude in `x` (fp32, 1-D), or +inf if any element is not finite; 0.0 if it is empty."""
    if x.numel() == 0:
        return 0.0
    low, high = (float(m) for m in torch.aminmax(x))
    largest = max(-low, high)
    return largest if math.isfinite(low) and math.isfinite(high) else math.inf


def local_squares(x: Tensor, maximum: float) -> int:
    """The exact sum over `x` (fp32, 1-D) of round((x / 2^e)^2 · 2^48), where 2^e > `maximum` >= |x|.

    `maximum` must be finite and the same on all ranks.
    """
    if maximum == 0.0:
        return 0
    scale = math.ldexp(1.0, 48 - 2 * math.frexp(maximum)[1])
    total = 0
    for block in x.split(BLOCK):
        wide = block.to(torch.float64)
        bits = torch.addcmul(BASE, wide, wide, value=scale).view(torch.int64)  # 2^52 + the rounded square
        total += (int(bits.sum()) - block.numel() * BASE_BITS) % (1 << 64)  # the sum wraps around, and back
    return total


def norm(total: int, maximum: float) -> float:
    """The Euclidean norm from the sum over all ranks of `local_squares` and the global `maximum`."""
    if not math.isfinite(maximum):
        return math.inf
    if total == 0:
        return 0.0
    return math.ldexp(math.sqrt(total), math.frexp(maximum)[1] - 24)


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The norm of tensors that this rank holds whole, by the same integers."""
    flat = [t.detach().reshape(-1).float() for t in tensors]
    maximum = max((local_max(t) for t in flat), default=0.0)
    return norm(sum(local_squares(t, maximum) for t in flat), maximum) if math.isfinite(maximum) else math.inf


class SharedNorm:
    """The norm of a vector that is cut over the ranks, time and again: share every rank's `message`, then `of`.

    Takes one round where the maximum has the exponent of the last time, which is the rule, else two.
    """

    def __init__(self, all_gather_bytes: Callable[[bytes], list[bytes]]) -> None:
        self._all_gather_bytes = all_gather_bytes
        self._expected = 1.0

    def message(self, mine: Sequence[Tensor]) -> bytes:
        """What every rank has to know of this rank's parts (fp32, 1-D); `MESSAGE.size` bytes."""
        largest = max((local_max(t) for t in mine), default=0.0)
        fits = largest < math.ldexp(1.0, math.frexp(self._expected)[1])
        return MESSAGE.pack(largest, self._squares(mine) if fits else b"")

    def of(self, mine: Sequence[Tensor], messages: Sequence[bytes]) -> float:
        """The norm, given every rank's message; inf where any element is not finite. Collective."""
        told = [MESSAGE.unpack(m) for m in messages]
        maximum = max(largest for largest, _ in told)
        if not math.isfinite(maximum) or maximum == 0.0:
            return maximum
        moved = math.frexp(maximum)[1] != math.frexp(self._expected)[1]
        self._expected = maximum
        squares = self._all_gather_bytes(self._squares(mine)) if moved else [own for _, own in told]
        return norm(sum(int.from_bytes(own, "little") for own in squares), maximum)

    def _squares(self, mine: Sequence[Tensor]) -> bytes:
        return sum(local_squares(t, self._expected) for t in mine).to_bytes(16, "little")
