"""`verify`: its verdicts, its files, its exit codes."""

import json
from pathlib import Path

import pytest

from onecurve.checkpoint import read_manifest
from onecurve.cli import main
from onecurve.config import load_config
from onecurve.errors import RunFailed
from onecurve.train.run import train
from onecurve.verify import controls, prove
from onecurve.verify.matrix import Combination, Kill, Leg, full_matrix, reference
from onecurve.verify.proof import compare, read_lines
from tests.controls import ODD, layouts

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def line(step: int, loss: str = "0x1p+0", tensors=("aa", "bb")) -> dict:
    named = [["master", f"t{i}", 0, digest] for i, digest in enumerate(tensors)]
    return {"step": step, "loss": loss, "grad_norm": "0x1p+1", "param_norm": "0x1p+2", "tensors": named}


EXPECTED = {1: [line(1)], 2: [line(2)]}


def test_equal_lines_are_no_difference_also_when_a_step_was_done_again():
    assert compare(EXPECTED, [line(1), line(2)]) is None
    assert compare(EXPECTED, [line(1), line(2), line(2)]) is None


def test_the_first_step_and_the_first_tensor_are_named():
    found = compare(EXPECTED, [line(1), line(2, tensors=("aa", "cc"))])
    assert found is not None
    assert (found.step, found.tensors, found.all_tensors) == (2, ("master t1",), 2)
    found = compare(EXPECTED, [line(1, loss="0x1p+1"), line(2, tensors=("cc", "cc"))])
    assert found is not None and (found.step, list(found.values), found.tensors) == (1, ["loss"], ())


def test_a_step_missing_or_failed_or_done_again_differently_is_a_difference():
    assert "step 2 is missing" in str(compare(EXPECTED, [line(1)]))
    assert "why" in str(compare(EXPECTED, [line(1)], RunFailed("why\ntrace")))
    assert compare(EXPECTED, [line(1), line(2), line(2, loss="0x1p+3")]) is not None


def test_a_rewound_run_must_end_where_the_reference_ends():
    rewound = {1: [line(1, "0x1p+5"), line(1)], 2: [line(2)]}
    assert compare(rewound, [line(1, "0x1p+5"), line(1), line(2)]) is None
    assert compare(rewound, [line(1), line(2), line(1, "0x1p+5")]) is not None


def test_a_line_that_a_full_disk_tore_is_left_out(tmp_path):
    path = tmp_path / "lines"
    assert read_lines(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo{"step": 4}\n')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_quick_on_the_demo(tmp_path, capsys):
    """At least 8 layouts with a kill and a change of layout in it; the table, the file and exit code 0."""
    out = tmp_path / "verify.json"
    assert main(["verify", str(DEMO), "--quick", "--out", str(out)]) == 0
    told, progress = capsys.readouterr()
    proof = json.loads(out.read_text())
    assert proof["same"] and proof["steps"] == 6 and len(proof["results"]) >= 8
    killed = [result for result in proof["results"] if result["legs"][0]["killed"]]
    assert killed and killed[0]["legs"][0]["layout"] != killed[0]["legs"][1]["layout"]
    assert "ONE CURVE  8 layouts" in told and told.count("same") >= 32 and proof["state"][:16] in told
    assert "1/9 layouts" in progress


def test_a_broken_clause_ends_with_exit_code_1_and_the_first_difference(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(controls.ENVIRONMENT, "divide-first")
    monkeypatch.chdir(tmp_path)
    short = [
        "--set",
        "train.steps=1",
        "--set",
        "train.leaves=2",
        "--set",
        "layout.dp=1",
        "--set",
        "optimizer.warmup_steps=0",
    ]
    assert main(["verify", str(ODD), "--quick", *short]) == 1
    told = capsys.readouterr().out
    assert "DIFFERS" in told and "DIFFERENT" in told and "step 1: " in told and "tensors, the first is master " in told
    proof = json.loads((tmp_path / "verify.json").read_text())
    assert not proof["same"] and proof["control"] == "divide-first"
    assert proof["results"][0]["difference"]["step"] == 1


def test_its_state_is_that_of_the_checkpoint_a_run_makes(tmp_path):
    """The curve under proof is the user's own: its first steps, with its id, whatever the last step is."""
    config = load_config(DEMO, ["train.steps=12", "optimizer.decay=cosine", "checkpoint.every_steps=6"])
    proof = prove(config, combinations=layouts(config, ((2, 3),)))
    train(config, tmp_path / "run")
    manifest = read_manifest(tmp_path / "run/checkpoints/step-00000006")
    assert proof.same and (manifest.state_digest, manifest.curve_id) == (proof.digest, proof.curve_id)


def test_a_kill_that_does_not_happen_is_no_proof():
    config = load_config(DEMO, ["train.steps=2"])
    (leg,) = reference(config).legs
    never = Combination((Leg(leg.layout, Kill(0, 1, "nowhere")), leg))
    (result,) = prove(config, combinations=[never]).results
    assert result.difference is not None and "never there" in str(result.difference)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (DEMO, ["train.leaves=8"]),
        (DEMO, ["train.leaves=8", "model.tied=true", "model.dropout=0.1", "optimizer.clip=0.5",
                "optimizer.warmup_steps=3", "train.accumulate=2"]),
        (DEMO, ["train.leaves=8", "model.width=36", "model.vocab=257", "model.context=17"]),
        (DEMO, ["train.leaves=6", "train.accumulate=2", "optimizer.weight_decay=0.1"]),
        (ODD, []),
    ],
    ids=["demo", "tied-dropout-clip", "odd-sizes", "six-leaves", "odd.toml"],
)  # fmt: skip
def test_the_whole_matrix(config, overrides):
    loaded = load_config(config, [*overrides, "layout.dp=1"])
    proof = prove(loaded)
    assert len(proof.results) == len(full_matrix(loaded)) >= 30
    assert proof.same, "\n".join(proof.lines())
