"""Awkward modules: one curve over widths, stages, transports and accumulation, and the right one (cases 17, 19)."""

import pytest
import torch

from onecurve.errors import RunFailed
from onecurve.parallel import Mesh
from tests.dist.harness import run_dist
from tests.dist.modules import MODULES, OnlyTiny, Sparse, loss_of
from tests.dist.training import draw, tensor, train

LEAVES = 5  # at W = 3 and 4 some ranks have no leaf in the last tick


def every_stage(context, name, transport="auto"):
    """Each stage with accumulate 1 and 4, on the ranks of one launch."""
    mesh = Mesh(dp=context.world, transport=transport, limit=20.0)
    found = []
    for accumulate in (1, 4):
        for stage in range(4):
            options = {"stage": stage, "leaves": LEAVES, "accumulate": accumulate, "clip": 3.0}
            found.append(train(mesh, MODULES[name], loss_of, **options))
    return found


@pytest.fixture(scope="module")
def alone():
    """The reference of each module: one rank, stage 0, accumulate 1 and 4."""
    kept = {}

    def of(name):
        if name not in kept:
            (found,) = run_dist(every_stage, 1, name)
            assert found[0:4] == [found[0]] * 4 and found[4:8] == [found[4]] * 4, "stages differ on one rank"
            kept[name] = found
        return kept[name]

    return of


@pytest.mark.parametrize("width", [pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", MODULES)
def test_every_stage_and_accumulation_is_one_curve(name, width, alone):
    for rank, found in enumerate(run_dist(every_stage, width, name)):
        assert found == alone(name), f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["p2p", "alltoall"])
@pytest.mark.parametrize("name", ["sizes", "mixed", "only-tiny"])
def test_every_transport_is_one_curve(name, transport, alone):
    for found in run_dist(every_stage, 3, name, transport):
        assert found == alone(name)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("mixed", "half")])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_is_the_curve_of_plain_pytorch(name, accumulate, alone):
    """One process, torch.optim.AdamW, gradients of the mean over all tokens: equal to rounding, unused ones too."""
    model = MODULES[name]().double()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():
        p.grad = torch.zeros_like(p)  # a parameter that nobody used has gradient zero and decays
    groups = [
        {"params": [p for p in trained.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(3):
        adamw.zero_grad(set_to_none=False)
        places = [(step, leaf, micro) for leaf in range(LEAVES) for micro in range(accumulate)]
        total = sum(_double_loss(model, *place) for place in places)
        (total / (3 * len(places))).backward()
        losses.append(total.item() / (3 * len(places)))
        torch.nn.utils.clip_grad_norm_(trained.values(), 3.0)
        adamw.step()
    rows, state = alone(name)[0 if accumulate == 1 else 4]
    for loss, row in zip(losses, rows, strict=True):
        assert float.fromhex(row[0]) == pytest.approx(loss, rel=1e-5)
    for n, p in trained.items():
        if p.numel():
            assert torch.allclose(tensor(state, n).double(), p.detach().reshape(-1), rtol=1e-4, atol=2e-5), n


def _double_loss(model, step, leaf, micro):
    x, y = draw(step, leaf, micro, 1, shape=(3, 5)), draw(step, leaf, micro, 2, shape=(3, 5))
    return (model(x.double(), step, leaf, micro) - y.double()).square().sum()


def test_a_rank_may_own_padding_alone():
    """Parameters of 8, 0, 24 and 1 elements on 4 ranks (case 19): one holds none of them, and joins all the same."""

    def held(context):
        from onecurve.parallel import ZeroOptimizer

        optimizer = ZeroOptimizer(OnlyTiny(), Mesh(dp=4), stage=1, leaves=4)
        return sum(r.length for r in optimizer.owned())

    assert run_dist(held, 4) == [8, 24, 1, 0]


def test_a_unit_that_only_some_leaves_use_is_one_curve_where_weights_are_whole():
    """At stage 3 all leaves must call the same units: ranks that do not are told so, and do not hang."""

    def work(context, stages):
        mesh = Mesh(dp=context.world, limit=10.0)
        return [train(mesh, Sparse, loss_of, stage=stage, leaves=LEAVES) for stage in stages]

    (alone,) = run_dist(work, 1, [0])
    for width in (2, 3):
        for found in run_dist(work, width, [0, 1, 2]):
            assert found == alone * 3
    with pytest.raises(RunFailed, match="out of step"):
        run_dist(work, 2, [3])
