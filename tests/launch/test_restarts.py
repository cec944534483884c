import pytest

from onecurve.errors import CheckFailed, GaveUp, InputError, RunFailed, Stopped
from onecurve.launch import with_restarts


class Scripted:
    """A run that fails, at given steps, and then returns; `reached` is its newest checkpoint."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.attempts = []
        self.reached = 0

    def run(self, attempt):
        self.attempts.append(attempt)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        if isinstance(outcome, int):
            self.reached = outcome
            raise RunFailed(f"died after step {outcome}")
        return outcome


def test_runs_again_until_done():
    scripted, told = Scripted(5, 5, "done"), []
    result = with_restarts(scripted.run, 2, lambda: scripted.reached, lambda attempt, error: told.append(attempt))
    assert result == "done" and scripted.attempts == [0, 1, 2] and told == [1, 2]


def test_budget_without_progress():
    scripted = Scripted(0, 0, 0, "never")
    with pytest.raises(RunFailed, match="after step 0"):
        with_restarts(scripted.run, 2, lambda: scripted.reached)
    assert scripted.attempts == [0, 1, 2]


def test_progress_refills_the_budget():
    scripted = Scripted(10, 10, 20, 20, 30, "done")
    assert with_restarts(scripted.run, 2, lambda: scripted.reached) == "done"


def test_no_budget_no_restart():
    scripted = Scripted(10, "never")
    with pytest.raises(RunFailed):
        with_restarts(scripted.run, 0, lambda: scripted.reached)


@pytest.mark.parametrize("error", [InputError("x"), CheckFailed("x"), GaveUp("x"), Stopped("x"), KeyboardInterrupt()])
def test_never_after_these(error):
    scripted = Scripted(error, "never")
    with pytest.raises(type(error)):
        with_restarts(scripted.run, 5, lambda: 0)
    assert scripted.attempts == [0]
