"""Start ranks, watch them, name the one that failed, leave nothing behind."""

from onecurve.launch.context import RankContext
from onecurve.launch.ranks import run_ranks
from onecurve.launch.restarts import with_restarts

__all__ = ["RankContext", "run_ranks", "with_restarts"]
