"""Train a mini GPT on 4 ranks for 20 steps, prove four invariants, and read the checkpoint back byte for byte.

This is the composition written out by hand: the DDP broadcast is one call, the ZeRO-1 step is one call, the checkpoint
is one call. The loop calls them in order and knows no collective.
"""

import mmap
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import pairwise, zip_longest
from pathlib import Path

if __name__ == "__main__":  # a checkout runs its own package, whether or not one is installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from torch import Tensor, nn

from onecurve.checkpoint import Manifest, read_manifest, save_checkpoint, verify_checkpoint
from onecurve.data.cycle import cycle_corpus
from onecurve.data.loader import Loader
from onecurve.errors import CheckFailed, OnecurveError
from onecurve.launch import RankContext, run_ranks
from onecurve.model.gpt import Block, Embedding, Head, initialize, token_loss
from onecurve.parallel import Mesh, ZeroOptimizer, replicate
from onecurve.parallel.norms import norm_of
from onecurve.report.console import table
from onecurve.train.memory import STATE, RankMemory, aggregate, measure

RANKS, STEPS, SAVE_AT = 4, 20, 10
LAYERS, WIDTH, HEADS, VOCAB, CONTEXT, BATCH = 2, 32, 4, 64, 16, 4
SEED = 41
TOKENS = 4096 * CONTEXT + 1  # the size that `data.source = "cycle"` has: this is the curve of configs/demo.toml


