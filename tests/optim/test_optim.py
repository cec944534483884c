"""AdamW on ranges of flat state, and rates as functions of the step."""

import math

import pytest
import torch

from onecurve.optim import AdamW, Schedule


def test_ranges_give_the_bits_of_the_whole():
    """On the 16-element grid any cut is the same update; this is what lets shards be cut anywhere on it."""
    g = torch.Generator().manual_seed(0)
    state = [torch.randn(1024, generator=g) for _ in range(3)] + [torch.rand(1024, generator=g)]
    rule = AdamW((0.9, 0.95), 1e-8, 0.1)
    whole, cut = [t.clone() for t in state], [t.clone() for t in state]
    for step in (1, 2, 3):
        rule.update([tuple(whole)], step=step, lr=1e-3, decay=True)
        ranges = [(0, 16), (16, 480), (480, 1008), (1008, 1024)]
        rule.update([tuple(t[a:b] for t in cut) for a, b in ranges], step=step, lr=1e-3, decay=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_it_is_torchs_adamw():
    g = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(64, generator=g), [torch.randn(64, generator=g) for _ in range(5)]
    p = torch.nn.Parameter(start.double())
    peer = torch.optim.AdamW([p], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    master, m, v = start.clone(), torch.zeros(64), torch.zeros(64)
    for step, gradient in enumerate(gradients, 1):
        p.grad = gradient.double()
        peer.step()
        AdamW((0.8, 0.9), 1e-6, 0.3).update([(master, gradient.clone(), m, v)], step=step, lr=1e-2, decay=True)
    assert torch.allclose(master.double(), p.detach(), rtol=1e-5, atol=1e-6)


def test_what_does_not_decay_keeps_its_value_without_gradient():
    master = torch.ones(16)
    AdamW(weight_decay=0.5).update([(master, *(torch.zeros(16) for _ in range(3)))], step=1, lr=0.1, decay=False)
    assert torch.equal(master, torch.ones(16))
    AdamW(weight_decay=0.5).update([(master, *(torch.zeros(16) for _ in range(3)))], step=1, lr=0.1, decay=True)
    assert torch.allclose(master, torch.full((16,), 0.95))


@pytest.mark.parametrize("decay", ["constant", "cosine", "linear"])
def test_a_schedule_warms_up_peaks_and_ends_where_it_should(decay):
    rate = Schedule(1.0, steps=20, warmup_steps=4, decay=decay, min_lr=0.1)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0
    assert rate(19) == pytest.approx(1.0 if decay == "constant" else 0.1)
    rates = [rate(step) for step in range(4, 20)]
    assert rates == sorted(rates, reverse=True)
    if decay == "cosine":
        assert rate(11) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 7 / 15)))


def test_a_schedule_depends_on_nothing_but_the_step():
    rate = Schedule(3e-3, steps=100, warmup_steps=10, decay="cosine")
    assert [rate(s) for s in (50, 3, 99, 3)] == [Schedule(3e-3, 100, 10, "cosine")(s) for s in (50, 3, 99, 3)]
