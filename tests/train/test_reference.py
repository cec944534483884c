"""The curve against an independent program: plain PyTorch, one process, one batch, torch.optim.AdamW.

Written from the definition of the model and sharing nothing with the package but the initial weights and the batches.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onecurve.config import Config, load_config
from onecurve.train.parts import new_loader, new_model
from tests.commands import DEMO, rows, train_here

STEPS = 50
PLAIN = [f"train.steps={STEPS}"]
FULL = [
    *PLAIN, "train.accumulate=2", "optimizer.weight_decay=0.1", "optimizer.clip=0.5", "optimizer.warmup_steps=10",
    "optimizer.decay=cosine", "optimizer.min_lr=5e-4", "model.tied=true", "layout.zero=2",
]  # fmt: skip


def logits(w: dict[str, Tensor], tokens: Tensor, config: Config) -> Tensor:
    """int64 [B, T] -> [B, T, V], with the parameters `w` by name."""
    b, t = tokens.shape
    c, heads = config.model.width, config.model.heads
    x = w["embedding.token"][tokens] + w["embedding.position"]
    for i in range(config.model.layers):
        block = {name.removeprefix(f"blocks.{i}."): p for name, p in w.items() if name.startswith(f"blocks.{i}.")}
        h = F.layer_norm(x, [c], block["norm1.weight"], block["norm1.bias"])
        q, k, v = (h @ block["attention.qkv"].T).split(c, dim=-1)
        q, k, v = (z.reshape(b, t, heads, c // heads).transpose(1, 2) for z in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(c // heads)
        scores = scores.masked_fill(~torch.ones(t, t).tril().bool(), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)
        x = x + mixed @ block["attention.out"].T
        h = F.layer_norm(x, [c], block["norm2.weight"], block["norm2.bias"])
        h = h @ block["mlp.up.weight"].T + block["mlp.up.bias"]
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        x = x + h @ block["mlp.down.weight"].T + block["mlp.down.bias"]
    head = w["embedding.token"] if config.model.tied else w["head.weight"]
    return F.layer_norm(x, [c], w["head.norm.weight"], w["head.norm.bias"]) @ head.T


def reference(config: Config) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    rates, steps = config.optimizer, config.train.steps
    initial = new_model(config).named_parameters()
    w = {n: p.detach().clone().requires_grad_() for n, p in initial if not (config.model.tied and n == "head.weight")}
    matrices = [p for name, p in w.items() if p.ndim == 2 and name != "embedding.position"]
    others = [p for p in w.values() if not any(p is matrix for matrix in matrices)]
    groups = [
        {"params": matrices, "weight_decay": rates.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rates.lr, betas=rates.betas, eps=rates.eps)
    loader = new_loader(config)
    curve = []
    for step in range(steps):
        if step < rates.warmup_steps:
            rate = rates.lr * (step + 1) / rates.warmup_steps
        elif rates.decay == "cosine":
            done = (step - rates.warmup_steps) / (steps - 1 - rates.warmup_steps)
            rate = rates.min_lr + (rates.lr - rates.min_lr) * (1 + math.cos(math.pi * done)) / 2
        else:
            rate = rates.lr
        for group in optimizer.param_groups:
            group["lr"] = rate
        batches = list(loader.micro_batches(step, range(config.train.leaves)))
        inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
        loss = F.cross_entropy(logits(w, inputs, config).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        clip = rates.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(w.values(), clip)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


@pytest.mark.parametrize("sets", [PLAIN, FULL], ids=["demo", "everything on"])
def test_50_steps_agree_with_plain_pytorch(tmp_path: Path, sets: list[str]) -> None:
    assert train_here(tmp_path / "run", *sets) == 0
    ours = [(row["loss"], row["grad_norm"]) for row in rows(tmp_path / "run")]
    theirs = reference(load_config(DEMO, sets))
    assert len(ours) == len(theirs) == STEPS
    worst = max(abs(a / b - 1) for (a, _), (b, _) in zip(ours, theirs, strict=True))
    assert worst < 1e-5, worst
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in theirs], rel=1e-5)
