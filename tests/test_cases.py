"""Faults that users of other trainers have hit, one named test each, through the command or on real ranks.

Others are tested where their part is: 2 and 3 in tests/data/test_loader.py, 9 in tests/checkpoint/test_policy.py,
11 in tests/checkpoint/test_layouts.py, 13 in tests/export and tests/badday/test_cases.py, 21 in
tests/train/test_killed.py and tests/launch, 22 in tests/launch, 23 in tests/badday/test_cases.py, 24 and 25 in
tests/test_bad_corpus.py and tests/test_bad_input.py.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onecurve import faults
from onecurve.checkpoint import load_checkpoint, read_manifest, state_digest, verify_checkpoint
from onecurve.config import load_config
from onecurve.launch import RankContext
from onecurve.optim import AdamW
from onecurve.parallel import Mesh, ZeroOptimizer, replicate
from onecurve.train.parts import new_loader, new_model
from tests.commands import DEMO, curve, digest, events, rows, train_here
from tests.dist.harness import run_dist

Complain = pytest.CaptureFixture[str]
SAVES = ("checkpoint.every_steps=5", "checkpoint.background=false")


@pytest.fixture(autouse=True)
def no_faults() -> object:
    yield
    faults.disarm()


def same(a: Path, b: Path, step: int = 20) -> bool:
    return curve(a) == curve(b) and len(rows(a)) == step and digest(a, step) == digest(b, step)


def killed(run: Path, step: int, *sets: str) -> None:
    """A run that ends by SIGKILL to one rank once `step` steps are done."""
    faults.arm(f"kill:rank=2,step={step},place=forward")
    assert train_here(run, *sets) == 3
    faults.disarm()


# --- resume ----------------------------------------------------------------------------------------------------------


def test_case_01_resume_with_dropout_agrees_in_every_bit(tmp_path: Path) -> None:
    sets = ("model.dropout=0.1", "train.steps=10", *SAVES)
    torch.manual_seed(1)
    assert train_here(tmp_path / "whole", *sets) == 0
    torch.manual_seed(2)  # ranks are forked: they begin with another state of the global generator
    killed(tmp_path / "resumed", 7, *sets)
    assert train_here(tmp_path / "resumed", *sets, flags=("--resume",)) == 0
    assert same(tmp_path / "whole", tmp_path / "resumed", 10)
    assert [e["step"] for e in events(tmp_path / "resumed") if e["event"] == "resume"] == [5]
    assert train_here(tmp_path / "without", "train.steps=10") == 0
    assert curve(tmp_path / "without") != curve(tmp_path / "whole")  # the dropout was there


def test_case_01_a_loader_consumes_no_random_state() -> None:
    def state() -> tuple[bytes, object, object]:
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())

    before = state()
    loader = new_loader(load_config(DEMO, ["model.dropout=0.1"]))
    for step in (0, 3, 7):
        list(loader.micro_batches(step, range(4)))
    assert state() == before


def test_case_04_what_was_loaded_has_the_manifests_digest(tmp_path: Path) -> None:
    assert train_here(tmp_path / "run", "train.steps=5") == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000005"
    config = load_config(DEMO)

    def work(context: RankContext) -> list[object]:
        mesh = Mesh(dp=context.world)
        model = new_model(config)
        optimizer = ZeroOptimizer(model, mesh, stage=1, leaves=4)
        before = state_digest(optimizer)
        load_checkpoint(checkpoint, optimizer)
        loaded = state_digest(optimizer)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        if mesh.rank == 1:  # one weight that was quietly not restored: no loss would show it
            optimizer.master[17] = 0.0
        return [before, loaded, state_digest(optimizer), float(weights.norm()), optimizer.updates]

    told = run_dist(work, 2)
    assert told[0] == told[1]
    before, loaded, spoilt, _, updates = told[0]
    assert loaded == read_manifest(checkpoint).state_digest and updates == 5
    assert len({before, loaded, spoilt}) == 3


@pytest.mark.parametrize(("killed_at", "resumed_at"), [(3, 2), (13, 12)], ids=["in the warm-up", "in the decay"])
def test_case_05_rates_actually_used_are_logged_and_survive_a_resume(
    killed_at: int, resumed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = tmp_path / "used"
    update = AdamW.update

    def spy(self: AdamW, ranges: list, *, step: int, lr: float, decay: bool) -> None:
        if torch.distributed.get_rank() == 0 and ranges and decay:
            with used.open("a") as file:
                file.write(f"{step} {lr.hex()} {self.weight_decay}\n")
        update(self, ranges, step=step, lr=lr, decay=decay)

    monkeypatch.setattr(AdamW, "update", spy)
    sets = (
        "optimizer.warmup_steps=6", "optimizer.decay=cosine", "optimizer.min_lr=5e-4", "optimizer.weight_decay=0.1",
        "checkpoint.every_steps=2", "checkpoint.background=false",
    )  # fmt: skip
    assert train_here(tmp_path / "whole", *sets) == 0
    whole = [(row["lr"], row["weight_decay"]) for row in rows(tmp_path / "whole")]
    assert [line.split() for line in used.read_text().splitlines()] == [
        [str(step), rate.hex(), str(decay)] for step, (rate, decay) in enumerate(whole, start=1)
    ]
    rates = [rate for rate, _ in whole]
    assert rates[:6] == pytest.approx([5e-3 * k / 6 for k in range(1, 7)])
    assert rates[6:] == sorted(rates[6:], reverse=True) and rates[-1] == pytest.approx(5e-4)

    killed(tmp_path / "resumed", killed_at, *sets)
    assert train_here(tmp_path / "resumed", *sets, flags=("--resume",)) == 0
    assert [e["step"] for e in events(tmp_path / "resumed") if e["event"] == "resume"] == [resumed_at]
    assert [(row["lr"], row["weight_decay"]) for row in rows(tmp_path / "resumed")] == whole
    assert same(tmp_path / "whole", tmp_path / "resumed")


def test_case_05_another_number_of_steps_on_resume_is_said_and_not_applied(tmp_path: Path, capfd: Complain) -> None:
    sets = ("optimizer.decay=linear", *SAVES)
    assert train_here(tmp_path / "whole", *sets) == 0
    run = tmp_path / "run"
    killed(run, 7, *sets)
    assert train_here(run, *sets, "train.steps=40", flags=("--resume",)) == 2
    longer = tmp_path / "longer.toml"
    longer.write_text((run / "config.toml").read_text().replace("steps = 20", "steps = 40"))
    capfd.readouterr()
    assert train_here(run, config=longer, flags=("--resume",)) == 0
    assert "train.steps = 40 is not applied: the run goes on with 20" in capfd.readouterr().err
    assert same(tmp_path / "whole", run)


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.trace),)


FILES = ["manifest.json", "manifest.sha256", *(f"rank-{rank:04d}.safetensors" for rank in range(4))]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 5, 10 and 15, killed after step 17."""
    run = tmp_path_factory.mktemp("interrupted") / "run"
    killed(run, 17, *SAVES)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step-{s:08d}" for s in (5, 10, 15)]
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train_here(run) == 0
    return run


