import numpy as np
import pytest

from onecurve.data.cycle import PERIOD, cycle_corpus, token_dtype


def test_the_same_arguments_give_the_same_corpus():
    assert np.array_equal(cycle_corpus(41, 1000, 64), cycle_corpus(41, 1000, 64))
    assert not np.array_equal(cycle_corpus(41, 1000, 64), cycle_corpus(42, 1000, 64))
    assert np.array_equal(cycle_corpus(41, 100, 64), cycle_corpus(41, 1000, 64)[:100])
    # Fixed for good: a curve trained on the corpus must be there again after an upgrade.
    assert cycle_corpus(41, 6, 64).tolist() == FIRST_OF_SEED_41


FIRST_OF_SEED_41 = [22, 1, 11, 40, 50, 31]


@pytest.mark.parametrize("vocab", [2, 3, 22, 23, 24, 64, 256, 257, 65_536, 65_537, 1_000_003])
def test_any_vocabulary_each_token_has_one_successor(vocab):
    corpus = cycle_corpus(3, 5000, vocab)
    assert corpus.dtype == token_dtype(vocab)
    assert int(corpus.max()) < vocab
    assert len(np.unique(corpus)) == min(vocab, PERIOD)
    assert len(set(zip(corpus[:-1].tolist(), corpus[1:].tolist(), strict=True))) == min(vocab, PERIOD)


def test_ids_beyond_16_bits_are_kept():
    assert max(int(cycle_corpus(seed, 50, 200_000).max()) for seed in range(3)) > 65_535


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="vocab is 1"):
        cycle_corpus(0, 10, 1)
    with pytest.raises(ValueError, match="total_tokens is -1"):
        cycle_corpus(0, -1, 64)
    assert len(cycle_corpus(0, 0, 64)) == 0
