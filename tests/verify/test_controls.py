"""The broken twin of every clause: `verify` must catch each, and find one curve where none is broken."""

import pytest

from onecurve.cli import main as command
from onecurve.config import load_config
from onecurve.verify import breaks, controls, prove
from onecurve.verify.controls import CONTROLS, Control
from tests.commands import ROOT
from tests.controls import ODD, layouts, main, run

# control -> a layout that breaks with it (dp, zero), what differs first, and at which step
CAUGHT = {
    "ring-sum": ((4, 1), {"grad_norm", "state"}, 1),
    "contiguous-ticks": ((4, 2), {"grad_norm", "state"}, 1),
    "losses-in-float": ((4, 1), {"loss"}, 1),
    "data-by-rank": ((4, 1), {"loss", "grad_norm", "state"}, 1),
    "strided-activations": ((4, 1), {"grad_norm", "state"}, 1),
    "dropout-by-rank": ((4, 3), {"loss", "grad_norm", "state"}, 1),
    "tied-together": ((4, 0), {"grad_norm", "state"}, 1),
    "float-norm": ((4, 2), {"grad_norm"}, 1),
    "off-grid": ((4, 1), {"state"}, 2),
    "divide-first": ((4, 1), {"state"}, 1),
    "reduce-each-micro-batch": ((4, 1), {"grad_norm", "state"}, 1),
    "last-in-first-out": ((4, 2), {"grad_norm", "state"}, 1),
    "lost-nan": ((4, 1), {"state"}, 2),
    "roll-back-one-step": ((4, 1), {"loss", "state"}, 2),
    "two-threads": ((4, 1), {"grad_norm", "state"}, 1),
}


def test_every_control_is_tested_and_documented():
    assert CAUGHT.keys() == CONTROLS.keys()
    text = (ROOT / "docs" / "determinism.md").read_text()
    assert [name for name in CONTROLS if text.count(f"`{name}`") < 2] == []  # with its rule, and with what it broke


# The rest takes its time; CI runs all of them, on every layout too.
FAST = ("ring-sum", "contiguous-ticks", "dropout-by-rank", "float-norm", "off-grid", "lost-nan")


@pytest.mark.parametrize("control", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CAUGHT])
def test_verify_catches(control):
    layout, values, step = CAUGHT[control]
    (result,) = run(control, (layout,), steps=2).results
    found = result.difference
    assert found is not None and not found.failure
    assert found.step == step
    assert {*found.values, *(["state"] if found.tensors else [])} >= values
    assert str(found).startswith(f"step {step}: ")


def test_nothing_broken_is_one_curve():
    assert run("", ((4, 0), (4, 1), (4, 2), (4, 3)), steps=2).same


def test_the_rehearsed_nan_itself_breaks_no_layout(monkeypatch):
    """The NaN is rolled back alike everywhere: what `lost-nan` changes is the loss of it, not the NaN."""
    rehearsal = Control("rehearsal only", rehearses=breaks.nan_in_last_parameter)
    monkeypatch.setitem(CONTROLS, "lost-nan", rehearsal)
    assert run("lost-nan", ((4, 0), (4, 1), (3, 2), (4, 3)), steps=3).same


def test_an_unknown_control_is_refused(monkeypatch, capsys):
    monkeypatch.setenv(controls.ENVIRONMENT, "ring-some")
    assert command(["verify", str(ODD), "--quick"]) == 2
    assert "ring-some" in (told := capsys.readouterr().err.splitlines()[-1]) and "ring-sum" in told


def test_a_ring_of_two_ranks_breaks_nothing():
    """Why the controls run on four: two numbers have one sum, whichever comes first."""
    assert run("ring-sum", ((2, 1),), steps=2).same


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_control_on_every_layout():
    assert main() == 0


@pytest.mark.slow
def test_two_threads_at_every_width_are_one_curve():
    config = load_config(ODD, ["numerics.threads=2", "train.steps=3"])
    assert prove(config, combinations=layouts(config, ((4, 1), (3, 3)))).same
