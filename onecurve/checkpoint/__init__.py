"""Sharded checkpoints: content hashes, atomic commit, any layout on load, no pickle. The format: manifest.py; the commit
protocol: store.py."""

from onecurve.checkpoint.load import latest_checkpoint, load_checkpoint, state_digest
from onecurve.checkpoint.lock import Fence, RunLock
from onecurve.checkpoint.manifest import Manifest
from onecurve.checkpoint.read import read_manifest, read_parameters, verify_checkpoint
from onecurve.checkpoint.save import save_checkpoint
from onecurve.checkpoint.store import clean_leftovers, list_steps, remove_checkpoint

__all__ = [
    "Fence",
    "Manifest",
    "RunLock",
    "clean_leftovers",
    "latest_checkpoint",
    "list_steps",
    "load_checkpoint",
    "read_manifest",
    "read_parameters",
    "remove_checkpoint",
    "save_checkpoint",
    "state_digest",
    "verify_checkpoint",
]
