"""What memory.json counts: live tensors, beside the formula, every difference named."""

import gc
import json
from pathlib import Path

import pytest
import torch

from onecurve.config import Config, load_config
from onecurve.launch import RankContext
from onecurve.model.gpt import token_loss
from onecurve.parallel import Mesh, ZeroOptimizer, replicate
from onecurve.parallel.ownership import OwnershipTable
from onecurve.report.plan import parameters, rank_costs
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
        # The shared-memory transport keeps views of other ranks' memory: each rank counts its own.
        others = {t.untyped_storage().data_ptr() for t in getattr(mesh.transport, "_mapped", {}).values()}
        alive = [t for t in alive if t.untyped_storage().data_ptr() not in others]
        counted = measure(mesh.rank, optimizer.tensors(), PARAMETERS, 1 if stage == 0 else 3)
        return [count_bytes(alive), counted.total]

    for found, counted in run_dist(work, 3):
        assert found == counted


LAYOUTS = [
    (),
    ("layout.dp=3",),
    ("layout.dp=1",),
    ("train.leaves=8",),
    ("train.leaves=8", "layout.dp=3"),
    ("train.accumulate=2",),
    ("model.tied=true",),
    ("model.tied=true", "layout.dp=3", "train.accumulate=2", "train.leaves=7"),
    ("layout.transport=p2p", "layout.dp=2"),
    ("layout.transport=alltoall", "train.leaves=6"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=[" ".join(sets) or "demo" for sets in LAYOUTS])
@pytest.mark.parametrize("zero", range(4))
def test_the_plan_is_what_is_measured(zero: int, layout: tuple[str, ...], tmp_path: Path) -> None:
    """Row by row: each formula, with the padding and scratch that the plan names, is what memory.json counts."""
    sets = (f"layout.zero={zero}", "train.steps=2", *layout)
    assert train_here(tmp_path / "run", *sets) == 0
    config = load_config(DEMO, sets)
    copied = any("transport" in setting for setting in layout)  # what was received is given back after the step
    for row, cost in zip(profile(tmp_path / "run")["ranks"], rank_costs(config), strict=True):
        expected = {
            "parameters": cost.weights + cost.weights_padding,
            "gradients": cost.gradients + cost.gradients_padding - (cost.counters if copied else 0),
            "formula": cost.optimizer,
            "padding": cost.padding,
            "optimizer": cost.optimizer + cost.padding,
            "scratch": cost.scratch + 12 * owned(config, row["rank"]),
        }
        assert {name: row[name] for name in expected} == expected


def owned(config: Config, rank: int) -> int:
    """Elements in the copy that a save in the background works from."""
    layout = config.layout
    table = OwnershipTable(parameters(config.model), dp=layout.dp, stage=layout.zero)
    return sum(place.length for place in table.owned(rank))