class MiniGPT(nn.Module):
    """Two transformer blocks and an LM head of its own: int64 tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = Embedding(VOCAB, CONTEXT, WIDTH, p=0.0)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, p=0.0) for _ in range(LAYERS))
        self.head = Head(VOCAB, WIDTH)
        initialize(self, seed, LAYERS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_corpus(seed: int, total_tokens: int) -> np.ndarray:
    """Deterministic next-token data that can be learned: a seeded cycle of tokens, uint8 [total_tokens]."""
    return cycle_corpus(seed, total_tokens, VOCAB)


def _train_worker(context: RankContext, folder: Path, snapshots: Tensor) -> dict:
    """One rank: train, save at step 10, keep a copy of the saved shard in `snapshots` [rank, kind, element]."""
    mesh = Mesh(dp=context.world)
    model = MiniGPT(SEED + context.rank)  # every rank draws other weights; replicate makes them rank 0's
    replicate(model, mesh)
    optimizer = ZeroOptimizer(model, mesh, stage=1, leaves=RANKS, lr=5e-3, betas=(0.9, 0.95))
    corpus = make_corpus(SEED, TOKENS)
    loader = Loader(corpus, context=CONTEXT, micro_batch=BATCH, leaves=RANKS, accumulate=1, seed=SEED)
    rows = []
    for step in range(STEPS):
        context.progress(step, STEPS)
        began = time.perf_counter()
        for batch in loader.micro_batches(step, optimizer.leaf_ids):
            loss_sum, tokens = token_loss(model(batch.inputs), batch.targets)
            optimizer.backward(loss_sum, tokens)
        stats = optimizer.step()
        milliseconds = 1e3 * (time.perf_counter() - began)
        rows.append([step + 1, stats.loss, stats.norm, norm_of(model.parameters()), milliseconds])
        if step + 1 == SAVE_AT:
            save_checkpoint(folder, optimizer, SAVE_AT, info={"data_fingerprint": loader.fingerprint})
            for kind, state in zip(snapshots[context.rank], STATE, strict=True):
                kind.copy_(getattr(optimizer, state))
    trained = sum(p.numel() for p in model.parameters())
    return {"rows": rows, "memory": asdict(measure(context.rank, optimizer.tensors(), trained, mesh.dp))}


def check_loss(losses: list[float]) -> str:
    """(a) The loss falls at every step; a rise of 1e-6 of the loss is taken for float noise."""
    for step, (before, after) in enumerate(pairwise(losses), start=2):
        if not after < before * (1 + 1e-6):
            raise CheckFailed(f"(a) the loss rises at step {step}: {before!r} -> {after!r}, by {after - before:.3g}")
    return f"(a) loss falls at each of {len(losses)} steps: {losses[0]:.6f} -> {losses[-1]:.6f}"


def check_norms(by_rank: list[list[float]]) -> str:
    """(b) Every rank holds the same parameter norm at every step, to the last bit."""
    for step, norms in enumerate(zip(*by_rank, strict=True), start=1):
        for rank, norm in enumerate(norms):
            if norm != norms[0]:
                gap = norm - norms[0]
                raise CheckFailed(
                    f"(b) parameter norm at step {step}: rank {rank} {norm!r}, rank 0 {norms[0]!r}, {gap:.3g} apart"
                )
    return f"(b) parameter norm equal on {len(by_rank)} ranks at each of {len(by_rank[0])} steps, bit for bit"


def check_memory(profile: list[RankMemory]) -> str:
    """(c) Optimizer memory counted from live tensors is 12·P/N bytes."""
    for row in profile:
        if row.optimizer != row.formula:
            gap = row.optimizer - row.formula
            raise CheckFailed(
                f"(c) optimizer memory on rank {row.rank}: {row.optimizer} bytes, 12·P/N = {row.formula}, {gap:+d}"
            )
    return (
        f"(c) optimizer memory = 12·P/N = {profile[0].formula} bytes on {len(profile)} ranks, counted from live tensors"
    )


def verify_resume(checkpoint: Path, snapshots: Tensor) -> str:
    """(d) Each rank's state on disk equals its snapshot, byte for byte, and every file has its hash."""
    problems, compared = verify_checkpoint(checkpoint), 0
    for rank, snapshot in enumerate(snapshots.numpy()):
        file, kept = checkpoint / f"rank-{rank:04d}.safetensors", snapshot.tobytes()
        saved = file.read_bytes()[-len(kept) :] if file.is_file() else b""  # a header, then master and both moments
        if saved != kept:
            differ = [at for at, (a, b) in enumerate(zip_longest(saved, kept)) if a != b]
            kind = STATE[differ[0] * len(STATE) // len(kept)]
            raise CheckFailed(
                f"(d) {file.name}: {len(differ)} of {len(kept)} bytes differ from rank {rank}'s snapshot, "
                f"the first in {kind}"
            )
        compared += len(kept)
    if problems:
        raise CheckFailed(f"(d) {problems[0]}")
    return f"(d) step-{SAVE_AT} checkpoint: {compared} bytes on disk equal the snapshots of {len(snapshots)} ranks"


def show(results: list[dict], profile: list[RankMemory], manifest: Manifest) -> None:
    """The loss table, the memory profile and the manifest, in plain text columns."""
    print("\n".join(table(["step", "loss", "grad norm", "param norm", "ms"], [
        [row[0], f"{row[1]:.6f}", f"{row[2]:.6f}", f"{row[3]:.6f}", f"{row[4]:.2f}"] for row in results[0]["rows"]
    ])), end="\n\n")  # fmt: skip
    print("\n".join(table(["rank", "parameters", "gradients", "optimizer", "12P/N", "ok"], [
        [r.rank, r.parameters, r.gradients, r.optimizer, r.formula, "ok" if r.optimizer == r.formula else "DIFFERS"]
        for r in profile
    ])))  # fmt: skip
    maximum, mean = aggregate(profile)
    print(f"all bytes of a rank: maximum {maximum}, mean {mean:.0f}", end="\n\n")
    print(f"checkpoint step {manifest.step}, state digest {manifest.state_digest[:16]}")
    files = [[f.name, f.size, f.sha256[:16]] for f in manifest.files]
    print("\n".join(table(["file", "bytes", "sha256"], files)), end="\n\n")


def main(run: Path | None = None) -> int:
    """Run it all in `run`, or in a temporary folder. Returns 0, or 1 where an invariant fails (3: a rank failed)."""
    with tempfile.TemporaryDirectory(prefix="onecurve-") as scratch:
        folder = (Path(run) if run else Path(scratch)) / "checkpoints"
        trained = sum(p.numel() for p in MiniGPT(SEED).parameters())
        size = 12 * trained // RANKS
        snapshots = torch.frombuffer(mmap.mmap(-1, RANKS * size), dtype=torch.float32).view(RANKS, len(STATE), -1)
        print(f"MiniGPT: {trained} parameters, {LAYERS} blocks, width {WIDTH}, {HEADS} heads, vocab {VOCAB}, "
              f"context {CONTEXT}\n{RANKS} ranks x {BATCH} sequences, ZeRO-1, AdamW, {STEPS} steps\n")  # fmt: skip
        try:
            worker = lambda context: _train_worker(context, folder, snapshots)  # noqa: E731
            results = run_ranks(worker, RANKS, folder=folder.parent, stall_seconds=60.0, on_signal="kill")
            checkpoint = folder / f"step-{SAVE_AT:08d}"
            profile = [RankMemory(**r["memory"]) for r in results]
            show(results, profile, read_manifest(checkpoint))
            print(check_loss([row[1] for row in results[0]["rows"]]))
            print(check_norms([[row[3] for row in r["rows"]] for r in results]))
            print(check_memory(profile))
            print(verify_resume(checkpoint, snapshots))
            print(f"RESUME VERIFIED step {SAVE_AT}, {RANKS} ranks, byte for byte")
        except OnecurveError as error:
            print(error, file=sys.stdout if isinstance(error, CheckFailed) else sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
