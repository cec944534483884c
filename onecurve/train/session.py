"""One rank's side of a run: everything the loop works with, made from the config and the run folder."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from onecurve.checkpoint import Manifest, latest_checkpoint, load_checkpoint
from onecurve.checkpoint.background import Checkpointer
from onecurve.checkpoint.errors import CheckpointError, ForeignCheckpoint, NotWritable, SaveFailed
from onecurve.checkpoint.patience import Alive
from onecurve.checkpoint.store import list_steps, remove_checkpoint
from onecurve.config import Config
from onecurve.data.evaluation import EvaluationSet
from onecurve.data.loader import Loader
from onecurve.errors import Stopped
from onecurve.launch import RankContext
from onecurve.model import GPT
from onecurve.optim import Schedule
from onecurve.parallel import Mesh, ZeroOptimizer
from onecurve.report.console import Progress, say_on
from onecurve.train.evaluate import evaluate
from onecurve.train.guard import Guard, GuardState, Rollback, data_step
from onecurve.train.memory import RankMemory, aggregate, measure
from onecurve.train.parts import new_model
from onecurve.train.plan import Plan
from onecurve.train.records import METRICS, REMOVED, Metrics, log_event, write_json


@dataclass
class Session:
    """The parts of a run on this rank, and where it is. `step` updates are done."""

    plan: Plan
    context: RankContext
    mesh: Mesh
    model: GPT
    optimizer: ZeroOptimizer
    loader: Loader
    held_out: EvaluationSet | None
    schedule: Schedule
    guard: Guard
    saver: Checkpointer
    numerics: dict[str, Any]
    metrics: Metrics | None = None
    lines: Progress | None = None  # off a terminal rank 0 prints a line per step; on one the launcher draws a bar
    step: int = 0
    val_loss: float | None = None  # the last one, for the bar
    saved_at: float = field(default_factory=time.monotonic)
    memory: tuple[int, float] | None = None  # maximum and mean over ranks, once measured

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def leader(self) -> bool:
        return self.mesh.rank == 0

    def event(self, name: str, *, step: int | None = None, **details: Any) -> None:
        if self.leader:
            log_event(self.plan.folder, name, self.step if step is None else step, **details)

    def say(self, text: str) -> None:
        """One line on stderr for the person who watches, once per run."""
        if self.leader and not self.plan.quiet:
            say_on(sys.stderr, f"onecurve: {text}")

    def learning_rate(self, step: int) -> float:
        """The rate that update `step` (1-based) uses, a rehearsed fault included."""
        fault = self.config.faults.lr_multiplier
        rate = self.schedule(step - 1)
        if fault is not None and fault.step == step and step not in self.guard.state.spent:
            rate *= fault.factor
            self.say(f"step {step}: the rehearsed fault multiplies the learning rate by {fault.factor:g}")
            self.event("fault", step=step, factor=fault.factor)
        return rate

    @property
    def fault_steps(self) -> tuple[int, ...]:
        fault = self.config.faults.lr_multiplier
        return (fault.step,) if fault is not None else ()

    def info(self, pending_row: dict[str, Any] | None = None) -> dict[str, Any]:
        """The fields of a manifest that the optimizer does not know. `pending_row`: a row not yet in the metrics."""
        state = self.guard.state
        return {
            "curve_id": self.plan.curve_id,
            "numerics": self.numerics,
            "data_fingerprint": self.loader.fingerprint,
            "data_step": data_step(self.step + 1, state.skipped),  # of the next step
            "skipped": list(state.skipped),
            "guard": state.to_json() | ({"pending_row": pending_row} if pending_row else {}),
            "faults": list(state.spent),
        }

    def write_row(self, row: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(row)
        if self.lines is not None:
            shown = {name: row.get(name) for name in ("loss", "val_loss", "tokens_per_second")}
            self.lines.update(row["step"], **shown)
        self.val_loss = row.get("val_loss", self.val_loss)
        numbers = (row["loss"], row["tokens_per_second"], self.val_loss)
        text = " ".join("None" if number is None else f"{number:.6g}" for number in numbers)
        self.context.progress(self.step, self.config.train.steps, text)

    def keep_alive(self) -> bool:
        """A sign of life within a step; whether this rank was asked to stop."""
        self.context.progress(self.step, self.config.train.steps)
        return self.context.stop_requested

    def save(self, pending_row: dict[str, Any] | None = None, *, wait: bool = False) -> None:
        """Save the state after `step`; in the background, if the config says so, unless `wait`. Collective."""
        old_enough = max(self.step - 2, 0)  # for a rollback from the next step
        self._note_saves(lambda: self.saver.save(self.step, self.info(pending_row), protect=old_enough))
        if wait:
            self._note_saves(self.saver.drain)
        self.saved_at = time.monotonic()

    def poll(self, all_ready: bool) -> None:
        """Commit what was written behind the training, once all ranks have written theirs. Collective."""
        self._note_saves(lambda: self.saver.poll(all_ready))

    def close(self) -> None:
        """Wait for what is still being written, and copied to the mirror. Collective."""
        self._note_saves(self.saver.close)
        if self.memory is not None:
            self.measure_memory()  # again: now the copies that saves work from are there

    def _note_saves(self, work: Callable[[], list[Manifest]]) -> None:
        """Do it, and record what came of it. A save that failed ends the run, in this call or a later one: a run that
        can't save promises work that it can't keep."""
        try:
            committed = work()
        except NotWritable as error:  # bad input before the first step; now it is a failure
            raise SaveFailed(str(error)) from error
        for manifest in committed:
            self.event("checkpoint", saved=manifest.step)
        for note in self.saver.take_notes():
            self.say(note)
            self.event("note", text=note)

    def evaluate(self) -> float | None:
        """The loss on the held-out part; None if a rank was asked to stop meanwhile. Collective."""
        assert self.held_out is not None
        self.keep_alive()
        self.context.place("evaluation")
        return evaluate(self.model, self.held_out, self.mesh, self.keep_alive)

    def restore(self, path: Path | None) -> Manifest | None:
        """Go to the state of a checkpoint of this curve, or with None to where the curve starts. Collective."""
        manifest, row = None, None
        if path is not None:
            alive = self.context.alive
            manifest = load_checkpoint(path, self.optimizer, curve_id=self.plan.curve_id, alive=alive)
            self.step = manifest.step
            self.guard.state = GuardState.from_json(manifest.guard)
            row = manifest.guard.get("pending_row")
        else:
            if self.plan.parent_digest:
                load_parent(self.plan, self.optimizer, self.context.alive)
            else:
                # Trained parameters only: this model has no buffers, and nothing of it is frozen.
                self.optimizer.reset(dict(new_model(self.config).named_parameters()))
            self.step = 0
            self.guard.state = GuardState()
        if self.leader:
            keep = self.step - 1 if row else self.step
            if self.metrics is None:
                self.metrics = Metrics(self.plan.folder, keep)
            else:
                self.metrics.cut(keep)
            if self.metrics.lost or self.metrics.removed:
                self.say(damage(self.metrics, keep))
                self.event("metrics_lost", rows=self.metrics.lost, removed=self.metrics.removed)
        if row:  # the run was stopped while it evaluated after this step: that comes first
            if self.held_out is not None and (loss := self.evaluate()) is None:
                raise Stopped(f"stopped at step {self.step} of {self.config.train.steps}")
            self.write_row(row | ({"val_loss": loss} if self.held_out is not None else {}))
            if self.step == self.plan.last_step:
                self.save()  # nothing else will, and without it the run would never count as finished
        return manifest

    def newest(self, at_most: int | None = None) -> Path | None:
        """The newest whole checkpoint, not past step `at_most`; newer ones are removed (they hold a bad update).

        Says which were passed over. Collective.
        """
        folder = self.saver.folder
        if at_most is not None and self.leader:
            if self.plan.fence is not None:
                self.plan.fence.check()  # those of a run that took the folder meanwhile are not ours to remove
            for found in list_steps(folder):
                if found.step > at_most:
                    remove_checkpoint(found.path)
        self.mesh.barrier()
        alive = self.context.alive
        path, reasons = latest_checkpoint(folder, self.mesh, curve_id=self.plan.curve_id, finite=True, alive=alive)
        for reason in reasons:
            self.say(f"passed over {reason}")
            self.event("skipped_checkpoint", reason=reason)
        return path

    def go_back(self, rollback: Rollback) -> None:
        """Rewind weights, moments, schedule, data, guard, metrics together; the loop replays the rest. Collective."""
        self._note_saves(self.saver.drain)
        self.context.place("rollback")
        self.say(f"step {rollback.step}: {rollback.reason}")
        self.restore(self.newest(at_most=rollback.back_to))
        # The rows up to `back_to` draw the same batches with the longer list: those it adds lie behind them.
        self.guard.state = replace(rollback.state, last_loss=self.guard.state.last_loss)
        self.event(
            "rollback", step=rollback.step, reason=rollback.reason, back_to=rollback.back_to, restored=self.step,
            skipped=rollback.dropped, count=rollback.state.rollbacks,
        )  # fmt: skip
        source = f"from the checkpoint of step {self.step}" if self.step else "from the start"
        if self.step < rollback.back_to:
            source += f", then {numbered('step', self.step + 1, rollback.back_to)} again"
        self.say(
            f"rollback {rollback.state.rollbacks} of at most {self.guard.max_rollbacks} in a row: to the state after "
            f"step {rollback.back_to} ({source}); {numbered('step', rollback.back_to + 1, rollback.step)} with new "
            f"batches in place of {', '.join(map(str, rollback.dropped))}"
        )
        self.context.place("replay")

    def measure_memory(self) -> None:
        """Count live tensors on every rank, once all buffers exist, and write memory.json. Collective."""
        trained = self.optimizer.share.numel
        cut = 1 if self.optimizer.stage == 0 else self.mesh.dp
        scratch = self.saver.scratch_bytes + self.optimizer.gathered_bytes
        mine = measure(self.mesh.rank, self.optimizer.tensors(), trained, cut, scratch)
        profile = [RankMemory(**json.loads(row)) for row in self.mesh.share(json.dumps(asdict(mine)).encode())]
        maximum, mean = self.memory = aggregate(profile)
        if self.leader:
            rows = [asdict(row) | {"total": row.total} for row in profile]
            write_json(self.plan.folder / "memory.json", {"ranks": rows, "maximum": maximum, "mean": mean})


def load_parent(plan: Plan, optimizer: ZeroOptimizer, alive: Alive) -> None:
    """The state that the curve starts from. Collective. Raises CheckpointError where the parent is gone or has another
    state by now: it may have been trained on since the plan was made, or between two starts of this run."""
    cure = "bring the parent's checkpoint back and resume, or start a new run with --from"
    wanted = f"this curve starts from a state with the digest {plan.parent_digest[:16]}"
    if plan.parent is None:
        raise CheckpointError(f"{plan.folder}: has no whole checkpoint, and {wanted}, whose place is not known; {cure}")
    try:
        manifest = load_checkpoint(plan.parent, optimizer, alive=alive)
    except CheckpointError as error:
        text = f"{plan.folder}: has no whole checkpoint, and its parent can't be used: {error}; {cure}"
        raise type(error)(text) from None
    if manifest.state_digest != plan.parent_digest:
        found = manifest.state_digest[:16]
        raise ForeignCheckpoint(f"{plan.folder}: {wanted}, but {plan.parent} has {found} now; {cure}")


def damage(metrics: Metrics, keep: int) -> str:
    """What was found wrong with the rows up to step `keep`, in one line."""
    parts = [f"lines that are no rows, moved to {REMOVED}: {metrics.removed}"] * bool(metrics.removed)
    parts += [f"steps without a row, of the first {keep}: {metrics.lost}"] * bool(metrics.lost)
    return f"{METRICS} was changed from outside: {'; '.join(parts)}"


def numbered(what: str, first: int, last: int) -> str:
    """ "step 11", or "steps 11 to 13"."""
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"
