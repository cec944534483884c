"""`onecurve export` from outside: what it writes, from which checkpoint, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model

from onecurve.checkpoint import read_manifest, read_parameters
from onecurve.cli import main
from onecurve.export import run as module
from onecurve.model import GPT

Said = pytest.CaptureFixture[str]
FORMATS = ("transformers", "safetensors")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def export(place: object, out: Path, *options: str) -> Path:
    assert main(["export", str(place), "--out", str(out), *options]) == 0
    return out


def refused(said: Said, place: object, out: object, *options: str, code: int = 2) -> str:
    """The one line of a refusal."""
    said.readouterr()
    assert main(["export", str(place), "--out", str(out), *options]) == code
    out_, err = said.readouterr()
    assert out_ == "" and err.count("\n") == 1 and err.startswith("onecurve: ") and err[:-1].isprintable(), err
    return err


def reload(folder: Path) -> GPT:
    model = GPT(**json.loads((folder / "model.json").read_text())["model"], seed=1)
    assert load_model(model, folder / "model.safetensors", strict=True) == (set(), [])
    return model


@pytest.mark.parametrize("kind", ["byte", "cycle"])
def test_case_13_reloaded_strictly_under_our_names(kind: str, runs: dict[str, Path], tmp_path: Path) -> None:
    """Every bit of the masters is there, and what was tied still is."""
    folder = export(runs[kind], tmp_path / "out", "--format", "safetensors")
    model = reload(folder)
    masters = read_parameters(runs[kind] / "checkpoints" / "step-00000006")
    for name, values in masters.items():
        assert model.get_parameter(name).detach().numpy().tobytes() == values.numpy().tobytes(), name
    tied = kind == "byte"
    assert ("head.weight" in masters) != tied
    assert (model.head.weight.data_ptr() == model.embedding.token.data_ptr()) == tied
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(masters)
        assert file.metadata() == {"format": "pt", **({"head.weight": "embedding.token"} if tied else {})}
    if tied:  # a head of its own can't be filled from it
        untied = GPT(**json.loads((folder / "model.json").read_text())["model"] | {"tied": False})
        with pytest.raises(RuntimeError, match=r"head\.weight"):
            load_model(untied, folder / "model.safetensors", strict=True)


@pytest.mark.parametrize("form", FORMATS)
def test_the_layout_that_saved_it_changes_no_byte(form: str, runs: dict[str, Path], tmp_path: Path) -> None:
    sharded, alone = (runs[name] / "checkpoints" / "step-00000006" for name in ("byte", "byte-alone"))
    assert [len(read_manifest(path).files) for path in (sharded, alone)] == [4, 1]
    made = [content(export(runs[name], tmp_path / name, "--format", form)) for name in ("byte", "byte-alone")]
    assert made[0] == made[1] and len(made[0]) == {"transformers": 4, "safetensors": 2}[form]
    assert made[0] != content(export(f"{runs['byte']}@4", tmp_path / "earlier", "--format", form))


def test_what_it_says(runs: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    """The table, a line for a corpus without text; and the line that loads, executed."""
    out = tmp_path / "it's a {new}\nfolder" / "x"
    capsys.readouterr()
    export(f"{runs['cycle']}@4", out, "--format", "safetensors")
    table, err = capsys.readouterr()
    manifest = read_manifest(runs["cycle"] / "checkpoints" / "step-00000004")
    assert err == "" and f"step 4, curve {manifest.curve_id[:8]}" in table
    count = sum(values.numel() for values in read_parameters(runs["cycle"] / "checkpoints" / "step-00000004").values())
    assert f"parameters  {count:,}, float32" in table
    for name, data in content(out).items():
        assert f"{name} " in table and f" {len(data):,}\n" in table
    origin = json.loads((out / "model.json").read_text())["onecurve"]
    assert (origin["step"], origin["state_digest"]) == (4, manifest.state_digest)
    load = table.splitlines()[-1].removeprefix("load it ").strip()
    names: dict[str, GPT] = {}
    exec(f"import json, onecurve.model, safetensors.torch\n{load}", names)
    assert torch.equal(names["model"].head.weight, reload(out).head.weight)

    export(runs["cycle"], tmp_path / "ids")
    assert "no text" in capsys.readouterr().err
    assert sorted(content(tmp_path / "ids")) == ["config.json", "model.safetensors"]


def test_it_takes_no_transformers(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    export(runs["bpe"], tmp_path / "out")


def damage(checkpoint: Path) -> None:
    shard = checkpoint / "rank-0000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")


def test_the_newest_whole_checkpoint_or_the_one_that_is_named(
    runs: dict[str, Path], tmp_path: Path, capsys: Said
) -> None:
    run = Path(shutil.copytree(runs["bpe"], tmp_path / "run"))
    damage(run / "checkpoints" / "step-00000006")
    capsys.readouterr()
    older = export(run, tmp_path / "older")
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "passed over step-00000006" in said.err and "step 4," in said.out
    assert content(older) == content(export(f"{runs['bpe']}@4", tmp_path / "named"))

    out = tmp_path / "not" / "made"
    for step, words in {"@6": ("step-00000006", "sha256"), "@5": ("no checkpoint of step 5",), "@x": ("'x'",)}.items():
        line = refused(capsys, f"{run}{step}", out)
        assert all(word in line for word in (*words, step)) and ("there: 2, 4, 6" in line or step == "@x"), line
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"curve_id": "0" * 64}))
    assert "of curve" in refused(capsys, f"{run}@2", out)
    shutil.rmtree(run / "checkpoints")
    assert "no whole checkpoint" in refused(capsys, run, out)
    assert not out.parent.exists()


def test_refusals(runs: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    run, file = runs["cycle"], tmp_path / "file"
    file.write_text("mine")
    for name in (".", "file", "link"):
        if name == "link":
            (tmp_path / name).symlink_to("nothing")
        assert "exists already" in refused(capsys, run, tmp_path / name)
    assert "file is not a folder" in refused(capsys, run, file / "x")
    assert "can't be written" in refused(capsys, run, "/proc/x")
    for name in ("checkpoints/new", "checkpoints/step-00000009/new"):
        assert f"among the checkpoints of the run {run}" in refused(capsys, run, run / name)
    for place in (tmp_path, tmp_path / "nowhere", file):
        assert "no run there" in refused(capsys, place, tmp_path / "new")
    assert "names no run" in refused(capsys, "@2", tmp_path / "new")
    assert "is empty" in refused(capsys, "", tmp_path / "new")
    for place in ("x" * 300, "x" * 300 + "@2"):
        line = refused(capsys, place, tmp_path / "new")
        assert line.startswith("onecurve: xxx") and "no run there (it is longer than a name may be)" in line
    line = refused(capsys, run, tmp_path / "new", "--format", "gguf")
    assert "gguf" in line and "transformers and safetensors" in line
    broken = Path(shutil.copytree(runs["bpe"], tmp_path / "broken"))
    (broken / "corpus" / "tokenizer.json").write_text("{}")
    line = refused(capsys, broken, tmp_path / "new")
    assert "tokenizer.json: it is not the one that the corpus was made with; copy manifest.json, and tokenizer" in line
    assert f"/merges into {broken / 'corpus'}" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file", "link"]
    assert file.read_text() == "mine"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 75), (OSError(28, "No space left on device"), 2)])
def test_failed_or_interrupted_it_leaves_nothing(
    error: BaseException,
    code: int,
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(path: Path, parts: Iterator[bytes]) -> None:
        path.write_bytes(next(iter(parts)))
        raise error

    monkeypatch.setattr(module, "write_new", write)
    line = refused(capsys, runs["byte"], tmp_path / "deep" / "out", code=code)
    assert "No space left" in line or code == 75
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(runs: dict[str, Path], tmp_path: Path, capsys: Said) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        for form in FORMATS:
            line = refused(capsys, runs["byte"], tmp_path / "out", "--format", form)
            assert "No space left on device" in line and "out" in line
            assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
