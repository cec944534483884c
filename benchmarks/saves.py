"""What saving costs the training: steps without saves, with one background save, and with one in the foreground.

A burst is `--every` steps; in the twins that save, a save begins with the burst and is committed within it, as in a run
with `checkpoint.every_steps` = that number. Snapshot, hashing, writing, fsync and commit are all in the time. All twins
train one and the same model; the ratio is against no saves, round by round.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.ours import optimizer_of
from benchmarks.workload import REPEAT, SEED, WORKLOADS, Workload
from onecurve.checkpoint import Checkpointer
from onecurve.launch import RankContext
from onecurve.model import token_loss
from onecurve.parallel import Mesh, ZeroOptimizer

WRITING = 1
TWINS = ("no saves", "background", "foreground")


def step_of(work: Workload, optimizer: ZeroOptimizer) -> Callable[[int, Checkpointer | None], None]:
    """A step of the training loop: the vote on the save in flight rides on the step's own exchange."""
    batches = work.batches(optimizer.leaf_ids)

    def step(data_step: int, saver: Checkpointer | None) -> None:
        for batch in batches[data_step % REPEAT]:
            loss_sum, tokens = token_loss(optimizer.model(batch.inputs, (SEED, *batch.place)), batch.targets)
            optimizer.backward(loss_sum, tokens)
        stats = optimizer.step(vote=WRITING if saver is not None and not saver.ready else 0)
        if saver is not None:
            saver.poll(not stats.vote & WRITING)

    return step


def measure_saves(work: Workload, world: int, stage: int, every: int, rounds: int, folder: Path | None) -> Any:
    """Seconds per burst of each twin, and the seconds in which a save held the training up before it went on."""

    def worker(context: RankContext) -> dict[str, Any]:
        optimizer = optimizer_of(work, Mesh(dp=world), stage=stage)
        step = step_of(work, optimizer)
        where = (folder or context.folder) / "saves"
        savers = {
            name: None
            if name == "no saves"
            else Checkpointer(where / name, optimizer, background=name == "background", keep=2)
            for name in TWINS
        }
        done = [0]

        def burst(saver: Checkpointer | None) -> Callable[[], None]:
            def run() -> None:
                if saver is not None:
                    saver.save(done[0], {"curve_id": "c"})
                for _ in range(every):
                    step(done[0], saver)
                    done[0] += 1
                if saver is not None:
                    saver.drain()

            return run

        turns = {name: burst(saver) for name, saver in savers.items()}
        return measure.take_turns(turns, rounds=rounds, warm_up=2, context=context)

    return measure.together(measure.on_ranks(worker, world), steps=1).seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.arguments(__doc__, rounds=15)
    parser.add_argument("--model", choices=list(WORKLOADS), default="1m")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--every", type=int, default=10, help="steps per save (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    options = parser.parse_args(argv)
    work = WORKLOADS[options.model]
    seconds = measure_saves(work, options.width, options.stage, options.every, options.rounds, options.folder)
    rows, figures = [], []
    for name in TWINS:
        median = measure.Spread.of(seconds[name]).median / options.every
        ratio = measure.speed_up(seconds["no saves"], seconds[name])
        rows.append([name, f"{1e3 * median:.2f}", f"{work.tokens / median:,.0f}", ratio])
        figures.append(
            {"saves": name, "seconds": seconds[name], "tokens_per_second": work.tokens / median, "ratio": ratio}
        )
    title = f"{work.name}: ZeRO-{options.stage}, W = {options.width}, a save every {options.every} steps"
    measure.report(["saves", "ms/step", "tokens/s", "x no saves [quartiles]"], rows, title)
    measure.write_json(options.json, machine=measure.machine(), model=work.name, every=options.every, twins=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
