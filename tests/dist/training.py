"""Train a small module on the ranks that are there, and bring the whole state home bit for bit."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onecurve.parallel import Mesh, ZeroOptimizer, replicate

State = dict[str, dict[str, str]]  # kind -> parameter -> hex of the fp32 bytes, whole
LossOf = Callable[[nn.Module, int, int, int], tuple[Tensor, int]]  # (model, step, leaf, micro) -> (sum, tokens)


def train(
    mesh: Mesh,
    make: Callable[[], nn.Module],
    loss_of: LossOf,
    *,
    stage: int,
    leaves: int,
    accumulate: int = 1,
    steps: int = 3,
    **options: Any,
) -> tuple[list[list[str]], State]:
    """([loss, gradient norm, parameter norm in hex] per step, state at the end)."""
    model = make()
    replicate(model, mesh)
    optimizer = ZeroOptimizer(
        model, mesh, stage=stage, leaves=leaves, accumulate=accumulate, **{"lr": 1e-2, "weight_decay": 0.1} | options
    )
    rows = []
    for step in range(steps):
        run_leaves(optimizer, model, loss_of, step)
        stats = optimizer.step(check_replicas=True)
        rows.append([stats.loss.hex(), stats.norm.hex(), optimizer.parameter_norm().hex()])
    return rows, whole_state(optimizer)


def run_leaves(optimizer: ZeroOptimizer, model: nn.Module, loss_of: LossOf, step: int) -> None:
    for leaf in optimizer.leaf_ids:
        for micro in range(optimizer.accumulate):
            optimizer.backward(*loss_of(model, step, leaf, micro))


def whole_state(optimizer: ZeroOptimizer) -> State:
    """Masters and moments of every parameter, put together from their primary owners. Collective."""
    homes = {(r.name, r.slice): r for r in optimizer.held()} if optimizer.stage == 0 else {}
    mine = []
    for own in optimizer.owned():
        home = homes.get((own.name, own.slice))
        at = home.at + own.offset if home else own.at
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            vector = getattr(optimizer, kind)
            mine.append([kind, own.name, own.offset, vector[at : at + own.length].numpy().tobytes().hex()])
    parts: dict[str, dict[str, list]] = {}
    for message in optimizer.mesh.all_gather_bytes(json.dumps(mine).encode()):
        for kind, name, offset, data in json.loads(message):
            parts.setdefault(kind, {}).setdefault(name, []).append((offset, data))
    return {kind: {n: "".join(d for _, d in sorted(p)) for n, p in of.items()} for kind, of in parts.items()}


def tensor(state: State, name: str, kind: str = "master") -> Tensor:
    return torch.frombuffer(bytearray.fromhex(state[kind][name]), dtype=torch.float32)


def draw(*key: int, shape: tuple[int, ...]) -> Tensor:
    """Normal numbers keyed by their place, on any rank alike."""
    seed = sum(k * 1009**i for i, k in enumerate(key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
