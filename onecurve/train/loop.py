"""The training loop. A step is: forward and backward of this rank's leaves, one verdict, one update, one row, and what
is due after it (evaluation, checkpoint, stop)."""

import time
from collections.abc import Callable
from enum import IntFlag
from typing import Any

from torch import Tensor

from onecurve import faults
from onecurve.checkpoint import due_by_clock, due_by_step
from onecurve.errors import Stopped
from onecurve.launch import RankContext
from onecurve.model import token_loss
from onecurve.parallel import Stats
from onecurve.parallel.replicas import ReplicasDiffer
from onecurve.train import saves
from onecurve.train.evaluate import EvaluationStopped, due_for_evaluation, held_out_loss, make_up_for_evaluation
from onecurve.train.guard import data_step
from onecurve.train.plan import Plan
from onecurve.train.restore import go_back
from onecurve.train.session import Session
from onecurve.train.start import open_session

Row = dict[str, Any]
Watch = Callable[[Session, Row], None]


class Vote(IntFlag):
    """What a rank asks for; votes ride on the step's exchange, so that all ranks act on the same step."""

    STOP = 1
    SAVE = 2
    WRITING = 4  # a save is still being written here: its commit must wait


def train_rank(order: dict[str, Any], context: RankContext, watch: Watch | None = None) -> dict[str, Any]:
    """One rank of a run, from where it stands to its last step. `order`: a Plan as JSON; `watch` is shown the session
    and the row of each step, on every rank. Raises Stopped where it was asked to stop."""
    session = open_session(Plan.from_json(order), context)
    make_up_for_evaluation(session)
    while session.step < session.plan.last_step:
        began = time.perf_counter()
        stats, rate = train_step(session)
        objection = None if stats.accepted else session.guard.objection(stats)  # a step without a token has none either
        if objection is not None:
            go_back(session, session.guard.roll_back(session.step + 1, objection, session.fault_steps))
            continue
        accept_step(session, stats)
        row = row_of(session, stats, rate, time.perf_counter() - began)
        if watch is not None:
            watch(session, row)
        finish_step(session, row, Vote(stats.vote))
    saves.close(session)
    session.recorder.event("end", session.step)
    return {"step": session.step, "loss": session.guard.state.last_loss}


def train_step(session: Session) -> tuple[Stats, float]:
    """Run this rank's leaves of the next step and reduce them; the weights change unless the guard objects. Returns
    the stats, the same on all ranks, and the learning rate that was used."""
    step, context, optimizer = session.step + 1, session.context, session.optimizer
    session.keep_alive()
    for batch in session.loader.micro_batches(data_step(step, session.guard.state.skipped), optimizer.leaf_ids):
        context.place("forward")
        logits = rehearsed(session.model(batch.inputs, (session.config.train.seed, *batch.place)))
        loss_sum, tokens = token_loss(logits, batch.targets)
        context.place("backward")
        optimizer.backward(loss_sum, tokens)
    context.place("exchange")
    rate = session.learning_rate(step)
    every = session.config.observe.check_replicas_every
    try:
        stats = optimizer.step(
            lambda s: session.guard.objection(s) is None,
            lr=rate,
            vote=votes(session),
            check_replicas=every > 0 and step % every == 0,
        )
    except ReplicasDiffer as error:
        raise ReplicasDiffer(f"step {step}: {error}") from None
    return stats, rate


def rehearsed(logits: Tensor) -> Tensor:
    """Where a rehearsal may spoil a micro-batch: its logits, or their gradient. See onecurve/faults.py."""
    if faults.armed:
        logits.register_hook(lambda gradient: faults.poison(gradient, "gradient"))
    return faults.poison(logits, "logits")


def votes(session: Session) -> Vote:
    """What this rank asks for: to stop; to save, by rank 0's clock; to wait for the save it still writes."""
    every_minutes = session.config.checkpoint.every_minutes
    overdue = session.leader and due_by_clock(time.monotonic() - session.saved_at, every_minutes=every_minutes)
    asked = {Vote.STOP: session.context.stop_requested, Vote.SAVE: overdue, Vote.WRITING: not session.saver.ready}
    return Vote(sum(vote for vote, wanted in asked.items() if wanted))


def accept_step(session: Session, stats: Stats) -> None:
    """Count the step: its update is done (without a token there was none)."""
    session.step += 1
    if session.guard.accept(session.step, stats):
        session.recorder.say(f"step {session.step}: accepted, loss {stats.loss:.6f}; the rollback is over")
    if not stats.tokens:
        session.recorder.event("no_tokens", session.step)
    if session.recorder.memory is None:
        session.measure_memory()


def row_of(session: Session, stats: Stats, rate: float, seconds: float) -> Row:
    """The metrics of the step just done. Collective: the parameter norm is."""
    maximum, mean = session.recorder.memory or (0, 0.0)
    return {
        "step": session.step,
        "loss": stats.loss if stats.tokens else None,
        "loss_hex": stats.loss.hex(),
        "grad_norm": stats.norm,
        "param_norm": session.optimizer.parameter_norm(),
        "lr": rate,
        "weight_decay": session.config.optimizer.weight_decay,
        "tokens": stats.tokens,
        "step_seconds": seconds,
        "tokens_per_second": stats.tokens / seconds,
        "memory_max_bytes": maximum,
        "memory_mean_bytes": mean,
    }


def finish_step(session: Session, row: Row, vote: Vote) -> None:
    """Evaluate, write the row, save, stop: whatever is due after the step, in this order. Collective."""
    steps, every = session.plan.last_step, session.config.checkpoint.every_steps
    session.keep_alive()
    saves.poll(session, all_ready=not vote & Vote.WRITING)
    try:
        if due_for_evaluation(session):
            row["val_loss"] = held_out_loss(session)
        session.recorder.row(row)
    except EvaluationStopped:
        session.pending_row = row
    stopping = bool(vote & Vote.STOP) or session.pending_row is not None
    if stopping or vote & Vote.SAVE or due_by_step(session.step, total=steps, every_steps=every):
        session.context.place("save")
        saves.save(session)
    if stopping and (session.step < steps or session.pending_row):
        saves.close(session)
        raise Stopped(f"stopped at step {session.step} of {steps}")
