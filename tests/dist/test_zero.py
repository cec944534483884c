"""ZeroOptimizer as a library: its refusals, steps without tokens or acceptance, accumulation, memory, replicas."""

import itertools

import pytest
import torch
from torch import nn

from onecurve.data.cycle import cycle_corpus
from onecurve.data.loader import Loader
from onecurve.model import GPT, token_loss
from onecurve.model.gpt import IGNORED
from onecurve.parallel import Mesh, ZeroOptimizer, replicate
from onecurve.parallel.replicas import ReplicasDiffer
from onecurve.parallel.weights import SpaceWeights
from onecurve.errors import InputError, RunFailed, UsageError
from tests.dist.harness import run_dist
from tests.dist.modules import Base, loss_of
from tests.dist.training import run_leaves, tensor, whole_state

SMALL = {"layers": 2, "width": 32, "heads": 4, "vocab": 64, "context": 16}


def optimizer_of(model, stage=1, leaves=4, **options):
    return ZeroOptimizer(model, Mesh(dp=1), stage=stage, leaves=leaves, **options)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("accumulate", [1, 3])
def test_too_few_and_too_many_backward_calls_give_both_numbers(stage, accumulate):
    model = Base()
    optimizer = optimizer_of(model, stage, leaves=2, accumulate=accumulate)
    expected = 2 * accumulate
    for _ in range(expected - 1):
        optimizer.backward(*loss_of(model, 0, 0, 0))
    with pytest.raises(UsageError, match=rf"{expected - 1} of {expected} backward calls"):
        optimizer.step()
    optimizer.backward(*loss_of(model, 0, 0, 0))
    with pytest.raises(UsageError, match=rf"called {expected + 1} times .* = {expected}"):
        optimizer.backward(*loss_of(model, 0, 0, 0))
    assert optimizer.step().accepted


def test_bad_numbers_are_refused():
    for options, words in [
        ({"stage": 4}, "stages 0, 1, 2 and 3"),
        ({"leaves": 0}, "leaves = 0"),
        ({"accumulate": 0}, "accumulate = 0"),
    ]:
        with pytest.raises(InputError, match=words):
            optimizer_of(Base(), **options)


@pytest.mark.parametrize("stage", range(4))
def test_a_step_without_a_token_and_one_not_accepted_change_nothing(stage):
    def work(context):
        model = GPT(**SMALL)
        optimizer = ZeroOptimizer(model, Mesh(dp=2), stage=stage, leaves=3, lr=1e-2)
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
        before = whole_state(optimizer)
        for targets, accept in [(torch.full_like(tokens, IGNORED), None), (tokens, lambda stats: False)]:
            for _ in optimizer.leaf_ids:
                optimizer.backward(*token_loss(model(tokens), targets))
            stats = optimizer.step(accept)
            assert not stats.accepted and optimizer.updates == 0
            assert whole_state(optimizer) == before
            if accept is None:
                assert (stats.tokens, stats.norm, stats.finite) == (0, 0.0, True) and stats.loss != stats.loss
        for _ in optimizer.leaf_ids:
            optimizer.backward(*token_loss(model(tokens), tokens))
        assert optimizer.step().accepted and whole_state(optimizer) != before
        return True

    assert run_dist(work, 2) == [True, True]


def combined_gradient(batches):
    """The mean gradient over all unmasked tokens of `batches`, as one batch in fp64."""
    model = GPT(**SMALL, seed=7).double()
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    logits = model(inputs)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    (loss / int((targets != IGNORED).sum())).backward()
    return {name: p.grad.reshape(-1) for name, p in model.named_parameters()}


def gradients_at(context, batches, leaves, accumulate):
    """At every stage: the gradient (exp_avg after one update with beta1 = 0), bit for bit, by parameter."""
    found = []
    mesh = Mesh(dp=context.world)
    for stage in range(4):
        model = GPT(**SMALL, seed=7)
        optimizer = ZeroOptimizer(model, mesh, stage=stage, leaves=leaves, accumulate=accumulate, betas=(0.0, 0.9))
        for leaf, micro in itertools.product(optimizer.leaf_ids, range(accumulate)):
            inputs, targets = batches[leaf * accumulate + micro]
            optimizer.backward(*token_loss(model(inputs), targets))
        stats = optimizer.step()
        assert stats.finite and stats.tokens == sum(int((t != IGNORED).sum()) for _, t in batches)
        found.append(whole_state(optimizer))
    return found


