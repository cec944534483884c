"""The promise, proven on a config: every layout, through kills and resumes, gives the bits of one rank alone."""

from onecurve.verify.proof import Proof, prove

__all__ = ["Proof", "prove"]
