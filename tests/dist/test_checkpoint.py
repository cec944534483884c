"""Checkpoints on real ranks: any layout to any layout, and the same bits afterwards."""

import signal
from pathlib import Path

import pytest
import torch

from onecurve import faults
from onecurve.checkpoint import (
    Checkpointer,
    latest_checkpoint,
    load_checkpoint,
    read_parameters,
    save_checkpoint,
    state_digest,
    verify_checkpoint,
)
from onecurve.checkpoint.errors import DiskFull
from onecurve.errors import RunFailed
from onecurve.model.gpt import GPT, initialize, token_loss
from onecurve.parallel import Mesh, ZeroOptimizer
from tests.dist.harness import run_dist

LEAVES = 4


def build(context, stage):
    """A model of odd sizes with a frozen parameter and a buffer, and its optimizer."""
    model = GPT(layers=2, width=36, heads=4, vocab=257, context=17)
    initialize(model, 41, 2)
    model.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
    model.register_parameter("frozen", torch.nn.Parameter(torch.full((3,), 0.5), requires_grad=False))
    mesh = Mesh(dp=context.world)
    return ZeroOptimizer(model, mesh, stage=stage, leaves=LEAVES, lr=1e-2, clip=1.0, weight_decay=0.1)


def train(optimizer, steps):
    """Run the 0-based `steps` on batches that depend on step and leaf alone."""
    for step in steps:
        for leaf in optimizer.leaf_ids:
            generator = torch.Generator().manual_seed(1000 * step + leaf)
            tokens = torch.randint(257, (2, 18), generator=generator)
            loss, count = token_loss(optimizer.model(tokens[:, :-1]), tokens[:, 1:])
            optimizer.backward(loss, count)
        optimizer.step()
        optimizer.model.calls += 1
    return optimizer


def start_and_save(context, stage, folder):
    optimizer = train(build(context, stage), range(3))
    return save_checkpoint(Path(folder), optimizer, 3).state_digest, state_digest(train(optimizer, range(3, 5)))


def resume(context, stage, folder):
    optimizer = build(context, stage)
    path, reasons = latest_checkpoint(Path(folder), optimizer.mesh)
    manifest = load_checkpoint(path, optimizer)
    loaded = state_digest(optimizer)
    extras = {name: t.clone() for name, t in optimizer.extras().items()}
    end = state_digest(train(optimizer, range(manifest.step, 5)))
    return loaded, end, reasons, int(extras["calls"]), extras["frozen"].tolist(), optimizer.updates


@pytest.mark.parametrize("saved", [(4, 3), (3, 1)])
def test_a_run_resumed_on_another_layout_ends_at_the_same_bits(tmp_path, saved):
    """Cases 4 and 11: the digest after the load is the manifest's, and the curve is the one that was never stopped."""
    world, stage = saved
    told = run_dist(start_and_save, world, stage, str(tmp_path))
    assert told == [told[0]] * world
    middle, end = told[0]
    assert verify_checkpoint(tmp_path / "step-00000003") == []
    for other in ((1, 1), (2, 1), (4, 2), (2, 0), (3, 3)):
        told = run_dist(resume, other[0], other[1], str(tmp_path))
        assert told == [[middle, end, [], 3, [0.5] * 3, 5]] * other[0], other


def test_parameters_and_moments_equal_those_in_memory(tmp_path):
    def work(context):
        optimizer = train(build(context, 3), range(2))
        save_checkpoint(tmp_path, optimizer, 2)
        found = {kind: read_parameters(tmp_path / "step-00000002", kind=kind) for kind in ("master", "exp_avg")}
        return all(
            torch.equal(found[kind][r.name].reshape(-1)[r.offset : r.offset + r.length],
                        getattr(optimizer, kind)[r.at : r.at + r.length])
            for kind in found for r in optimizer.held()
        )  # fmt: skip

    assert run_dist(work, 4) == [True] * 4


def test_background_saves_change_no_bit(tmp_path):
    def work(context, background):
        optimizer = build(context, 1)
        saves = Checkpointer(tmp_path / str(background), optimizer, background=background, keep=2)
        digests = {}
        for step in range(1, 7):
            train(optimizer, [step - 1])
            digests |= {m.step: m.state_digest for m in saves.poll()}
            if step % 2 == 0:
                digests |= {m.step: m.state_digest for m in saves.save(step)}
        digests |= {m.step: m.state_digest for m in saves.close()}
        return digests, state_digest(optimizer)

    told = [run_dist(work, 3, background)[0] for background in (False, True)]
    assert told[0] == told[1] and list(told[0][0]) == ["2", "4", "6"] and told[0][0]["6"] == told[0][1]


@pytest.mark.parametrize("place", ["save.begin", "save.write", "save.written", "save.commit", "save.rename"])
def test_a_rank_killed_in_a_save_is_named_and_the_older_checkpoint_is_whole(tmp_path, place):
    rank = 0 if place in ("save.commit", "save.rename") else 2

    def work(context):
        optimizer = train(build(context, 1), range(1))
        save_checkpoint(tmp_path, optimizer, 1)
        faults.arm(f"kill:rank={rank},place={place}")
        save_checkpoint(tmp_path, train(optimizer, range(1, 2)), 2)

    with pytest.raises(RunFailed, match=rf"rank {rank}\b.*{signal.Signals(9).name}"):
        run_dist(work, 3)
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-00000001", [])


def test_an_error_on_one_rank_is_raised_on_all_and_training_goes_on(tmp_path):
    def work(context):
        optimizer = train(build(context, 2), range(1))
        faults.arm("io:rank=2,place=save.write")
        try:
            save_checkpoint(tmp_path, optimizer, 1)
        except DiskFull as error:
            text = str(error)
        return (
            text,
            [path.name for path in tmp_path.iterdir()],
            save_checkpoint(tmp_path, train(optimizer, range(1, 2)), 2).state_digest,
        )

    told = run_dist(work, 3)
    assert told == [told[0]] * 3 and "rank 2: can't write" in told[0][0] and told[0][1] == []
    assert verify_checkpoint(tmp_path / "step-00000002") == []
