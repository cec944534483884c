"""Ranks, ownership, and the exchanges between them. Nothing here knows of training runs or run folders."""

from onecurve.parallel.mesh import Mesh
from onecurve.parallel.replicate import replicate
from onecurve.parallel.stats import Stats
from onecurve.parallel.zero import ZeroOptimizer

__all__ = ["Mesh", "Stats", "ZeroOptimizer", "replicate"]
