"""A run's trained weights in formats that others load."""

from onecurve.export.run import FORMATS, Exported, export_run

__all__ = ["FORMATS", "Exported", "export_run"]
