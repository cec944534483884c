"""The stateless loader: which windows a leaf trains on is a function of the seed and its place in the curve.

    sample  = data_step * L*A*B + leaf * A*B + micro_batch * B + row      L leaves, A accumulate, B rows
    epoch   = sample // windows,   place = sample % windows
    window  = permutation[seed, epoch](place)                             every window exactly once per epoch
    tokens  = corpus[window * context : window * context + context + 1]

No rank, no width, no position to save or restore, no random generator: resuming is asking for the next step.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onecurve.data.corpus import Corpus, as_corpus, check_windows
from onecurve.data.permutation import permuted


class Batch(NamedTuple):
    """`inputs` and `targets`, both int64 [micro_batch, context], contiguous; a target of -100 does not count.

    `place` = (data_step, leaf, micro-batch), what a dropout mask is keyed by; empty for evaluation.
    """

    inputs: Tensor
    targets: Tensor
    place: tuple[int, ...] = ()


class Loader:
    """Micro-batches of a corpus for any set of leaves of any step.

    Raises InputError where the corpus has fewer windows than one step draws: a step would see a window twice.
    """

    def __init__(
        self, corpus: Corpus | np.ndarray, *, context: int, micro_batch: int, leaves: int, accumulate: int, seed: int
    ) -> None:
        for name, value in [("context", context), ("micro_batch", micro_batch), ("leaves", leaves)]:
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}; it must be at least 1")
        self.corpus = as_corpus(corpus)
        self.context, self.micro_batch = context, micro_batch
        self.leaves, self.accumulate, self.seed = leaves, accumulate, seed
        self.sequences_per_step = leaves * accumulate * micro_batch
        self.windows = self.corpus.windows(context)
        check_windows(self.corpus, context, self.sequences_per_step)

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the corpus."""
        return self.corpus.fingerprint

    def window_indices(self, data_step: int, leaf: int) -> np.ndarray:
        """The windows that `leaf` trains on in `data_step`: int64 [accumulate, micro_batch]."""
        if not 0 <= leaf < self.leaves:
            raise ValueError(f"leaf is {leaf}; this loader has leaves 0 … {self.leaves - 1}")
        per_leaf = self.accumulate * self.micro_batch
        first = data_step * self.sequences_per_step + leaf * per_leaf  # a Python integer: no run is too long for it
        indices = np.empty(per_leaf, np.int64)
        done = 0
        while done < per_leaf:  # more than one turn only where an epoch ends inside the leaf
            epoch, place = divmod(first + done, self.windows)
            count = min(per_leaf - done, self.windows - place)
            key = f"onecurve windows {self.seed} {epoch}"
            indices[done : done + count] = permuted(np.arange(place, place + count), self.windows, key)
            done += count
        return indices.reshape(self.accumulate, self.micro_batch)

    def micro_batches(self, data_step: int, leaf_ids: Iterable[int]) -> Iterator[Batch]:
        """`accumulate` batches for each of `leaf_ids`, in the order given."""
        for leaf in leaf_ids:
            for micro, indices in enumerate(self.window_indices(data_step, leaf)):
                yield cut_windows(self.corpus.tokens, indices, self.context)._replace(place=(data_step, leaf, micro))


def cut_windows(tokens: np.ndarray, indices: np.ndarray, context: int) -> Batch:
    """The windows `indices` (int64 [rows]) as a batch; a copy, so that nothing holds on to a mapped file."""
    ids = tokens[indices[:, None] * context + np.arange(context + 1)].astype(np.int64)
    # Copies, not views of one tensor: the strides of what the model sees must not depend on how it was cut.
    return Batch(torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy()))
