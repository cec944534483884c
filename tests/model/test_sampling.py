from itertools import islice

import pytest
import torch

from onecurve.model import GPT
from onecurve.model.sampling import Window, draw, generate

CONTEXT = 12


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied"])
def model(request: pytest.FixtureRequest) -> GPT:
    gpt = GPT(layers=3, width=24, heads=3, vocab=40, context=CONTEXT, tied=request.param, dropout=0.5, seed=3)
    with torch.no_grad():
        for p in gpt.parameters():
            p.mul_(8)  # far from uniform, so that a wrong mask or position shows
    return gpt.double().eval()  # cached and uncached sums differ in order only


def uncached(model: GPT, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0, -1].float()


def taken(model: GPT, prompt: list[int], count: int, **settings: float) -> list[int]:
    return list(islice(generate(model, prompt, **settings), count))  # type: ignore[arg-type]


def test_cached_logits_are_the_uncached_ones(model: GPT) -> None:
    tokens = torch.randint(40, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    for given in (1, 5, CONTEXT - 1):
        window = Window(model)
        logits = window.read(tokens[:given])
        for end in range(given, CONTEXT):
            torch.testing.assert_close(logits, uncached(model, tokens[:end]), rtol=1e-6, atol=1e-6)
            logits = window.append(tokens[end])
        torch.testing.assert_close(logits, uncached(model, tokens), rtol=1e-6, atol=1e-6)


def test_the_comparison_sees_a_wrong_position(model: GPT) -> None:
    window = Window(model)
    window.read([1, 2, 3])
    window._seen.pop()  # the next token is now read at position 2 instead of 3
    assert (window.append(4) - uncached(model, [1, 2, 3, 4])).abs().max() > 1e-2


def test_beyond_the_context_the_older_half_is_dropped(model: GPT) -> None:
    """Three contexts of tokens: each is drawn from exactly the window that the file's head describes."""
    tokens = taken(model, [7], 3 * CONTEXT, temperature=0.0)
    seen = [7]
    for token in tokens:
        assert token == int(uncached(model, seen).argmax())
        seen = ([*seen, token])[-CONTEXT // 2 :] if len(seen) == CONTEXT else [*seen, token]


def test_of_a_long_prompt_the_end_is_read(model: GPT) -> None:
    long = [i % 40 for i in range(5 * CONTEXT)]
    assert taken(model, long, 30, seed=1) == taken(model, long[-CONTEXT:], 30, seed=1)
    assert taken(model, long, 30, seed=1) != taken(model, long[-CONTEXT + 1 :], 30, seed=1)


def test_a_context_of_one() -> None:
    gpt = GPT(layers=1, width=8, heads=2, vocab=10, context=1, seed=1).eval()
    tokens = taken(gpt, [3, 4], 20, temperature=0.0)
    for before, after in zip([4, *tokens], tokens, strict=False):
        assert after == int(uncached(gpt, [before]).argmax())


def test_the_seed_decides_and_nothing_global(model: GPT) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = taken(model, [1], 30, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert taken(model, [1], 30, seed=5) == first
    assert taken(model, [1], 40, seed=5)[:30] == first
    assert taken(model, [1], 30, seed=6) != first


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, float("-inf")])
    draws = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, 0), (0.5, 0), (2.0, 3), (1.0, 99)):
        kept = logits.clone()
        if top_k == 3:
            kept[2] = float("-inf")
        expected = (kept.double() / temperature).softmax(0)
        counts = torch.bincount(
            torch.tensor([draw(logits, temperature, top_k, draws) for _ in range(4000)]), minlength=5
        )
        assert (counts / 4000 - expected).abs().max() < 0.03
        assert counts[expected == 0].sum() == 0


def test_the_ends_of_temperature_and_top_k() -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    for temperature, top_k in ((0.0, 0), (1e-320, 1), (1.0, 1)):
        assert {draw(logits, temperature, top_k, draws) for _ in range(20)} == {1}  # of equals the lower id
    assert {draw(logits, 1e-300, 0, draws) for _ in range(50)} == {1, 2}
    assert {draw(logits, 1e300, 0, draws) for _ in range(100)} == {0, 1, 2, 3}
