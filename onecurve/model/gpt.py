"""A GPT (pre-norm decoder-only transformer; Radford et al. 2019) cut into units: embedding, each block, head.

Shapes: B sequences, T tokens (the context), C width, V vocabulary, H heads. Activations are [B, T, C].
A unit is the piece that is gathered, exchanged and, later, placed on a pipeline stage as a whole.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecurve.model.randomness import dropout, generator

Key = tuple[object, ...]
IGNORED = -100  # a target that is masked out of the loss


class Embedding(nn.Module):
    """Token plus learned position embedding: int64 [B, T] -> [B, T, C]."""

    def __init__(self, vocab: int, context: int, width: int, p: float) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(vocab, width))
        self.position = nn.Parameter(torch.empty(context, width))
        self.p = p

    def forward(self, tokens: Tensor, key: Key | None = None, start: int = 0) -> Tensor:
        stop = start + tokens.shape[-1]
        whole = start == 0 and stop == len(self.position)  # as in training; a slice costs backward two more passes
        x = F.embedding(tokens, self.token) + (self.position if whole else self.position[start:stop])
        return dropout(x, self.p, key and (*key, "embedding"))


class Attention(nn.Module):
    """Masked multi-head self-attention without biases; query, key and value come from one fused matrix."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads = heads
        self.p = p
        self.qkv = nn.Parameter(torch.empty(3 * width, width))
        self.out = nn.Parameter(torch.empty(width, width))

    def forward(self, x: Tensor, key: Key | None = None, cache: list[Tensor] | None = None) -> Tensor:
        """`cache`, for sampling, holds the keys and values of earlier tokens ([B, H, t, C/H] each) and is extended."""
        b, t, c = x.shape
        fused = F.linear(x, self.qkv).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = (part.transpose(1, 2) for part in fused.unbind(2))  # each [B, H, T, C/H]; one copy fewer in backward
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
            cache[:] = [k, v]
        if self.p == 0.0 or key is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=t == k.shape[2])
        else:
            # The fused kernel's dropout draws from the global generator; here the mask has a key.
            scores = q @ k.transpose(-2, -1) / math.sqrt(c // self.heads)
            future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
            mixed = dropout(weights, self.p, (*key, "attention weights")) @ v
        return F.linear(mixed.transpose(1, 2).reshape(b, t, c), self.out)


class MLP(nn.Module):
    """C -> 4C -> C with biases and exact GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # what a Linear draws for itself is overwritten
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One transformer block: attention, then MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, p)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.p = p

    def forward(self, x: Tensor, key: Key | None = None, cache: list[Tensor] | None = None) -> Tensor:
        x = x + dropout(self.attention(self.norm1(x), key, cache), self.p, key and (*key, "attention"))
        return x + dropout(self.mlp(self.norm2(x)), self.p, key and (*key, "mlp"))


class Head(nn.Module):
    """Final norm and projection to the vocabulary, without bias: [B, T, C] -> [B, T, V]."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class GPT(nn.Module):
    """Decoder-only language model; int64 tokens [B, T] -> logits [B, T, V].

    With `tied`, `head.weight` and `embedding.token` are two parameters over one storage, with two gradients, so that
    each use can be reduced on its own before the two are added (see docs/determinism.md). `tied_uses` maps the second
    name to the first.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        vocab: int,
        context: int,
        tied: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = Embedding(vocab, context, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = Head(vocab, width)
        self.tied_uses = {"head.weight": "embedding.token"} if tied else {}
        initialize(self, seed, layers)
        if tied:
            self.head.weight = nn.Parameter(self.embedding.token.detach())

    def forward(self, tokens: Tensor, key: Key | None = None) -> Tensor:
        """`key` = (seed, data_step, leaf, micro-batch) keys the dropout masks; None turns dropout off."""
        x = self.embedding(tokens, key)
        for i, block in enumerate(self.blocks):
            x = block(x, key and (*key, i))
        return self.head(x)

    def units(self) -> list[tuple[str, nn.Module]]:
        """The units in forward order."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embedding", self.embedding), *blocks, ("head", self.head)]

    def undecayed(self) -> set[str]:
        """Names of the matrices that weight decay leaves alone (vectors never decay)."""
        return {"embedding.position"}


@torch.no_grad()
def initialize(model: nn.Module, seed: int, layers: int) -> None:
    """GPT-2's initial weights, each drawn from a generator keyed by (seed, name): normal with standard deviation 0.02,
    the projections back into the residual stream scaled by 1/sqrt(2 layers); norms 1, biases 0."""
    for name, p in model.named_parameters():
        if p.ndim == 2:
            residual = name.endswith((".out", "down.weight"))
            p.normal_(0.0, 0.02 / math.sqrt(2 * layers) if residual else 0.02, generator=generator(seed, name))
        else:
            p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy summed over the tokens that are not masked: logits [B, T, V], targets int64 [B, T] with `IGNORED`
    where masked -> (fp32 scalar sum, number of tokens counted). Without any token the sum is 0 and has a gradient."""
    loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, int((targets != IGNORED).sum())
