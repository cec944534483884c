"""The numeric environment: what the bits hold in, and a fingerprint of what it computes.

Version strings alone miss some differences (a BLAS that picks other kernels on another CPU), so the digest of one
block's forward and backward at the run's own shapes is part of it.
"""

import hashlib
import os
import platform
from typing import Any

import torch

from onecurve.config import Config
from onecurve.model.gpt import Block
from onecurve.model.randomness import generator

VARIABLES = ("MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE")


def environment(config: Config) -> dict[str, Any]:
    """A flat table of what may change bits, apart from the curve. Equal tables: the same bits."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "mkldnn": torch.backends.mkldnn.is_available(),
        "threads": torch.get_num_threads(),
        "device": config.numerics.device,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flush_denormal": _flushes_denormals(),
        **{name: os.environ.get(name, "") for name in VARIABLES},
        "fingerprint": fingerprint(config),
    }


def fingerprint(config: Config) -> str:
    """sha256 (hex) of a block's output and gradients at the run's micro-batch, context, width, heads and dropout: with
    one, attention takes another path."""
    model = config.model
    block = Block(model.width, model.heads, model.dropout)
    with torch.no_grad():
        for name, p in block.named_parameters():
            p.normal_(0.0, 0.1, generator=generator("fingerprint", name))
    shape = (config.train.micro_batch, model.context, model.width)
    x = torch.randn(shape, generator=generator("fingerprint", "input")).requires_grad_()
    y = block(x, ("fingerprint", "dropout"))
    gradients = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
    digest = hashlib.sha256()
    for tensor in (y.detach(), *gradients):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One phrase for each entry that differs."""
    names = dict.fromkeys([*before, *now])
    return [f"{name} {before.get(name)!r} -> {now.get(name)!r}" for name in names if before.get(name) != now.get(name)]


def _flushes_denormals() -> bool:
    return bool((torch.tensor([1e-310], dtype=torch.float64) * 1.0).item() == 0.0)
