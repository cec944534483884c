"""Drawing tokens from a model, one after another, with the keys and values of earlier ones kept.

read     the tokens so far in one forward pass; each block keeps its keys and values
draw     a token from the last position's logits, by the generator of (seed)
append   one forward pass over that token alone, its position the next one
crop     positions are learned and absolute, so once the context is full the window can't slide by one: its older
         half is dropped and the rest read again from position 0, once per context/2 tokens
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onecurve.model.gpt import GPT
from onecurve.model.randomness import generator


class Window:
    """The tokens that the model sees, and what each block keeps of them."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self._seen: list[int] = []
        self._caches: list[list[Tensor]] = [[] for _ in model.blocks]

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Begin anew with the end of `tokens` (at least one); the logits that follow the last, fp32 [vocab]."""
        self._seen, self._caches = [], [[] for _ in self.model.blocks]
        return self._forward(list(tokens[-self.model.context :]))

    def append(self, token: int) -> Tensor:
        """Read one token more; the logits that follow it, fp32 [vocab]."""
        if len(self._seen) == self.model.context:
            return self.read([*self._seen, token][-max(1, self.model.context // 2) :])
        return self._forward([token])

    @torch.no_grad()
    def _forward(self, tokens: list[int]) -> Tensor:
        x = self.model.embedding(torch.tensor([tokens]), start=len(self._seen))
        for block, cache in zip(self.model.blocks, self._caches, strict=True):
            x = block(x, cache=cache)
        self._seen += tokens
        logits: Tensor = self.model.head(x[:, -1:])
        return logits[0, -1].float()


def generate(
    model: GPT, prompt: Sequence[int], *, temperature: float = 1.0, top_k: int = 0, seed: int = 0
) -> Iterator[int]:
    """Token ids that follow `prompt` (at least one id; of a longer one than the context its end is read), without end.

    `temperature` divides the logits, 0 takes the likeliest; `top_k` keeps the likeliest k, 0 all. What is drawn is a
    function of the weights and the arguments; no global generator is used.
    """
    draws = generator(seed, "sample")
    window = Window(model)
    logits = window.read(prompt)
    while True:
        token = draw(logits, temperature, top_k, draws)
        yield token
        logits = window.append(token)


def draw(logits: Tensor, temperature: float, top_k: int, draws: torch.Generator) -> int:
    """One id of [vocab] logits, by inverting the cumulative distribution at one uniform number (in fp64)."""
    values, ids = logits.double().sort(descending=True, stable=True)
    if temperature == 0.0:
        return int(ids[0])
    kept = values[:top_k] if top_k else values
    cumulative = ((kept - kept[0]) / temperature).softmax(0).cumsum(0)  # the maximum first: no temperature overflows
    place = torch.rand((), generator=draws, dtype=torch.float64) * cumulative[-1]
    return int(ids[min(int(torch.searchsorted(cumulative, place, right=True)), len(kept) - 1)])
