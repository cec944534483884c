import math

import numpy as np
import pytest
import torch

from onecurve.data.evaluation import EvaluationSet


def chunks(evaluation):
    return [(index, evaluation.chunk(index)) for index in range(len(evaluation))]


def targets_in(evaluation):
    return torch.cat([batch.targets[batch.targets != -100] for _, batch in chunks(evaluation)]).tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 7, 40, 41, 99, 100])
def test_every_token_but_the_first_is_predicted_once(count):
    evaluation = EvaluationSet(np.arange(count), context=5, micro_batch=4)
    assert len(evaluation) == math.ceil(max(0, count - 1) / 20)
    assert targets_in(evaluation) == list(range(1, count)) if len(evaluation) else count < 2
    for _, batch in chunks(evaluation):
        assert batch.inputs.shape == batch.targets.shape == (4, 5)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        real = batch.targets != -100
        assert torch.equal(batch.inputs[real] + 1, batch.targets[real])


def loss_of(batch):
    real = batch.targets[batch.targets != -100].double()
    return float((real.sqrt() * 1.1).sum()), len(real)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 50])
def test_the_same_bits_at_any_width(world):
    evaluation = EvaluationSet(np.arange(777), context=5, micro_batch=4)
    parts = [(i, *loss_of(batch)) for rank in range(world) for i, batch in chunks(evaluation)[rank::world]]
    alone = evaluation.combine((i, *loss_of(batch)) for i, batch in chunks(evaluation))
    assert evaluation.combine(parts).hex() == alone.hex()


def test_a_gap_or_a_double_is_an_error():
    evaluation = EvaluationSet(np.arange(100), context=5, micro_batch=4)
    parts = [(i, *loss_of(batch)) for i, batch in chunks(evaluation)]
    for wrong in (parts[1:], [*parts, parts[0]], [*parts[1:], parts[1]]):
        with pytest.raises(ValueError, match="each of the 5 chunks once"):
            evaluation.combine(wrong)


def test_a_share_is_fixed_and_spread():
    tokens = np.arange(1001)
    evaluation = EvaluationSet(tokens, context=5, micro_batch=4, share=0.1)
    assert evaluation.windows == 20
    starts = [int(row[0]) for _, batch in chunks(evaluation) for row in batch.inputs]
    assert starts == list(range(0, 1000, 50))
    assert EvaluationSet(tokens, context=5, micro_batch=4, share=1e-9).windows == 1
    for share in (0, 1.1, -1, math.nan):
        with pytest.raises(ValueError, match="share is"):
            EvaluationSet(tokens, context=5, micro_batch=4, share=share)
    with pytest.raises(IndexError):
        evaluation.chunk(5)
