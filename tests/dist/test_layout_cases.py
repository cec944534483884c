"""Faults that users of other trainers have hit on resume, across widths and stages (their numbers in the names)."""

import pytest
import torch

from onecurve import faults
from onecurve.checkpoint import load_checkpoint, save_checkpoint, state_digest
from onecurve.config import load_config
from onecurve.parallel import Mesh, ZeroOptimizer
from onecurve.train.parts import new_model
from tests.commands import DEMO, ROOT, curve, digest, rows, train_here
from tests.dist.harness import run_dist
from tests.dist.modules import Base, loss_of
from tests.dist.training import run_leaves, whole_state
from tests.train.test_reference import FULL, STEPS, reference

ODD = ROOT / "configs" / "odd.toml"


def killed_and_resumed(run, sets, before, after, step, config=DEMO):
    faults.arm(f"kill:rank=0,step={step},place=exchange")
    assert train_here(run, *sets, *before, config=config) == 3
    faults.disarm()
    assert train_here(run, *sets, *after, flags=("--resume",), config=config) == 0


def test_case_01_dropout_saved_at_step_5_of_10_goes_on_in_every_bit_on_another_layout(tmp_path):
    sets = ("train.steps=10", "checkpoint.every_steps=5", "checkpoint.background=false")
    assert train_here(tmp_path / "whole", *sets, "layout.dp=1", config=ODD) == 0
    before, after = ("layout.dp=4", "layout.zero=3"), ("layout.dp=3", "layout.zero=2")
    killed_and_resumed(tmp_path / "resumed", sets, before, after, 7, ODD)
    assert curve(tmp_path / "resumed") == curve(tmp_path / "whole")
    assert digest(tmp_path / "resumed", 10) == digest(tmp_path / "whole", 10)


@pytest.mark.parametrize("stage", range(4))
def test_case_02_each_rank_gets_back_what_it_saved_itself(stage, tmp_path):
    """Ranks' generators differ, as do their shards: rank by rank, all that is restored is what that rank saved."""

    def work(context):
        torch.manual_seed(100 + context.rank)
        drawn = torch.rand(3)  # other draws on each rank
        mesh = Mesh(dp=3)
        model, fresh = Base(), Base()
        optimizer = ZeroOptimizer(model, mesh, stage=stage, leaves=4)
        for step in range(2):
            run_leaves(optimizer, model, loss_of, step)
            optimizer.step()
        kept = [getattr(optimizer, kind).clone() for kind in ("master", "exp_avg", "exp_avg_sq")]
        save_checkpoint(tmp_path, optimizer, 2)
        generator = torch.get_rng_state()
        other = ZeroOptimizer(fresh, mesh, stage=stage, leaves=4)
        load_checkpoint(tmp_path / "step-00000002", other)
        for kind, mine in zip(("master", "exp_avg", "exp_avg_sq"), kept, strict=True):
            assert torch.equal(getattr(other, kind), mine), kind
        assert torch.equal(torch.get_rng_state(), generator) and other.updates == 2
        return [drawn.tolist(), kept[0].tolist(), state_digest(other)]

    found = run_dist(work, 3)
    assert len({str(drawn) for drawn, _, _ in found}) == 3
    assert len({str(master) for _, master, _ in found}) == (1 if stage == 0 else 3)
    assert len({digest for _, _, digest in found}) == 1


@pytest.mark.parametrize("killed_at", [3, 13], ids=["in the warm-up", "in the decay"])
def test_case_05_rates_are_those_of_the_uninterrupted_run_on_another_layout(killed_at, tmp_path):
    sets = ("optimizer.warmup_steps=6", "optimizer.decay=cosine", "optimizer.weight_decay=0.1", "checkpoint.every_steps=2")
    assert train_here(tmp_path / "whole", *sets) == 0
    killed_and_resumed(tmp_path / "resumed", sets, ["layout.zero=2"], ["layout.dp=3", "layout.zero=3"], killed_at)
    for name in ("lr", "weight_decay"):
        assert [r[name] for r in rows(tmp_path / "resumed")] == [r[name] for r in rows(tmp_path / "whole")]
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")


def test_case_11_saved_at_zero_3_on_4_ranks_and_loaded_at_zero_1_on_2_and_on_one_rank(tmp_path):
    """Parameters and both moments equal, and so are the working weights."""
    config = load_config(ODD)

    def loaded(context, stage):
        model = new_model(config)
        optimizer = ZeroOptimizer(model, Mesh(dp=context.world), stage=stage, leaves=8)
        load_checkpoint(tmp_path / "step-00000001", optimizer)
        weights = {name: p.detach().numpy().tobytes().hex() for name, p in model.named_parameters()}
        return [whole_state(optimizer), weights]

    def saved(context):
        model = new_model(config)
        optimizer = ZeroOptimizer(model, Mesh(dp=4), stage=3, leaves=8, lr=1e-2)
        tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(3))
        for leaf in optimizer.leaf_ids:
            optimizer.backward(model(tokens, (leaf,)).square().sum(), 34)
        optimizer.step()
        save_checkpoint(tmp_path, optimizer, 1)
        return whole_state(optimizer)

    state = run_dist(saved, 4)[0]
    assert set(state) == {"master", "exp_avg", "exp_avg_sq"}
    for world, stage in [(2, 1), (1, 1), (1, 0), (3, 2)]:
        for found, weights in run_dist(loaded, world, stage):
            assert found == state
            assert weights == {name: state["master"][first_use(name)] for name in weights}


def first_use(name: str) -> str:
    return "embedding.token" if name == "head.weight" else name


SLOW_STAGES = [pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)]


@pytest.mark.parametrize("stage", [*SLOW_STAGES, 3])
def test_50_steps_agree_with_plain_pytorch_at_every_stage(stage, tmp_path):
    assert train_here(tmp_path / "run", *FULL, f"layout.zero={stage}", "layout.dp=3", "checkpoint.every_steps=0") == 0
    theirs = reference(load_config(DEMO, FULL))
    found = [row["loss"] for row in rows(tmp_path / "run")]
    assert len(found) == STEPS
    assert max(abs(a / b - 1) for a, (b, _) in zip(found, theirs, strict=True)) < 1e-5
