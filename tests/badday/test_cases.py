"""Cases 13 (the checkpoint's half; the export's: tests/export) and 23, as far as it is built. (9 and 20:
test_verdict.py; 8 and 10: test_folder.py, test_damage.py; 21: test_failures.py; 22: test_signals.py.)"""

import pytest

from onecurve.checkpoint import read_manifest, read_parameters


def test_case_13_tied_weights_stay_tied(new_run, reference):
    """One matrix in the checkpoint; resumed on other layouts it still is one, and serves both uses."""
    sets = ("model.tied=true",)
    run = new_run(*sets)
    assert run.train(armed="kill:rank=3,step=12,place=forward") == 3
    assert run.train("layout.dp=2", "layout.zero=3", resume=True) == 0
    assert run.result() == reference(*sets)
    names = set(read_parameters(run.checkpoint(20)))
    assert "embedding.token" in names and "head.weight" not in names
    assert not read_manifest(run.checkpoint(20)).extras


REFUSED = [
    (("layout.dp=9",), "layout.dp", "train.leaves = 8"),
    (("train.leaves=0",), "train.leaves", ""),
    (("model.heads=3",), "model.heads", "heads that work: 1, 2, 4, 8, 16"),
    (("train.leaves=5", "train.accumulate=1", "layout.pp=2"), "layout.pp = 2", "it must be at most 1, "),
    (("train.leaves=5", "train.accumulate=1", "layout.pp=2"), "layout.pp = 2", "5 // layout.dp 4 x train.accumulate 1"),
    (("layout.dp=8", "layout.pp=3"), "layout.pp = 3", "set layout.pp to 2 or less, layout.dp to 4 or less, or "),
    (("layout.dp=8", "layout.pp=3"), "layout.pp = 3", "or train.accumulate to 3 or more"),
    (("layout.pp=4",), "layout.pp = 4", "at most model.layers + 2 = 3"),
    (("layout.pp=4",), "layout.pp = 4", "or model.layers to 2"),
    (("layout.pp=3",), "layout.pp = 3", "not built yet"),  # the numbers are right
    (("layout.tp=2",), "layout.tp = 2", "tp that works: 1; or set model.slices to 2"),
    (("layout.tp=3",), "layout.tp = 3", "tp that works: 1"),
    (("model.slices=3",), "model.slices = 3", "take 2 or 4"),
    (("model.slices=4",), "model.slices = 4", "slices that work: 1, 2"),
]


@pytest.mark.parametrize(
    ("sets", "key", "cure"), REFUSED, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_case_23_what_does_not_divide_is_refused_before_the_first_step(new_run, sets, key, cure):
    run = new_run()
    assert run.train(*sets) == 2
    assert run.errors.count("\n") == 1 and key in run.errors and cure in run.errors
    assert not run.folder.exists()
