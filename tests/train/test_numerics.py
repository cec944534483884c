"""The numeric environment: recorded, compared on resume, and said or refused where it is another."""

from pathlib import Path

import pytest
import torch
from torch.distributed import get_rank

from onecurve.checkpoint import read_manifest
from onecurve.config import load_config
from onecurve.train import start
from onecurve.train.numerics import differences, environment, fingerprint
from tests.commands import DEMO, digest, events, rows, train, train_here

SHORT = ("train.steps=4", "checkpoint.every_steps=2", "checkpoint.background=false")


def test_every_entry_the_contract_names_is_there():
    found = environment(load_config(DEMO))
    assert found["threads"] == torch.get_num_threads() and found["torch"] == torch.__version__
    for name in ("cpu_capability", "blas", "device", "deterministic", "flush_denormal", "fingerprint", "MKL_CBWR",
                 "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):  # fmt: skip
        assert name in found


def test_the_fingerprint_is_of_the_runs_own_shapes_and_draws_nothing():
    state = torch.get_rng_state()
    first = fingerprint(load_config(DEMO))
    assert first == fingerprint(load_config(DEMO, ["train.seed=7"]))
    assert first != fingerprint(load_config(DEMO, ["model.width=36"]))
    assert first != fingerprint(load_config(DEMO, ["model.context=17"]))
    assert first != fingerprint(load_config(DEMO, ["model.dropout=0.1"]))
    assert torch.equal(state, torch.get_rng_state())


def test_the_fingerprint_takes_the_runs_own_path_through_attention(monkeypatch):
    """With dropout it is not the fused kernel's, so a change there is no change for such a run, and the other way."""
    plain, dropped = load_config(DEMO), load_config(DEMO, ["model.dropout=0.1"])
    before = fingerprint(plain), fingerprint(dropped)
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **o: real(*a, **o) * 1.5)
    assert fingerprint(plain) != before[0] and fingerprint(dropped) == before[1]


def test_differences_are_one_phrase_each():
    assert differences({"a": 1, "b": "x"}, {"a": 1, "b": "x"}) == []
    assert differences({"a": 1}, {"a": 2, "c": 3}) == ["a 1 -> 2", "c None -> 3"]


def stopped_half_way(run: Path, *sets: str) -> None:
    assert train_here(run, *SHORT, *sets) == 0
    for last in (run / "checkpoints/step-00000004").iterdir():
        last.unlink()
    (run / "checkpoints/step-00000004").rmdir()


@pytest.fixture
def elsewhere(monkeypatch):
    """Another machine, as far as its fingerprint tells."""
    monkeypatch.setattr(start, "environment", lambda config: environment(config) | {"fingerprint": "elsewhere"})


def test_record_goes_on_says_so_in_one_line_and_writes_an_event(tmp_path, capfd, elsewhere, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as here:
        here.setattr(start, "environment", environment)
        stopped_half_way(run)
    capfd.readouterr()
    assert train_here(run, flags=("--resume",)) == 0
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "numeric environment" in line]
    assert "changed since step 2: fingerprint" in line and "-> 'elsewhere'" in line and "may differ from here" in line
    (event,) = [event for event in events(run) if event["event"] == "numerics"]
    assert event["step"] == 2 and "elsewhere" in event["changed"][0]
    assert len(rows(run)) == 4
    assert read_manifest(run / "checkpoints/step-00000004").numerics["fingerprint"] == "elsewhere"


def test_refuse_refuses_and_loses_nothing(tmp_path, capfd, elsewhere, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as here:
        here.setattr(start, "environment", environment)
        stopped_half_way(run, 'numerics.on_change="refuse"')
        whole = digest(run, 2)
    capfd.readouterr()
    assert train_here(run, flags=("--resume",)) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "numeric environment" in line]
    assert len(said) == 1 and 'on_change = "refuse"' in said[0] and "-> 'elsewhere'" in said[0]
    assert digest(run, 2) == whole and not (run / "checkpoints/step-00000004").exists()


@pytest.fixture
def odd_ranks(monkeypatch):
    """Ranks 1 and 3 run on more threads, as where a launcher sets them on some hosts only."""
    threads = (1, 2, 1, 2)
    monkeypatch.setattr(start, "environment", lambda config: environment(config) | {"threads": threads[get_rank()]})


def test_ranks_that_differ_are_named_and_recorded(tmp_path, capfd, odd_ranks):
    run = tmp_path / "run"
    assert train_here(run, *SHORT) == 0
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "numeric environment" in line]
    assert "of ranks 1, 3 is not that of rank 0: threads 1 -> 2;" in line and "may differ from here" in line
    (event,) = [event for event in events(run) if event["event"] == "numerics"]
    assert (event["step"], event["ranks"], event["changed"]) == (0, [1, 3], ["threads 1 -> 2"])


def test_ranks_that_differ_are_refused(tmp_path, capfd, odd_ranks):
    assert train_here(tmp_path / "run", *SHORT, 'numerics.on_change="refuse"') == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "numeric environment" in line]
    assert "ranks 1, 3" in line and 'on_change = "refuse"' in line
    assert not (tmp_path / "run/checkpoints").exists()


def test_the_same_environment_says_nothing(tmp_path, capfd):
    run = tmp_path / "run"
    stopped_half_way(run, 'numerics.on_change="refuse"')
    assert train_here(run, flags=("--resume",)) == 0
    assert "numeric environment" not in capfd.readouterr().err
    assert not [event for event in events(run) if event["event"] == "numerics"]


def test_other_kernels_are_another_environment(tmp_path):
    """Not a stand-in: the same machine told to use the plainest kernels really computes other bits."""
    run = tmp_path / "run"
    stopped_half_way(run)
    done = train(run, flags=("--resume",), ATEN_CPU_CAPABILITY="default")
    assert done.returncode == 0
    (event,) = [event for event in events(run) if event["event"] == "numerics"]
    assert {phrase.split()[0] for phrase in event["changed"]} >= {"cpu_capability", "ATEN_CPU_CAPABILITY"}
    assert done.stderr.count("the numeric environment changed") == 1
