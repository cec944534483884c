"""A copy that goes wrong in a run: found at the next check, named, and the end of the run (exit code 3)."""

from pathlib import Path

import pytest
import torch

from onecurve.parallel.zero import ZeroOptimizer
from tests.commands import events, train_here


def flip_a_bit(monkeypatch: pytest.MonkeyPatch, tensor: str, step: int) -> None:
    """On rank 2, before the gradients of `step` are reduced."""
    run_step = ZeroOptimizer.step

    def flipped(self, *args, **options):
        if self.updates == step - 1:
            self.mesh.transport.all_gather_bytes(b".")  # the others have read this rank's memory
            if self.mesh.rank == 2:
                self.replicas()[tensor].view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
        return run_step(self, *args, **options)

    monkeypatch.setattr(ZeroOptimizer, "step", flipped)


def train_checked(run: Path, zero: int) -> int:
    return train_here(run, f"layout.zero={zero}", "observe.check_replicas_every=5")


@pytest.mark.parametrize(
    ("zero", "tensor"),
    [(1, "blocks.1.mlp.up.weight"), (0, "exp_avg of head.norm.bias"), (2, "embedding.position")],
)
def test_a_flipped_bit_ends_the_run_with_rank_step_and_tensor(
    zero: int, tensor: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit(monkeypatch, tensor, 10)
    assert train_checked(tmp_path / "run", zero) == 3
    line = f"step 10: rank 2 holds another {tensor} than the other ranks"
    assert line in capfd.readouterr().err
    (error,) = [e for e in events(tmp_path / "run") if e["event"] == "error"]
    assert line in error["text"]


def test_a_moment_that_went_wrong_between_checks_is_found_at_the_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the weights have followed it: the first tensor in the model's order is named."""
    flip_a_bit(monkeypatch, "exp_avg_sq of head.norm.bias", 7)
    assert train_checked(tmp_path / "run", 0) == 3
    said = capfd.readouterr().err
    assert "step 10: rank 2 holds another " in said and "head.norm.bias" in said