def close_to(state, expected) -> float:
    """The largest distance of a parameter's gradient, relative to its norm."""
    gap = 0.0
    for name, gradient in expected.items():
        gap = max(gap, float((tensor(state, name, "exp_avg").double() - gradient).norm() / gradient.norm()))
    return gap


def batches_of(count, masked=None):
    loader = Loader(cycle_corpus(41, 4096, 64), context=16, micro_batch=4, leaves=1, accumulate=count, seed=3)
    batches = [[b.inputs, b.targets.clone()] for b in loader.micro_batches(0, [0])]
    for (_, targets), valid in zip(batches, masked or [], strict=False):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(valid))
        targets.view(-1)[order[valid:]] = IGNORED
    return batches


def test_four_micro_batches_have_the_gradient_of_one_big_batch():
    """X2: to rounding (1e-6 relative, compared in fp64) that of the big batch; and its own bits at every layout."""
    batches = batches_of(8)
    expected = combined_gradient(batches)
    (alone,) = run_dist(gradients_at, 1, batches, 2, 4)
    big = [[torch.cat(column) for column in zip(*batches[4 * i : 4 * i + 4], strict=True)] for i in range(2)]
    (in_one,) = run_dist(gradients_at, 1, big, 2, 1)
    for found in (alone, in_one):
        assert found == [found[0]] * 4
        assert close_to(found[0], expected) < 1e-6
    for found in run_dist(gradients_at, 2, batches, 2, 4):
        assert found == alone


@pytest.mark.parametrize("masked", [[1, 7, 30, 64], [0, 7, 0, 64]], ids=["1, 7, 30, 64 tokens", "two without a token"])
def test_two_ranks_with_two_micro_batches_and_masks_have_the_combined_gradient(masked):
    """Case 14: tokens are weighed alike wherever they are; a micro-batch without one is no NaN."""
    batches = batches_of(4, masked)
    (alone,) = run_dist(gradients_at, 1, batches, 2, 2)
    for found in run_dist(gradients_at, 2, batches, 2, 2):
        assert found == alone == [alone[0]] * 4
    assert close_to(alone[0], combined_gradient(batches)) < 1e-6


def test_the_rate_of_an_update_depends_neither_on_ranks_nor_on_accumulation():
    """Case 18: the schedule is asked once per update, with its number."""

    def work(context):
        asked = []
        for stage, accumulate in itertools.product((1, 3), (1, 4)):
            seen = []
            model = Base()
            optimizer = ZeroOptimizer(
                model,
                Mesh(dp=context.world),
                stage=stage,
                leaves=4,
                accumulate=accumulate,
                lr=lambda step, seen=seen: seen.append(step) or 1e-2 / (step + 1),
            )
            for step in range(4):
                run_leaves(optimizer, model, loss_of, step)
                optimizer.step(lambda stats, step=step: step != 2)  # one is refused: it is no update
            asked.append(seen)
        return asked

    for found in (*run_dist(work, 1), *run_dist(work, 4)):
        assert found == [[0, 1, 2]] * 4


