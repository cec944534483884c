"""What can be known before step 1: each refusal is one line, and leaves nothing behind.

The lock and the corpus are checked on the way here (`RunLock`, `open_corpus`). Shared memory needs no check of its own:
the transport's is anonymous, so that /dev/shm does not limit it; it counts as memory.
"""

import math
import shutil
import sys
from pathlib import Path

import torch

from onecurve.checkpoint.mirror import without_secrets
from onecurve.config import Config
from onecurve.errors import InputError
from onecurve.model import token_loss
from onecurve.paths import FOLDER, need_place
from onecurve.report.console import human_bytes
from onecurve.report.plan import parameters, rank_costs
from onecurve.train.parts import new_held_out, new_loader, new_model
from onecurve.train.plan import Plan

BYTES_PER_ELEMENT = 12  # of a checkpoint: fp32 master and two moments


def preflight(plan: Plan, ranks_here: int) -> None:
    """Raises InputError where the folder can't be written, the disk can't hold `checkpoint.keep` + 1 checkpoints, the
    memory can't hold `ranks_here` ranks, there is nothing to evaluate on, no such mirror can be, or the first
    micro-batch fails."""
    check_disk(plan.folder, plan.config)
    check_memory(plan.config, ranks_here, available_memory())
    new_held_out(plan.config, full_check=True)
    check_mirror(plan.config.checkpoint.mirror)
    dry_batch(plan.config)


def check_mirror(url: str) -> None:
    """A mirror that fails stops nothing; one that can never work is a slip of the pen. Nothing is connected to here."""
    if not url:
        return
    from fsspec import get_filesystem_class  # most runs have no mirror, and it takes 50 ms
    from fsspec.utils import get_protocol

    try:
        get_filesystem_class(get_protocol(url))
    except (ValueError, ImportError) as error:
        cure = "give a URL that fsspec can open here, or leave checkpoint.mirror empty"
        raise InputError(f"checkpoint.mirror = {without_secrets(url)!r}: {error}; {cure}") from None


def check_disk(folder: Path, config: Config) -> None:
    need_place(folder / "checkpoints", FOLDER, "run folder", "choose another --run, or put this right")
    one = BYTES_PER_ELEMENT * sum(spec.numel for spec in parameters(config.model))
    kept = sum(f.lstat().st_size for f in (folder / "checkpoints").glob("step-*/rank-*.safetensors"))
    copies = config.checkpoint.keep + 1
    needed = one * copies - kept
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder}: {human_bytes(free)} free, but checkpoint.keep + 1 = {copies} checkpoints of "
            f"{human_bytes(one)} need {human_bytes(needed)}; free some space, lower checkpoint.keep, or move the run"
        )


def check_memory(config: Config, ranks_here: int, available: int | None) -> None:
    """`available` bytes against what the ranks of this host hold for sure; None where it can't be known."""
    costs = rank_costs(config)
    copy = costs[0].optimizer + costs[0].padding if config.checkpoint.background else 0
    one = max(cost.total for cost in costs) + copy
    if available is not None and one * ranks_here > available:
        raise InputError(
            f"{human_bytes(available)} of memory are free, but {ranks_here} ranks need {human_bytes(one * ranks_here)} "
            "before activations; raise layout.zero, lower layout.dp, or set checkpoint.background = false"
        )


def available_memory() -> int | None:
    """Bytes that this process and its children may still take: the host's, or its control group's where that is less.
    None off Linux."""
    if not sys.platform.startswith("linux"):
        return None
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    found = [1024 * int(lines["MemAvailable"].split()[0])] if "MemAvailable" in lines else []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            text = (root / limit).read_text().strip()
            if text != "max":
                statistics = (root / limit).with_name("memory.stat").read_text().split()
                cache = int(dict(zip(statistics[::2], statistics[1::2], strict=True)).get("inactive_file", 0))
                found.append(int(text) - int((root / used).read_text()) + cache)
        except (OSError, ValueError):  # no such control group
            continue
    return max(0, min(found)) if found else None


def dry_batch(config: Config) -> None:
    """Forward and backward of the curve's first micro-batch on a model of its own: nothing is consumed or changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # this process may fork ranks, and they could not use a pool that was made here
    try:
        with torch.random.fork_rng(devices=[]):  # torch's layers draw weights before ours replace them
            model, seed = new_model(config), config.train.seed
        batch = next(iter(new_loader(config).micro_batches(0, [0])))
        loss_sum, tokens = token_loss(model(batch.inputs, (seed, *batch.place)), batch.targets)
        loss_sum.backward()
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        loss = float(loss_sum.detach()) / max(tokens, 1)
    except (RuntimeError, IndexError, MemoryError) as error:
        raise InputError(f"the first micro-batch fails: {str(error).splitlines()[0]}") from error
    finally:
        torch.set_num_threads(before)
    if not (finite and math.isfinite(loss)):
        raise InputError(f"the first micro-batch gives loss {loss:g} or a gradient that is not finite; see the model")
