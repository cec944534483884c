"""A corpus as training sees it: one row of token ids, a vocabulary, and a fingerprint of both."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from onecurve.errors import InputError

BLOCK = 1 << 20  # tokens looked at together: what hashing and checking need of memory, however long the corpus


def fingerprint_of(tokens: np.ndarray) -> str:
    """sha256 (hex) over the ids as little-endian uint32: the same for one text whatever integer type holds it."""
    digest = hashlib.sha256(b"onecurve tokens\n")
    for start in range(0, len(tokens), BLOCK):
        digest.update(tokens[start : start + BLOCK].astype("<u4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Token ids (1-D, unsigned; in memory or mapped from a file) and where they come from.

    `text_bytes` is how many bytes of text the ids stand for (0: unknown), for figures in nats per byte.
    """

    tokens: np.ndarray = field(repr=False)
    vocab: int
    name: str = "tokens in memory"
    split: str = "train"
    known_fingerprint: str = ""
    text_bytes: int = 0
    folder: Path | None = None

    @cached_property
    def fingerprint(self) -> str:
        return self.known_fingerprint or fingerprint_of(self.tokens)

    def windows(self, context: int) -> int:
        """How many windows of `context` inputs, each with its next token, lie side by side in the corpus."""
        return max(0, (len(self.tokens) - 1) // context)


def as_corpus(corpus: Corpus | np.ndarray) -> Corpus:
    """A bare array of ids taken as a corpus, its vocabulary the largest id + 1."""
    if isinstance(corpus, Corpus):
        return corpus
    return Corpus(corpus, vocab=int(corpus.max()) + 1 if len(corpus) else 1)


def check_windows(corpus: Corpus, context: int, needed: int) -> None:
    """Raises InputError where `corpus` has fewer than `needed` (at least 1) windows."""
    tokens, windows = len(corpus.tokens), corpus.windows(context)
    where = f"{corpus.name}, {corpus.split} part"
    if tokens == 0:
        raise InputError(f"{where}: it is empty (0 tokens); training needs at least {context + 1}: prepare more text")
    if windows == 0:
        cure = f" or set model.context to at most {tokens - 1}" if tokens > 1 else ""
        raise InputError(
            f"{where}: its {tokens} token{'s are' if tokens > 1 else ' is'} shorter than one window of context + 1 = "
            f"{context + 1}; prepare more text{cure}"
        )
    if windows < needed:
        raise InputError(
            f"{where}: its {tokens} tokens make {windows} windows of {context}, but one step draws {needed} "
            f"(leaves x accumulate x micro_batch); prepare at least {needed * context + 1} tokens or lower these three"
        )
