"""Again from the newest checkpoint, a limited number of times without progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from onecurve.errors import GaveUp, RunFailed

T = TypeVar("T")


def with_restarts(
    run: Callable[[int], T],
    budget: int,
    progressed: Callable[[], int],
    on_restart: Callable[[int, RunFailed], None] | None = None,
) -> T:
    """Call `run(attempt)`, attempt = 0, 1, …, until it returns; after RunFailed at most `budget` times in a row.

    `progressed()` gives the newest step that a restart would resume from; each time it has grown since the last failure
    the budget is full again. Bad input, a failed check, GaveUp and a stop on request are never retried.
    `on_restart(attempt, error)` is told before each retry. Raises the last RunFailed when the budget is spent.
    """
    left, reached, attempt = budget, progressed(), 0
    while True:
        try:
            return run(attempt)
        except RunFailed as error:
            if (now := progressed()) > reached:
                left, reached = budget, now
            if left <= 0 or isinstance(error, GaveUp):
                raise
            left -= 1
            attempt += 1
            if on_restart is not None:
                on_restart(attempt, error)
