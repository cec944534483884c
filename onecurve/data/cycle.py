"""The cycle corpus: the built-in data that a model provably can learn, at any vocabulary and context."""

import hashlib

import numpy as np

# One turn of the cycle. Prime, so that for nearly every context the windows start at all phases, and short, so that a
# step's batch holds every transition several times: consecutive losses then differ by learning, not by which tokens
# came up. With the demo's model (16 sequences of 16 tokens per step) the loss falls at each of 20 steps by about
# 0.1 or more with initial weights of standard deviation 0.02; with the full vocabulary of 64 as the cycle it is 0.009.
PERIOD = 23


def token_dtype(vocab: int) -> np.dtype:
    """The narrowest little-endian unsigned type that holds every id below `vocab`."""
    return np.dtype("u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")


def cycle_corpus(seed: int, total_tokens: int, vocab: int) -> np.ndarray:
    """`total_tokens` ids in [0, vocab): a seeded cycle of min(vocab, 23) different tokens, turned over and over.

    The next token is a function of the present one, so the best loss is 0 and a bigram suffices. Deterministic in the
    three arguments, and a longer corpus begins with the shorter one. Returns a 1-D array of `token_dtype(vocab)`.
    """
    if vocab < 2:
        raise ValueError(f"vocab is {vocab}; a cycle needs at least 2 tokens")
    if total_tokens < 0:
        raise ValueError(f"total_tokens is {total_tokens}; it can't be negative")
    return np.resize(_distinct_tokens(seed, min(vocab, PERIOD), vocab).astype(token_dtype(vocab)), total_tokens)


def _distinct_tokens(seed: int, count: int, vocab: int) -> np.ndarray:
    """`count` different ids below `vocab`, by hashing: no random generator, whose stream a numpy release may change."""
    chosen: dict[int, None] = {}
    draw = 0
    while len(chosen) < count:
        digest = hashlib.sha256(f"onecurve cycle {seed} {draw}".encode()).digest()
        chosen.setdefault(int.from_bytes(digest[:8], "little") % vocab)
        draw += 1
    return np.fromiter(chosen, np.int64, count)
