"""What memory.json counts: live tensors, beside the formula, every difference named."""

import gc
import json
from pathlib import Path

import pytest
import torch

from onecurve.config import load_config
from onecurve.launch import RankContext
from onecurve.model.gpt import token_loss
from onecurve.parallel import Mesh, ZeroOptimizer, replicate
from onecurve.train.memory import STATE, count_bytes, measure
from onecurve.train.parts import new_loader, new_model
from tests.commands import DEMO, rows, train_here
from tests.dist.harness import run_dist

PARAMETERS = 29_824


def profile(run: Path) -> dict:
    return json.loads((run / "memory.json").read_text(encoding="utf-8"))


def test_the_demos_profile_is_the_specified_one(undisturbed: Path) -> None:
    memory = profile(undisturbed)
    for rank, row in enumerate(memory["ranks"]):
        assert (row["rank"], row["parameters"], row["gradients"]) == (rank, 119_296, 119_296)
        assert row["optimizer"] == row["formula"] == 12 * PARAMETERS // 4 == 89_472 and row["padding"] == 0
        assert [row[kind] for kind in STATE] == [29_824] * 3
        assert row["total"] == 328_064
    assert (memory["maximum"], memory["mean"]) == (328_064, 328_064.0)
    assert {(row["memory_max_bytes"], row["memory_mean_bytes"]) for row in rows(undisturbed)} == {(328_064, 328_064.0)}


def test_at_width_3_the_padding_is_named(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", "layout.dp=3", "train.steps=2") == 0
    for row in profile(tmp_path / "run")["ranks"]:
        assert row["padding"] > 0
        assert row["formula"] + row["padding"] == row["optimizer"] == sum(row[kind] for kind in STATE)
        # cut into shards of whole 16-element vectors: the least that 29,824 elements on 3 ranks can take
        assert row["optimizer"] == 12 * 16 * -(-PARAMETERS // (3 * 16))


@pytest.mark.parametrize("transport", ["shm", "p2p", "alltoall"])
@pytest.mark.parametrize("stage", range(4))
def test_nothing_that_lives_is_left_out(stage: int, transport: str) -> None:
    """Every float tensor that the collector finds after two steps has a storage that the profile counted."""
    config = load_config(DEMO)

    def work(context: RankContext) -> list[int]:
        mesh = Mesh(dp=context.world, transport=transport)
        model = new_model(config)
        replicate(model, mesh)
        optimizer = ZeroOptimizer(model, mesh, stage=stage, leaves=4)
        for step in range(2):
            for batch in new_loader(config).micro_batches(step, optimizer.leaf_ids):
                loss, tokens = token_loss(model(batch.inputs), batch.targets)
                optimizer.backward(loss, tokens)
            optimizer.step()
        del loss, batch
        gc.collect()
        alive = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.is_floating_point()]
        alive += [p.grad for p in model.parameters() if p.grad is not None]
        counted = measure(mesh.rank, optimizer.tensors(), PARAMETERS, 1 if stage == 0 else 3)
        return [count_bytes(alive), counted.total]

    for found, counted in run_dist(work, 3):
        assert found == counted
