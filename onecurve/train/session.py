"""One rank's side of a run: everything the loop works with, and where the run is."""

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from onecurve.checkpoint.background import Checkpointer
from onecurve.config import Config
from onecurve.data.evaluation import EvaluationSet
from onecurve.data.loader import Loader
from onecurve.launch import RankContext
from onecurve.model import GPT
from onecurve.optim import Schedule
from onecurve.parallel import Mesh, ZeroOptimizer
from onecurve.train.guard import Guard
from onecurve.train.memory import RankMemory, measure
from onecurve.train.plan import Plan
from onecurve.train.recorder import Recorder


@dataclass
class Session:
    """The parts of a run on this rank. `step` updates are done. `pending_row`: that of the step at which the run was
    stopped in the evaluation, until it is made."""

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
    recorder: Recorder
    numerics: dict[str, Any]
    step: int = 0
    pending_row: dict[str, Any] | None = None
    saved_at: float = field(default_factory=time.monotonic)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def leader(self) -> bool:
        return self.mesh.rank == 0

    @property
    def fault_steps(self) -> tuple[int, ...]:
        """The steps whose update a rehearsed fault changes."""
        fault = self.config.faults.lr_multiplier
        return (fault.step,) if fault is not None else ()

    def learning_rate(self, step: int) -> float:
        """The rate that update `step` (1-based) uses, a rehearsed fault included."""
        fault = self.config.faults.lr_multiplier
        rate = self.schedule(step - 1)
        if fault is not None and fault.step == step and step not in self.guard.state.spent:
            rate *= fault.factor
            self.recorder.say(f"step {step}: the rehearsed fault multiplies the learning rate by {fault.factor:g}")
            self.recorder.event("fault", step, factor=fault.factor)
        return rate

    def keep_alive(self) -> bool:
        """A sign of life within a step; whether this rank was asked to stop."""
        self.context.progress(self.step, self.config.train.steps)
        return self.context.stop_requested

    def measure_memory(self) -> None:
        """Count live tensors on every rank, once all buffers exist. Collective."""
        trained = self.optimizer.share.numel
        cut = 1 if self.optimizer.stage == 0 else self.mesh.dp
        scratch = self.saver.scratch_bytes + self.optimizer.gathered_bytes
        mine = measure(self.mesh.rank, self.optimizer.tensors(), trained, cut, scratch)
        told = self.mesh.share(json.dumps(asdict(mine)).encode())
        self.recorder.profile([RankMemory(**json.loads(row)) for row in told])
