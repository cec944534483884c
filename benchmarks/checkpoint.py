"""Sharded checkpoints beside torch.distributed.checkpoint: save, load, the stall of a background save, bytes on disk.

Both keep the same state, three fp32 vectors (master weights and two moments) cut over the ranks, in the same ranks and
on the same disk, and take turns. Ours hashes every byte twice (file and state digest), commits atomically, and verifies
what it loads; the other does none of that. A load fills the live tensors; ours also rebuilds the working weights.

stall   how long a background save holds up the thread that trains; nothing else runs on that thread meanwhile, and what
        it waits for the thread behind is not counted
        ours   `Checkpointer(background=True)`: `save` (begin, copy), and once the threads behind are done the two calls
               of `poll` that gather what they have to tell and conclude
        peer   `async_save` until it returns (its copy); stager and copy are kept and used again, as ours are, and its
               thread has a process group of its own
"""

import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import measure
from onecurve.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from onecurve.launch import RankContext
from onecurve.parallel import Mesh, ZeroOptimizer
from onecurve.train.memory import STATE

OURS, PEER = "onecurve", "torch.distributed.checkpoint"
WHAT = ("save", "load", "stall")
Actions = dict[str, Callable[[], float]]  # by WHAT: does it, and returns its seconds


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def our_actions(mesh: Mesh, optimizer: ZeroOptimizer, folder: Path) -> Actions:
    saver = Checkpointer(folder, optimizer, background=True)

    def stall() -> float:
        seconds = seconds_of(lambda: saver.save(1))
        while saver.in_flight is not None:
            while not saver.ready:
                time.sleep(1e-3)
            mesh.barrier()
            seconds += seconds_of(lambda: saver.poll(True))
        return seconds

    return {
        "save": lambda: seconds_of(lambda: save_checkpoint(folder, optimizer, 1)),
        "load": lambda: seconds_of(lambda: load_checkpoint(folder / "step-00000001", optimizer)),
        "stall": stall,
    }


def peer_actions(mesh: Mesh, optimizer: ZeroOptimizer, folder: Path) -> Actions:
    device_mesh = init_device_mesh("cpu", (mesh.world,))
    sharded = {state: DTensor.from_local(getattr(optimizer, state), device_mesh, [Shard(0)]) for state in STATE}
    group = dist.new_group()
    # no pinned or shared memory and no stream: these are for GPUs and other processes
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def stall() -> float:
        began = time.perf_counter()
        future = dcp.async_save(sharded, checkpoint_id=folder, process_group=group, async_stager=stager)
        seconds = time.perf_counter() - began
        future.result()
        return seconds

    return {
        "save": lambda: seconds_of(lambda: dcp.save(sharded, checkpoint_id=folder)),
        "load": lambda: seconds_of(lambda: dcp.load(sharded, checkpoint_id=folder)),
        "stall": stall,
    }


def measure_rank(context: RankContext, elements: int, rounds: int, scratch: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of each system by WHAT and round, after one that does not count."""
    warnings.simplefilter("ignore")  # the peer's own deprecations
    mesh = Mesh(dp=context.world)
    optimizer = ZeroOptimizer(nn.Linear(elements // 1024, 1024, bias=False), mesh, stage=1, leaves=mesh.dp)
    for state in STATE:
        getattr(optimizer, state).copy_(torch.rand(optimizer.partition.local))
    systems = {
        OURS: our_actions(mesh, optimizer, scratch / OURS),
        PEER: peer_actions(mesh, optimizer, scratch / PEER),
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {what: [] for what in WHAT} for name in systems}
    for turn in range(-1, rounds):
        for name in list(systems) if turn % 2 else reversed(systems):
            context.progress(turn + 1, rounds + 1, name)
            for what in WHAT:
                if mesh.rank == 0 and what != "load":
                    shutil.rmtree(scratch / name, ignore_errors=True)
                mesh.barrier()
                took = systems[name][what]()
                mesh.barrier()
                if turn >= 0:
                    seconds[name][what].append(took)
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
    for what in WHAT:
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
                f["what"], f["system"], f"{1e3 * measure.Spread.of(f['seconds']).median:.1f}", f["ratio"],
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
