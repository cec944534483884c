"""Controls: each breaks one clause of the arithmetic contract on purpose, so that one can see `verify` catch it.

    ONECURVE_BREAK=ring-sum onecurve verify configs/odd.toml --quick        must end with exit code 1

Only `verify` reads the variable, and only its ranks are changed, by replacing parts of the library inside them. The
reference keeps the contract (a clause broken everywhere alike would often be a consistent other curve). What each
control changes where it was run is in docs/determinism.md.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onecurve.errors import InputError
from onecurve.verify import breaks

ENVIRONMENT = "ONECURVE_BREAK"


@dataclass(frozen=True)
class Control:
    """`clause`: the rule that it breaks. `breaks(rank)` changes this process. `rehearses`, run on the reference too,
    brings the trouble that the clause is about. `numerics`: settings of the config that are the break themselves."""

    clause: str
    breaks: Callable[[int], None] = lambda rank: None
    rehearses: Callable[[], None] = lambda: None
    numerics: dict[str, Any] = field(default_factory=dict)


def from_environment() -> str:
    """The control that ONECURVE_BREAK names, or "". Raises InputError for an unknown one."""
    name = os.environ.get(ENVIRONMENT, "").strip()
    if name:
        find(name)
    return name


def find(name: str) -> Control:
    if name not in CONTROLS:
        raise InputError(f"{ENVIRONMENT}={name}: no such control; allowed: {', '.join(CONTROLS)}")
    return CONTROLS[name]


def break_clause(name: str, rank: int, *, keep: bool) -> None:
    """Break the clause in this process for good; with `keep` (the reference) only rehearse its trouble."""
    control = find(name)
    control.rehearses()
    if not keep:
        control.breaks(rank)


CONTROLS: dict[str, Control] = {
    "ring-sum": Control("tree: leaves are added in one fixed tree", breaks.ring_sum),
    "contiguous-ticks": Control("tree: ZeRO-2 and 3 run leaf t*W + r in tick t", breaks.contiguous_ticks),
    "losses-in-float": Control("loss: losses are added in fp64, leaves in the tree", breaks.losses_in_float),
    "data-by-rank": Control("leaf: the rank never enters the sample order", breaks.data_by_rank),
    "strided-activations": Control("leaf: the same shapes and strides in every layout", breaks.strided_activations),
    "dropout-by-rank": Control("randomness: masks are keyed by their place in the curve", breaks.dropout_by_rank),
    "tied-together": Control("tied: each use is reduced on its own", breaks.tied_together),
    "float-norm": Control("norms: exact integers, no backend sum", breaks.float_norm),
    "off-grid": Control("optimizer: shards lie on the 16-element grid", breaks.off_grid),
    "divide-first": Control("loss: one multiply, by clip factor / tokens", breaks.divide_first),
    "reduce-each-micro-batch": Control(
        "tree: exchange per leaf, never per micro-batch", breaks.reduce_each_micro_batch
    ),
    "last-in-first-out": Control("leaf: backward is first-in first-out", breaks.last_in_first_out),
    "lost-nan": Control("finite: a NaN on any rank counts", breaks.lose_nan, rehearses=breaks.nan_in_last_parameter),
    "roll-back-one-step": Control(
        "rollback: to the state before the suspected update",
        breaks.roll_back_one_step,
        rehearses=breaks.nan_in_last_parameter,
    ),
    "two-threads": Control("numerics: the same threads at every width", numerics={"threads": 2}),
}
