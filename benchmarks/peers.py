"""PyTorch's own systems, as their documentation would have them set up for speed.

Each function makes one system on this rank and returns its step: data step -> mean loss over this rank's tokens, as a
tensor (nobody waits for it). Settings: fused AdamW, gradients as views of the buckets, the static graph, grads set to
None, no reduction before a rank's last micro-batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import REPEAT, Workload, mean_loss
from onecurve.data.loader import Batch
from onecurve.parallel.tree import contiguous_leaves

Step = Callable[[int], Tensor]


def my_batches(work: Workload, rank: int, world: int) -> list[list[Batch]]:
    """The micro-batches of this rank's equal share of the leaves."""
    return work.batches(list(contiguous_leaves(work.leaves, world, rank)))


def adamw(work: Workload) -> dict:
    return {"lr": work.lr, "betas": work.betas, "eps": work.eps, "weight_decay": 0.0, "fused": True}


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[list[Batch]],
    reducing: Callable[[bool], AbstractContextManager],
) -> Step:
    """`reducing(last)` is entered around each micro-batch: gradients are to be reduced in the last one only."""

    def step(data_step: int) -> Tensor:
        micros = batches[data_step % REPEAT]
        total = torch.zeros(())
        for i, batch in enumerate(micros):
            with reducing(i == len(micros) - 1):
                loss = mean_loss(model, batch) / len(micros)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def replicated(work: Workload, rank: int, world: int, *, zero: bool, defaults: bool = False) -> Step:
    """DistributedDataParallel with AdamW, or with a ZeroRedundancyOptimizer around it; `defaults`: with no setting."""
    batches = my_batches(work, rank, world)
    once = len(batches[0]) == 1  # the static graph and no_sync exclude each other
    model = DistributedDataParallel(
        work.model(), gradient_as_bucket_view=not defaults, static_graph=once and not defaults
    )
    constants = adamw(work) | {"fused": None if defaults else True}
    if zero:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=not defaults,
            **constants,
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **constants)

    return step_of(model, optimizer, batches, lambda last: nullcontext() if last else model.no_sync())


def fsdp2(work: Workload, rank: int, world: int, *, reshard: bool) -> Step:
    """fully_shard on every block and on the whole; `reshard` = ZeRO-3, else ZeRO-2."""
    batches = my_batches(work, rank, world)
    model = work.model()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw(work))

    def reducing(last: bool) -> AbstractContextManager:
        if len(batches[0]) > 1:
            model.set_requires_gradient_sync(last)
        return nullcontext()

    return step_of(model, optimizer, batches, reducing)


PEERS: dict[str, Callable[[Workload, int, int], Step]] = {
    "DDP": lambda work, rank, world: replicated(work, rank, world, zero=False),
    "DDP+ZeRO": lambda work, rank, world: replicated(work, rank, world, zero=True),
    "DDP+ZeRO, untuned": lambda work, rank, world: replicated(work, rank, world, zero=True, defaults=True),
    "FSDP2 ZeRO-2": lambda work, rank, world: fsdp2(work, rank, world, reshard=False),
    "FSDP2 ZeRO-3": lambda work, rank, world: fsdp2(work, rank, world, reshard=True),
}
