"""DDP's first act: every rank begins with rank 0's parameters and buffers. One call at construction."""

import hashlib

from torch import nn

from onecurve.errors import InputError
from onecurve.parallel.mesh import Mesh
from onecurve.parallel.transports import broadcast


def replicate(model: nn.Module, mesh: Mesh) -> None:
    """Overwrite parameters and buffers on all ranks with those of rank 0. Collective.

    Raises InputError on every rank if the models differ in a name, shape or dtype.
    """
    if mesh.world == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    signature = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors])
    signatures = mesh.all_gather_bytes(hashlib.sha256(signature.encode()).digest())
    strangers = [rank for rank, other in enumerate(signatures) if other != signatures[0]]
    if strangers:
        raise InputError(f"replicate: ranks {strangers} built another model than rank 0 (names, shapes or dtypes)")
    contiguous = [t.detach().contiguous() for _, t in tensors]
    broadcast(contiguous)
    for (_, tensor), received in zip(tensors, contiguous, strict=True):
        if tensor.data_ptr() != received.data_ptr():
            tensor.detach().copy_(received)
