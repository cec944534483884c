"""Which error is primary, and what the parent makes of it."""

import signal

import pytest

from onecurve.checkpoint.errors import DiskFull, Superseded
from onecurve.errors import CheckFailed, GaveUp, InputError, PeerLost, RunFailed, Stopped
from onecurve.launch.blame import Ending, describe, is_secondary, to_error, verdict
from onecurve.parallel.replicas import ReplicasDiffer

CLOSED = "[../pair.cc:553] Connection closed by peer [127.0.0.1]:44930. This is typically caused by a remote worker"


def chained(outer, inner):
    try:
        try:
            raise inner
        except type(inner):
            raise outer  # noqa: B904  (the implicit chain is what is tested)
    except type(outer) as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CLOSED),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        PeerLost("rank 2 is silent"),
        ConnectionResetError("gone"),
        TimeoutError("late"),
        chained(ValueError("no bytes from rank 3"), RuntimeError(CLOSED)),
    ],
)
def test_secondary(error):
    assert is_secondary(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(CLOSED),  # only torch's own errors are matched by text
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RecursionError("maximum depth"),
        OSError(28, "No space left on device"),
        CheckFailed("loss rose"),
        chained(ValueError("bad"), KeyError("x")),
    ],
)
def test_not_secondary(error):
    assert not is_secondary(error)


def ending(rank, error=None, at=0.0, status=None, ours=False):
    record = None
    if error is not None:
        record = describe(error, rank=rank, step=7, place="exchange")
        record["monotonic_ns"] = int(at * 1e9)
    return Ending(rank, record, status, int(at * 1e9), ours, 7, "exchange")


def test_the_earliest_real_error_is_named():
    endings = [
        ending(0, ValueError("late"), 100.2),
        ending(1, ValueError("first"), 100.1),
        ending(2, PeerLost(""), 100.0),
    ]
    assert "rank 1 failed at step 7, in exchange: ValueError: first" in str(verdict(endings))


def test_a_rank_killed_from_outside_comes_before_what_it_caused():
    endings = [ending(0, ValueError("no answer"), 100.0), ending(3, at=100.05, status=-signal.SIGKILL)]
    assert str(verdict(endings)).startswith("rank 3 vanished")


def test_a_rank_that_aborts_after_an_error_is_not_blamed():
    endings = [ending(0, ValueError("boom"), 100.0), ending(3, at=100.05, status=-signal.SIGABRT)]
    assert str(verdict(endings)).startswith("rank 0 failed")


def test_a_rank_that_the_parent_ended_is_not_blamed():
    endings = [ending(0, PeerLost("?"), 100.0), ending(3, at=99.0, status=-signal.SIGKILL, ours=True)]
    assert str(verdict(endings)).startswith("rank 0 failed")


def test_stopped_comes_before_lost_peers_and_after_real_errors():
    stop, lost = ending(1, Stopped("stopped at step 7"), 100.1), ending(0, PeerLost("?"), 100.0)
    assert type(verdict([stop, lost])) is Stopped
    assert type(verdict([stop, lost, ending(2, InputError("no such file"), 100.2)])) is InputError


def test_no_error_no_verdict():
    assert verdict([ending(0, status=0, ours=True)]) is None


def test_run_failed_on_a_rank_keeps_its_line_without_a_traceback():
    error = verdict([ending(1, RunFailed("gave up after 3 rollbacks"))])
    assert type(error) is RunFailed and str(error) == "gave up after 3 rollbacks" and error.rank == 1


@pytest.mark.parametrize(
    ("error", "again"), [(Superseded("x"), False), (ReplicasDiffer("x"), False), (DiskFull("x"), True)]
)
def test_whether_another_attempt_could_help_is_known_to_the_parent(error, again):
    told = to_error(describe(error, rank=1, step=2, place="save"))
    assert isinstance(told, RunFailed) and isinstance(told, GaveUp) != again
