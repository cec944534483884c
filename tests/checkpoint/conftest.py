import pytest

from onecurve.checkpoint import save_checkpoint
from tests.checkpoint.fakes import Param, all_good, make, on_ranks


@pytest.fixture
def two(tmp_path):
    """A run with checkpoints of steps 10 and 20; the newer one will be damaged."""
    parameters = [Param("a", (64, 32)), Param("b", (2048,))]  # four shards of one size, so that a swap changes no size

    def work(mesh):
        for step in (10, 20):
            save_checkpoint(tmp_path, make(mesh, seed=step, parameters=parameters), step, info={"curve_id": "c"})

    all_good(on_ranks(4, work))
    return tmp_path, tmp_path / "step-00000020", parameters
