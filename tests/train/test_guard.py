"""The guard's arithmetic: which batches, which verdict, where to, and when to give up."""

import math

import pytest

from onecurve.errors import RunFailed
from onecurve.parallel import Stats
from onecurve.train.guard import Guard, GuardState, data_step


def stats(loss=1.0, *, finite=True, tokens=8):
    return Stats(loss=loss, norm=1.0, tokens=tokens, finite=finite)


@pytest.mark.parametrize(
    ("skipped", "drawn"),
    [
        ((), [0, 1, 2, 3, 4]),
        ((0,), [1, 2, 3, 4, 5]),
        ((0, 1), [2, 3, 4, 5, 6]),
        ((2, 3), [0, 1, 4, 5, 6]),
        ((3, 2), [0, 1, 4, 5, 6]),  # in the order in which they were given up
        ((1, 3), [0, 2, 4, 5, 6]),
        ((2, 3, 4, 5), [0, 1, 6, 7, 8]),
        ((2, 3, 1, 4), [0, 5, 6, 7, 8]),
        ((7,), [0, 1, 2, 3, 4]),
    ],
)
def test_a_step_draws_the_next_batch_that_was_not_given_up(skipped, drawn):
    assert [data_step(step, skipped) for step in range(1, 6)] == drawn


def test_no_batch_is_drawn_twice_and_only_given_up_ones_are_left_out():
    skipped = (4, 5, 3, 6, 20, 21, 7)
    drawn = [data_step(step, skipped) for step in range(1, 40)]
    assert drawn == sorted(set(range(39 + len(skipped))) - set(skipped))


def test_verdicts():
    guard = Guard(2.0, 3, GuardState(last_loss=1.0))
    assert guard.objection(stats(2.0)) is None  # exactly the factor is no spike
    assert "2 x the previous 1.0" in guard.objection(stats(math.nextafter(2.0, 3.0)))
    for loss in (math.nan, math.inf, -math.inf, 0.5):
        assert "not finite" in guard.objection(stats(loss, finite=False))


def test_the_first_step_has_nothing_to_compare_with():
    assert Guard(2.0, 3).objection(stats(1e9)) is None


def test_off_it_still_catches_what_is_not_finite():
    guard = Guard(0.0, 3, GuardState(last_loss=1.0))
    assert guard.objection(stats(1e9)) is None and guard.objection(stats(math.nan, finite=False))


def test_a_step_without_tokens_leaves_the_loss_to_compare_with():
    guard = Guard(2.0, 3, GuardState(last_loss=1.0))
    guard.accept(5, stats(math.nan, tokens=0))
    assert guard.state.last_loss == 1.0 and guard.state.furthest == 5


@pytest.mark.parametrize(
    ("step", "back_to", "dropped"), [(1, 0, (0,)), (2, 0, (0, 1)), (3, 1, (1, 2)), (13, 11, (11, 12))]
)
def test_back_to_the_state_after_the_update_before_the_last(step, back_to, dropped):
    guard = Guard(2.0, 3, GuardState(last_loss=1.0, furthest=step - 1))
    rollback = guard.roll_back(step, "why", ())
    assert (rollback.back_to, rollback.dropped) == (back_to, dropped)
    assert rollback.state.skipped == dropped and rollback.state.rollbacks == 1


def test_twice_at_one_step_and_then_one_earlier():
    guard = Guard(2.0, 3, GuardState(furthest=12))
    guard.state = guard.roll_back(13, "why", ()).state
    again = guard.roll_back(13, "why", ())
    assert again.dropped == (13, 14)
    guard.state = again.state
    earlier = guard.roll_back(12, "why", ())  # the new batch of step 12 is bad itself
    assert (earlier.back_to, earlier.dropped, earlier.state.rollbacks) == (10, (10, 15), 3)
    drawn = [data_step(step, earlier.state.skipped) for step in range(10, 15)]
    assert drawn == [9, 16, 17, 18, 19]


def test_gives_up_with_the_story_and_counts_only_rollbacks_in_a_row():
    guard = Guard(2.0, 2)
    for step in range(1, 6):
        guard.accept(step, stats())
    for _ in range(2):
        guard.state = guard.roll_back(6, "loss nan", ()).state
    with pytest.raises(RunFailed) as story:
        guard.roll_back(6, "loss nan", ())
    assert story.value.exit_code == 3
    for part in ("step 6: loss nan", "gave up after 2 rollbacks in a row", "guard.max_rollbacks", "[4, 5, 6, 7]"):
        assert part in str(story.value)
    assert not guard.accept(5, stats())  # a replay is no new step
    assert guard.state.rollbacks == 2
    assert guard.accept(6, stats())  # that ends the row
    assert guard.state.rollbacks == 0 and not guard.accept(7, stats())


def test_no_rollback_allowed():
    with pytest.raises(RunFailed, match="after 0 rollbacks"):
        Guard(2.0, 0).roll_back(3, "why", ())


def test_a_rehearsed_fault_is_spent_where_its_update_is_undone():
    """At step 12 it changes update 12, which the loss of step 13 shows."""
    guard = Guard(2.0, 3, GuardState(furthest=12))
    assert guard.roll_back(13, "why", (12,)).state.spent == (12,)
    assert guard.roll_back(12, "why", (12,)).state.spent == ()  # not fired yet: it does when step 12 is run again
    assert guard.roll_back(20, "why", (12,)).state.spent == ()  # accepted long ago: a replay repeats it


def test_the_state_survives_json_to_the_last_bit():
    for loss in (math.nan, 0.1, 1e-320):
        state = GuardState(loss, (3, 2), (12,), 2, 17)
        stored = GuardState.from_json(state.to_json())
        assert stored.last_loss.hex() == loss.hex() and stored.to_json() == state.to_json()
