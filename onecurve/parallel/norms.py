"""Norms and the finite check as exact integers, so that no cut, order or backend can change them.

Every x is scaled by the power of two above the global maximum, squared in fp64 (exact: 24-bit significands) and rounded
once to a 48-bit integer. Integer sums are associative, so ranks add theirs in any order:

    1. share the local maximum  (NaN counts as infinity)   -> the common exponent
    2. share the local sum of integers                     -> the same norm on every rank
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 1 << 14  # elements: 2^14 values below 2^48 stay below 2^62 in int64
BLOCK = 1 << 16  # elements handled at once, so that the fp64 temporaries stay in cache


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
    scale = math.ldexp(1.0, 24 - math.frexp(maximum)[1])
    total = 0
    for block in x.split(BLOCK):
        squares = block.to(torch.float64).mul_(scale).square_().round_().to(torch.int64)
        total += sum(int(chunk.sum()) for chunk in squares.split(CHUNK))
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
