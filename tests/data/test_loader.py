import random

import numpy as np
import pytest
import torch

from onecurve.data.corpus import Corpus, fingerprint_of
from onecurve.data.cycle import cycle_corpus
from onecurve.data.loader import Loader
from onecurve.data.permutation import permuted
from onecurve.errors import InputError


def loader_over(windows, *, context=5, micro_batch=3, leaves=2, accumulate=2, seed=7, extra=1):
    """A loader over a corpus whose token at place i is i: a window's first token tells which window it is."""
    tokens = np.arange(windows * context + extra, dtype=np.uint32)
    return Loader(tokens, context=context, micro_batch=micro_batch, leaves=leaves, accumulate=accumulate, seed=seed)


def windows_of_steps(loader, steps):
    return [int(w) for step in steps for leaf in range(loader.leaves) for w in loader.window_indices(step, leaf).flat]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 99, 100, 101, 1000, 4096, 65_537])
def test_the_permutation_visits_every_place_once(n):
    image = permuted(np.arange(n), n, "key")
    assert np.array_equal(np.sort(image), np.arange(n))
    # In any pieces, too: it is computed place by place.
    assert np.array_equal(image[n // 2 :], permuted(np.arange(n // 2, n), n, "key"))


def test_the_permutation_mixes():
    n = 10_000
    a, b = (permuted(np.arange(n), n, key) for key in ("one", "two"))
    for image in (a, b):
        assert abs(np.corrcoef(image, np.arange(n))[0, 1]) < 0.05
        assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05
        assert (image == np.arange(n)).sum() < 8  # fixed points: 1 expected
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    first = [int(permuted(np.zeros(1, np.int64), 10, f"k{i}")[0]) for i in range(2000)]
    assert np.bincount(first, minlength=10).min() > 140  # 200 expected at each place


def test_a_batch_is_windows_and_their_next_tokens():
    loader = loader_over(40)
    batches = list(loader.micro_batches(1, [1]))
    assert len(batches) == loader.accumulate
    for batch, indices in zip(batches, loader.window_indices(1, 1), strict=True):
        assert batch.inputs.shape == batch.targets.shape == (3, 5)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.is_contiguous() and batch.targets.is_contiguous()
        assert torch.equal(batch.inputs[:, 0], torch.from_numpy(indices * 5))
        assert torch.equal(batch.targets, batch.inputs + 1)


def test_leaves_are_independent_of_who_asks_for_them():
    loader = loader_over(100, leaves=4)
    everything = list(loader.micro_batches(3, range(4)))
    for leaf in range(4):
        own = list(loader_over(100, leaves=4).micro_batches(3, [leaf]))
        for a, b in zip(everything[2 * leaf : 2 * leaf + 2], own, strict=True):
            assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


@pytest.mark.parametrize("windows", [12, 13, 36, 50, 101])
def test_every_epoch_sees_every_window_once(windows):
    loader = loader_over(windows)
    steps = 5 * windows // loader.sequences_per_step + 1
    seen = windows_of_steps(loader, range(steps))
    epochs = [seen[e * windows : (e + 1) * windows] for e in range(4)]
    assert all(sorted(epoch) == list(range(windows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4  # each epoch in another order


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_resume_late_in_an_epoch_sees_every_window_of_the_next_two(share):
    """Cases 3: after a resume at 90 % of an epoch, or exactly at its end, no epoch consists of a tail only."""
    windows = 120
    first = loader_over(windows)
    resumed_at = int(share * windows) // first.sequences_per_step
    before = windows_of_steps(first, range(resumed_at))
    after = windows_of_steps(loader_over(windows), range(resumed_at, 3 * windows // first.sequences_per_step))
    seen = before + after
    assert seen == windows_of_steps(first, range(3 * windows // first.sequences_per_step))
    for epoch in range(3):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_no_random_state_is_consumed():
    """Cases 1: making, using or skipping a loader changes no generator."""
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    list(loader_over(50).micro_batches(4, range(2)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_seeds_differ_and_far_steps_work():
    assert windows_of_steps(loader_over(200), [0]) != windows_of_steps(loader_over(200, seed=8), [0])
    far = loader_over(200).window_indices(10**18, 1)
    assert far.min() >= 0 and far.max() < 200


@pytest.mark.parametrize("tokens, word", [(0, "empty"), (1, "shorter"), (16, "shorter"), (17, "16")])
def test_too_little_text_is_refused_with_the_numbers(tokens, word):
    corpus = Corpus(cycle_corpus(0, tokens, 64), vocab=64)
    with pytest.raises(InputError, match=word):
        Loader(corpus, context=16, micro_batch=4, leaves=4, accumulate=1, seed=0)
    if tokens == 17:
        Loader(corpus, context=16, micro_batch=1, leaves=1, accumulate=1, seed=0)


def test_exactly_one_step_of_windows_is_enough():
    Loader(cycle_corpus(0, 16 * 16 + 1, 64), context=16, micro_batch=4, leaves=4, accumulate=1, seed=0)
    with pytest.raises(InputError, match="15 windows of 16, but one step draws 16"):
        Loader(cycle_corpus(0, 16 * 16, 64), context=16, micro_batch=4, leaves=4, accumulate=1, seed=0)


def test_fingerprint_is_of_the_ids():
    tokens = cycle_corpus(0, 500, 64)
    assert fingerprint_of(tokens) == fingerprint_of(tokens.astype(np.int64))
    changed = tokens.copy()
    changed[499] ^= 1
    assert len({fingerprint_of(t) for t in (tokens, tokens[:-1], changed)}) == 3
    loader = Loader(tokens, context=16, micro_batch=1, leaves=1, accumulate=1, seed=0)
    assert loader.fingerprint == fingerprint_of(tokens)
