"""The demo's run that nothing happened to: what every other way of running it must equal."""

from pathlib import Path

import pytest

from onecurve import faults
from tests.commands import train_here


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train_here(run) == 0
    return run


@pytest.fixture(autouse=True)
def no_faults() -> object:
    faults.disarm()
    yield
    faults.disarm()
