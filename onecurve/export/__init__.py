"""A run's trained weights in formats that others load."""

from onecurve.export.gpt2 import gpt2_config, gpt2_tensors
from onecurve.export.run import FORMATS, Exported, export_run

__all__ = ["FORMATS", "Exported", "export_run", "gpt2_config", "gpt2_tensors"]
