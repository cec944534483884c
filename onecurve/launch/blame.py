"""Whose fault was it? Each rank's first error as a record, and the choice of the one that came first.

When one rank dies, its peers fail too, milliseconds later, with errors about lost connections. Those are *secondary*:
they are kept but never blamed while a real error, or a rank that vanished without a word, is there to be named.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecurve import errors

# What gloo, its TCP store and NCCL say when a peer is gone. Matched in the text only for exceptions that torch raises.
PEER_LOST_PHRASES = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "pair closure",
    "socket closed",
    "socket timeout",
    "timed out",
    "wait timeout",
    "connection refused",
    "connection was likely closed",
    "failed to recv",
    "failed to send",
    "recv failed",
    "send failed",
    "the client socket has",
    "unbound buffer",
    "pair is closed",
    "peer has closed",
    "nccl watchdog",
    "remote process exited",
)
# The kernel or a person sends this one; a process does not fall into it because a peer died.
SENT_FROM_OUTSIDE = (signal.SIGKILL,)
OUT_OF_MEMORY = " (by somebody, or by the kernel for lack of memory)"
# For errors raised on purpose whose own type is not in `onecurve.errors`.
BY_EXIT_CODE: dict[int, type[errors.OnecurveError]] = {1: errors.CheckFailed, 2: errors.InputError, 75: errors.Stopped}


def is_secondary(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, only tells that another rank is gone or late."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, errors.PeerLost | ConnectionError | TimeoutError):
            return True
        if type(current).__name__ in ("DistNetworkError", "DistStoreError"):
            return True
        if isinstance(current, RuntimeError) and not isinstance(current, RecursionError | NotImplementedError):
            text = str(current).lower()
            if any(phrase in text for phrase in PEER_LOST_PHRASES):
                return True
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def describe(error: BaseException, *, rank: int, step: int, place: str) -> dict[str, Any]:
    """The record of one rank's error, ready for JSON. The launcher's own outermost frame is left out."""
    trace = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
    return {
        "rank": rank,
        "type": type(error).__qualname__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
        "time": time.time(),
        "monotonic_ns": time.monotonic_ns(),
        "step": step,
        "place": place,
        "pid": os.getpid(),
        "secondary": is_secondary(error),
        "on_purpose": isinstance(error, errors.OnecurveError) and not isinstance(error, errors.PeerLost),
        "exit_code": error.exit_code if isinstance(error, errors.OnecurveError) else 3,
        "gave_up": isinstance(error, errors.GaveUp),
    }


def error_path(folder: Path, rank: int) -> Path:
    return folder / "errors" / f"rank-{rank}.json"


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Atomically, so that a reader sees the whole record or none. Raises OSError where it cannot be written."""
    path = error_path(folder, record["rank"])
    path.parent.mkdir(exist_ok=True)  # not its parents: a run folder that was moved is not made again
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1))
    temporary.replace(path)


def clear_records(folder: Path) -> None:
    """Remove the records of an earlier attempt, so that they are not taken for this one's."""
    for path in (folder / "errors").glob("rank-*.json"):
        path.unlink(missing_ok=True)


@dataclass
class RankExit:
    """How one rank ended, as the parent saw it."""

    rank: int
    record: dict[str, Any] | None  # its own error
    status: int | None  # os.waitstatus_to_exitcode: ≥ 0 exit code, < 0 minus the signal
    seen_ns: int  # monotonic, when the parent saw the end
    ours: bool  # it was the parent that ended it
    step: int
    place: str
    stack: str = ""  # what faulthandler left on a fatal signal

    @property
    def vanished(self) -> bool:
        return self.record is None and not self.ours


def where(step: int, place: str) -> str:
    parts = [f"at step {step}"] if step else []
    parts += [f"in {place}"] if place else []
    return (" " + ", ".join(parts)) if parts else ""


def _cause_ns(exit: RankExit) -> int:
    """When the trouble began. A rank killed from outside is seen a little after its peers complain: so one second."""
    if exit.record is not None:
        return exit.record["monotonic_ns"]
    from_outside = exit.status is not None and -exit.status in SENT_FROM_OUTSIDE
    return exit.seen_ns - (1_000_000_000 if from_outside else 0)


def _named(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _vanished_error(exit: RankExit) -> errors.RunFailed:
    status = exit.status
    if status is None:
        how = "it is gone"
    elif status < 0:
        how = f"killed by {_named(-status)}" + OUT_OF_MEMORY * (status == -signal.SIGKILL)
    else:
        how = f"it left with exit code {status} before it returned a result"
    text = f"rank {exit.rank} vanished without a word{where(exit.step, exit.place)}: {how}"
    return _failed(text, exit.rank, exit.stack)


def _failed(text: str, rank: int, detail: str) -> errors.RunFailed:
    error = errors.RunFailed(text + ("\n" + detail.rstrip() if detail else ""))
    error.rank = rank
    return error


def to_error(record: dict[str, Any]) -> errors.OnecurveError:
    """The exception that the parent raises for a rank's record.

    An error raised on purpose keeps its type, its exit code and its one line; anything else becomes RunFailed with the
    rank, the type, the message and the traceback.
    """
    if record["on_purpose"]:
        named = getattr(errors, record["type"], None)
        if not (isinstance(named, type) and issubclass(named, errors.OnecurveError)):
            failed = errors.GaveUp if record["gave_up"] else errors.RunFailed
            named = BY_EXIT_CODE.get(record["exit_code"], failed)
        error = named(record["message"])
        error.rank = record["rank"]
        return error
    place = where(record["step"], record["place"])
    text = f"rank {record['rank']} failed{place}: {record['type']}: {record['message']}"
    return _failed(text, record["rank"], record["traceback"])


def verdict(endings: list[RankExit]) -> errors.OnecurveError | None:
    """The error of the run: the earliest real one, else a stop on request, else the earliest secondary one."""
    real: list[RankExit] = []
    stops: list[RankExit] = []
    secondary: list[RankExit] = []
    for exit in endings:
        if exit.vanished:
            real.append(exit)
        elif exit.record is not None and exit.record["exit_code"] == errors.Stopped.exit_code:
            stops.append(exit)
        elif exit.record is not None:
            (secondary if exit.record["secondary"] else real).append(exit)
    for group in (real, stops, secondary):
        if group:
            first = min(group, key=lambda exit: (_cause_ns(exit), exit.rank))
            return _vanished_error(first) if first.record is None else to_error(first.record)
    return None