def goes_on_without(
    newest: Callable[[Path], None],
    interrupted: Path,
    whole: Path,
    tmp_path: Path,
    capfd: Complain,
    resumed_at: int = 10,
) -> str:
    """Does `newest(checkpoint)` to the one of step 15; the run must say so, go on from the one before, pass step 15
    again, and end as if nothing had been. Returns what it said."""
    run = Path(shutil.copytree(interrupted, tmp_path / "run"))
    newest(run / "checkpoints" / "step-00000015")
    capfd.readouterr()
    assert train_here(run, *SAVES, flags=("--resume",)) == 0
    said = capfd.readouterr().err
    assert said.count("passed over step-00000015") == (1 if resumed_at < 15 else 0), said
    assert [e["step"] for e in events(run) if e["event"] == "resume"] == [resumed_at]
    assert same(run, whole)
    assert verify_checkpoint(run / "checkpoints" / "step-00000015") == []
    return said


def test_the_newest_checkpoint_is_used_where_nothing_is_wrong_with_it(
    interrupted: Path, whole: Path, tmp_path: Path, capfd: Complain
) -> None:
    goes_on_without(lambda checkpoint: None, interrupted, whole, tmp_path, capfd, resumed_at=15)


@pytest.mark.parametrize("name", FILES)
def test_case_06_a_pickle_in_the_place_of_any_file_is_refused_and_never_opened(
    name: str, interrupted: Path, whole: Path, tmp_path: Path, capfd: Complain
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    pickle.loads(pickle.dumps(Bomb(tmp_path / "works")))
    assert (tmp_path / "works").exists()
    said = goes_on_without(lambda c: (c / name).write_bytes(bomb) and None, interrupted, whole, tmp_path, capfd)
    assert name in said or "manifest" in said
    assert not (tmp_path / "exploded").exists()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_case_07_a_partial_folder_is_named_and_passed_again(
    interrupted: Path, whole: Path, tmp_path: Path, capfd: Complain
) -> None:
    def partial(checkpoint: Path) -> None:
        for name in ("manifest.json", "manifest.sha256", "rank-0003.safetensors"):
            (checkpoint / name).unlink()
        (checkpoint.parent / ".tmp-step-00000020-0a1b2c3d").mkdir()

    said = goes_on_without(partial, interrupted, whole, tmp_path, capfd)
    assert "manifest.json: is missing" in said and "step-00000020: an unfinished save was removed" in said
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob(".*")] == []


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "missing": lambda file: file.unlink(),
    "zero bytes": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_case_08_a_damaged_shard_is_named_and_the_one_before_is_used(
    damage: str, interrupted: Path, whole: Path, tmp_path: Path, capfd: Complain
) -> None:
    name = "rank-0002.safetensors"
    said = goes_on_without(lambda c: DAMAGE[damage](c / name) and None, interrupted, whole, tmp_path, capfd)
    assert name in said


