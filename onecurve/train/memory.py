"""The memory profile: bytes counted from live tensors, beside the formula they must match.

Per rank, for P trained elements cut over N data-parallel ranks, b bytes per working weight and c leaf buffers alive:

    zero    working weights    gradients (fp32)        optimizer (fp32 master, two moments)
    0       bP                 4Pc                     12P
    1       bP                 4Pc                     12P/N
    2       bP                 4P/N · c + two units    12P/N
    3       bP/N               4P/N · c + two units    12P/N

Scratch, in a row of its own: at zero 3 two units of gathered weights; the copy of the state that a save in the
background works from.

(Rajbhandari et al. 2020, section 5, with the master weights counted in K = 12 bytes per element.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

STATE = ("master", "exp_avg", "exp_avg_sq")


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`; tensors that share a storage count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, by what they are for. `optimizer` is master and both moments together."""

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    formula: int  # 12P/N, or 12P at stage 0
    padding: int  # elements of the optimizer's tensors that stand for no trained element, in bytes
    scratch: int = 0  # memory that is used at times: at its most, and not in the total

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def measure(rank: int, tensors: Mapping[str, Sequence[Tensor]], trained: int, cut: int, scratch: int = 0) -> RankMemory:
    """Count what is alive. `tensors`: by purpose, as `ZeroOptimizer.tensors()` gives them. `trained`: P, `cut`: N."""
    counted = {purpose: count_bytes(live) for purpose, live in tensors.items()}
    optimizer = sum(counted[kind] for kind in STATE)
    formula = 12 * trained / cut
    return RankMemory(
        rank=rank,
        optimizer=optimizer,
        formula=round(formula),
        padding=optimizer - round(formula),
        scratch=scratch,
        **counted,
    )


def aggregate(profile: Sequence[RankMemory]) -> tuple[int, float]:
    """(maximum, mean) over ranks of the total."""
    totals = [row.total for row in profile]
    return max(totals), sum(totals) / len(totals)
