"""Random numbers keyed by what they are for, never drawn from a global generator.

A dropout mask depends on (seed, data_step, leaf, micro-batch, layer, site); an initial weight on (seed, parameter
name). Neither depends on a rank, on the order of calls, or on what was drawn before, so every layout and every resumed
run draws the same numbers.
"""

import hashlib

import torch
from torch import Tensor


def generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator whose seed is a hash of `key` (ints and strings)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)


def dropout(x: Tensor, p: float, key: tuple[object, ...] | None) -> Tensor:
    """Inverted dropout with a keyed mask; the identity where `p` is 0 or `key` is None (evaluation).

    The mask is drawn at x's shape: element i of x is always dropped together with the same draw.
    """
    if p == 0.0 or key is None:
        return x
    keep = torch.rand(x.shape, generator=generator(*key, device=x.device), device=x.device) >= p
    return x * (keep.to(x.dtype) * (1.0 / (1.0 - p)))
