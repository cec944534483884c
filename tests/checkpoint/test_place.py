"""RUN[@STEP]: what it may say, and the checkpoint that it means."""

from pathlib import Path

import pytest

from onecurve.checkpoint import find_checkpoint, parse_place
from onecurve.errors import InputError
from tests.commands import train_here


def test_what_a_place_says(tmp_path: Path) -> None:
    assert parse_place("runs/a b") == (Path("runs/a b"), None, "runs/a b")
    assert parse_place("runs/a@0012", "--from") == (Path("runs/a"), 12, "--from runs/a@0012")
    (tmp_path / "me@home").mkdir()
    here = str(tmp_path / "me@home")
    assert parse_place(here) == (Path(here), None, here)
    assert parse_place(f"{here}@7") == (Path(here), 7, f"{here}@7")


@pytest.mark.parametrize("step", ["", "x", "-1", "1.5", "²", "٣"])
def test_no_step(step: str) -> None:
    with pytest.raises(InputError, match="is no step; write RUN@STEP") as refusal:
        parse_place(f"run@{step}")
    assert repr(step) in str(refusal.value)


def test_the_step_that_is_meant(tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()
    assert train_here(run, "train.steps=6", "checkpoint.every_steps=2", "checkpoint.background=false") == 0

    def found(text: str, curve_id: str | None = None) -> str:
        said.clear()
        return find_checkpoint(parse_place(f"{run}{text}"), said.append, curve_id=curve_id).name

    assert (found(""), found("@6"), found("@4"), found("@02")) == (
        "step-00000006", "step-00000006", "step-00000004", "step-00000002",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"run@5: no checkpoint of step 5; steps there: 2, 4, 6"):
        found("@5")
    with pytest.raises(InputError, match=r"run@123456789: no checkpoint of step 123456789; steps there: 2, 4, 6"):
        found("@123456789")
    with pytest.raises(InputError, match=r"run@4: .*is of curve .*; steps there: 2, 4, 6"):
        found("@4", curve_id="0" * 64)

    shard = run / "checkpoints" / "step-00000006" / "rank-0001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    assert found("") == "step-00000004"
    assert len(said) == 1 and said[0].startswith("passed over step-00000006") and "rank-0001.safetensors" in said[0]
    assert found("@2") == "step-00000002" and said == []
    with pytest.raises(InputError, match=r"run@6: step-00000006: .*rank-0001.safetensors.*; steps there: 2, 4, 6"):
        found("@6")