@pytest.mark.parametrize("background", ["true", "false"])
def test_case_08_a_full_disk_ends_the_run_and_loses_nothing(background: str, tmp_path: Path, capfd: Complain) -> None:
    run, setting = tmp_path / "run", f"checkpoint.background={background}"
    faults.arm("io:rank=1,step=20,place=save.write")
    assert train_here(run, setting) == 3
    said = capfd.readouterr().err
    assert "rank 1" in said and "rank-0001.safetensors" in said and "No space left on device" in said
    assert "Traceback" not in said  # the disk's fault, not the program's
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000010"]
    assert verify_checkpoint(run / "checkpoints" / "step-00000010") == []
    faults.disarm()
    assert train_here(run, setting, flags=("--resume",)) == 0
    assert train_here(tmp_path / "whole") == 0
    assert same(run, tmp_path / "whole")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_case_10_one_flipped_bit_in_any_file_is_seen(
    name: str, interrupted: Path, whole: Path, tmp_path: Path, capfd: Complain
) -> None:
    said = goes_on_without(lambda c: flip(c / name), interrupted, whole, tmp_path, capfd)
    assert name in said


def test_case_10_two_swapped_shards_are_seen(interrupted: Path, whole: Path, tmp_path: Path, capfd: Complain) -> None:
    def swap(checkpoint: Path) -> None:
        one, two = (checkpoint / f"rank-000{r}.safetensors" for r in (1, 2))
        assert one.stat().st_size == two.stat().st_size
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)

    said = goes_on_without(swap, interrupted, whole, tmp_path, capfd)
    assert "rank-0001.safetensors" in said and "rank-0002.safetensors" in said


# --- gradients -------------------------------------------------------------------------------------------------------


def test_case_18_the_rate_per_step_depends_on_neither_ranks_nor_accumulation(tmp_path: Path) -> None:
    sets = ("train.steps=6", "optimizer.warmup_steps=3", "optimizer.decay=linear", "train.micro_batch=2")
    seen = {}
    for dp in (1, 2, 4):
        for accumulate in (1, 4):
            run = tmp_path / f"{dp}-{accumulate}"
            assert train_here(run, *sets, f"layout.dp={dp}", f"train.accumulate={accumulate}") == 0
            seen[dp, accumulate] = [row["lr"] for row in rows(run)]
            assert {row["tokens"] for row in rows(run)} == {4 * accumulate * 2 * 16}
    assert set(map(tuple, seen.values())) == {tuple(seen[1, 1])} and len(set(seen[1, 1])) > 3


