"""The plan's figures, by hand and by the ownership table."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecurve.config import Config, load_config
from onecurve.report.plan import parameters, plan_lines, rank_costs

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def count(*overrides: str) -> int:
    return sum(spec.numel for spec in parameters(load_config(DEMO, overrides).model))


def test_the_demo_has_29824_parameters() -> None:
    assert count() == 29_824
    assert count("model.tied=true") == 29_824 - 64 * 32
    assert count("model.layers=3") == 29_824 + 12 * 32 * 32 + 9 * 32


@pytest.mark.parametrize(
    "overrides", [[], ["model.tied=true"], ["model.width=36", "model.vocab=257", "model.context=17"]]
)
def test_the_formula_is_the_model(overrides: list[str]) -> None:
    """Names, shapes and order of the real GPT's trained parameters."""
    gpt = pytest.importorskip("onecurve.model.gpt")
    config = load_config(DEMO, overrides).model
    keys = ("layers", "width", "heads", "vocab", "context", "tied")
    model = gpt.GPT(**{key: getattr(config, key) for key in keys})
    real = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in model.tied_uses}
    assert {spec.name: spec.shape for spec in parameters(config)} == real
    assert [spec.name for spec in parameters(config)] == list(real)


def test_the_demos_memory_is_the_specified_one() -> None:
    costs = rank_costs(Config())
    assert len(costs) == 4 and len(set(costs)) == 1
    assert (costs[0].weights, costs[0].gradients, costs[0].optimizer, costs[0].padding) == (119_296, 119_296, 89_472, 0)


@pytest.mark.parametrize("zero", range(4))
def test_the_stages_follow_the_table(zero: int) -> None:
    p, n = 29_824, 4
    unit = 12_576  # a block
    cost = rank_costs(load_config(DEMO, [f"layout.zero={zero}"]))[0]
    assert cost.weights == (4 * p if zero < 3 else p)
    assert cost.gradients == (4 * p if zero < 2 else 4 * (2 * p // n + 2 * unit))  # 4 leaves: 2 buffers in the counter
    assert cost.scratch == (0 if zero < 3 else 4 * 2 * -(-unit // 64) * 64)  # two units, each cut on the 16-grid by 4
    assert cost.optimizer == (12 * p if zero == 0 else 12 * p // n)


def test_padding_is_named_where_the_ranks_do_not_divide() -> None:
    costs = rank_costs(load_config(DEMO, ["layout.dp=3"]))
    assert [cost.optimizer + cost.padding for cost in costs] == [12 * 9_952] * 3  # shards of 16 elements' multiples
    assert costs[0].optimizer == 12 * 29_824 // 3 and costs[0].padding > 0


def test_more_leaves_than_ranks_need_more_gradient_buffers() -> None:
    p = 29_824
    for leaves, buffers in ((4, 1), (8, 2), (16, 3), (32, 4)):
        cost = rank_costs(load_config(DEMO, [f"train.leaves={leaves}"]))[0]
        assert cost.gradients == 4 * p * buffers, leaves


def test_the_text_says_what_is_out_of_balance_and_what_would_be_in() -> None:
    text = "\n".join(plan_lines(load_config(DEMO, ["layout.dp=3"])))
    assert "4 leaves on 3 ranks: the busiest runs 2" in text and "67%" in text and "1, 2, 4" in text
    assert "29,824 parameters" in text and "349.5 KiB per checkpoint" in text and "keep + 1: 1.4 MiB" in text
    assert "none waits" in "\n".join(plan_lines(Config()))


def test_the_widest_curve_is_planned_in_seconds() -> None:
    wide = ["train.leaves=65536", "layout.dp=2048", "layout.zero=2", "train.micro_batch=1"]
    assert "2048 ranks" in "\n".join(plan_lines(load_config(DEMO, wide)))


def test_every_layout_of_a_wide_curve_can_be_planned() -> None:
    for dp in range(1, 13):
        for zero in range(4):
            assert plan_lines(load_config(DEMO, ["train.leaves=12", f"layout.dp={dp}", f"layout.zero={zero}"]))
