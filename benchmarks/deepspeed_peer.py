"""DeepSpeed's ZeRO-1 and 2, where the package is installed (it is not among this project's dependencies).

pip install deepspeed      DS_BUILD_OPS=0 builds nothing in advance; its shared-memory all-reduce for CPUs is
                           compiled at the first run, which needs a C++ compiler and takes minutes
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

import torch
from torch import Tensor

from benchmarks.peers import Step, adamw, my_batches
from benchmarks.workload import REPEAT, Workload, mean_loss


def why_missing() -> str | None:
    """None where DeepSpeed runs here. Call it before the ranks are forked: it builds what they would all build."""
    if importlib.util.find_spec("deepspeed") is None:
        return "not installed: pip install deepspeed"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.comm.torch import build_shm_op

    try:
        with redirect_stdout(sys.stderr):
            build_shm_op()
    except (OSError, RuntimeError, ImportError) as error:
        return f"its shared-memory operation does not build: {str(error).splitlines()[0]}"
    return None


def deepspeed_zero(work: Workload, rank: int, world: int, *, stage: int) -> Step:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # what its launcher sets; with all ranks on one host it takes its shared-memory all-reduce
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    batches = my_batches(work, rank, world)
    model = work.model()
    with redirect_stdout(sys.stderr):  # the table has stdout for itself
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), **adamw(work)),
            config={
                "train_micro_batch_size_per_gpu": work.micro_batch,
                "gradient_accumulation_steps": len(batches[0]),
                "zero_optimization": {"stage": stage},
                "gradient_clipping": 0.0,  # its default is 1.0
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 1 << 30,
            },
        )

    def step(data_step: int) -> Tensor:
        micros = batches[data_step % REPEAT]
        total = torch.zeros(())
        for batch in micros:
            loss = mean_loss(engine, batch)
            engine.backward(loss)  # divides by the accumulation steps itself
            engine.step()
            total += loss.detach() / len(micros)
        return total

    return step


DEEPSPEED: dict[str, Callable[[Workload, int, int], Step]] = {
    "DeepSpeed ZeRO-1": lambda work, rank, world: deepspeed_zero(work, rank, world, stage=1),
    "DeepSpeed ZeRO-2": lambda work, rank, world: deepspeed_zero(work, rank, world, stage=2),
}
