"""Norms as exact integers: no cut, order or permutation changes one, and no NaN is lost."""

import math
import random

import pytest
import torch

from onecurve.parallel.norms import BLOCK, local_max, local_squares, norm, norm_of

N = 3 * BLOCK + 17


def values(scale: float = 1.0, n: int = N) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, generator=g) * 10.0 ** torch.randint(-6, 3, (n,), generator=g) * scale


def norm_of_parts(parts) -> float:
    maximum = max((local_max(part) for part in parts), default=0.0)
    if not math.isfinite(maximum):
        return norm(0, maximum)
    return norm(sum(local_squares(part, maximum) for part in parts), maximum)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 2.0**-126])
def test_any_cut_and_any_order_give_one_integer(scale):
    x, rng = values(scale), random.Random(2)
    maximum = local_max(x)
    whole = local_squares(x, maximum)
    for _ in range(8):
        cuts = sorted(rng.choices(range(N + 1), k=rng.randint(1, 12)))
        parts = [x[a:b] for a, b in zip([0, *cuts], [*cuts, N], strict=True)]
        rng.shuffle(parts)
        assert sum(local_squares(part, maximum) for part in parts) == whole
    assert local_squares(x[torch.randperm(N, generator=torch.Generator().manual_seed(3))], maximum) == whole
    assert local_squares(x.flip(0), maximum) == whole


def test_fp32_sums_do_depend_on_the_cut():
    """The control: what the integers replace is not the same for these values."""
    x = values()
    sums = {float(sum(part.square().sum() for part in x.chunk(n))) for n in (1, 2, 3, 4, 7)}
    assert len(sums) > 1


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_it_is_the_norm(scale):
    x = values(scale)
    assert norm_of_parts([x]) == pytest.approx(float(x.double().norm()), rel=1e-7)
    assert norm_of([x[:100].view(10, 10), x[100:]]) == norm_of_parts([x])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", range(4))
def test_what_is_not_finite_counts_on_any_part(bad, part):
    parts = [p.clone() for p in values(n=4000).chunk(4)]
    parts[part][-1] = bad
    assert local_max(parts[part]) == math.inf
    assert norm_of_parts(parts) == math.inf


def test_extremes():
    assert norm_of_parts([]) == 0.0
    assert norm_of_parts([torch.empty(0), torch.zeros(5)]) == 0.0
    assert local_max(torch.tensor([-3.0, 2.0])) == 3.0
    largest = torch.full((1 << 15,), torch.finfo(torch.float32).max)  # full chunks of the largest squares: no overflow
    assert norm_of_parts([largest]) == pytest.approx(float(largest[0]) * math.sqrt(1 << 15), rel=1e-7)
    tiny = torch.full((3,), 2.0**-149)
    assert norm_of_parts([tiny]) == pytest.approx(2.0**-149 * math.sqrt(3), rel=1e-7)


def test_a_denormal_beside_a_large_value_is_rounded_alike_everywhere():
    x = torch.tensor([1e38, 1e-40, 1e-38, 1.0])
    maximum = local_max(x)
    assert sum(local_squares(x[i : i + 1], maximum) for i in range(4)) == local_squares(x, maximum)
