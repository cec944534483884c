import itertools

import pytest

from tests.badday.commands import Run, adopt_orphans, small


@pytest.fixture(autouse=True)
def orphans():
    adopt_orphans(True)
    yield
    adopt_orphans(False)


@pytest.fixture
def new_run(tmp_path):
    """Makes a run of the small config: new_run("train.steps=30")."""
    number = itertools.count()
    config = small(tmp_path)
    return lambda *sets: Run(tmp_path / f"run-{next(number)}", config, sets)


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The result of a run on one rank that nobody disturbed: reference("train.steps=30")."""
    known = {}

    def result(*sets, armed=""):
        if (sets, armed) not in known:
            folder = tmp_path_factory.mktemp("reference")
            run = Run(folder / "run", small(folder), sets)
            assert run.train("layout.dp=1", armed=armed) == 0, run.errors
            known[sets, armed] = run.result()
        return known[sets, armed]

    return result
