"""Run a function on real gloo ranks from a test: results or the real error, in limited time, nothing left."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onecurve.launch import RankContext, run_ranks


def run_dist(
    fn: Callable[..., Any], world: int, *args: Any, seconds: float = 60.0, folder: Path | None = None, **options: Any
) -> list[Any]:
    """Call `fn(context, *args)` on `world` ranks; their JSON results in rank order.

    `fn` may be a closure (ranks are forked). `seconds` limits the whole call: RunFailed with the stacks on stderr, and
    nothing left running. Other `options` go to `run_ranks`. A group is made also for one rank, so that the same code
    runs at every width.
    """

    def worker(context: RankContext) -> Any:
        return fn(context, *args)

    options = {"group": True, "on_signal": "kill", "stall_seconds": seconds, "limit_seconds": seconds, **options}
    with tempfile.TemporaryDirectory() as scratch:
        return run_ranks(worker, world, folder=folder or Path(scratch), **options)
