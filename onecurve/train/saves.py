"""Saving a session: what goes into a manifest beside the state, and what is told of each save. Calls are collective.

A save that failed ends the run, in the call that began it or in a later one: a run that can't save promises work that
it can't keep.
"""

import time
from collections.abc import Callable
from typing import Any

from onecurve.checkpoint import Manifest
from onecurve.checkpoint.errors import NotWritable, SaveFailed
from onecurve.train.guard import data_step
from onecurve.train.session import Session


def save(session: Session) -> None:
    """Save the state after `session.step`; in the background, if the config says so."""
    old_enough = max(session.step - 2, 0)  # for a rollback from the next step
    told(session, lambda: session.saver.save(session.step, details(session), protect=old_enough))
    session.saved_at = time.monotonic()


def poll(session: Session, all_ready: bool) -> None:
    """Commit what was written behind the training, once all ranks have written theirs."""
    told(session, lambda: session.saver.poll(all_ready))


def drain(session: Session) -> None:
    """Wait for the save in flight."""
    told(session, session.saver.drain)


def close(session: Session) -> None:
    """Wait for what is still being written, and copied to the mirror."""
    told(session, session.saver.close)
    if session.recorder.memory is not None:
        session.measure_memory()  # again: now the copies that saves work from are there


def details(session: Session) -> dict[str, Any]:
    """The fields of a manifest that the optimizer does not know. A row that waits for its evaluation is not in the
    metrics yet, so it goes in here."""
    state = session.guard.state
    return {
        "curve_id": session.plan.curve_id,
        "numerics": session.numerics,
        "data_fingerprint": session.loader.fingerprint,
        "data_step": data_step(session.step + 1, state.skipped),  # of the next step
        "skipped": list(state.skipped),
        "guard": state.to_json() | ({"pending_row": session.pending_row} if session.pending_row else {}),
        "faults": list(state.spent),
    }


def told(session: Session, work: Callable[[], list[Manifest]]) -> None:
    """Do it, and record what came of it."""
    try:
        committed = work()
    except NotWritable as error:  # bad input before the first step; now it is a failure
        raise SaveFailed(str(error)) from error
    for manifest in committed:
        session.recorder.event("checkpoint", session.step, saved=manifest.step)
    for note in session.saver.take_notes():
        session.recorder.say(note)
        session.recorder.event("note", session.step, text=note)
