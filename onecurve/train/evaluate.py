"""The loss on the held-out part, spread over the ranks; the same bits at any width."""

import json
from collections.abc import Callable

import torch
from torch import nn

from onecurve.data.evaluation import EvaluationSet
from onecurve.errors import Stopped
from onecurve.model import token_loss
from onecurve.parallel import Mesh
from onecurve.train import saves
from onecurve.train.session import Session


class EvaluationStopped(Exception):
    """A rank was asked to stop while all evaluated; raised on all ranks alike."""


@torch.no_grad()
def evaluate(model: nn.Module, held_out: EvaluationSet, mesh: Mesh, alive: Callable[[], bool]) -> float:
    """Mean loss per token (nats) over `held_out`. Collective.

    `alive` is called before each chunk and says whether this rank was asked to stop; if any was, EvaluationStopped is
    raised. Every rank runs the same number of forwards (gathers are collective): one that has no chunk left runs the
    first again and counts it nowhere.
    """
    parts: list[tuple[int, float, int]] = []
    for first in range(0, len(held_out), mesh.dp):
        if any(flag != b"\0" for flag in mesh.transport.share(b"\1" if alive() else b"\0")):
            raise EvaluationStopped
        index = first + mesh.dp_rank
        batch = held_out.chunk(index if index < len(held_out) else 0)
        loss, tokens = token_loss(model(batch.inputs), batch.targets)
        if index < len(held_out):
            parts.append((index, float(loss), tokens))
    everywhere = [json.loads(p) for p in mesh.share(json.dumps(parts).encode())]  # JSON keeps every bit of a float
    return held_out.combine(tuple(part) for rank in everywhere for part in rank)


def due_for_evaluation(session: Session) -> bool:
    if session.held_out is None:
        return False
    return session.step % session.config.observe.eval_every == 0 or session.step == session.plan.last_step


def held_out_loss(session: Session) -> float:
    """The loss on the held-out part. Collective. Raises EvaluationStopped where a rank was asked to stop meanwhile."""
    assert session.held_out is not None
    session.keep_alive()
    session.context.place("evaluation")
    return evaluate(session.model, session.held_out, session.mesh, session.keep_alive)


def make_up_for_evaluation(session: Session) -> None:
    """A run that was stopped while it evaluated does so first when it goes on; then the step's row is whole."""
    row, steps = session.pending_row, session.plan.last_step
    if row is None:
        return
    try:
        if session.held_out is not None:
            row["val_loss"] = held_out_loss(session)
    except EvaluationStopped:
        raise Stopped(f"stopped at step {session.step} of {steps}") from None  # saved as it is, with the row
    session.pending_row = None
    session.recorder.row(row)
    if session.step == steps:
        saves.save(session)  # nothing else will, and without it the run would never count as finished
