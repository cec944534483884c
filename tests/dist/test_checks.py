"""What would let the ranks part unseen is refused, by name, before it does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onecurve.errors import UsageError
from onecurve.parallel import Mesh, ZeroOptimizer, replicate
from tests.dist.harness import run_dist
from tests.dist.modules import Base, Part, loss_of
from tests.dist.training import run_leaves


def trained(model, steps=1, mesh=None, between=None, **options):
    optimizer = ZeroOptimizer(model, mesh or Mesh(), **{"stage": 1, "leaves": 2} | options)
    for step in range(steps):
        run_leaves(optimizer, model, loss_of, step)
        optimizer.step()
        if between is not None:
            between(model)
    return optimizer


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_models_that_were_not_replicated(stage):
    def work(context, replicated):
        torch.manual_seed(context.rank)
        model, mesh = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), Mesh(dp=context.world)
        if replicated:
            replicate(model, mesh)
        ZeroOptimizer(model, mesh, stage=stage, leaves=3)
        return True

    assert run_dist(work, 3, True) == [True] * 3
    with pytest.raises(UsageError, match=r"0\.weight is not the same on all ranks; call replicate"):
        run_dist(work, 3, False)


@pytest.mark.parametrize("name", ["lr", "clip", "weight_decay", "accumulate"])
def test_settings_that_differ_between_ranks(name):
    def work(context):
        ZeroOptimizer(Base(), Mesh(dp=2), leaves=2, **{name: 1 + context.rank})

    with pytest.raises(UsageError, match=f"{name} is not the same on all ranks .1 on rank 0, 2 on rank 1"):
        run_dist(work, 2)


class Random(Base):
    def forward(self, x, step, leaf, micro):
        return F.dropout(super().forward(x, step, leaf, micro), 0.1)


class Counting(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, step, leaf, micro):
        self.calls += 1
        return super().forward(x, step, leaf, micro)


@pytest.mark.parametrize(
    ("make", "words"), [(Random, "global random generator"), (Counting, "changed the buffer calls")]
)
def test_forwards_whose_result_depends_on_what_ran_before(make, words):
    with pytest.raises(UsageError, match=words):
        trained(make())


@pytest.mark.parametrize("make", [Random, Counting])
def test_without_gradients_they_are_an_evaluation(make):
    model = make()
    optimizer = ZeroOptimizer(model, Mesh(), stage=1, leaves=2)
    with torch.no_grad():
        loss_of(model, 0, 0, 0)
    assert optimizer.updates == 0


def halve(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def reload(model):
    model.load_state_dict(Base().state_dict())


def test_what_was_changed_may_be_set_back():
    model = Base()
    optimizer = trained(model)
    halve(model)
    optimizer.refresh()
    run_leaves(optimizer, model, loss_of, 1)
    assert optimizer.step().accepted


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("edit", [halve, reload])
def test_weights_changed_behind_the_optimizer(edit, stage):
    with pytest.raises((UsageError, RuntimeError)) as caught:  # at stage 3 torch itself refuses to write what is absent
        trained(Base(), steps=2, between=edit, stage=stage)
    assert stage == 3 or "was changed since ZeroOptimizer was made" in str(caught.value)


def test_a_constant_written_over_absent_weights_is_found_too():
    with pytest.raises(UsageError, match="was changed"):
        trained(Base(), steps=2, between=lambda model: nn.init.zeros_(model.parts[0].weight), stage=3)


def test_leaves_that_choose_units_of_one_size_at_stage_3():
    """All exchanges have the same sizes and come in the same number, so nothing else would tell."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Part(40), Part(50)

        def forward(self, x, step, leaf, micro):
            return (self.one if leaf else self.other)(x)

    def work(context):
        trained(Either(), mesh=Mesh(dp=2, limit=10.0), stage=3)

    with pytest.raises(UsageError, match="went through different units"):
        run_dist(work, 2)


@pytest.mark.parametrize("tokens", [16.0, torch.tensor(3), -1, None])
def test_counts_of_targets_that_are_none(tokens):
    model = Base()
    optimizer = ZeroOptimizer(model, Mesh(), leaves=1)
    with pytest.raises(UsageError, match="how many targets were summed"):
        optimizer.backward(loss_of(model, 0, 0, 0)[0], tokens)


def test_a_loss_without_a_gradient():
    model = Base()
    optimizer = ZeroOptimizer(model, Mesh(), leaves=1)
    with pytest.raises(UsageError, match="has no gradient"):
        optimizer.backward(loss_of(model, 0, 0, 0)[0].detach(), 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_that_another_optimizer_has(stage):
    model = Base()
    trained(model, stage=stage)
    with pytest.raises(UsageError, match="belongs to a ZeroOptimizer already"):
        trained(model, stage=stage)
