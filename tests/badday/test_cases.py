"""cases.md 13 (the checkpoint's half; the export's: tests/export) and 23, as far as it is built. (9 and 20:
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
    (("layout.pp=2",), "layout.pp", ""),  # with fewer micro-batches than stages, once it is built
    (("layout.tp=2",), "layout.tp", ""),
]


@pytest.mark.parametrize(
    ("sets", "key", "cure"), REFUSED, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_case_23_what_does_not_divide_is_refused_before_the_first_step(new_run, sets, key, cure):
    run = new_run()
    assert run.train(*sets) == 2
    assert run.errors.count("\n") == 1 and key in run.errors and cure in run.errors
    assert not run.folder.exists()