def test_stage_3_holds_a_shard_and_at_most_two_units_of_weights():
    """Allocations are watched: whenever weights are gathered or freed, the bytes behind all flat tensors are added."""

    def work(context):
        model = GPT(**SMALL | {"layers": 5, "width": 64}, seed=1)
        optimizer = ZeroOptimizer(model, Mesh(dp=2), stage=3, leaves=4, accumulate=2)
        spaces = optimizer.weights.spaces
        seen = []

        def watched(original):
            def call(self, *args):
                result = original(self, *args)
                seen.append([space.flat.untyped_storage().nbytes() for space in spaces])
                return result

            return call

        for name in ("start_gather", "finish_gather", "free"):
            setattr(SpaceWeights, name, watched(getattr(SpaceWeights, name)))
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            for _ in range(2 * len(optimizer.leaf_ids)):
                optimizer.backward(*token_loss(model(tokens), tokens))
            optimizer.step()
            with torch.no_grad():
                model(tokens)
        peak = max(sum(alive) for alive in seen)
        sizes = [space.shard.numel() * 4 * 2 for space in spaces]
        return [peak, sorted(sizes)[-2:], sum(sizes), max(sum(size > 0 for size in alive) for alive in seen), seen[-1]]

    for peak, largest, whole, units, after in run_dist(work, 2):
        assert units == 2
        assert largest[1] < peak <= sum(largest) < whole / 2
        assert after == [0] * 7


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_stages_2_and_3_are_shards_and_two_units(stage):
    """The plan's table: 4P/N per counter buffer alive, and two units while backward runs."""

    def work(context):
        model = GPT(**SMALL | {"layers": 5, "width": 64}, seed=1)
        optimizer = ZeroOptimizer(model, Mesh(dp=4), stage=stage, leaves=8)
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
        for _ in range(3):
            for _ in optimizer.leaf_ids:
                optimizer.backward(*token_loss(model(tokens), tokens))
            optimizer.step()
        partition = optimizer.partition
        units = [hi - lo for unit in {p.unit for p in partition.pieces} for lo, hi in [partition.unit_range(unit)]]
        live = sum(t.untyped_storage().nbytes() for t in optimizer.tensors()["gradients"])
        return [live, 4 * max(units), partition.local * 4]

    for live, unit, shard in run_dist(work, 4):
        counters = 4  # log2(8 leaves) + 1
        assert live <= 2 * unit + counters * shard + 4096


def flipped(context, stage, where, mesh_size=3):
    """Train two steps, flip one bit on rank 2, train one more."""
    model = Base()
    model.register_buffer("shift", torch.zeros(5))
    model.parts[0].bias.requires_grad_(False)
    mesh = Mesh(dp=mesh_size)
    replicate(model, mesh)
    optimizer = ZeroOptimizer(model, mesh, stage=stage, leaves=4)
    for step in range(3):
        mesh.barrier()  # the others have read this rank's part of the gather
        if step == 2 and context.rank == mesh_size - 1:
            target = optimizer.replicas()[where].view(-1)
            target[:1].view(torch.int32).bitwise_xor_(1)
        run_leaves(optimizer, model, loss_of, step)
        optimizer.step(check_replicas=True)


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        (0, "parts.1.weight"),
        (1, "parts.2.norm.bias"),
        (2, "parts.1.weight"),
        (0, "exp_avg of parts.2.weight"),
        (0, "exp_avg_sq of parts.1.bias"),
        (0, "master of parts.0.norm.weight"),
        (1, "shift"),
        (3, "shift"),
        (3, "parts.0.bias"),
    ],
)
def test_a_flipped_bit_names_rank_update_and_tensor(stage, where):
    with pytest.raises(RunFailed, match=f"rank 2 holds another {where} than the other ranks, found before update 3"):
        run_dist(flipped, 3, stage, where)


def test_of_two_ranks_nobody_can_say_which_is_wrong():
    with pytest.raises(RunFailed, match=r"ranks 0 and 1 hold different parts\.1\.weight"):
        run_dist(flipped, 2, 1, "parts.1.weight", 2)
    assert ReplicasDiffer("").exit_code == 3


def test_a_flipped_bit_in_a_sharded_tensor_is_no_replica():
    """The control of the check: without it the run would go on."""

    def work(context):
        model = Base()
        optimizer = ZeroOptimizer(model, Mesh(dp=3), stage=1, leaves=4)
        assert not any(name.startswith(("master", "exp_avg")) for name in optimizer.replicas())
        if context.rank == 2:
            model.parts[1].weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        run_leaves(optimizer, model, loss_of, 0)
        return optimizer.step().accepted

    assert run_dist(work, 3) == [True] * 3


def test_a_forward_that_changes_a_buffer_is_refused_at_once():
    """Statistics that a module keeps of its rank's data are no replicas."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(5))

        def forward(self, x):
            self.seen += x.detach().mean(0)
            return x

    def work(context):
        model = nn.Sequential(nn.Linear(5, 5), Mean())
        mesh = Mesh(dp=2)
        replicate(model, mesh)
        optimizer = ZeroOptimizer(model, mesh, stage=3, leaves=2)
        for leaf in optimizer.leaf_ids:
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(leaf))
            optimizer.backward(model(x).square().sum(), 4)
        optimizer.step()

    with pytest.raises(UsageError, match=r"the forward changed the buffer 1\.seen"):
        run_dist(work, 2)
