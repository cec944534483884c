"""SIGKILL at random moments, saves included, to one rank or to all; resumed at another random width and stage."""

import contextlib
import os
import random
import secrets
import signal
import time
from pathlib import Path

import pytest

from onecurve import faults
from tests.commands import ROOT, curve, digest, rows, train_here
from tests.launch.helpers import Command
from tests.processes import children

ODD, STEPS, LEAVES = ROOT / "configs" / "odd.toml", 12, 6
CURVE = (f"train.steps={STEPS}", f"train.leaves={LEAVES}", "train.accumulate=2")
SAVES = ("checkpoint.every_steps=3", "checkpoint.keep=2", "observe.log_every=0")
SAVE_PLACES = ("save.begin", "save.write", "save.written", "save.commit", "save.rename")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    run = tmp_path_factory.mktemp("reference") / "run"
    began = time.monotonic()
    assert train_here(run, *CURVE, *SAVES, "layout.dp=1", "layout.zero=0", config=ODD) == 0
    return run, (time.monotonic() - began) / STEPS


def layout(rng: random.Random, other_than: tuple[int, int] = (-1, -1)) -> tuple[tuple[int, int], list[str]]:
    """A random (width, stage), neither of which is that of `other_than`, and the settings that make it."""
    width = rng.choice([w for w in range(1, LEAVES + 1) if w != other_than[0]])
    place = width, rng.choice([zero for zero in range(4) if zero != other_than[1]])
    transport, background = rng.choice(["auto", "p2p", "alltoall"]), rng.choice(["true", "false"])
    return place, [
        f"layout.dp={place[0]}",
        f"layout.zero={place[1]}",
        f"layout.transport={transport}",
        f"checkpoint.background={background}",
    ]


def ranks_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def wait_for_row(run: Path, row: int, command: Command) -> None:
    limit = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_bytes().splitlines()) < row:
        assert time.monotonic() < limit
        if (run / "gone").exists():
            return
        time.sleep(0.001)


def kill_once(rng: random.Random, folder: Path, step_seconds: float) -> str:
    """One rehearsal: start, kill, resume elsewhere. Returns what was done, or "" if the kill came too late."""
    run = folder / "run"
    first, sets = layout(rng)
    second, resumed_sets = layout(rng, other_than=first)
    way = rng.choice(["rank", "tree", "save"])
    fault = ""
    if way == "save":
        rank, place, after = rng.randrange(first[0]), rng.choice(SAVE_PLACES), rng.randrange(3)
        rank = 0 if place in ("save.commit", "save.rename") else rank
        fault = f"kill:rank={rank},place={place},after={after}"

    def main() -> None:
        faults.arm(fault)
        os._exit(train_here(run, *CURVE, *SAVES, *sets, config=ODD))

    command = Command(main, folder)
    told = f"dp {first[0]} zero {first[1]}: {fault or way}"
    if not fault:
        wait_for_row(run, rng.randrange(STEPS), command)
        time.sleep(rng.uniform(0.0, 2 * step_seconds))
        ranks = ranks_of(command.pid)
        victims = [command.pid, *ranks] if way == "tree" else [rng.choice(ranks)] if ranks else []
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        told += f" at row {len(rows(run)) if (run / 'metrics.jsonl').exists() else 0}"
    code = command.wait(60)
    if code == 0:
        return ""
    assert code == (-signal.SIGKILL if way == "tree" else 3), told
    limit = time.monotonic() + 10
    while ranks_of(command.pid):  # ranks of a killed parent leave by themselves, at once
        assert time.monotonic() < limit, told
    assert train_here(run, *CURVE, *SAVES, *resumed_sets, flags=("--resume",), config=ODD) == 0, told
    return f"{told}, resumed at dp {second[0]} zero {second[1]}"


def rehearse(kills: int, tmp_path: Path, reference, capsys) -> None:
    expected, step_seconds = reference
    seed = int(os.environ.get("ONECURVE_SEED", secrets.randbelow(2**32)))
    rng, done, tries = random.Random(seed), [], 0
    while len(done) < kills:
        tries += 1
        assert tries <= 4 * kills, f"seed {seed}: the runs end before they are killed"
        folder = tmp_path / f"{tries:02d}"
        folder.mkdir()
        told = kill_once(rng, folder, step_seconds)
        if not told:
            continue
        done.append(told)
        run = folder / "run"
        where = f"seed {seed}, kill {len(done)}: {told}"
        assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1)), where
        assert curve(run) == curve(expected), where
        assert digest(run, STEPS) == digest(expected, STEPS), where
    assert children() == []
    with capsys.disabled():
        print(f"\n{kills} kills (ONECURVE_SEED={seed}), all at the reference digest {digest(expected, STEPS)[:16]}")
        print("\n".join(done))


@pytest.mark.slow
def test_three_random_kills(tmp_path, reference, capsys):
    rehearse(3, tmp_path, reference, capsys)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_random_kills(tmp_path, reference, capsys):
    rehearse(20, tmp_path, reference, capsys)