class Odd(nn.Module):
    """Parameters of 8, 0, 24 and 1 elements; a transposed one; one that is never used; one used in the first
    micro-batch only; one that leaf 2 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=drawn)

        self.eight = nn.Parameter(normal(8))
        self.none = nn.Parameter(normal(0))
        self.inner = nn.Module()
        self.inner.matrix = nn.Parameter(normal(3, 8))
        self.one = nn.Parameter(normal(1))
        self.transposed = nn.Parameter(normal(6, 3).t())
        self.unused = nn.Parameter(normal(3, 3))
        self.first = nn.Parameter(normal(5, 6))
        self.rare = nn.Parameter(normal(6))

    def forward(self, x: Tensor, leaf: int, micro: int) -> Tensor:
        h = torch.tanh(x * self.eight @ self.inner.matrix.t() * self.one + self.none.sum())
        h = h @ self.transposed
        if micro == 0:
            h = h + self.first.sum(0)
        if leaf == 2:
            h = h * self.rare
        return h.square().sum()

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("all", self)]


STEPS, LEAVES, ACCUMULATE, ROWS = 3, 4, 2, 6


def inputs(step: int, leaf: int, micro: int) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * step + 10 * leaf + micro)
    return torch.randn(ROWS, 8, generator=drawn)


def train_odd(context: RankContext, stage: int) -> list[object]:
    mesh = Mesh(dp=context.world)
    model = Odd()
    replicate(model, mesh)
    optimizer = ZeroOptimizer(
        model, mesh, stage=stage, leaves=LEAVES, accumulate=ACCUMULATE, lr=1e-2, weight_decay=0.1, clip=1.0
    )
    norms = []
    for step in range(STEPS):
        for leaf in optimizer.leaf_ids:
            for micro in range(ACCUMULATE):
                optimizer.backward(model(inputs(step, leaf, micro), leaf, micro), ROWS)
        norms.append(optimizer.step().norm)
    values = {place.name: None for place in optimizer.held()}
    return [state_digest(optimizer), norms, sorted(values), optimizer.parameter_norm()]


def reference_odd() -> tuple[list[float], dict[str, Tensor]]:
    """The same in plain PyTorch: (gradient norms, parameters)."""
    model = Odd()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    norms = []
    for step in range(STEPS):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # a parameter that nothing used has gradient zero, and decays
        for leaf in range(LEAVES):
            for micro in range(ACCUMULATE):
                (model(inputs(step, leaf, micro), leaf, micro) / (ROWS * LEAVES * ACCUMULATE)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def test_case_19_odd_parameters_on_every_stage_and_width() -> None:
    (alone,) = run_dist(train_odd, 1, 1)
    for stage in range(4):
        for world in (2, 3, 4):
            for told in run_dist(train_odd, world, stage):
                assert (told[0], told[1], told[3]) == (alone[0], alone[1], alone[3]), (stage, world)
    norms, parameters = reference_odd()
    assert alone[1] == pytest.approx(norms, rel=1e-5)
    total = float(torch.cat([p.flatten() for p in parameters.values()]).norm())
    assert alone[3] == pytest.approx(total, rel=1e-5)
    assert alone[2] == sorted(name for name in parameters if name != "none")


def test_case_19_a_parameter_that_no_leaf_used_decays_and_nothing_else() -> None:
    def work(context: RankContext, stage: int) -> list[float]:
        train = Odd()
        mesh = Mesh(dp=context.world)
        optimizer = ZeroOptimizer(
            train, mesh, stage=stage, leaves=LEAVES, accumulate=ACCUMULATE, lr=1e-2, weight_decay=0.1
        )
        for leaf in optimizer.leaf_ids:
            for micro in range(ACCUMULATE):
                optimizer.backward(train(inputs(0, leaf, micro), leaf, micro), ROWS)
        optimizer.step()
        place = [p for p in optimizer.held() if p.name == "unused"]
        return [float(x) for p in place for x in optimizer.master[p.at : p.at + p.length]]

    expected = Odd().unused.detach().flatten() * (1 - 1e-2 * 0.1)
    for stage in (1, 3):
        found = [x for told in run_dist(work, 4, stage) for x in told]
        assert found == pytest.approx(expected.tolist(), rel=1e-6)
