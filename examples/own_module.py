"""Your own module in your own loop: a small convolutional classifier, on any number of ranks.

    python examples/own_module.py --ranks 4 --stage 3
    python examples/own_module.py --ranks 2 --stage 1 --resume    after a kill, on another layout

It learns to tell in which direction the stripes of a noisy picture run; one picture in five has no label. The digest at
the end covers every bit of the weights and of both moments: it is the same for any ranks and stage, killed or not.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecurve.checkpoint import latest_checkpoint, list_steps, load_checkpoint, save_checkpoint, state_digest
from onecurve.errors import OnecurveError
from onecurve.launch import RankContext, run_ranks
from onecurve.parallel import Mesh, ZeroOptimizer, replicate

# What defines the curve. A step's batch is cut into leaves, each of so many micro-batches of so many pictures; ranks
# share out the leaves, so 6 leaves serve 1 to 6 ranks, and the number of ranks changes nothing.
SEED, LEAVES, ACCUMULATE, PICTURES = 7, 6, 2, 8
DIRECTIONS, SIZE, CHANNELS, UNLABELLED = 4, 12, 16, -100
SAVE_EVERY = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A batch norm's running statistics would depend on which leaves a rank runs, so the library refuses it.
        self.norm = nn.GroupNorm(4, CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.gelu(self.norm(x)))


class Classifier(nn.Module):
    """Pictures [B, 1, SIZE, SIZE] -> logits [B, DIRECTIONS]. Its units, gathered one by one at stage 3, are stem, both
    blocks, and head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(CHANNELS, DIRECTIONS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.gelu(x).mean(dim=(2, 3)))


def batch_of(step: int, leaf: int, micro: int) -> tuple[Tensor, Tensor]:
    """Pictures [B, 1, SIZE, SIZE] and labels [B]. They depend on their place in the batch alone: never on the rank, nor
    on what was drawn before. That is why a resume needs no state of a loader, and other ranks see the same data."""
    place = ((SEED * 1_000_000 + step) * LEAVES + leaf) * ACCUMULATE + micro
    generator = torch.Generator().manual_seed(place)
    labels = torch.randint(DIRECTIONS, (PICTURES,), generator=generator)
    period, phase = (torch.rand(2, PICTURES, 1, 1, generator=generator) + 0.5).unbind()
    angle = labels.view(-1, 1, 1) * (math.pi / DIRECTIONS)
    at = torch.arange(SIZE, dtype=torch.float32)
    waves = torch.sin((at * angle.cos() + at.view(-1, 1) * angle.sin()) / period + 2 * math.pi * phase)
    noise = torch.randn(PICTURES, SIZE, SIZE, generator=generator)
    hidden = torch.rand(PICTURES, generator=generator) < 0.2
    return (waves + 0.5 * noise).unsqueeze(1), labels.masked_fill(hidden, UNLABELLED)


def loss_of(model: nn.Module, pictures: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The sum over the labelled pictures, and how many they are; the optimizer divides once, by the count of the whole
    step. A mean would weigh a picture by how many others of its micro-batch have labels."""
    loss = F.cross_entropy(model(pictures), labels, ignore_index=UNLABELLED, reduction="sum")
    return loss, int((labels != UNLABELLED).sum())


def train(context: RankContext, stage: int, steps: int, resume: bool) -> tuple[float, str]:
    """One rank: the whole training. Returns the share of unseen pictures that it tells right, and the state digest."""
    checkpoints = context.folder / "checkpoints"
    mesh = Mesh(dp=context.world)
    torch.manual_seed(SEED)
    model = Classifier()
    replicate(model, mesh)  # every rank begins with rank 0's weights
    optimizer = ZeroOptimizer(model, mesh, stage=stage, leaves=LEAVES, accumulate=ACCUMULATE, lr=3e-3, weight_decay=0.1)

    done = 0
    if resume:
        newest, _ = latest_checkpoint(checkpoints, mesh)  # the newest that verifies whole
        if newest:
            done = load_checkpoint(newest, optimizer).step  # whatever ranks and stage saved it
        if context.rank == 0:
            print(f"resumed after step {done}", flush=True)

    for step in range(done, steps):
        context.progress(step, steps)  # a sign of life: a rank that hangs is named, and ended
        for leaf in optimizer.leaf_ids:  # those that this rank computes, each by itself and in this order
            for micro in range(ACCUMULATE):
                optimizer.backward(*loss_of(model, *batch_of(step, leaf, micro)))
        stats = optimizer.step()  # adds the leaves in one fixed tree; from here on all ranks know the same
        if context.rank == 0:
            print(f"step {step + 1}  loss {stats.loss:.6f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save_checkpoint(checkpoints, optimizer, step + 1)

    # At stage 3 a forward is an exchange: all ranks run it, and without gradients, for it belongs to no leaf.
    with torch.no_grad():
        tests = [batch_of(999_999, leaf, micro) for leaf in range(LEAVES) for micro in range(ACCUMULATE)]
        pictures, labels = (torch.cat(parts) for parts in zip(*tests, strict=True))
        right = (model(pictures).argmax(1) == labels)[labels != UNLABELLED]
    return right.float().mean().item(), state_digest(optimizer)


def main() -> int:
    parser = argparse.ArgumentParser(description="A small classifier on many ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=1, help="what is sharded: ZeRO 0 to 3")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--run", type=Path, default=Path("runs/own-module"), help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint there")
    asked = parser.parse_args()
    if not asked.resume and list_steps(asked.run / "checkpoints"):
        parser.error(f"{asked.run} has checkpoints: --resume goes on from them, another --run begins anew")
    try:
        worker = lambda context: train(context, asked.stage, asked.steps, asked.resume)  # noqa: E731
        results = run_ranks(worker, asked.ranks, folder=asked.run, on_signal="kill")
    except OnecurveError as error:  # one line: the first rank's real error, or what was wrong with the input
        print(error, file=sys.stderr)
        return error.exit_code
    right, digest = results[0]
    print(f"{right:.1%} of unseen pictures are told right\nstate digest {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
