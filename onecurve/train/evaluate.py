"""The loss on the held-out part, spread over the ranks; the same bits at any width."""

import json
from collections.abc import Callable

import torch
from torch import nn

from onecurve.data.evaluation import EvaluationSet
from onecurve.model import token_loss
from onecurve.parallel import Mesh


@torch.no_grad()
def evaluate(model: nn.Module, held_out: EvaluationSet, mesh: Mesh, alive: Callable[[], bool]) -> float | None:
    """Mean loss per token (nats) over `held_out`. Collective.

    `alive` is called before each chunk and says whether this rank was asked to stop; if any was, the evaluation is
    given up on all ranks alike and None returned. Every rank runs the same number of forwards (gathers are collective):
    one that has no chunk left runs the first again and counts it nowhere.
    """
    parts: list[tuple[int, float, int]] = []
    for first in range(0, len(held_out), mesh.dp):
        stop = any(flag != b"\0" for flag in mesh.transport.share(b"\1" if alive() else b"\0"))
        if stop:
            return None
        index = first + mesh.dp_rank
        batch = held_out.chunk(index if index < len(held_out) else 0)
        loss, tokens = token_loss(model(batch.inputs), batch.targets)
        if index < len(held_out):
            parts.append((index, float(loss), tokens))
    everywhere = [json.loads(p) for p in mesh.share(json.dumps(parts).encode())]  # JSON keeps every bit of a float
    return held_out.combine(tuple(part) for rank in everywhere for part in rank)
