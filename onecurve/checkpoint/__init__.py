"""Sharded checkpoints: content hashes, atomic commit, any layout on load, no pickle.

The format: manifest.py. The commit protocol: store.py."""

from onecurve.checkpoint.background import Checkpointer
from onecurve.checkpoint.load import latest_checkpoint, load_checkpoint, state_digest, tensor_digests
from onecurve.checkpoint.lock import Fence, RunLock
from onecurve.checkpoint.manifest import Manifest
from onecurve.checkpoint.mirror import Mirror, fetch_latest
from onecurve.checkpoint.place import Place, find_checkpoint, parse_place
from onecurve.checkpoint.policy import due_by_clock, due_by_step
from onecurve.checkpoint.read import read_manifest, read_parameters, verify_checkpoint
from onecurve.checkpoint.save import save_checkpoint
from onecurve.checkpoint.store import clean_leftovers, list_steps, remove_checkpoint

__all__ = [
    "Checkpointer",
    "Fence",
    "Manifest",
    "Mirror",
    "Place",
    "RunLock",
    "clean_leftovers",
    "due_by_clock",
    "due_by_step",
    "fetch_latest",
    "find_checkpoint",
    "latest_checkpoint",
    "list_steps",
    "load_checkpoint",
    "parse_place",
    "read_manifest",
    "read_parameters",
    "remove_checkpoint",
    "save_checkpoint",
    "state_digest",
    "tensor_digests",
    "verify_checkpoint",
]
