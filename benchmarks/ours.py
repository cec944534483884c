"""onecurve's step, as the training loop does it.

Beyond the peers' it holds: the loss over all ranks, the exact gradient norm, the finite check and one verdict on all
ranks before the weights change. The loss comes back from the step itself, where the peers' is this rank's share.
"""

from collections.abc import Callable

from benchmarks.workload import REPEAT, SEED, Workload
from onecurve.model import token_loss
from onecurve.parallel import Mesh, ZeroOptimizer, replicate

OurStep = Callable[[int], float]


def optimizer_of(work: Workload, mesh: Mesh, *, stage: int) -> ZeroOptimizer:
    model = work.model()
    replicate(model, mesh)
    return ZeroOptimizer(
        model,
        mesh,
        stage=stage,
        leaves=work.leaves,
        accumulate=work.accumulate,
        lr=work.lr,
        betas=work.betas,
        eps=work.eps,
    )


def step_of(work: Workload, optimizer: ZeroOptimizer) -> OurStep:
    batches = work.batches(optimizer.leaf_ids)
    model = optimizer.model

    def step(data_step: int) -> float:
        for batch in batches[data_step % REPEAT]:
            loss_sum, tokens = token_loss(model(batch.inputs, (SEED, *batch.place)), batch.targets)
            optimizer.backward(loss_sum, tokens)
        return optimizer.step().loss

    return step


def onecurve(work: Workload, world: int, *, stage: int, transport: str = "auto") -> OurStep:
    return step_of(work, optimizer_of(work, Mesh(dp=world, transport=transport), stage=stage))


ONECURVE = [f"onecurve ZeRO-{stage}" for stage in range(4)]
