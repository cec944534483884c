"""The capstone: its output as a whole, its shape, and each of its four invariants broken on purpose, on real ranks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from onecurve import cli, faults
from onecurve.launch import RankContext
from onecurve.parallel import ZeroOptimizer
from tests.commands import CAPSTONE, DEMO, ROOT, environment, load_capstone, onecurve, rows

NUMBER = r"\d+(?:\.\d+)?"
OUTPUT = re.compile(
    r"MiniGPT: 29824 parameters, 2 blocks, width 32, 4 heads, vocab 64, context 16\n"
    r"4 ranks x 4 sequences, ZeRO-1, AdamW, 20 steps\n"
    r"\n"
    r"step +loss +grad norm +param norm +ms\n"
    rf"(?P<losses>(?:\d+ +\d+\.\d{{6}} +{NUMBER} +{NUMBER} +{NUMBER}\n){{20}})"
    r"\n"
    r"rank +parameters +gradients +optimizer +12P/N +ok\n"
    r"(?P<memory>(?:[0-3] +119296 +119296 +89472 +89472 +ok\n){4})"
    r"all bytes of a rank: maximum 328064, mean 328064\n"
    r"\n"
    r"checkpoint step 10, state digest [0-9a-f]{16}\n"
    r"file +bytes +sha256\n"
    r"(?P<files>(?:rank-000[0-3]\.safetensors +89728 +[0-9a-f]{16}\n){4})"
    r"\n"
    r"\(a\) loss falls at each of 20 steps: \d\.\d{6} -> \d\.\d{6}\n"
    r"\(b\) parameter norm equal on 4 ranks at each of 20 steps, bit for bit\n"
    r"\(c\) optimizer memory = 12·P/N = 89472 bytes on 4 ranks, counted from live tensors\n"
    r"\(d\) step-10 checkpoint: 357888 bytes on disk equal the snapshots of 4 ranks\n"
    r"RESUME VERIFIED step 10, 4 ranks, byte for byte\n"
)


@pytest.fixture
def capstone() -> ModuleType:
    return load_capstone()


def without_times(text: str) -> str:
    """The output with the column of milliseconds left out."""
    return re.sub(rf"(?m)^(\d+ +\d+\.\d{{6}} .*?|step .*?) +(?:{NUMBER}|ms)$", r"\1", text)


def test_it_prints_everything_in_order_and_ends_with_0(tmp_path: Path) -> None:
    """As a user starts it, from anywhere, without this package being installed."""
    lonely = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, CAPSTONE], cwd=tmp_path, env=lonely, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = OUTPUT.fullmatch(done.stdout)
    assert shown is not None, done.stdout
    assert [int(line.split()[0]) for line in shown["losses"].splitlines()] == list(range(1, 21))
    assert [int(line.split()[0]) for line in shown["memory"].splitlines()] == [0, 1, 2, 3]
    assert list(tmp_path.iterdir()) == []  # its run folder was a temporary one

    demo = onecurve("demo", "--run", tmp_path / "kept")
    assert demo.returncode == 0 and without_times(demo.stdout) == without_times(done.stdout)
    assert (tmp_path / "kept" / "checkpoints" / "step-00000010" / "manifest.json").is_file()


def test_the_readme_shows_it_as_it_is_printed(capstone: ModuleType, capfd: Any) -> None:
    assert capstone.main() == 0
    printed = without_times(capfd.readouterr().out)
    shown = without_times((ROOT / "README.md").read_text(encoding="utf-8"))
    assert printed in shown


def test_its_shape() -> None:
    """Row S3 and S9: five names, at most 200 lines, and a worker that knows no collective and no rendezvous."""
    text = CAPSTONE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    tree = ast.parse(text)
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {"MiniGPT", "make_corpus", "_train_worker", "verify_resume", "main"} <= set(defined)
    assert [argument.arg for argument in defined["make_corpus"].args.args] == ["seed", "total_tokens"]  # type: ignore[union-attr]
    called = [ast.unparse(node.func) for node in ast.walk(defined["_train_worker"]) if isinstance(node, ast.Call)]
    for once in ("replicate", "ZeroOptimizer", "optimizer.step", "save_checkpoint", "optimizer.backward"):
        assert called.count(once) == 1, once
    assert "distributed" not in text and "while" not in {type(n).__name__.lower() for n in ast.walk(tree)}


def test_train_with_the_demos_config_draws_the_same_curve(capstone: ModuleType, tmp_path: Path) -> None:
    """Losses and gradient norms in every bit, and the checkpoint at step 10."""
    seen: list[list[dict[str, Any]]] = []
    capstone.show = lambda results, *_: seen.append(results)
    assert capstone.main(tmp_path / "by-hand") == 0
    assert cli.main(["train", str(DEMO), "--run", str(tmp_path / "run")]) == 0
    by_hand = [(row[1].hex(), row[2], row[3]) for row in seen[0][0]["rows"]]
    assert by_hand == [(row["loss_hex"], row["grad_norm"], row["param_norm"]) for row in rows(tmp_path / "run")]
    saved = [
        capstone.read_manifest(tmp_path / run / "checkpoints" / "step-00000010").state_digest
        for run in ("by-hand", "run")
    ]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("seed", range(10))
def test_the_loss_falls_at_each_step_for_every_seed(capstone: ModuleType, seed: int, capfd: Any) -> None:
    capstone.SEED = seed
    assert capstone.main() == 0, capfd.readouterr().out


# --- tampering -----------------------------------------------------------------------------------------------------


def failure(capstone: ModuleType, capfd: pytest.CaptureFixture[str], letter: str) -> str:
    """Runs it; it must end with 1, and its last line be the broken invariant `letter`."""
    assert capstone.main() == 1
    out, err = capfd.readouterr()
    last = out.splitlines()[-1]
    assert last.startswith(f"({letter}) ") and "RESUME VERIFIED" not in out and err == ""
    return last


def test_a_corpus_that_can_not_be_learned_breaks_a(capstone: ModuleType, capfd: Any) -> None:
    capstone.make_corpus = lambda seed, total: np.random.default_rng(seed).integers(0, 64, total, dtype=np.uint8)
    said = failure(capstone, capfd, "a")
    found = re.fullmatch(rf"\(a\) the loss rises at step (\d+): ({NUMBER}) -> ({NUMBER}), by (\S+)", said)
    assert found is not None, said
    step, before, after, gap = (float(group) for group in found.groups())
    assert 2 <= step <= 20 and 0 < gap == pytest.approx(after - before, rel=1e-2)


def test_a_negative_rate_breaks_a(capstone: ModuleType, capfd: Any) -> None:
    class Uphill(ZeroOptimizer):
        def __init__(self, *arguments: Any, lr: float, **options: Any) -> None:
            super().__init__(*arguments, lr=-lr, **options)

    capstone.ZeroOptimizer = Uphill
    assert "rises at step 2" in failure(capstone, capfd, "a")


def test_a_loss_that_is_not_a_number_breaks_a(capstone: ModuleType) -> None:
    with pytest.raises(capstone.CheckFailed, match=r"\(a\).* step 3: 1.5 -> nan"):
        capstone.check_loss([2.0, 1.5, float("nan"), 1.0])


@pytest.mark.parametrize("rank", [1, 3])
def test_one_ulp_in_one_weight_of_one_rank_breaks_b(capstone: ModuleType, capfd: Any, rank: int) -> None:
    class Skewed(ZeroOptimizer):
        def step(self, *arguments: Any, **options: Any) -> Any:
            stats = super().step(*arguments, **options)
            if self.updates == 7 and self.mesh.rank == rank:
                weight = self.trained.parameters["blocks.1.norm2.weight"].data[5:6]
                weight.copy_(torch.nextafter(weight, weight + 1))
            return stats

    capstone.ZeroOptimizer = Skewed
    said = failure(capstone, capfd, "b")
    assert re.match(rf"\(b\) parameter norm at step 7: rank {rank} {NUMBER}, rank 0 {NUMBER}, \S+ apart", said), said


def test_one_more_optimizer_tensor_breaks_c(capstone: ModuleType, capfd: Any) -> None:
    class Hoarder(ZeroOptimizer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if self.mesh.rank == 2:  # the moment of a rank that forgot to cut its last 16 elements off
                self.exp_avg = torch.zeros(self.exp_avg.numel() + 16)[: self.exp_avg.numel()]

    capstone.ZeroOptimizer = Hoarder
    said = failure(capstone, capfd, "c")
    assert said == "(c) optimizer memory on rank 2: 89536 bytes, 12·P/N = 89472, +64"


def damaged(capstone: ModuleType, damage: Any) -> None:
    """`damage(checkpoint)` is done between the save and the check."""
    read = capstone.read_manifest

    def tampering(checkpoint: Path) -> Any:
        manifest = read(checkpoint)
        damage(checkpoint)
        return manifest

    capstone.read_manifest = tampering


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("at", "kind"), [(-1, "exp_avg_sq"), (-30000, "exp_avg"), (-89472, "master")])
def test_a_flipped_bit_breaks_d(capstone: ModuleType, capfd: Any, at: int, kind: str) -> None:
    damaged(capstone, lambda checkpoint: flip(checkpoint / "rank-0002.safetensors", at))
    said = failure(capstone, capfd, "d")
    assert said == f"(d) rank-0002.safetensors: 1 of 89472 bytes differ from rank 2's snapshot, the first in {kind}"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: flip(c / "rank-0001.safetensors", 20), "rank-0001.safetensors"),
        (lambda c: flip(c / "manifest.json", 20), "manifest.json"),
        (lambda c: (c / "rank-0003.safetensors").unlink(), "rank-0003.safetensors: 89472 of 89472 bytes"),
        (lambda c: (c / "rank-0000.safetensors").write_bytes(b""), "rank-0000.safetensors: 89472 of 89472 bytes"),
    ],
    ids=["header", "manifest", "missing", "empty"],
)
def test_other_damage_breaks_d(capstone: ModuleType, capfd: Any, damage: Any, words: str) -> None:
    damaged(capstone, damage)
    assert words in failure(capstone, capfd, "d")


def test_a_save_of_something_else_breaks_d(capstone: ModuleType, capfd: Any) -> None:
    """Every hash is right, and the bytes are not those that were in memory."""
    save = capstone.save_checkpoint

    def late(folder: Path, optimizer: ZeroOptimizer, *arguments: Any, **options: Any) -> Any:
        manifest = save(folder, optimizer, *arguments, **options)
        if optimizer.mesh.rank == 3:
            element = optimizer.exp_avg_sq[100:101]
            element.copy_(torch.nextafter(element, element + 1))
        return manifest

    capstone.save_checkpoint = late
    said = failure(capstone, capfd, "d")
    assert re.match(r"\(d\) rank-0003.safetensors: [1-4] of 89472 bytes differ .* the first in exp_avg_sq", said), said


def test_a_rank_that_dies_is_named_and_ends_it_with_3(capstone: ModuleType, capfd: Any) -> None:
    worker = capstone._train_worker

    def dying(context: RankContext, *arguments: Any) -> Any:
        if context.rank == 1:
            faults.arm("kill:rank=1,place=save.write")
        return worker(context, *arguments)

    capstone._train_worker = dying
    assert capstone.main() == 3
    out, err = capfd.readouterr()
    assert "RESUME VERIFIED" not in out and "rank 1 vanished" in err and "SIGKILL" in err


def test_the_tests_run_on_this_checkout() -> None:
    import onecurve as package

    assert Path(str(package.__file__)).is_relative_to(ROOT)
