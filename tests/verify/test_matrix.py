"""What `verify` runs: enough of the layouts, whatever the config."""

import pytest

from onecurve.config import Config
from onecurve.verify.matrix import full_matrix, quick_matrix, reference


def config(**train) -> Config:
    return Config(train=train, layout={"dp": 1})


def test_quick_on_four_leaves_has_eight_layouts_with_a_kill_and_another_layout_after_it():
    runs = quick_matrix(config(leaves=4))
    assert len(runs) >= 8 and len(set(runs)) == len(runs)
    (killed,) = [run for run in runs if len(run.legs) > 1]
    before, after = (leg.layout for leg in killed.legs)
    assert killed.legs[0].kill and before.dp != after.dp and before.zero != after.zero


@pytest.mark.parametrize("leaves", [8, 9, 100])
def test_full_has_every_width_and_stage(leaves):
    runs = full_matrix(config(leaves=leaves))
    single = {(run.legs[0].layout.dp, run.legs[0].layout.zero) for run in runs if len(run.legs) == 1}
    widths = {1, 2, 3, 4, 6, 8}
    assert single | {(1, 0)} == {(width, zero) for width in widths for zero in range(4)}
    places = [leg.kill.place for run in runs for leg in run.legs if leg.kill]
    assert sorted(places) == ["backward", "exchange", "forward", "save", "save.rename"]
    assert {run.legs[0].layout.transport for run in runs} == {"auto", "shm", "p2p", "alltoall"}


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("matrix", [full_matrix, quick_matrix])
def test_no_layout_has_more_ranks_than_leaves(matrix, leaves):
    runs = matrix(config(leaves=leaves, steps=1))
    assert runs and reference(config(leaves=leaves)) not in runs
    for leg in (leg for run in runs for leg in run.legs):
        assert leg.layout.dp <= leaves
        assert leg.kill is None or leg.kill.rank < leg.layout.dp


def test_the_gate_of_the_controls_is_met_where_leaves_allow_it():
    """Faults that hide at W = leaves or W = 2 show at W >= 4 with two leaves per rank."""
    layouts = [run.legs[0].layout for run in quick_matrix(config(leaves=8)) if len(run.legs) == 1]
    assert {layout.zero for layout in layouts if layout.dp == 4} == {0, 1, 2, 3}
