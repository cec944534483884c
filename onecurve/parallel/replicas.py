"""Replicas that must be bitwise copies, compared by digest.

The digest of all that is replicated is eight bytes and rides on the step's exchange; only where it differs do the ranks
share one digest per tensor, to name the first that is not the same everywhere.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onecurve.errors import GaveUp
from onecurve.parallel.mesh import Mesh


class ReplicasDiffer(GaveUp):
    """A rank's copy of a tensor is not the others'. The newest checkpoint may hold what came of it: somebody should
    look before the run goes on."""


def digest(tensors: Mapping[str, Tensor]) -> int:
    """64 bits of a hash over the tensors' bytes, in their order; never 0."""
    hasher = hashlib.blake2b(digest_size=8)
    for tensor in tensors.values():
        hasher.update(_raw(tensor))
    return int.from_bytes(hasher.digest(), "little") | 1


def differing(digests: Sequence[int]) -> list[int]:
    """The ranks whose digest is not that of the majority (of the lowest rank, in a tie)."""
    common = Counter(digests).most_common(1)[0][0]
    return [rank for rank, found in enumerate(digests) if found != common]


def name_difference(mesh: Mesh, tensors: Mapping[str, Tensor]) -> str:
    """The first tensor that is not the same on all ranks. Collective."""
    mine = {name: digest({name: tensor}) for name, tensor in tensors.items()}
    everywhere = [json.loads(m) for m in mesh.share(json.dumps(mine).encode())]
    for name in tensors:
        if differing([of_rank[name] for of_rank in everywhere]):
            return name
    return "none (the copies agree now)"


def tell_difference(name: str, odd: Sequence[int], size: int) -> str:
    """Who holds another `name`, of `size` ranks. Where the odd ones are no minority, nobody can say who is wrong."""
    if 2 * len(odd) < size:
        return f"rank {', '.join(map(str, odd))} holds another {name} than the other ranks"
    others = [rank for rank in range(size) if rank not in odd]
    return f"ranks {', '.join(map(str, others))} and {', '.join(map(str, odd))} hold different {name}"


def _raw(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
