"""Sharded checkpoints beside torch.distributed.checkpoint: save, load, bytes on disk.

Both keep the same state, three fp32 vectors (master weights and two moments) cut over the ranks, in the same ranks and
on the same disk, and take turns. Ours hashes every byte twice (file and state digest), commits atomically, and verifies
what it loads; the other does none of that. A load fills the live tensors.
"""

import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import measure
from onecurve.checkpoint import load_checkpoint, save_checkpoint
from onecurve.launch import RankContext
from onecurve.parallel import Mesh, ZeroOptimizer
from onecurve.train.memory import STATE

OURS, PEER = "onecurve", "torch.distributed.checkpoint"


def measure_rank(context: RankContext, elements: int, rounds: int, scratch: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of each system's save and load by round, after one that does not count."""
    warnings.simplefilter("ignore")  # the peer's own deprecations
    mesh = Mesh(dp=context.world)
    optimizer = ZeroOptimizer(nn.Linear(elements // 1024, 1024, bias=False), mesh, stage=1, leaves=mesh.dp)
    for state in STATE:
        getattr(optimizer, state).copy_(torch.rand(optimizer.share.local))
    device_mesh = init_device_mesh("cpu", (mesh.world,))
    sharded = {state: DTensor.from_local(getattr(optimizer, state), device_mesh, [Shard(0)]) for state in STATE}
    actions: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        OURS: (
            lambda: save_checkpoint(scratch / OURS, optimizer, 1),
            lambda: load_checkpoint(scratch / OURS / "step-00000001", optimizer),
        ),
        PEER: (
            lambda: dcp.save(sharded, checkpoint_id=scratch / PEER),
            lambda: dcp.load(sharded, checkpoint_id=scratch / PEER),
        ),
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in actions}
    for turn in range(-1, rounds):
        for name in list(actions) if turn % 2 else reversed(actions):
            context.progress(turn + 1, rounds + 1, name)
            if mesh.rank == 0:
                shutil.rmtree(scratch / name, ignore_errors=True)
            for what, action in zip(("save", "load"), actions[name], strict=True):
                mesh.barrier()
                began = time.perf_counter()
                action()
                mesh.barrier()
                if turn >= 0:
                    seconds[name][what].append(time.perf_counter() - began)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    parser = measure.arguments(__doc__, rounds=9)
    parser.add_argument("--elements", type=int, default=16 << 20, help="of each of the three (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="onecurve-bench-") as folder:
        scratch = Path(folder)
        results = measure.on_ranks(
            lambda context: measure_rank(context, options.elements, options.rounds, scratch), options.ranks
        )
        disk = {name: sum(f.stat().st_size for f in (scratch / name).rglob("*") if f.is_file()) for name in results[0]}
    figures = []
    for what in ("save", "load"):
        slowest = {
            name: [max(r) for r in zip(*(own[name][what] for own in results), strict=True)] for name in results[0]
        }
        for name, seconds in slowest.items():
            ratio = measure.speed_up(slowest[PEER], seconds)
            figures.append({"system": name, "what": what, "seconds": seconds, "ratio": ratio, "bytes": disk[name]})
    measure.report(
        ["", "system", "ms", f"x {PEER} [quartiles]", "bytes per element"],
        [
            [
                f["what"], f["system"], f"{1e3 * measure.Spread.of(f['seconds']).median:.0f}", f["ratio"],
                f"{f['bytes'] / options.elements:.3f}",
            ]
            for f in figures
        ],
        f"3 x {options.elements:,} fp32 elements on {options.ranks} ranks, {options.rounds} rounds",
    )  # fmt: skip
    measure.write_json(options.json, machine=measure.machine(), figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
