"""A model of transformers, trained on ranks: a small GPT-2 learns the bytes of a text, and is saved for transformers.

    python examples/transformers_gpt2.py --ranks 4 --stage 3

Nothing is downloaded; the weights begin at random. The digest at the end covers every bit of the weights and of both
moments, and is the same for any ranks and stage. Killing and resuming is shown in own_module.py, and no different here.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from onecurve.checkpoint import read_parameters, save_checkpoint, state_digest
from onecurve.errors import OnecurveError
from onecurve.launch import RankContext, run_ranks
from onecurve.parallel import Mesh, ZeroOptimizer, replicate

SEED, LEAVES, SEQUENCES, CONTEXT = 11, 4, 2, 64


def make_model() -> GPT2LMHeadModel:
    """Random weights; `GPT2LMHeadModel.from_pretrained(...)` would do as well."""
    torch.manual_seed(SEED)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=48,
            n_layer=3,
            n_head=4,
            # Dropout draws from the global generator, so its bits would depend on the layout: refused unless 0.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,  # keys and values serve to generate; as a unit's output they would be refused at stage 3
            bos_token_id=None,  # bytes have none; GPT-2's own are not among them
            eos_token_id=None,
        )
    )


def units_of(model: GPT2LMHeadModel) -> list[tuple[str, nn.Module]]:
    """What is gathered together at stage 3: modules that are *called*, in the order of their calls. Without this it
    would be the model's children, so the whole transformer at once. The head's weight is the embedding's, one
    parameter: it is found, and gathered for both."""
    body = model.transformer
    blocks = [(f"h.{i}", block) for i, block in enumerate(body.h)]
    return [("wte", body.wte), ("wpe", body.wpe), *blocks, ("ln_f", body.ln_f), ("lm_head", model.lm_head)]


def batch_of(text: Tensor, step: int, leaf: int) -> Tensor:
    """Bytes [SEQUENCES, CONTEXT + 1]. Which ones depends on step and leaf alone, never on the rank."""
    generator = torch.Generator().manual_seed((SEED * 1_000_000 + step) * LEAVES + leaf)
    starts = torch.randint(len(text) - CONTEXT, (SEQUENCES, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """The sum over the targets, and how many they are. (`labels=` would give a mean: the optimizer divides itself.)"""
    logits = model(input_ids=tokens[:, :-1]).logits
    targets = tokens[:, 1:].reshape(-1)
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()


def train(context: RankContext, text: Tensor, stage: int, steps: int) -> str:
    """One rank: train, save what it owns, return the state digest."""
    mesh = Mesh(dp=context.world)
    model = make_model()
    replicate(model, mesh)
    optimizer = ZeroOptimizer(model, mesh, stage=stage, leaves=LEAVES, lr=3e-3, clip=1.0, units=units_of(model))
    for step in range(steps):
        context.progress(step, steps)
        for leaf in optimizer.leaf_ids:
            optimizer.backward(*loss_of(model, batch_of(text, step, leaf)))
        stats = optimizer.step()
        if context.rank == 0:
            print(f"step {step + 1}  loss {stats.loss:.6f}", flush=True)
    save_checkpoint(context.folder, optimizer, steps)
    return state_digest(optimizer)


def main() -> int:
    parser = argparse.ArgumentParser(description="A small GPT-2 of transformers on many ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3, help="what is sharded: ZeRO 0 to 3")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--text", type=Path, default=Path(argparse.__file__), help="a file; by default Python's argparse"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpt2"), help="for `from_pretrained`")
    asked = parser.parse_args()
    text = torch.frombuffer(bytearray(asked.text.read_bytes()), dtype=torch.uint8).long()
    with tempfile.TemporaryDirectory() as run:
        try:
            worker = lambda context: train(context, text, asked.stage, asked.steps)  # noqa: E731
            digest = run_ranks(worker, asked.ranks, folder=Path(run), on_signal="kill")[0]
            # At stage 3 no rank has the whole weights; the checkpoint does, whatever layout saved it.
            (checkpoint,) = Path(run).glob("step-*")
            whole = make_model()
            with torch.no_grad():
                for name, values in read_parameters(checkpoint).items():
                    whole.get_parameter(name).copy_(values)  # the fp32 masters; what is tied is there once
        except OnecurveError as error:
            print(error, file=sys.stderr)
            return error.exit_code
    whole.save_pretrained(asked.out)
    print(f"saved as {asked.out}\nstate digest {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
