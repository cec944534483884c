"""What all ranks know of a step before the weights change, from one message each.

losses per leaf, tokens, vote, digest of replicas, and what the norm needs   60 bytes or so
-> loss (fp64, leaves in the tree), norm (exact integers), finite: the same bits on every rank
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from onecurve.errors import UsageError
from onecurve.parallel.norms import MESSAGE, SharedNorm
from onecurve.parallel.transports import Transport
from onecurve.parallel.tree import tree_sum


@dataclass(frozen=True)
class Stats:
    """`loss`: mean over the step's unmasked tokens (nan without any). `norm`: of the mean gradient, before clipping.
    `tokens`: unmasked tokens of the whole step. `finite`: loss and every gradient element. `vote`: bitwise or of what
    the ranks passed to `step`. `replicas`: by rank, the digest of the weights that this step's gradients came from
    (where `step` was asked to check them). `accepted`: whether the weights changed.
    """

    loss: float
    norm: float
    tokens: int
    finite: bool
    vote: int = 0
    replicas: tuple[int, ...] = ()
    accepted: bool = False


class Agreement:
    """Reached once per step. `leaves_of` gives the leaves that a rank runs, in its order."""

    def __init__(self, transport: Transport, leaves: int, leaves_of: Callable[[int], Sequence[int]]) -> None:
        self._transport, self._leaves, self._leaves_of = transport, leaves, leaves_of
        self._norm = SharedNorm(transport.all_gather_bytes)
        self._most = -(-leaves // transport.size)  # leaves of one rank: all messages have one length
        self._form = struct.Struct(f"<qqQQ{self._most}d")

    def reach(
        self, gradient: Sequence[Tensor], losses: Sequence[float], tokens: int, vote: int, replica: int, sequence: int
    ) -> Stats:
        """The step's stats. `gradient`: what this rank is the primary owner of, of the summed gradient (fp32, 1-D);
        `losses`: one sum per leaf of this rank; `replica`: a digest, 0 where none was asked for; `sequence`: the
        checksum of this rank's collectives. Collective. Raises UsageError where the ranks' sequences differ."""
        padded = [*losses, *[0.0] * (self._most - len(losses))]
        message = self._norm.message(gradient) + self._form.pack(tokens, vote, replica, sequence, *padded)
        told = self._transport.all_gather_bytes(message)
        total_tokens = votes = 0
        replicas, sequences = [], set()
        by_leaf = [0.0] * self._leaves
        for rank, theirs in enumerate(told):
            numbers = self._form.unpack_from(theirs, MESSAGE.size)
            their_tokens, their_vote, their_replica, their_sequence, *their_losses = numbers
            total_tokens += their_tokens
            sequences.add(their_sequence)
            votes |= their_vote
            replicas.append(their_replica)
            for leaf, loss in zip(self._leaves_of(rank), their_losses, strict=False):
                by_leaf[leaf] = loss
        if len(sequences) > 1:
            raise UsageError(
                "the ranks went through different units in this step: at ZeRO-3 every leaf must call the same units in "
                "the same order; use a stage below 3 for a model that chooses"
            )
        loss = tree_sum(by_leaf)
        norm = self._norm.of(gradient, [theirs[: MESSAGE.size] for theirs in told])
        finite = math.isfinite(loss) and math.isfinite(norm)
        loss, norm = (loss / total_tokens, norm / total_tokens) if total_tokens else (math.nan, 0.0)
        return Stats(loss, norm, total_tokens, finite, votes, tuple(replicas))
