"""ZeRO-3: weights that are not gathered are never read unnoticed, and what autograd kept is still there in backward."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onecurve.errors import RunFailed, UsageError
from onecurve.parallel import Mesh, ZeroOptimizer
from tests.dist.harness import run_dist
from tests.dist.modules import Base, Part, loss_of, parameter
from tests.dist.training import draw, run_leaves, train


class Detached(Base):
    """A unit that also uses its weights without their gradients, after the last use that has one."""

    def __init__(self):
        super().__init__()
        self.gated = Part(40)
        self.gated.forward = lambda x: F.linear(x, self.gated.weight, self.gated.bias) * self.gated.weight.detach().sum(0)

    def forward(self, x, step, leaf, micro):
        return super().forward(self.gated(self.parts[0](x)), step, leaf, micro)


@dataclass
class Out:
    value: Tensor


class Dataclasses(Base):
    """Units that return a dataclass, within a dict."""

    def __init__(self):
        super().__init__()
        self.boxed = Part(40)
        inner = self.boxed.forward
        self.boxed.forward = lambda x: {"out": [Out(inner(x))]}

    def forward(self, x, step, leaf, micro):
        return super().forward(self.boxed(x)["out"][0].value, step, leaf, micro)


class Recomputed(Base):
    """Activation checkpointing around single units and around all of them."""

    def forward(self, x, step, leaf, micro):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return checkpoint(partial(super().forward, step=step, leaf=leaf, micro=micro), x, use_reentrant=False)


class Reader(nn.Module):
    """It reads twice what another unit holds, and then something of its own."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.norm = nn.LayerNorm(5)

    def forward(self, x):
        return self.norm(torch.tanh(F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)))


class ReadByOthers(Base):
    """A weight that a unit without inputs of a gradient reads of another unit, whose forward never runs."""

    def __init__(self):
        super().__init__()
        self.holder = Part(40)
        self.reader = Reader(self.holder.weight)

    def forward(self, x, step, leaf, micro):
        return super().forward(self.reader(x), step, leaf, micro)


class ReadBesides(ReadByOthers):
    """The same, of a unit whose backward comes later."""

    def forward(self, x, step, leaf, micro):
        held = self.holder(x)
        return Base.forward(self, held + self.reader(x), step, leaf, micro)


def stages(context, make, which=(0, 1, 2, 3)):
    mesh = Mesh(dp=context.world, limit=20.0)
    return [train(mesh, make, loss_of, stage=stage, leaves=5, accumulate=2) for stage in which]


@pytest.mark.parametrize("make", [Detached, Dataclasses, Recomputed, ReadByOthers, ReadBesides])
def test_every_stage_is_one_curve(make):
    (alone,) = run_dist(stages, 1, make)
    assert alone == [alone[0]] * 4
    for width in (2, 3):
        for found in run_dist(stages, width, make):
            assert found == alone


class ThroughMethod(Base):
    """The last part is used through a method, so nobody gathers its weights."""

    def forward(self, x, step, leaf, micro):
        return F.linear(self.parts[1](self.parts[0](x)), self.parts[2].weight)


class WithoutGradient(Base):
    """As above, where no gradient tells of it."""

    def forward(self, x, step, leaf, micro):
        return super().forward(x, step, leaf, micro) * self.parts[2].weight.detach().sum()


@pytest.mark.parametrize("width", [1, 2])
def test_weights_read_outside_their_units_forward_are_refused(width):
    def work(context):
        model = ThroughMethod()
        optimizer = ZeroOptimizer(model, Mesh(dp=context.world), stage=3, leaves=2)
        run_leaves(optimizer, model, loss_of, 0)

    words = r"parts\.2\.weight was read outside the forward of its unit parts\.2"
    with pytest.raises(UsageError, match=words):
        run_dist(work, width)


