"""onecurve: one config, one loss curve, on any layout."""

__version__ = "0.1.0"
