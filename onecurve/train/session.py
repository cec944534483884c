"""One rank's side of a run: everything the loop works with, made from the config and the run folder."""

import json
import platform
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from onecurve import __version__
from onecurve.checkpoint import Manifest, latest_checkpoint, load_checkpoint
from onecurve.checkpoint.background import Checkpointer
from onecurve.checkpoint.mirror import Mirror
from onecurve.checkpoint.store import list_steps, remove_checkpoint
from onecurve.config import Config
from onecurve.data.evaluation import EvaluationSet
from onecurve.data.loader import Loader
from onecurve.data.text import open_corpus
from onecurve.errors import ConfigError, Stopped
from onecurve.launch import RankContext
from onecurve.model import GPT
from onecurve.optim import Schedule
from onecurve.parallel import Mesh, ZeroOptimizer, replicate
from onecurve.report.console import Progress
from onecurve.train.evaluate import evaluate
from onecurve.train.guard import Guard, GuardState, Rollback
from onecurve.train.memory import RankMemory, aggregate, measure
from onecurve.train.numerics import differences, environment
from onecurve.train.plan import Plan
from onecurve.train.records import Metrics, log_event, write_json

EVALUATION_TOKENS = 1 << 17  # of the held-out part, at most so many, spread evenly over it


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
    saved_at: float = field(default_factory=time.monotonic)
    memory: tuple[int, float] | None = None  # maximum and mean over ranks, once measured

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def leader(self) -> bool:
        return self.mesh.rank == 0

    def event(self, name: str, **details: Any) -> None:
        if self.leader:
            log_event(self.plan.folder, name, self.step, **details)

    def say(self, text: str) -> None:
        """One line on stderr for the person who watches, once per run."""
        if self.leader and not self.plan.quiet:
            print(f"onecurve: {text}", file=sys.stderr, flush=True)

    def learning_rate(self, step: int) -> float:
        """The rate that update `step` (1-based) uses, a rehearsed fault included."""
        fault = self.config.faults.lr_multiplier
        rate = self.schedule(step - 1)
        if fault is not None and fault.step == step and step not in self.guard.state.spent:
            rate *= fault.factor
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
            "data_step": self.step + len(state.skipped),
            "skipped": list(state.skipped),
            "guard": state.to_json() | ({"pending_row": pending_row} if pending_row else {}),
            "faults": list(state.spent),
        }

    def write_row(self, row: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(row)
        if self.lines is not None:
            self.lines.update(row["step"], loss=row["loss"], tokens_per_second=row["tokens_per_second"])
        self.context.progress(self.step, self.config.train.steps, f"{row['loss']} {row['tokens_per_second']}")

    def keep_alive(self) -> bool:
        """A sign of life within a step; whether this rank was asked to stop."""
        self.context.progress(self.step, self.config.train.steps)
        return self.context.stop_requested

    def save(self, pending_row: dict[str, Any] | None = None) -> None:
        """Save the state after `step`; in the background, if the config says so. Collective."""
        keep_for_rollback = self.step - 2
        for manifest in self.saver.save(self.step, self.info(pending_row), protect=max(keep_for_rollback, 0)):
            self.event("checkpoint", saved=manifest.step)
        self.saved_at = time.monotonic()

    def close(self) -> None:
        """Wait for what is still being written. Collective."""
        for manifest in self.saver.close():
            self.event("checkpoint", saved=manifest.step)
        for note in self.saver.take_notes():
            self.say(note)
            self.event("note", text=note)
        self.event("end")

    def evaluate(self) -> float | None:
        """The loss on the held-out part; None if a rank was asked to stop meanwhile. Collective."""
        assert self.held_out is not None
        return evaluate(self.model, self.held_out, self.mesh, self.keep_alive)

    def restore(self, path: Path | None) -> Manifest | None:
        """Go to the state of a checkpoint of this curve, or with None to where the curve starts. Collective."""
        manifest, row = None, None
        if path is not None:
            manifest = load_checkpoint(path, self.optimizer, curve_id=self.plan.curve_id)
            self.step = manifest.step
            self.guard.state = GuardState.from_json(manifest.guard)
            row = manifest.guard.get("pending_row")
        else:
            if self.plan.parent is not None:
                load_checkpoint(self.plan.parent, self.optimizer)
            else:
                self.optimizer.reset(dict(new_model(self.config).named_parameters()))
            self.step = 0
            self.guard.state = GuardState()
        if self.leader:
            keep = self.step - 1 if row else self.step
            if self.metrics is None:
                self.metrics = Metrics(self.plan.folder, keep)
            else:
                self.metrics.cut(keep)
        if row:  # the run was stopped while it evaluated after this step: that comes first
            if self.held_out is not None and (loss := self.evaluate()) is None:
                raise Stopped(f"stopped at step {self.step} of {self.config.train.steps}")
            self.write_row(row | ({"val_loss": loss} if self.held_out is not None else {}))
        return manifest

    def newest(self, at_most: int | None = None) -> Path | None:
        """The newest whole checkpoint, not past step `at_most`; newer ones are removed (they hold a bad update).

        Says which were passed over. Collective.
        """
        folder = self.saver.folder
        if at_most is not None and self.leader:
            for found in list_steps(folder):
                if found.step > at_most:
                    remove_checkpoint(found.path)
        self.mesh.barrier()
        path, reasons = latest_checkpoint(folder, self.mesh, curve_id=self.plan.curve_id, finite=True)
        for reason in reasons:
            self.say(f"passed over {reason}")
            self.event("skipped_checkpoint", reason=reason)
        return path

    def go_back(self, rollback: Rollback) -> None:
        """Rewind weights, moments, schedule, data, guard, metrics together; the loop replays the rest. Collective."""
        self.saver.drain()
        self.step = rollback.step - 1
        self.event(
            "rollback", at=rollback.step, reason=rollback.reason, back_to=rollback.back_to, skipped=rollback.dropped
        )
        self.say(
            f"step {rollback.step}: {rollback.reason}; back to the state after step {rollback.back_to}, "
            f"giving up batches {list(rollback.dropped)}"
        )
        self.restore(self.newest(at_most=rollback.back_to))
        # The rows up to `back_to` draw the same batches with the longer list: those it adds lie behind them.
        self.guard.state = replace(rollback.state, last_loss=self.guard.state.last_loss)

    def measure_memory(self) -> None:
        """Count live tensors on every rank, once all buffers exist, and write memory.json. Collective."""
        trained = self.optimizer.share.numel
        cut = 1 if self.optimizer.stage == 0 else self.mesh.dp
        mine = measure(self.mesh.rank, self.optimizer.tensors(), trained, cut)
        profile = [RankMemory(**json.loads(row)) for row in self.mesh.share(json.dumps(asdict(mine)).encode())]
        maximum, mean = self.memory = aggregate(profile)
        if self.leader:
            scratch = self.saver.scratch_bytes
            rows = [asdict(row) | {"scratch": scratch, "total": row.total} for row in profile]
            write_json(self.plan.folder / "memory.json", {"ranks": rows, "maximum": maximum, "mean": mean})


def new_model(config: Config) -> GPT:
    """The untrained model of a curve."""
    m = config.model
    return GPT(
        layers=m.layers, width=m.width, heads=m.heads, vocab=m.vocab, context=m.context,
        tied=m.tied, dropout=m.dropout, seed=config.train.seed,
    )  # fmt: skip


def new_loader(config: Config, *, full_check: bool = False) -> Loader:
    """The training batches of a curve; `full_check` reads the whole corpus once. Raises InputError for a corpus that
    can't serve it."""
    m, t = config.model, config.train
    needed = t.leaves * t.accumulate * t.micro_batch
    corpus = open_corpus(
        config.data.source, vocab=m.vocab, context=m.context, seed=t.seed, step_windows=needed, full_check=full_check
    )
    return Loader(
        corpus, context=m.context, micro_batch=t.micro_batch, leaves=t.leaves, accumulate=t.accumulate, seed=t.seed
    )


def open_session(plan: Plan, context: RankContext) -> Session:
    """Build the model and its optimizer, and go to where the run stands. Collective."""
    config = plan.config
    mesh = Mesh(dp=config.layout.dp, transport=config.layout.transport, limit=config.limits.stall_seconds)
    model = new_model(config)
    replicate(model, mesh)
    rates, train = config.optimizer, config.train
    optimizer = ZeroOptimizer(
        model,
        mesh,
        stage=config.layout.zero,
        leaves=train.leaves,
        accumulate=train.accumulate,
        betas=rates.betas,
        eps=rates.eps,
        weight_decay=rates.weight_decay,
        clip=rates.clip,
    )
    held_out = None
    if config.observe.eval_every:
        corpus = open_corpus(
            config.data.source, vocab=config.model.vocab, context=config.model.context, seed=train.seed, split="val"
        )
        share = min(1.0, EVALUATION_TOKENS / max(len(corpus.tokens), 1))
        held_out = EvaluationSet(corpus, context=config.model.context, micro_batch=train.micro_batch, share=share)
    saver = Checkpointer(
        plan.folder / "checkpoints",
        optimizer,
        background=config.checkpoint.background,
        keep=config.checkpoint.keep,
        fence=plan.fence,
        mirror=Mirror(config.checkpoint.mirror, keep=config.checkpoint.keep) if config.checkpoint.mirror else None,
    )
    session = Session(
        plan=plan,
        context=context,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        loader=new_loader(config),
        held_out=held_out,
        schedule=Schedule(rates.lr, train.steps, rates.warmup_steps, rates.decay, rates.min_lr),
        guard=Guard(config.guard.spike_factor, config.guard.max_rollbacks),
        saver=saver,
        lines=Progress(train.steps, log_every=config.observe.log_every) if draws_lines(plan, mesh) else None,
        numerics=environment(config),
    )
    path = session.newest() if plan.resume else None
    manifest = session.restore(path)
    if session.leader:
        write_run_record(session)
    session.event("resume" if manifest else "start", layout=config.layout.model_dump())
    if manifest is not None:
        check_numerics(session, manifest)
        session.say(f"resumed at step {manifest.step} of {train.steps}")
    elif plan.resume:
        session.say("no checkpoint to resume from: starting fresh")
    if manifest is None and plan.parent is not None:
        session.save()  # a copy of its own: the other run may be removed
    return session


def draws_lines(plan: Plan, mesh: Mesh) -> bool:
    return mesh.rank == 0 and not plan.quiet and not sys.stderr.isatty()


def write_run_record(session: Session) -> None:
    """run.json: what this curve is and where it runs now."""
    plan, optimizer = session.plan, session.optimizer
    record = {
        "curve_id": plan.curve_id,
        "parent": plan.parent_digest,
        "data_fingerprint": session.loader.fingerprint,
        "parameters": sum(spec.numel for spec in optimizer.table.parameters),
        "layout": plan.config.layout.model_dump() | {"transport": session.mesh.transport_name},
        "numerics": session.numerics,
        "versions": {"onecurve": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    write_json(plan.folder / "run.json", record)


def check_numerics(session: Session, manifest: Manifest) -> None:
    """Compare the environment with the checkpoint's: go on and say so, or refuse (numerics.on_change)."""
    changed = differences(manifest.numerics, session.numerics)
    if not changed:
        return
    text = f"the numeric environment changed since step {manifest.step}: {'; '.join(changed)}"
    if session.config.numerics.on_change == "refuse":
        cure = 'resume where it was, or set numerics.on_change = "record" in the run\'s config.toml'
        raise ConfigError(f'{text}; numerics.on_change = "refuse": {cure}')
    session.say(f"{text}; the run goes on, its bits may differ from here")
    session.event("numerics", changed=changed)
