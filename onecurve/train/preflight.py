"""What can be known before step 1: each refusal is one line."""

import os
import shutil

from onecurve.errors import InputError
from onecurve.report.console import human_bytes
from onecurve.report.plan import parameters
from onecurve.train.plan import Plan

BYTES_PER_ELEMENT = 12  # of a checkpoint: fp32 master and two moments


def preflight(plan: Plan) -> None:
    """Raises InputError where the disk can't hold `checkpoint.keep` + 1 checkpoints, or the folder can't be written."""
    config, folder = plan.config, plan.folder
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: can't be written; choose another --run or change its permissions")
    one = BYTES_PER_ELEMENT * sum(spec.numel for spec in parameters(config.model))
    kept = sum(f.stat().st_size for f in (folder / "checkpoints").glob("step-*/rank-*.safetensors"))
    copies = config.checkpoint.keep + 1
    needed = one * copies - kept
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder}: {human_bytes(free)} free, but checkpoint.keep + 1 = {copies} checkpoints of "
            f"{human_bytes(one)} need {human_bytes(needed)}; free some space, lower checkpoint.keep, or move the run"
        )
