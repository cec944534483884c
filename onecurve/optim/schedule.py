"""The learning rate as a function of the step alone: nothing to save, nothing to restore."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `lr`, then constant, cosine (Loshchilov and Hutter 2017) or linear decay to `min_lr`, which is
    reached at the last of `steps` steps."""

    lr: float
    steps: int = 0
    warmup_steps: int = 0
    decay: str = "constant"
    min_lr: float = 0.0

    def __call__(self, step: int) -> float:
        """The rate of update `step` (0-based)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.lr
        span = max(self.steps - 1 - self.warmup_steps, 1)
        done = min((step - self.warmup_steps) / span, 1.0)
        share = 0.5 * (1.0 + math.cos(math.pi * done)) if self.decay == "cosine" else 1.0 - done
        return self.min_lr + (self.lr - self.min_lr) * share
