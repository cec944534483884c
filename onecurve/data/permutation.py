"""A seeded permutation of range(n) that is computed place by place, so that it needs no memory.

A generalised Feistel network over Z_a x Z_b with a = ceil(sqrt n), b = ceil(n / a), and cycle walking for the fewer
than a places of the rectangle beyond n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
Each round adds to one half a keyed hash of the other, which can be undone; so the whole is a bijection.
"""

import hashlib
import math

import numpy as np

ROUNDS = 8  # one 64-bit key each, from one 512-bit digest


def permuted(places: np.ndarray, n: int, key: str) -> np.ndarray:
    """Where the permutation of range(n) named by `key` sends each of `places` (int64 in [0, n)); int64, same shape."""
    if n >= 1 << 52:
        raise ValueError(f"{n} places are more than the permutation was made for (2^52)")
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), "<u8")
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    at = _rounds(places.astype(np.uint64), np.uint64(a), np.uint64(b), keys)
    while (outside := at >= n).any():
        # A place that landed beyond n walks on; it must come back, since the cycle it is on holds where it began.
        at[outside] = _rounds(at[outside], np.uint64(a), np.uint64(b), keys)
    return at.astype(np.int64)


def _rounds(places: np.ndarray, a: np.uint64, b: np.uint64, keys: np.ndarray) -> np.ndarray:
    left: np.ndarray = places // b
    right: np.ndarray = places % b
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mixed(right ^ left_key) % a) % a
        right = (right + _mixed(left ^ right_key) % b) % b
    return left * b + right


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); uint64 in, uint64 out, wrapping."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
