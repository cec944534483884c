"""The training loop. A step is: forward and backward of this rank's leaves, one verdict, one update, one row, and what
is due after it (evaluation, checkpoint, stop)."""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from onecurve import faults
from onecurve.checkpoint import due_by_clock, due_by_step
from onecurve.errors import Stopped
from onecurve.launch import RankContext
from onecurve.model import token_loss
from onecurve.parallel import Stats
from onecurve.parallel.replicas import ReplicasDiffer
from onecurve.train.guard import data_step
from onecurve.train.plan import Plan
from onecurve.train.session import Session
from onecurve.train.start import open_session

STOP, SAVE, WRITING = 1, 2, 4  # votes that ride on the step's exchange, so that all ranks act on the same step


Watch = Callable[[Session, dict[str, Any]], None]


def train_rank(order: dict[str, Any], context: RankContext, watch: Watch | None = None) -> dict[str, Any]:
    """One rank of a run, from where it stands to its last step. `order`: a Plan as JSON; `watch` is shown the session
    and the row of each step, on every rank. Raises Stopped where it was asked to stop."""
    plan = Plan.from_json(order)
    session = open_session(plan, context)
    while session.step < plan.last_step:
        began = time.perf_counter()
        stats, rate = train_step(session)
        objection = None if stats.accepted else session.guard.objection(stats)  # without a token there is none
        if objection:
            session.go_back(session.guard.roll_back(session.step + 1, objection, session.fault_steps))
            continue
        session.step += 1
        recovered = session.guard.accept(session.step, stats)
        if recovered:
            session.say(f"step {session.step}: accepted, loss {stats.loss:.6f}; the rollback is over")
        if not stats.tokens:
            session.event("no_tokens")
        if session.memory is None:
            session.measure_memory()
        row = row_of(session, stats, rate, time.perf_counter() - began)
        if watch is not None:
            watch(session, row)
        finish_step(session, row, stats.vote)
    session.close()
    session.event("end")
    return {"step": session.step, "loss": session.guard.state.last_loss}


def train_step(session: Session) -> tuple[Stats, float]:
    """Run this rank's leaves of the next step and reduce them; the weights change unless the guard objects. Returns
    the stats, the same on all ranks, and the learning rate that was used."""
    step, context, optimizer = session.step + 1, session.context, session.optimizer
    context.progress(session.step, session.config.train.steps)
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


def votes(session: Session) -> int:
    """What this rank asks for: to stop; to save, by rank 0's clock; to wait, for it still writes a save."""
    every_minutes = session.config.checkpoint.every_minutes
    overdue = session.leader and due_by_clock(time.monotonic() - session.saved_at, every_minutes=every_minutes)
    return STOP * session.context.stop_requested | SAVE * overdue | WRITING * (not session.saver.ready)


def row_of(session: Session, stats: Stats, rate: float, seconds: float) -> dict[str, Any]:
    """The metrics of the step just done. Collective: the parameter norm is."""
    maximum, mean = session.memory or (0, 0.0)
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


def finish_step(session: Session, row: dict[str, Any], vote: int) -> None:
    """Evaluate, write the row, save, stop: whatever is due after the step, in this order. Collective."""
    observe, checkpoint, steps = session.config.observe, session.config.checkpoint, session.plan.last_step
    session.context.progress(session.step, steps)
    session.poll(not vote & WRITING)
    evaluated = True
    if session.held_out is not None and (session.step % observe.eval_every == 0 or session.step == steps):
        loss = session.evaluate()
        evaluated = loss is not None
        row["val_loss"] = loss
    if evaluated:
        session.write_row(row)
    stopping = bool(vote & STOP) or not evaluated
    due = due_by_step(session.step, total=steps, every_steps=checkpoint.every_steps)
    if due or vote & SAVE or stopping:
        session.context.place("save")
        session.save(pending_row=None if evaluated else row)
    if stopping and (session.step < steps or not evaluated):
        session.close()
        raise Stopped(f"stopped at step {session.step} of {steps}")
