"""ZeRO (Rajbhandari et al. 2020) as one optimizer over one ownership table.

One call of `step` is, on every rank:

    1. exchange    partial gradient sums go to each range's owner, who finishes the tree  (contiguous.py, strided.py)
    2. agree       losses per leaf, token counts, sum of squares -> loss, norm, verdict   60 bytes or so    (stats.py)
    3. update      gradient x (clip factor / tokens), AdamW on the ranges this rank holds
    4. all-gather  masters, rounded to the working dtype, to whoever computes with them   (weights.py)

The stages differ only in what is cut by W data-parallel ranks: 0 nothing, 1 the optimizer's state, 2 also the
gradients, 3 also the working weights. No stage, width or transport changes a bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from onecurve.errors import InputError, UsageError
from onecurve.optim.adamw import AdamW
from onecurve.parallel.bands import GradientSpace
from onecurve.parallel.checks import FirstStep, Untouched, check_ranks_agree, check_unclaimed, claim
from onecurve.parallel.contiguous import ContiguousGradients
from onecurve.parallel.gathered import GatheredWeights, Journal
from onecurve.parallel.mesh import Mesh
from onecurve.parallel.norms import SharedNorm
from onecurve.parallel.ownership import OwnedRange, OwnershipTable
from onecurve.parallel.replicas import ReplicasDiffer, differing, digest, name_difference, tell_difference
from onecurve.parallel.stats import Agreement, Stats
from onecurve.parallel.strided import StridedGradients
from onecurve.parallel.units import Units, extras, survey
from onecurve.parallel.weights import WholeWeights


class ZeroOptimizer:
    """AdamW over the ownership table, ZeRO stage 0 to 3, with gradients added in one fixed tree.

    A step's batch is cut into `leaves` equal parts, the leaves, of `accumulate` micro-batches each; data-parallel ranks
    share them out, and their number is the most ranks that can be used. A step takes, on each rank and for each of its
    `leaf_ids` in order, `accumulate` calls of `backward`, then one of `step`. The masters and moments are fp32:
    `master`, `exp_avg`, `exp_avg_sq`, 1-D, [elements this rank holds].
    `lr`: a rate, or a function of the 0-based update number. `betas`, `eps`, `weight_decay`: AdamW's (Loshchilov and
    Hutter 2019, algorithm 2); parameters with two or more dimensions decay, but those that the model's `undecayed()`
    names. `clip`: largest global gradient norm, 0 = off.
    `units`: (name, module) pairs that are gathered and exchanged together; by default the model's own `units()`, else
    its children. At stage 3 a unit's parameters are there only while its `forward` runs (and the backward of it), and
    every leaf must call the same units in the same order.

    Raises InputError if `leaves` is less than the data-parallel width, or a trained parameter is wider than fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        stage: int = 1,
        leaves: int,
        accumulate: int = 1,
        lr: float | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float = 0.0,
        units: Units | None = None,
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise InputError(f"stage = {stage}: ZeRO has stages 0, 1, 2 and 3")
        if not 1 <= mesh.dp <= leaves:
            raise InputError(
                f"leaves = {leaves}: fewer than the {mesh.dp} data-parallel ranks; raise leaves or lower dp"
            )
        if accumulate < 1:
            raise InputError(f"accumulate = {accumulate}: at least one micro-batch per leaf")
        self.model, self.mesh, self.stage = model, mesh, stage
        self.leaves, self.accumulate, self.clip = leaves, accumulate, clip
        self.lr = lr
        self.rule = AdamW(betas, eps, weight_decay)
        check_unclaimed(model)
        self.trained = trained = survey(model, units)
        settings = {
            "stage": stage, "leaves": leaves, "accumulate": accumulate, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "clip": clip, "lr": None if callable(lr) else lr,
        }  # fmt: skip
        check_ranks_agree(mesh, settings, {name: p.data for name, p in model.named_parameters()})
        self.table = OwnershipTable(trained.specs, dp=mesh.dp, tp=mesh.tp, pp=mesh.pp, stage=stage)
        self.partition = self.table.partition(mesh.rank)
        self.updates = 0
        # The state is laid out before the working weights move into their flat home, while parameters are whole.
        self.master = torch.zeros(self.partition.local)
        self.exp_avg = torch.zeros(self.partition.local)
        self.exp_avg_sq = torch.zeros(self.partition.local)
        self._fill(trained.parameters)
        self._journal, space = Journal(), GradientSpace(self.partition, trained)
        self.weights: WholeWeights | GatheredWeights
        if stage == 3:
            self.weights = GatheredWeights(self.partition, trained, mesh.transport, self._journal)
        else:
            self.weights = WholeWeights(self.partition, trained, mesh.transport)
        self._gradients: ContiguousGradients | StridedGradients
        if stage < 2:
            self._gradients = ContiguousGradients(space, mesh.transport, leaves)
        else:
            self._gradients = StridedGradients(space, mesh.transport, leaves, accumulate, self.weights, self._journal)
        self.weights.refresh(self.master)
        self._agreement = Agreement(mesh.transport, leaves, self._gradients.leaves_of)
        self._master_norm = SharedNorm(mesh.transport.all_gather_bytes)
        self._segments = self._decay_segments()
        self._first_step = FirstStep(model)
        self._untouched = Untouched(trained.gradients_of.items())
        claim(model)
        self._begin_step()

    @property
    def leaf_ids(self) -> list[int]:
        """The leaves that this rank runs, in the order in which it runs them."""
        return self._gradients.leaf_ids

    def held(self) -> list[OwnedRange]:
        """The canonical ranges whose state this rank holds: what a load fills."""
        return self.partition.held(self.mesh.dp_rank)

    def owned(self) -> list[OwnedRange]:
        """The canonical ranges whose primary owner this rank is: what a save writes."""
        return self.table.owned(self.mesh.rank)

    def extras(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers by name: saved and restored beside the trained state."""
        return extras(self.model)

    def reset(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin again from whole `parameters` by name, with zero moments and no updates. Collective."""
        self._fill(parameters)
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.updates = 0
        self.refresh()

    def _fill(self, parameters: Mapping[str, Tensor]) -> None:
        """Take the ranges that this rank holds as its masters."""
        for place in self.held():
            whole = parameters[place.name].detach().reshape(-1)
            self.master[place.at : place.at + place.length] = whole[place.offset : place.offset + place.length]

    def refresh(self) -> None:
        """Rebuild the working weights from the masters. Collective; call after changing `master` (a load)."""
        self.weights.refresh(self.master)
        self._untouched = Untouched(self.trained.gradients_of.items())

    def backward(self, loss_sum: Tensor, tokens: int) -> None:
        """Backward of one micro-batch's *sum* of token losses (scalar); `tokens` = how many were summed.

        A leaf ends after `accumulate` calls. Raises UsageError on one call too many.
        """
        expected = len(self.leaf_ids) * self.accumulate
        if self._calls == expected:
            raise UsageError(
                f"backward called {self._calls + 1} times before step; this rank has {len(self.leaf_ids)} leaves x "
                f"{self.accumulate} micro-batches = {expected}"
            )
        if not isinstance(tokens, int) or tokens < 0:
            raise UsageError(f"tokens = {tokens!r}: how many targets were summed, a whole number (int) from 0 on")
        if not loss_sum.requires_grad:
            raise UsageError(
                "the loss has no gradient: it was detached, computed under no_grad, or of frozen parts alone"
            )
        index, micro = divmod(self._calls, self.accumulate)
        self._calls += 1
        self._gradients.begin(micro)
        loss_sum.backward()
        self._losses[index] += float(loss_sum.detach())
        self._tokens += tokens
        self._gradients.end(self.leaf_ids[index], last=micro == self.accumulate - 1)

    def step(
        self,
        accept: Callable[[Stats], bool] | None = None,
        *,
        lr: float | None = None,
        vote: int = 0,
        check_replicas: bool = False,
    ) -> Stats:
        """Reduce the gradients, ask `accept`, and update. Collective.

        `accept(stats)` decides, on every rank alike, whether the weights change; by default they do if everything is
        finite. A step without a token never changes them. `lr` overrides the rate of this update. `check_replicas`
        compares what the ranks hold copies of (see `replicas`). Raises UsageError if
        `backward` was not called for every micro-batch, ReplicasDiffer where a rank's weights are not the others'.
        """
        expected = len(self.leaf_ids) * self.accumulate
        if self._calls != expected:
            raise UsageError(
                f"step called after {self._calls} of {expected} backward calls ({len(self.leaf_ids)} leaves x "
                f"{self.accumulate} micro-batches on rank {self.mesh.rank})"
            )
        self._untouched.check()
        gradient = self._gradients.reduce()
        replicas = self.replicas() if check_replicas else {}
        replica = digest(replicas) if replicas else 0
        stats = self._agreement.reach(
            self._primary(gradient), self._losses, self._tokens, vote, replica, self._journal.sequence
        )
        if odd := differing(stats.replicas):
            name = name_difference(self.mesh, replicas)
            told = tell_difference(name, odd, len(stats.replicas))
            raise ReplicasDiffer(f"{told}, found before update {self.updates + 1}")
        wanted = stats.finite if accept is None else accept(stats)
        if wanted and stats.tokens:
            rate = lr if lr is not None else self.lr(self.updates) if callable(self.lr) else self.lr
            self._update(gradient, stats, rate)
            stats = replace(stats, accepted=True)
        self._first_step.done()
        self._begin_step()
        return stats

    def replicas(self) -> dict[str, Tensor]:
        """What must be a bitwise copy on all ranks, by name: the working weights, unless they are sharded; the state,
        unless it is; frozen parameters and all buffers."""
        weights = {} if self.stage == 3 else {name: p.data for name, p in self.trained.parameters.items()}
        state: dict[str, Tensor] = {}
        if self.stage == 0:
            for kind, vector in (("master", self.master), ("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
                state |= {f"{kind} of {r.name}": vector[r.at : r.at + r.length] for r in self.held()}
        return weights | state | self.extras() | dict(self.model.named_buffers())

    def parameter_norm(self) -> float:
        """The norm of all trained parameters (masters), by exact integers. Collective."""
        mine = self._primary([(0, self.master)])
        return self._master_norm.of(mine, self.mesh.transport.all_gather_bytes(self._master_norm.message(mine)))

    def tensors(self) -> dict[str, list[Tensor]]:
        """The live tensors by what they are for: what a memory profile counts."""
        return {
            "parameters": self.weights.live(),
            "gradients": self._gradients.live(),
            "master": [self.master],
            "exp_avg": [self.exp_avg],
            "exp_avg_sq": [self.exp_avg_sq],
        }

    @property
    def gathered_bytes(self) -> int:
        """Stage 3: the most bytes of gathered weights that were here at once, freed again since."""
        return self.weights.most_gathered if isinstance(self.weights, GatheredWeights) else 0

    def _begin_step(self) -> None:
        self._calls = 0
        self._tokens = 0
        self._losses = [0.0] * len(self.leaf_ids)

    def _primary(self, vector: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """The parts of a local vector that this rank is the primary owner of: all, but at stage 0 only its shard."""
        if not self.partition.replicated:
            return [t for _, t in vector]
        (space,) = self.partition.spaces
        return [t[self.mesh.dp_rank * space.width : (self.mesh.dp_rank + 1) * space.width] for _, t in vector]

    def _update(self, gradient: Sequence[tuple[int, Tensor]], stats: Stats, lr: float) -> None:
        clip_factor = self.clip / stats.norm if 0.0 < self.clip < stats.norm else 1.0
        scale = clip_factor / stats.tokens
        self.updates += 1
        for _, tensor in gradient:
            tensor.mul_(scale)
        for decay in (False, True):
            ranges = []
            for lo, hi, decays in self._segments:
                if decays != decay:
                    continue
                for at, tensor in gradient:
                    a, b = max(lo, at), min(hi, at + tensor.numel())
                    if a < b:
                        state = (self.master[a:b], tensor[a - at : b - at], self.exp_avg[a:b], self.exp_avg_sq[a:b])
                        ranges.append(state)
            self.rule.update(ranges, step=self.updates, lr=lr, decay=decay)
        self.weights.refresh(self.master)

    def _decay_segments(self) -> list[tuple[int, int, bool]]:
        """Local intervals (start, stop, decays) that cover the whole local vector, each on the 16-element grid; none
        where this rank holds nothing but padding."""
        starts = [(r.at, decays) for r in self.held() for decays in [self.partition.piece_of[r.name].decay]]
        merged: list[list] = []
        for at, decays in starts:
            decays = decays and self.rule.weight_decay > 0.0
            if not merged or merged[-1][1] != decays:
                merged.append([at if merged else 0, decays])
        stops = [m[0] for m in merged[1:]] + [self.partition.local] * bool(merged)
        return [(start, stop, decays) for (start, decays), stop in zip(merged, stops, strict=True)]
