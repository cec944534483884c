"""What is refused before step 1, each in one line; and that looking changes nothing."""

from types import SimpleNamespace

import pytest
import torch

from onecurve.config import load_config
from onecurve.errors import InputError
from onecurve.train import folder, preflight
from tests.badday.commands import small
from tests.commands import train_here


@pytest.fixture
def config(tmp_path):
    return lambda *sets: load_config(small(tmp_path), list(sets))


def test_disk_for_keep_plus_one_checkpoints(config, tmp_path, monkeypatch):
    """12 bytes per parameter, four times; what is there already counts."""
    wanted = config("checkpoint.keep=3")
    one = 12 * sum(spec.numel for spec in preflight.parameters(wanted.model))
    for free in (4 * one, 4 * one - 1):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if free < 4 * one:
            with pytest.raises(InputError, match=r"keep \+ 1 = 4 checkpoints") as refusal:
                preflight.check_disk(tmp_path, wanted)
            assert "\n" not in str(refusal.value)
        else:
            preflight.check_disk(tmp_path, wanted)
    old = tmp_path / "checkpoints" / "step-00000005"
    old.mkdir(parents=True)
    (old / "rank-0000.safetensors").write_bytes(b".")
    preflight.check_disk(tmp_path, wanted)


def test_memory_for_the_ranks_of_this_host(config):
    wanted = config("layout.dp=4", "layout.zero=1")
    p = sum(spec.numel for spec in preflight.parameters(wanted.model))
    least = 4 * 4 * p + 4 * 4 * p + 2 * 12 * p  # weights and gradients on each rank, the state and its copy once
    with pytest.raises(InputError, match="4 ranks need") as refusal:
        preflight.check_memory(wanted, 4, least - 1)
    assert "\n" not in str(refusal.value)
    preflight.check_memory(wanted, 4, 2 * least)
    preflight.check_memory(wanted, 1, least)
    preflight.check_memory(wanted, 4, None)  # where it can't be known nothing is refused


def test_the_memory_that_is_free_here():
    free = preflight.available_memory()
    assert free is None or 0 < free < 1 << 50


def test_a_dry_batch_consumes_and_changes_nothing(config):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    preflight.dry_batch(config("model.dropout=0.1", "model.tied=true"))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_a_dry_batch_that_is_not_finite(config, monkeypatch):
    real = preflight.new_model

    def broken(config):
        model = real(config)
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        return model

    monkeypatch.setattr(preflight, "new_model", broken)
    with pytest.raises(InputError, match="loss nan"):
        preflight.dry_batch(config())


def test_a_dry_batch_that_fails(config, monkeypatch):
    def fails(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nstack")

    monkeypatch.setattr(preflight, "token_loss", fails)
    with pytest.raises(InputError, match="can't allocate memory") as refusal:
        preflight.dry_batch(config())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("there", [[], ["runs"], ["runs/new"], ["runs/new/notes"]])
def test_a_refused_start_leaves_nothing_behind(tmp_path, monkeypatch, there):
    """Neither the lock's files nor the folders that were made for them; what was there stays."""

    def refused(*_):
        raise InputError("no")

    for name in there:
        (tmp_path / name).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(folder, "preflight", refused)
    assert train_here(tmp_path / "runs/new") == 2
    assert sorted(tmp_path.rglob("*")) == before
