"""Run the reference, run every combination, compare each step: losses, norms, and every tensor of the state."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from onecurve.config import Config, make_config
from onecurve.curve import curve_id
from onecurve.data.folder import create_locked, remove_abandoned
from onecurve.errors import OnecurveError, RunFailed, Stopped
from onecurve.launch import run_ranks
from onecurve.report.console import table
from onecurve.train.parts import new_loader
from onecurve.train.plan import Plan
from onecurve.verify.controls import find
from onecurve.verify.matrix import SAVE_EVERY, Combination, Leg, full_matrix, last_step, quick_matrix, reference
from onecurve.verify.watch import LINES, verify_rank

VALUES = ("loss", "grad_norm", "param_norm")
STALL_SECONDS = 60.0  # at most: these steps are short
FOLDERS = "onecurve-verify-"
Lines = list[dict[str, Any]]
Steps = dict[int, Lines]  # the lines of each step, more than one where the run was rewound


@dataclass(frozen=True)
class Difference:
    """The first step of a run that is not the reference's. `values`: name -> (reference, here), in hex. `tensors`:
    those of the state after the step that differ, "kind name", in canonical order, of `all_tensors`."""

    step: int
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    all_tensors: int = 0
    failure: str = ""  # the run ended with this instead

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        parts = [f"{name} {here} instead of {there}" for name, (there, here) in self.values.items()]
        if self.tensors:
            parts.append(f"{len(self.tensors)} of {self.all_tensors} tensors, the first is {self.tensors[0]}")
        return f"step {self.step}: {'; '.join(parts)}"


@dataclass(frozen=True)
class Result:
    """What came of one combination; `difference` is None where every step has the reference's bits."""

    combination: Combination
    steps: int
    seconds: float
    difference: Difference | None

    @property
    def same(self) -> bool:
        return self.difference is None

    def row(self) -> list[object]:
        found = self.difference
        values = ["DIFFERS" if found and name in found.values else "same" for name in VALUES]
        values.append("DIFFERS" if found and found.tensors else "same")
        if found and found.failure:
            values = ["FAILED", "", "", ""]
        return [str(self.combination), self.steps, *values, f"{self.seconds:.1f}"]


@dataclass(frozen=True)
class Proof:
    """The reference and what was compared with it. `digest`: of the reference's state after its last step."""

    curve_id: str
    steps: int
    control: str
    reference: Result
    digest: str
    results: list[Result]

    @property
    def same(self) -> bool:
        return all(result.same for result in self.results)

    def lines(self) -> list[str]:
        """The proof as plain text, the verdict last."""
        headers = ["layout", "steps", *(name.replace("_", " ") for name in VALUES), "state", "seconds"]
        first = [f"{self.reference.combination} (the reference)", self.steps, "", "", "", "", ""]
        first[-1] = f"{self.reference.seconds:.1f}"
        lines = table(headers, [first, *(result.row() for result in self.results)])
        bad = [result for result in self.results if result.difference is not None]
        if not bad:
            text = f"ONE CURVE  {len(self.results)} layouts, {self.steps} steps each: loss, norms and state are equal"
            return [*lines, "", f"{text} bit for bit, state {self.digest[:16]}"]
        lines += ["", f"DIFFERENT  {len(bad)} of {len(self.results)} layouts are not the reference's"]
        return lines + [f"{result.combination}: {result.difference}" for result in bad]

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.same,
            "curve_id": self.curve_id,
            "steps": self.steps,
            "state": self.digest,
            "control": self.control,
            "reference": _result_json(self.reference),
            "results": [_result_json(result) for result in self.results],
        }


