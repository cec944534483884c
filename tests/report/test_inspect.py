"""`inspect`: the manifest as a table, and what `--check` finds."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from onecurve.checkpoint.manifest import FileEntry, Manifest, TensorEntry, hash_line
from onecurve.cli import main
from onecurve.errors import CheckFailed, InputError
from onecurve.report.inspect import inspect_checkpoint, manifest_lines

MANIFEST = Manifest(
    step=10,
    curve_id="ab" * 32,
    state_digest="cd" * 32,
    updates=10,
    finite=True,
    numerics={"torch": "2.13.0"},
    layout={"dp": 2, "zero": 1},
    wall_clock=0.0,
    data_fingerprint="ef" * 32,
    data_step=12,
    skipped=[3, 4],
    files=[FileEntry(name=f"rank-000{r}.safetensors", size=1000 + r, sha256=f"{r}" * 64) for r in range(2)],
    tensors=[
        TensorEntry(
            name="embedding.token",
            shape=[64, 32],
            dtype="float32",
            ranges={"rank-0000.safetensors": [(0, 0, 1024)], "rank-0001.safetensors": [(0, 1024, 1024)]},
        ),
        TensorEntry(name="none\n\x1b[31m", shape=[0], dtype="float32"),
    ],
)


def write(folder: Path) -> Path:
    folder.mkdir()
    data = MANIFEST.to_bytes()
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_bytes(hash_line(data))
    return folder


def test_the_table_holds_what_the_manifest_says() -> None:
    lines = manifest_lines(MANIFEST)
    text = "\n".join(lines)
    for part in (
        "10, 10 updates, next batch 12",
        "3, 4",
        "1970-01-01",
        "dp 2, zero 1",
        "ab" * 32,
        "cd" * 32,
        "2,048 trained",
        "read as schema 2, chunks of the digest by blake3",
    ):
        assert part in text
    assert "rank-0001.safetensors  1,001  " + "1" * 64 in text
    assert "embedding.token" in text and "64 x 32" in text and "rank-0000 0+1024, rank-0001 1024+1024" in text
    assert "\x1b" not in text and "none\\n\\x1b[31m" in text  # a name can't drive the terminal
    assert all("\n" not in line for line in lines)


def test_ranges_of_slices_name_the_slice() -> None:
    ranges = {"rank-0000.safetensors": [(0, 0, 4), (1, 0, 4)]}
    sliced = TensorEntry(name="x", shape=[8], dtype="float32", slices=2, ranges=ranges)
    text = "\n".join(manifest_lines(MANIFEST.model_copy(update={"tensors": [sliced]})))
    assert "slice:offset+length" in text and "rank-0000 0:0+4 1:0+4" in text


def test_a_damaged_manifest_is_bad_input_and_under_check_a_failed_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-00000010")
    assert inspect_checkpoint(folder)[0] == manifest_lines(MANIFEST)
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes().replace(b"10", b"11"))
    with pytest.raises(InputError, match="manifest"):
        inspect_checkpoint(folder)
    with pytest.raises(CheckFailed, match="manifest"):
        inspect_checkpoint(folder, check=True)


def test_check_lists_what_is_wrong_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "step-00000010")
    assert main(["inspect", str(folder)]) == 0
    assert main(["inspect", str(folder), "--check"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 2 and "rank-0000.safetensors" in wrong[0] and "rank-0001.safetensors" in wrong[1]


def test_another_folder_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for path, word in ((tmp_path / "none", "none"), (tmp_path / "run", "step-NNNNNNNN")):
        assert main(["inspect", str(path), "--check"]) == 2
        assert word in capsys.readouterr().err


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-00000010")
    moved = Path(shutil.move(folder, tmp_path / "step-00000011"))
    assert hashlib.sha256((moved / "manifest.json").read_bytes()).hexdigest() in (moved / "manifest.sha256").read_text()
    with pytest.raises(InputError, match="holds step 10"):
        inspect_checkpoint(moved)
