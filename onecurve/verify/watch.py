"""One rank of a run under proof: the training loop as it is, and a line per step with everything that is compared."""

import json
from pathlib import Path
from typing import Any

from onecurve import faults
from onecurve.checkpoint import tensor_digests
from onecurve.launch import RankContext
from onecurve.train.loop import train_rank
from onecurve.train.session import Session
from onecurve.verify.controls import break_clause

LINES = "verify.jsonl"  # in the run folder; a kill leaves what was written, and the resumed run appends


def verify_rank(leg_json: dict[str, Any], context: RankContext) -> None:
    """Train one leg. `leg_json`: the `plan` as JSON; `kill`, a fault to arm, or None; `control` and `reference`, see
    `break_clause`."""
    if leg_json["control"]:
        break_clause(leg_json["control"], context.rank, keep=leg_json["reference"])
    if leg_json["kill"]:
        faults.arm([leg_json["kill"]])

    def watch(session: Session, row: dict[str, Any]) -> None:
        digests = tensor_digests(session.optimizer)
        if session.leader:
            write_line(session.plan.folder / LINES, row, digests)

    train_rank(leg_json["plan"], context, watch)


def write_line(path: Path, row: dict[str, Any], digests: dict[tuple[str, str, int], bytes]) -> None:
    """Append one step: the bits of its loss and norms, and of each tensor of the state after its update."""
    step = {
        "step": row["step"],
        "loss": row["loss_hex"],
        "grad_norm": row["grad_norm"].hex(),
        "param_norm": row["param_norm"].hex(),
        "tensors": [[kind, name, index, digest.hex()] for (kind, name, index), digest in digests.items()],
    }
    with path.open("ab", buffering=0) as file:  # one write: a rank that is killed leaves no half line
        file.write(json.dumps(step).encode() + b"\n")