@pytest.mark.parametrize("width", [1, 2])
def test_weights_read_there_without_a_gradient_are_not_numbers(width):
    """So no step accepts them. Negative control: with the placeholder gone, the step of width 1 is accepted."""

    def work(context, visible):
        model = WithoutGradient()
        optimizer = ZeroOptimizer(model, Mesh(dp=context.world), stage=3, leaves=2)
        if visible:
            part = optimizer.weights.by_unit["parts.2"]
            part.hold()
        before = optimizer.master.clone()
        run_leaves(optimizer, model, loss_of, 0)
        stats = optimizer.step()
        return [stats.finite, stats.accepted, torch.equal(before, optimizer.master)]

    assert run_dist(work, width, False) == [[False, False, True]] * width
    assert run_dist(work, width, True) == [[True, True, False]] * width


def test_shapes_can_be_read_at_any_time_and_values_only_when_they_are_there():
    model = Base()
    optimizer = ZeroOptimizer(model, Mesh(), stage=3, leaves=1)
    assert sum(p.numel() for p in model.parameters()) == sum(s.numel for s in optimizer.table.parameters)
    assert all(p.isnan().all() for p in model.parameters())
    with pytest.raises(RuntimeError, match="single memory location"):
        nn.init.normal_(model.parts[0].weight)


class Opaque:
    def __init__(self, value):
        self.value = value


def test_outputs_that_hide_tensors_are_refused():
    class Hiding(Base):
        def __init__(self):
            super().__init__()
            self.hiding = Part(40)
            inner = self.hiding.forward
            self.hiding.forward = lambda x: Opaque(inner(x))

        def forward(self, x, step, leaf, micro):
            return super().forward(self.hiding(x).value, step, leaf, micro)

    model = Hiding()
    ZeroOptimizer(model, Mesh(), stage=3, leaves=1)
    with pytest.raises(UsageError, match="unit hiding returns a Opaque"):
        loss_of(model, 0, 0, 0)


def test_a_unit_that_an_evaluation_skipped_may_be_loaded_again():
    """Its gather was on its way when the weights were refreshed."""

    def work(context):
        model = Base()
        optimizer = ZeroOptimizer(model, Mesh(dp=2), stage=3, leaves=2)
        with torch.no_grad():
            model.parts[0](draw(1, shape=(3, 5)))  # the next part's weights are on their way, and not used
        optimizer.refresh()
        run_leaves(optimizer, model, loss_of, 0)
        return optimizer.step().accepted

    assert run_dist(work, 2) == [True, True]


class TwiceReentrant(Base):
    """One part, used twice under a reentrant checkpoint: its gradients come in two backwards."""

    def forward(self, x, step, leaf, micro):
        x = x + parameter(5, key=9).requires_grad_()
        return checkpoint(self.parts[0], checkpoint(self.parts[0], x, use_reentrant=True), use_reentrant=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_come_twice_are_refused_where_they_would_be_lost(stage):
    def work(context):
        model = TwiceReentrant()
        optimizer = ZeroOptimizer(model, Mesh(dp=context.world), stage=stage, leaves=1)
        run_leaves(optimizer, model, loss_of, 0)

    with pytest.raises(UsageError, match="got two gradients in one backward"):
        run_dist(work, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_a_backward_of_the_users_own_is_refused(stage, dtype):
    model = nn.Sequential(nn.Linear(3, 3)).to(dtype)
    optimizer = ZeroOptimizer(model, Mesh(), stage=stage, leaves=1)
    x = torch.ones(2, 3, dtype=dtype)
    with pytest.raises(UsageError, match="got a gradient outside the backward of its ZeroOptimizer"):
        model(x).sum().backward()
        optimizer.backward(model(x).sum(), 2)  # with fp32 at stages 0 and 1 it is found here


def test_a_forward_with_gradients_outside_a_leaf_is_named_where_ranks_part():
    """At stage 3 a forward is an exchange of all ranks: without `no_grad` it counts as a part of the next leaf."""

    def work(context):
        model = Base()
        optimizer = ZeroOptimizer(model, Mesh(dp=2, limit=10.0), stage=3, leaves=3)
        model(draw(1, shape=(3, 5)), 0, 0, 0)
        run_leaves(optimizer, model, loss_of, 0)
        optimizer.step()

    with pytest.raises(RunFailed, match=r"out of step.*no_grad"):
        run_dist(work, 2)
