"""What would let the ranks part unseen, found where it happens: before the first step, within it, or at the next.

    at the start   no other ZeroOptimizer has the parameters                          `check_unclaimed`
                   all ranks have the same weights and settings                       `check_ranks_agree`
    first step     a forward draws no random numbers and changes no buffer            `FirstStep`
    every step     nobody but the optimizer has changed the weights                   `Untouched`
                   all ranks went through the same units (ZeRO-3)                     stats.py

(Dropout layers, batch norm and memory shared without saying so are refused before that: units.py.)
"""

import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from onecurve.errors import UsageError
from onecurve.parallel.mesh import Mesh
from onecurve.parallel.replicas import differing, digest, name_difference


def check_unclaimed(model: nn.Module) -> None:
    """Raises UsageError for a parameter that a ZeroOptimizer has, or had: its hooks are still there."""
    for name, p in model.named_parameters():
        if getattr(p, "_in_zero_optimizer", False):
            raise UsageError(f"{name} belongs to a ZeroOptimizer already; make a new module for another one")


def claim(model: nn.Module) -> None:
    for p in model.parameters():
        p._in_zero_optimizer = True  # type: ignore[attr-defined]


def check_ranks_agree(mesh: Mesh, settings: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Collective. Raises UsageError, on all ranks, where a rank has other settings or other weights."""
    mine = {**{name: repr(value) for name, value in settings.items()}, "": digest(tensors)}
    told = [json.loads(message) for message in mesh.all_gather_bytes(json.dumps(mine).encode())]
    for name in settings:
        if odd := differing([one.get(name) for one in told]):
            seen = ", ".join(f"{one.get(name)} on rank {rank}" for rank, one in enumerate(told))
            raise UsageError(f"{name} is not the same on all ranks ({seen}); give rank {odd[0]} what the others have")
    if differing([one[""] for one in told]):
        name = name_difference(mesh, tensors)
        raise UsageError(f"{name} is not the same on all ranks; call replicate(model, mesh) before ZeroOptimizer")


class FirstStep:
    """Watches the model's forwards that have gradients, until `done`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: tuple[Tensor, dict[str, int]] | None = None
        self._handles = [model.register_forward_pre_hook(self._look), model.register_forward_hook(self._compare)]

    def done(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _look(self, module: nn.Module, args: object) -> None:
        self._before = (torch.get_rng_state(), self._versions()) if torch.is_grad_enabled() else None

    def _compare(self, module: nn.Module, args: object, output: object) -> None:
        if self._before is None:
            return
        state, versions = self._before
        self._before = None
        if not torch.equal(state, torch.get_rng_state()):
            raise UsageError(
                "the forward drew from the global random generator, so the bits would depend on the layout; draw from "
                "one that is keyed by step, leaf and micro-batch (see onecurve.model.randomness), or seed the global "
                "one so inside torch.random.fork_rng()"
            )
        if changed := [name for name, version in self._versions().items() if version != versions.get(name)]:
            raise UsageError(
                f"the forward changed the buffer {changed[0]}, which would depend on which leaves a rank runs; "
                "change buffers between steps, on all ranks alike"
            )

    def _versions(self) -> dict[str, int]:
        return {name: buffer._version for name, buffer in self._model.named_buffers()}


class Untouched:
    """Remembers the version of each parameter: autograd counts a write to it, but not the optimizer's own."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._versions = [(name, p, p._version) for name, p in named]

    def check(self) -> None:
        """Raises UsageError for a parameter that was written to."""
        for name, p, version in self._versions:
            if p._version != version:
                raise UsageError(
                    f"{name} was changed since ZeroOptimizer was made; its fp32 master was not, so the change would be "
                    "lost: set the weights before, or load a checkpoint"
                )
