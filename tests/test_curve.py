"""The curve id changes with everything that may change a bit, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecurve import curve
from onecurve.config import CURVE_SECTIONS, Config, load_config
from onecurve.curve import canonical_json, curve_id

DEMO = Path(__file__).parent.parent / "configs" / "demo.toml"
FINGERPRINT = "ab" * 32


def name_of(*overrides: str) -> str:
    return curve_id(load_config(DEMO, overrides), FINGERPRINT)


def test_it_is_a_sha256_and_always_the_same() -> None:
    assert len(name_of()) == 64 and int(name_of(), 16) > 0
    assert name_of() == curve_id(Config(), FINGERPRINT)


def test_the_spelling_of_a_number_does_not_matter() -> None:
    assert name_of("optimizer.lr=1e-3") == name_of("optimizer.lr=0.001") != name_of()
    assert name_of("optimizer.clip=1") == name_of("optimizer.clip=1.0")
    assert name_of("optimizer.weight_decay=-0.0") == name_of("optimizer.weight_decay=0.0")


LAYOUT = [
    "layout.dp=2",
    "layout.zero=3",
    "layout.transport=p2p",
    "checkpoint.every_steps=3",
    "checkpoint.mirror=/tmp/x",
    "observe.log_every=5",
    "limits.stall_seconds=9",
    "numerics.threads=2",
]
CURVE = [
    "model.layers=3",
    "model.tied=true",
    "train.seed=42",
    "train.steps=21",
    "train.leaves=8",
    "optimizer.lr=0.0050000000000000001",  # the same float as 5e-3, see below
    "optimizer.betas=[0.9, 0.96]",
    "guard.spike_factor=3.0",
    "faults.lr_multiplier={ step = 12, factor = 1000.0 }",
]


@pytest.mark.parametrize("override", LAYOUT)
def test_layout_and_numerics_leave_it(override: str) -> None:
    assert name_of(override) == name_of()


@pytest.mark.parametrize("override", [text for text in CURVE if not text.startswith("optimizer.lr")])
def test_the_curve_part_changes_it(override: str) -> None:
    assert name_of(override) != name_of()


def test_one_ulp_of_a_rate_changes_it_and_a_longer_spelling_does_not() -> None:
    assert name_of("optimizer.lr=0.0050000000000000001") == name_of("optimizer.lr=5e-3")
    assert name_of("optimizer.lr=0.005000000000000001") != name_of("optimizer.lr=5e-3")


def test_data_counts_by_content_and_not_by_path() -> None:
    assert name_of("data.source=/a/corpus") == name_of("data.source=/b/corpus")
    assert curve_id(Config(), "another") != curve_id(Config(), FINGERPRINT)


def test_parent_and_arithmetic_count(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = curve_id(Config(), FINGERPRINT)
    assert curve_id(Config(), FINGERPRINT, parent="cd" * 32) != plain
    monkeypatch.setattr(curve, "ARITHMETIC_VERSION", curve.ARITHMETIC_VERSION + 1)
    assert curve_id(Config(), FINGERPRINT) != plain


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_every_curve_field_counts() -> None:
    """Each field of each curve section, one at a time, but for the corpus' path."""
    base = curve_id(Config(), FINGERPRINT)
    for section in CURVE_SECTIONS:
        table = getattr(Config(), section)
        for key, value in table.model_dump().items():
            changed = table.model_copy(update={key: (value, "changed")})
            with_change = Config().model_copy(update={section: changed})
            assert (curve_id(with_change, FINGERPRINT) != base) == (key != "source"), f"{section}.{key}"


def test_canonical_json_has_one_spelling() -> None:
    assert (
        canonical_json({"b": 1e-3, "a": [1, True, None, "é"]})
        == '{"a":[1,true,null,"\\u00e9"],"b":"0x1.0624dd2f1a9fcp-10"}'
    )
