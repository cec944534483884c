"""AdamW (Loshchilov and Hutter 2019) on ranges of flat fp32 state, through torch's fused kernel.

The kernel works through a tensor in vectors and finishes with a scalar tail that may round differently, so every range
here begins and ends at a multiple of 16 elements; the padding in between is zero and stays zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RangeState = tuple[Tensor, Tensor, Tensor, Tensor]  # master, gradient, exp_avg, exp_avg_sq


@dataclass(frozen=True)
class AdamW:
    """The rule's constants. `weight_decay` is decoupled and applies to ranges marked as decaying."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def update(self, ranges: Sequence[RangeState], *, step: int, lr: float, decay: bool) -> None:
        """One update in place of (master, gradient, exp_avg, exp_avg_sq), each 1-D fp32; `step` counts from 1."""
        if not ranges:
            return
        masters, gradients, averages, squares = (list(column) for column in zip(*ranges, strict=True))
        torch._fused_adamw_(
            masters,
            gradients,
            averages,
            squares,
            [],
            [torch.tensor(float(step))] * len(masters),
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay if decay else 0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
