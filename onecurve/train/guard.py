"""The guard: one verdict per step, before the weights change, and where the run goes back to.

A loss that is not finite, or more than `spike_factor` times the one before, at step d was caused by update d-1 or by
the data of d. So the run returns to the state after update d-2 and steps d-1 and d draw batches that nobody has used.
Everything that decides this is in `GuardState`, a few numbers that travel with each checkpoint: the result is a
function of the curve, wherever checkpoints were made and however often the run was killed.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from onecurve.errors import GaveUp
from onecurve.parallel import Stats


def data_step(step: int, skipped: tuple[int, ...]) -> int:
    """Which batch (0-based) step `step` (1-based) draws: the step-th of those that were not skipped."""
    drawn = step - 1
    for batch in sorted(skipped):
        if batch <= drawn:
            drawn += 1
    return drawn


@dataclass(frozen=True)
class GuardState:
    """`last_loss`: the loss that the next is compared with (nan: none). `skipped`: batches drawn and given up.
    `spent`: the steps whose rehearsed fault has fired and was rolled back. `rollbacks`: in a row, since `furthest`,
    the last step that was accepted for the first time."""

    last_loss: float = math.nan
    skipped: tuple[int, ...] = ()
    spent: tuple[int, ...] = ()
    rollbacks: int = 0
    furthest: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"last_loss": self.last_loss.hex()}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "GuardState":
        lists = {name: tuple(stored[name]) for name in ("skipped", "spent")}
        return cls(
            float.fromhex(stored["last_loss"]), rollbacks=stored["rollbacks"], furthest=stored["furthest"], **lists
        )


@dataclass(frozen=True)
class Rollback:
    """What the guard decided at `step`: go back to the state after update `back_to`, with `state`."""

    step: int
    reason: str
    back_to: int
    dropped: tuple[int, ...]
    state: GuardState


@dataclass
class Guard:
    """Judges each step's stats; the same inputs on all ranks, so the same verdict. See the module's text."""

    spike_factor: float
    max_rollbacks: int
    state: GuardState = field(default_factory=GuardState)

    def objection(self, stats: Stats) -> str | None:
        """Why these stats must not become an update; None if they may."""
        if not stats.finite:
            return f"loss {stats.loss:g} or a gradient is not finite"
        if 0.0 < self.spike_factor < math.inf and stats.loss > self.spike_factor * self.state.last_loss:
            return f"loss {stats.loss:.6f} is more than {self.spike_factor:g} x the previous {self.state.last_loss:.6f}"
        return None

    def accept(self, step: int, stats: Stats) -> bool:
        """Step `step` was accepted (or had no token, and changed nothing). Whether that ends a row of rollbacks."""
        recovered = step > self.state.furthest and self.state.rollbacks > 0
        loss = stats.loss if stats.tokens else self.state.last_loss
        if step > self.state.furthest:
            self.state = replace(self.state, last_loss=loss, furthest=step, rollbacks=0)
        else:
            self.state = replace(self.state, last_loss=loss)
        return recovered

    def roll_back(self, step: int, reason: str, fired: tuple[int, ...]) -> Rollback:
        """The consequence of an objection at `step`. `fired`: steps at which a rehearsed fault changes the update.

        Raises GaveUp, with the story, once there were more than `max_rollbacks` without a new accepted step.
        """
        count = self.state.rollbacks + 1
        back_to = max(step - 2, 0)
        dropped = tuple(data_step(s, self.state.skipped) for s in range(back_to + 1, step + 1))
        if count > self.max_rollbacks:
            raise GaveUp(
                f"step {step}: {reason}; gave up after {self.max_rollbacks} rollbacks in a row without an accepted new "
                f"step (guard.max_rollbacks); batches given up so far: {list(self.state.skipped)}"
            )
        state = replace(
            self.state,
            skipped=self.state.skipped + dropped,
            spent=tuple(sorted({*self.state.spent, *(s for s in fired if back_to < s < step)})),
            rollbacks=count,
        )
        return Rollback(step, reason, back_to, dropped, state)
