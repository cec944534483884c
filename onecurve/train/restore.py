"""Going to a state that was: on resume, and back from a bad step. All calls are collective."""

from dataclasses import replace
from pathlib import Path

from onecurve.checkpoint import Manifest, latest_checkpoint, load_checkpoint
from onecurve.checkpoint.errors import CheckpointError, ForeignCheckpoint
from onecurve.checkpoint.store import list_steps, remove_checkpoint
from onecurve.train import saves
from onecurve.train.guard import GuardState, Rollback
from onecurve.train.parts import new_model
from onecurve.train.session import Session


def newest(session: Session) -> Path | None:
    """The newest whole checkpoint of this curve. Says which were passed over."""
    folder, curve = session.saver.folder, session.plan.curve_id
    session.mesh.barrier()  # rank 0 may have changed what is there
    path, reasons = latest_checkpoint(folder, session.mesh, curve_id=curve, finite=True, alive=session.context.alive)
    for reason in reasons:
        session.recorder.say(f"passed over {reason}")
        session.recorder.event("skipped_checkpoint", session.step, reason=reason)
    return path


def restore(session: Session, path: Path | None) -> Manifest | None:
    """Go to the state of a checkpoint of this curve, or with None to where the curve starts."""
    if path is None:
        go_to_start(session)
        return None
    manifest = load_checkpoint(path, session.optimizer, curve_id=session.plan.curve_id, alive=session.context.alive)
    session.step = manifest.step
    session.guard.state = GuardState.from_json(manifest.guard)
    return manifest


def go_to_start(session: Session) -> None:
    """New weights, or the parent's state where there is one: it may be needed again before the run has saved a copy."""
    if session.plan.parent_digest:
        load_parent(session)
    else:
        # Trained parameters only: this model has no buffers, and nothing of it is frozen.
        session.optimizer.reset(dict(new_model(session.config).named_parameters()))
    session.step = 0
    session.guard.state = GuardState()


def load_parent(session: Session) -> None:
    """Raises CheckpointError where the parent is gone or has another state by now: it may have been trained on since
    the plan was made, or between two starts of this run."""
    plan = session.plan
    cure = "bring the parent's checkpoint back and resume, or start a new run with --from"
    wanted = f"this curve starts from a state with the digest {plan.parent_digest[:16]}"
    if plan.parent is None:
        raise CheckpointError(f"{plan.folder}: has no whole checkpoint, and {wanted}, whose place is not known; {cure}")
    try:
        manifest = load_checkpoint(plan.parent, session.optimizer, alive=session.context.alive)
    except CheckpointError as error:
        text = f"{plan.folder}: has no whole checkpoint, and its parent can't be used: {error}; {cure}"
        raise type(error)(text) from None
    if manifest.state_digest != plan.parent_digest:
        found = manifest.state_digest[:16]
        raise ForeignCheckpoint(f"{plan.folder}: {wanted}, but {plan.parent} has {found} now; {cure}")


def go_back(session: Session, rollback: Rollback) -> None:
    """Rewind weights, moments, schedule, data, guard, metrics together; the loop replays the rest."""
    saves.drain(session)
    session.context.place("rollback")
    session.recorder.say(f"step {rollback.step}: {rollback.reason}")
    drop_newer(session, rollback.back_to)
    restore(session, newest(session))
    session.recorder.keep_rows(session.step)
    # The rows up to `back_to` draw the same batches with the longer list: those it adds lie behind them.
    session.guard.state = replace(rollback.state, last_loss=session.guard.state.last_loss)
    session.recorder.event(
        "rollback", rollback.step, reason=rollback.reason, back_to=rollback.back_to, restored=session.step,
        skipped=rollback.dropped, count=rollback.state.rollbacks,
    )  # fmt: skip
    session.recorder.say(told(session, rollback))
    session.context.place("replay")


def drop_newer(session: Session, step: int) -> None:
    """Remove the checkpoints past `step`: they hold a bad update."""
    if not session.leader:
        return
    if session.plan.fence is not None:
        session.plan.fence.check()  # those of a run that took the folder meanwhile are not ours to remove
    for found in list_steps(session.saver.folder):
        if found.step > step:
            remove_checkpoint(found.path)


def told(session: Session, rollback: Rollback) -> str:
    """The rollback in one line, for the person who watches."""
    source = f"from the checkpoint of step {session.step}" if session.step else "from the start"
    if session.step < rollback.back_to:
        source += f", then {numbered('step', session.step + 1, rollback.back_to)} again"
    return (
        f"rollback {rollback.state.rollbacks} of at most {session.guard.max_rollbacks} in a row: to the state after "
        f"step {rollback.back_to} ({source}); {numbered('step', rollback.back_to + 1, rollback.step)} with new "
        f"batches in place of {', '.join(map(str, rollback.dropped))}"
    )


def numbered(what: str, first: int, last: int) -> str:
    """ "step 11", or "steps 11 to 13"."""
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"
