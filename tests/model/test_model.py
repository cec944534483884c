"""The GPT: sizes, keyed randomness, the masked loss."""

import pytest
import torch
import torch.nn.functional as F

from onecurve.model import GPT, token_loss
from onecurve.model.gpt import IGNORED
from onecurve.model.randomness import dropout, generator

SMALL = {"layers": 2, "width": 32, "heads": 4, "vocab": 64, "context": 16}
KEY = (41, 3, 1, 0)


def tokens(batch=2, context=16, vocab=64):
    return torch.randint(0, vocab, (batch, context), generator=torch.Generator().manual_seed(1))


def test_the_demos_model_has_29824_parameters():
    assert sum(p.numel() for p in GPT(**SMALL).parameters()) == 29_824


def test_initial_weights_depend_on_seed_and_name_alone():
    a, b = GPT(**SMALL, seed=5), GPT(**SMALL, seed=5)
    torch.manual_seed(99)
    torch.rand(7)
    deeper = GPT(**SMALL | {"layers": 3}, seed=5)
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert torch.equal(a.head.weight, deeper.head.weight)  # however much was drawn before it
    assert not torch.equal(a.head.weight, GPT(**SMALL, seed=6).head.weight)


def test_building_and_training_consume_no_global_generator():
    before = torch.get_rng_state()
    model = GPT(**SMALL | {"dropout": 0.1}, seed=5)
    token_loss(model(tokens(), KEY), tokens())[0].backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("place", range(4))
def test_a_dropout_mask_is_keyed_by_its_place_in_the_curve(place):
    model = GPT(**SMALL | {"dropout": 0.1}, seed=5)
    other = tuple(value + (i == place) for i, value in enumerate(KEY))
    assert torch.equal(model(tokens(), KEY), model(tokens(), KEY))
    assert not torch.equal(model(tokens(), KEY), model(tokens(), other))


def test_every_site_and_layer_has_its_own_mask(monkeypatch):
    seen = []
    monkeypatch.setattr("onecurve.model.gpt.dropout", lambda x, p, key: seen.append(key) or x)
    GPT(**SMALL | {"dropout": 0.1})(tokens(), KEY)
    assert len(seen) == len(set(seen)) == 1 + 2 * 3


def test_without_a_key_nothing_is_dropped():
    dropping, plain = GPT(**SMALL | {"dropout": 0.5}, seed=5), GPT(**SMALL, seed=5)
    assert torch.equal(dropping(tokens()), plain(tokens()))


def test_the_two_ways_to_attention_agree():
    """The keyed-dropout path writes attention out; at probability 0+ it is the fused kernel's function."""
    dropping, plain = GPT(**SMALL | {"dropout": 1e-9}, seed=5), GPT(**SMALL, seed=5)
    assert torch.allclose(dropping(tokens(), KEY), plain(tokens()), rtol=1e-4, atol=1e-6)


def test_kept_elements_are_scaled_up():
    x = torch.ones(10_000)
    y = dropout(x, 0.25, ("a",))
    assert set(y.tolist()) == {0.0, 1.0 / 0.75} or torch.allclose(y[y > 0], torch.tensor(1 / 0.75))
    assert 0.7 < float((y > 0).float().mean()) < 0.8


def test_generators_of_different_keys_differ():
    draws = {float(torch.rand((), generator=generator(*key))) for key in [(1, 2), (2, 1), (12,), ("1", 2), (1, "2")]}
    assert len(draws) == 5


def test_no_position_sees_the_future():
    model, ids = GPT(**SMALL, seed=5), tokens()
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 64
    assert torch.allclose(model(ids)[:, :9], model(changed)[:, :9], atol=1e-6)
    assert not torch.allclose(model(ids)[:, 9:], model(changed)[:, 9:], atol=1e-3)


def test_tied_weights_share_one_storage_and_are_two_leaves():
    model = GPT(**SMALL | {"tied": True})
    assert model.head.weight.data_ptr() == model.embedding.token.data_ptr()
    assert model.head.weight is not model.embedding.token


def test_the_loss_is_the_sum_over_unmasked_tokens():
    logits, targets = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2)), torch.arange(10).view(2, 5) % 7
    targets[0, :3] = IGNORED
    loss, counted = token_loss(logits, targets)
    kept = targets.flatten() != IGNORED
    assert counted == 7
    assert loss == F.cross_entropy(logits.flatten(0, 1)[kept], targets.flatten()[kept], reduction="sum")


def test_a_batch_without_any_token_has_loss_0_and_gradient_0():
    logits = torch.randn(1, 3, 5).requires_grad_()
    loss, counted = token_loss(logits, torch.full((1, 3), IGNORED))
    loss.backward()
    assert (float(loss.detach()), counted) == (0.0, 0) and torch.equal(logits.grad, torch.zeros_like(logits))
