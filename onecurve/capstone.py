"""The demo's program as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from onecurve.errors import InputError


def load_capstone() -> ModuleType:
    """`code/main.py` as a module: beside the package in a source checkout, inside it once installed (see setup.py)."""
    package = Path(__file__).parent
    places = [package / "_capstone" / "main.py", package.parent / "code" / "main.py"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise InputError(
            f"the demo's program is missing: looked for {' and '.join(map(str, places))}; install onecurve again"
        )
    spec = importlib.util.spec_from_file_location("onecurve_capstone", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling by spawn look it up by name
    spec.loader.exec_module(module)
    return module
