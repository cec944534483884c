"""The held-out part as numbered chunks of one shape, so that any number of ranks gets the same bits of its loss.

chunk i        rows i*B … i*B + B-1 of the part: always [micro_batch, context], whoever computes it
rank r of W    computes chunks r, r + W, r + 2W, …           each gives (index, sum of losses, tokens)
combined       the sums are added exactly (math.fsum), so neither the order nor the width can matter
"""

import math
from collections.abc import Iterable

import numpy as np
import torch

from onecurve.data.corpus import Corpus, as_corpus
from onecurve.data.loader import Batch


class EvaluationSet:
    """The first-to-last windows of a corpus, or a fixed `share` of them spread evenly over it.

    Unlike in training, the last window may be short: what it lacks, and the rows that the last chunk lacks, are
    padding (input 0, target -100), so each token but the first is predicted exactly once where `share` is 1.
    """

    def __init__(self, corpus: Corpus | np.ndarray, *, context: int, micro_batch: int, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; it must be above 0 and at most 1")
        self.corpus = as_corpus(corpus)
        self.context, self.micro_batch = context, micro_batch
        self._present = -(-(len(self.corpus.tokens) - 1) // context) if len(self.corpus.tokens) else 0
        self.windows = math.ceil(self._present * share)

    def __len__(self) -> int:
        """The number of chunks."""
        return -(-self.windows // self.micro_batch)

    def chunk(self, index: int) -> Batch:
        """Chunk `index`: inputs and targets int64 [micro_batch, context]."""
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        ids = np.zeros((self.micro_batch, self.context), np.int64)
        targets = np.full((self.micro_batch, self.context), -100, np.int64)
        first = index * self.micro_batch
        for row, used in enumerate(range(first, min(first + self.micro_batch, self.windows))):
            start = used * self._present // self.windows * self.context
            window = self.corpus.tokens[start : start + self.context + 1]
            ids[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        return Batch(torch.from_numpy(ids), torch.from_numpy(targets))

    def combine(self, parts: Iterable[tuple[int, float, int]]) -> float:
        """The mean loss per token (nats), from all chunks' (index, sum of losses, targets that counted), in any order.

        Raises ValueError where a chunk is missing or comes twice.
        """
        ordered = sorted(parts)
        if [index for index, _, _ in ordered] != list(range(len(self))):
            raise ValueError(f"{len(ordered)} contributions do not make each of the {len(self)} chunks once")
        tokens = sum(count for _, _, count in ordered)
        return math.fsum(loss_sum for _, loss_sum, _ in ordered) / tokens if tokens else math.nan
