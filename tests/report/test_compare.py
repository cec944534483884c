"""Two runs side by side: equal bits, the first difference, and run folders in every state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from onecurve.cli import main
from onecurve.config import config_to_toml, load_config
from onecurve.errors import InputError
from onecurve.report.compare import compare_runs, ulps_apart

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def row(step: int, **changes: Any) -> dict[str, Any]:
    loss = changes.pop("loss", 4.0 / step)
    return {"step": step, "loss": loss, "loss_hex": loss.hex(), "grad_norm": 0.1 * step, "param_norm": 7.0, **changes}


def write_run(
    path: Path, rows: list[dict[str, Any]], *overrides: str, digests: dict[int, str] | None = None, **manifest: str
) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (path / "config.toml").write_text(config_to_toml(load_config(DEMO, overrides)))
    (path / "run.json").write_text(json.dumps({"curve_id": "ab", "numerics": {"torch": "2.13.0"}}))
    for step, digest in (digests or {}).items():
        folder = path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"step": step, "state_digest": digest, **manifest}))
    return path


ROWS = [row(step) for step in range(1, 6)]


def changed(step: int, **changes: Any) -> list[dict[str, Any]]:
    return [row(r["step"], **changes) if r["step"] == step else r for r in ROWS]


def test_equal_runs_on_two_layouts_are_the_same_curve(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ROWS, digests={5: "d"})
    b = write_run(
        tmp_path / "b", [{**r, "step_seconds": 9.0} for r in ROWS], "layout.dp=2", "layout.zero=3", digests={5: "d"}
    )
    result = compare_runs(a, b)
    text = "\n".join(result.lines())
    assert result.same and "SAME CURVE  5 steps, 0 validation losses and 1 state digests" in text
    assert result.settings == [("layout", "layout.dp", "4", "2"), ("layout", "layout.zero", "1", "3")]


def test_one_ulp_of_the_loss_is_found_at_its_step(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ROWS)
    b = write_run(tmp_path / "b", changed(3, loss=math.nextafter(4.0 / 3, 9.0)))
    result = compare_runs(a, b)
    text = "\n".join(result.lines())
    assert not result.same and result.steps == 2
    assert [(d.step, d.name, d.ulps) for d in result.first] == [(3, "loss", 1)]
    assert "step 3 is the first that differs" in text
    for value in (4.0 / 3, math.nextafter(4.0 / 3, 9.0)):
        assert repr(value) in text and value.hex() in text


@pytest.mark.parametrize("name", ["grad_norm", "param_norm", "val_loss"])
def test_each_value_counts(tmp_path: Path, name: str) -> None:
    old = 7.0
    a = write_run(tmp_path / "a", changed(4, **{name: old}))
    b = write_run(tmp_path / "b", changed(4, **{name: math.nextafter(old, 0.0)}))
    assert [(d.step, d.name, d.ulps) for d in compare_runs(a, b).first] == [(4, name, 1)]


def test_an_evaluation_that_one_run_did_not_make_is_no_difference(tmp_path: Path) -> None:
    assert compare_runs(write_run(tmp_path / "a", changed(4, val_loss=3.0)), write_run(tmp_path / "b", ROWS)).same


def test_equal_losses_over_other_weights_are_a_difference(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ROWS, digests={2: "same", 4: "one"})
    b = write_run(tmp_path / "b", ROWS, digests={2: "same", 4: "two", 5: "alone"})
    result = compare_runs(a, b)
    assert [(d.step, d.name, d.a, d.b) for d in result.first] == [(4, "state_digest", "one", "two")]
    assert "one" in "\n".join(result.lines())


def test_digests_of_chunks_hashed_otherwise_are_not_compared(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ROWS, digests={2: "old"})
    b = write_run(tmp_path / "b", ROWS, digests={2: "new"}, chunk_hash="blake3")
    c = write_run(tmp_path / "c", ROWS, digests={2: "other"}, chunk_hash="blake3")
    assert "and 0 state digests are equal" in "\n".join(compare_runs(a, b).lines())
    assert [(d.step, d.a, d.b) for d in compare_runs(b, c).first] == [(2, "new", "other")]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (ROWS[:3], "EQUAL SO FAR  3 steps, 0 validation losses and 0 state digests are equal bit for bit; B ends at "),
        (ROWS[2:], "0 state digests are equal bit for bit; B begins at step 3"),
        (ROWS[1:4], "bit for bit; B begins at step 2; B ends at step 4"),
        ([row(6)], "NO STEP IN COMMON  0 steps, "),
    ],
)  # fmt: skip
def test_a_part_of_a_run_is_equal_so_far_and_not_the_same_curve(tmp_path: Path, part: Any, says: str) -> None:
    """Stopped early, or brought from a mirror: the rows before that are gone."""
    a, b = write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", part)
    result = compare_runs(a, b)
    assert not result.same and result.first == []
    assert says in "\n".join(result.lines()) and "DIFFERENT" not in "\n".join(result.lines())
    assert main(["compare", str(b), str(a)]) == 1


def test_a_part_with_other_bits_is_different(tmp_path: Path) -> None:
    result = compare_runs(write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", changed(2, loss=1.5)[:3]))
    assert [(d.step, d.name) for d in result.first] == [(2, "loss")]


def test_checkpoints_without_metrics_are_told_from_no_run(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", ROWS, digests={5: "d"})
    (b / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match="it has checkpoints but no metrics"):
        compare_runs(a, b)


def test_not_a_number_equals_itself_and_nothing_else(tmp_path: Path) -> None:
    bad = changed(5, loss=math.nan)
    a, b = write_run(tmp_path / "a", bad), write_run(tmp_path / "b", bad)
    assert compare_runs(a, b).same
    result = compare_runs(a, write_run(tmp_path / "c", ROWS))
    assert [(d.step, d.name, d.ulps) for d in result.first] == [(5, "loss", None)]
    assert "nan" in "\n".join(result.lines())


def test_a_torn_last_line_is_noted_and_left_out(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ROWS)
    b = write_run(tmp_path / "b", ROWS)
    with (b / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    result = compare_runs(a, b)
    assert result.same and "line 6 of 6 is torn" in "\n".join(result.lines())


def test_rows_twice_and_rows_missing_are_noted(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ROWS)
    twice = compare_runs(a, write_run(tmp_path / "b", [*ROWS, ROWS[2]]))
    assert twice.same and "step 3 is there twice" in "\n".join(twice.lines())
    hole = compare_runs(a, write_run(tmp_path / "c", [*ROWS[:2], *ROWS[3:]]))
    assert not hole.same and hole.first[0].step == 3 and "1 steps are missing" in "\n".join(hole.lines())


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"loss": 1.0}', '{"step": "x"}', '{"step": 0}', '{"step": 6, "loss_hex": "zz"}']
)
def test_a_foreign_line_is_left_out(tmp_path: Path, line: str) -> None:
    b = write_run(tmp_path / "b", ROWS)
    with (b / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert compare_runs(write_run(tmp_path / "a", ROWS), b).same


def test_missing_records_are_noted(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", ROWS)
    (b / "run.json").unlink()
    (b / "config.toml").unlink()
    result = compare_runs(a, b)
    assert result.same and len(result.b.notes) == 2


@pytest.mark.parametrize("state", ["missing", "no metrics", "empty metrics", "a file"])
def test_what_is_no_run_is_refused_by_name(tmp_path: Path, state: str) -> None:
    a, b = write_run(tmp_path / "a", ROWS), tmp_path / "b"
    if state == "a file":
        b.write_text("x")
    elif state != "missing":
        write_run(b, [])
        if state == "no metrics":
            (b / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=str(b)):
        compare_runs(a, b)


def test_settings_name_curve_layout_and_numerics(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ROWS)
    b = write_run(tmp_path / "b", ROWS, "optimizer.lr=0.1", "layout.dp=1", "faults.lr_multiplier={step=1,factor=2.0}")
    (b / "run.json").write_text(json.dumps({"curve_id": "cd", "numerics": {"torch": "2.9.0"}}))
    assert compare_runs(a, b).settings == [
        ("curve", "optimizer.lr", "0.005", "0.1"),
        ("curve", "faults.lr_multiplier", "none", "{ step = 1, factor = 2.0 }"),
        ("curve", "curve_id", '"ab"', '"cd"'),
        ("layout", "layout.dp", "4", "1"),
        ("numerics", "numerics.torch", '"2.13.0"', '"2.9.0"'),
    ]


def test_ulps() -> None:
    assert ulps_apart(1.0, 1.0) == 0 == ulps_apart(0.0, -0.0)
    assert ulps_apart(1.0, math.nextafter(1.0, 2.0)) == 1
    assert ulps_apart(-5e-324, 5e-324) == 2
    assert ulps_apart(1.0, 2.0) == 2**52
    assert ulps_apart(math.nan, 1.0) is None


def test_each_setting_is_told_once_and_a_transport_that_was_chosen_too(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, ROWS, f"numerics.threads={n}") for name, n in (("a", 1), ("b", 2))]
    for run, threads, transport in zip(runs, (1, 2), ("shm", "p2p"), strict=True):
        record = {"layout": {"transport": transport}, "numerics": {"threads": threads}}
        (run / "run.json").write_text(json.dumps(record))
    assert compare_runs(*runs).settings == [
        ("layout", "layout.transport", '"shm"', '"p2p"'),
        ("numerics", "numerics.threads", "1", "2"),
    ]
