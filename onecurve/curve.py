"""The curve's name: a hash over everything that may change a bit of the result, and over nothing else."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from onecurve.config import Config, curve_part

# Bumped whenever the arithmetic changes: two versions of this library that give other bits give other curve ids.
ARITHMETIC_VERSION = 1


def curve_id(config: Config, data_fingerprint: str, parent: str | None = None) -> str:
    """sha256 (64 hex digits) over the curve part, the data, the arithmetic and the parent's state digest.

    The corpus counts by its fingerprint and not by its path: a folder that was moved holds the same curve. `parent` is
    the digest of the state that a run started by `--from` begins with.
    """
    curve = curve_part(config)
    del curve["data"]["source"]
    identity = {"arithmetic": ARITHMETIC_VERSION, "curve": curve, "data": data_fingerprint, "parent": parent}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with one spelling per value: sorted keys, no spaces, floats as `float.hex()`; 1e-3 and 0.001 are one."""
    return json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _canonical(value: Any) -> Any:
    if isinstance(value, float):
        return (value + 0.0).hex()  # -0.0 is 0.0
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value