def prove(
    config: Config,
    *,
    quick: bool = False,
    control: str = "",
    combinations: Sequence[Combination] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Proof:
    """Compare layouts of `config`, each over the first steps of its curve. `progress(done, total, next)` is told of
    each run. `control` breaks a clause of the contract on every layout but the reference (see controls.py).

    Raises InputError for a config or corpus that can't be trained, RunFailed if the reference itself fails, Stopped on
    a signal.
    """
    if control:
        find(control)
    chosen = list(combinations or (quick_matrix(config) if quick else full_matrix(config)))
    identity = curve_id(config, new_loader(config, full_check=True).fingerprint)
    remove_abandoned(Path(tempfile.gettempdir()), FOLDERS)
    runner = _Runner(config, identity, control)
    total = 1 + len(chosen)
    base = reference(config)
    progress(0, total, str(base))
    lines, seconds, failure = runner.run(base, keep=True)
    if failure is not None:
        raise failure
    expected = _by_step(lines)
    results = []
    for done, combination in enumerate(chosen, 1):
        progress(done, total, str(combination))
        lines, took, failure = runner.run(combination)
        difference = compare(expected, lines, failure)
        results.append(Result(combination, len({line["step"] for line in lines}), took, difference))
    progress(total, total, "")
    digest = state_of(expected[max(expected)][-1])
    return Proof(identity, len(expected), control, Result(base, len(expected), seconds, None), digest, results)


def compare(expected: Steps, lines: Lines, failure: OnecurveError | None = None) -> Difference | None:
    """The first line that the reference does not have, steps that a resumed or rewound run did again included; else a
    step whose last line is another, or is missing, or the failure that ended the run."""
    for line in lines:
        if found := _difference(expected.get(line["step"], []), line):
            return found
    last = {line["step"]: line for line in lines}
    missing = min(expected.keys() - last.keys(), default=0)
    if failure is not None:
        return Difference(missing or max(expected), failure=str(failure).splitlines()[0])
    if missing:
        return Difference(missing, failure=f"step {missing} is missing")
    ends = (_difference(expected[step][-1:], line) for step, line in sorted(last.items()))
    return next((end for end in ends if end is not None), None)


def _difference(expected: Lines, line: dict[str, Any]) -> Difference | None:
    """None if `line` is one of those `expected` (several where the run was rewound); else what sets it apart."""
    if line in expected:
        return None
    if not expected:
        return Difference(line["step"], failure=f"step {line['step']} is one too many")
    there = expected[-1]
    values = {name: (there[name], line[name]) for name in VALUES if there[name] != line[name]}
    pairs = zip(there["tensors"], line["tensors"], strict=True)
    return Difference(line["step"], values, tuple(_named(b) for a, b in pairs if a != b), len(line["tensors"]))


def _by_step(lines: Lines) -> Steps:
    steps: Steps = {}
    for line in lines:
        steps.setdefault(line["step"], []).append(line)
    return steps


def state_of(line: dict[str, Any]) -> str:
    """The state digest of a step from its tensors' digests; the very one that a checkpoint's manifest states."""
    return hashlib.sha256(b"".join(bytes.fromhex(tensor[-1]) for tensor in line["tensors"])).hexdigest()


def read_lines(path: Path) -> Lines:
    """What a run wrote of its steps, up to the first line that is torn: a full disk leaves one."""
    lines: Lines = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for line in path.read_text("utf-8").splitlines():
            lines.append(json.loads(line))
    return lines


class _Runner:
    """Runs combinations, each in a run folder of its own that is removed afterwards."""

    def __init__(self, config: Config, identity: str, control: str) -> None:
        self._config, self._identity, self._control = config, identity, control

    def run(self, combination: Combination, *, keep: bool = False) -> tuple[Lines, float, OnecurveError | None]:
        """(its steps in the order in which they were done, seconds, what it failed with)."""
        began = time.monotonic()
        failure: OnecurveError | None = None
        folder, lock = create_locked(Path(tempfile.gettempdir()), FOLDERS, 0o700)
        try:
            for number, leg in enumerate(combination.legs):
                try:
                    self._run_leg(leg, folder, resume=number > 0, keep=keep)
                    if leg.kill:
                        failure = RunFailed(f"{leg}: the rank was never there")
                except Stopped:
                    raise Stopped("stopped on request; nothing is proved") from None
                except OnecurveError as error:
                    if leg.kill is None or error.rank != leg.kill.rank or not isinstance(error, RunFailed):
                        failure = error
                if failure is not None:
                    break
            lines = read_lines(folder / LINES)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        return lines, time.monotonic() - began, failure

    def _run_leg(self, leg: Leg, folder: Path, *, resume: bool, keep: bool) -> None:
        tables = self._config.model_dump()
        tables["layout"] = leg.layout.model_dump()
        tables["checkpoint"] |= {"every_steps": SAVE_EVERY, "every_minutes": 0.0, "mirror": ""}
        tables["observe"] |= {"eval_every": 0, "check_replicas_every": 1}
        if self._control and not keep:
            tables["numerics"] |= find(self._control).numerics
        config = make_config(tables)
        plan = Plan(config, folder, self._identity, None, resume, through=last_step(config), quiet=True)
        leg_json = {
            "plan": plan.to_json(),
            "kill": leg.kill.fault if leg.kill else None,
            "control": self._control,
            "reference": keep,
        }
        run_ranks(
            partial(verify_rank, leg_json),
            config.layout.dp,
            folder=folder,
            stall_seconds=min(config.limits.stall_seconds, STALL_SECONDS),
            threads=config.numerics.threads,
            on_signal="kill",
        )


def _named(tensor: Sequence[Any]) -> str:
    kind, name, index, _ = tensor
    return f"{kind} {name}" + (f" slice {index}" if index else "")


def _result_json(result: Result) -> dict[str, Any]:
    found = result.difference
    return {
        "legs": [
            {"layout": leg.layout.model_dump(), "killed": vars(leg.kill) if leg.kill else None}
            for leg in result.combination.legs
        ],
        "steps": result.steps,
        "seconds": round(result.seconds, 3),
        "same": result.same,
        "difference": {**vars(found), "tensors": list(found.tensors), "text": str(found)} if found else None,
    }
