"""Start ranks, watch them, name the one that failed, leave nothing behind."""

from onecurve.launch.context import RankContext
from onecurve.launch.ranks import run_ranks
from onecurve.launch.restarts import with_restarts
from onecurve.launch.torchrun import context_from_torchrun

__all__ = ["RankContext", "context_from_torchrun", "run_ranks", "with_restarts"]
