"""AdamW on ranges of the flat state, and learning rates as functions of the step."""

from onecurve.optim.adamw import AdamW
from onecurve.optim.schedule import Schedule

__all__ = ["AdamW", "Schedule"]
