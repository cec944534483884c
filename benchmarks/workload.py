"""The work that every system gets: a model, its initial weights, and the micro-batches of each step."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor, nn

from onecurve.data.cycle import cycle_corpus
from onecurve.data.loader import Batch, Loader
from onecurve.model import GPT

SEED = 41
REPEAT = 16  # data steps made in advance; then they come again


@dataclass(frozen=True)
class Workload:
    """One curve: shapes, batch and AdamW's constants. No decay, no clipping: all systems do the same there."""

    name: str
    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    micro_batch: int
    lr: float
    leaves: int = 4
    accumulate: int = 1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    @property
    def tokens(self) -> int:
        """Per step, on all ranks together."""
        return self.leaves * self.accumulate * self.micro_batch * self.context

    def model(self) -> GPT:
        return GPT(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            vocab=self.vocab,
            context=self.context,
            seed=SEED,
        )

    @cached_property
    def loader(self) -> Loader:
        corpus = cycle_corpus(SEED, 4096 * self.context + 1, self.vocab)
        return Loader(
            corpus,
            context=self.context,
            micro_batch=self.micro_batch,
            leaves=self.leaves,
            accumulate=self.accumulate,
            seed=SEED,
        )

    def batches(self, leaf_ids: list[int]) -> list[list[Batch]]:
        """The micro-batches of `leaf_ids`, in order, for each of `REPEAT` data steps."""
        return [list(self.loader.micro_batches(step, leaf_ids)) for step in range(REPEAT)]

    def resized(self, **changes: int | None) -> "Workload":
        return replace(self, **{key: value for key, value in changes.items() if value is not None})


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs).flatten(0, -2), batch.targets.flatten())


WORKLOADS = {
    # configs/demo.toml: 29,824 parameters, 256 tokens per step
    "demo": Workload("demo", layers=2, width=32, heads=4, vocab=64, context=16, micro_batch=4, lr=5e-3),
    # the shapes of configs/text.toml: about a million parameters, 4,096 tokens per step
    "1m": Workload("1m", layers=4, width=128, heads=4, vocab=257, context=128, micro_batch=8, lr=1e-3),
}
