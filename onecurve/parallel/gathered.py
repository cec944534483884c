"""ZeRO-3: a unit's weights are here only while it computes.

    forward    hold(unit) | unit runs, the next one's weights are on their way | release(unit)
    backward   hold(unit) when the gradient of its output arrives | the one before it is on its way
               release(unit) when the gradients of its parameters and of its inputs are all there

A gather is an exchange of all ranks. So that a rank without a leaf in the last tick can take part in those of the
others, the exchanges of a leaf are kept in a `Journal`.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onecurve.errors import UsageError
from onecurve.parallel.ownership import Partition
from onecurve.parallel.transports import Transport
from onecurve.parallel.units import Trained
from onecurve.parallel.weights import Absent, SpaceWeights

Operation = Callable[[], None]


class Journal:
    """The collectives within this rank's first leaf of a step, in order: forward's and backward's, not an
    evaluation's. `sequence` is a checksum of all that there ever were: ranks that are in step have the same."""

    def __init__(self) -> None:
        self.in_backward = False
        self.sequence = 0
        self._first_leaf = True
        self._operations: list[tuple[str, Operation]] = []

    def record(self, what: str, operation: Operation) -> None:
        """This rank is at the collective `what`; `operation` does the same without a leaf."""
        self.sequence = zlib.crc32(what.encode(), self.sequence)
        if self._first_leaf and (self.in_backward or torch.is_grad_enabled()):
            self._operations.append((what, operation))

    def end_leaf(self) -> None:
        self._first_leaf = False

    def replay(self) -> None:
        for what, operation in self._operations:
            self.sequence = zlib.crc32(what.encode(), self.sequence)
            operation()

    def clear(self) -> None:
        self._first_leaf = True
        self._operations.clear()


class GatheredWeights:
    """The units' weights on this rank, and the hooks that bring them."""

    def __init__(self, partition: Partition, trained: Trained, transport: Transport, journal: Journal) -> None:
        self._partition = partition
        self._journal = journal
        self._absent = Absent()
        self.by_unit: dict[str, SpaceWeights] = {}
        for space in partition.spaces:
            (unit,) = space.units
            pieces = [p for p in partition.pieces if p.unit == unit]
            self.by_unit[unit] = SpaceWeights(space, pieces, trained, transport, self._absent)
        self.spaces = list(self.by_unit.values())
        self.most_gathered = 0  # bytes of whole units that were here at once
        self._needs = trained.needs
        self._order = [unit for unit in trained.modules if trained.needs[unit]]
        self._idle = set(self._order) - set(trained.unit_of_use.values())  # only read what other units hold
        self._in_backward: dict[str, None] = {}  # units in the order in which their backward began
        self._awaited: Counter[str] = Counter()  # inputs of a unit's calls whose gradients are not there yet
        self._inputless: set[str] = set()  # units with a call whose inputs take no gradient
        self._complete: set[str] = set(self._idle)  # units whose parameters have all their gradients
        for unit in self._order:
            module = trained.modules[unit]
            module.register_forward_pre_hook(self._before_forward(unit), with_kwargs=True)
            module.register_forward_hook(self._after_forward(unit), always_call=True)

    def live(self) -> list[Tensor]:
        return [*(t for weights in self.spaces for t in weights.live()), *self._absent.values.values()]

    def refresh(self, master: Tensor) -> None:
        """Round this rank's masters into its shards; units are gathered when they are next used."""
        for space, weights in zip(self._partition.spaces, self.spaces, strict=True):
            weights.shard.copy_(master[space.local : space.local + space.width])
            weights.free()

    def is_here(self, unit: str) -> bool:
        """Whether the weights that `unit` reads are here for it to read."""
        return all(self.by_unit[need].held for need in self._needs[unit])

    def gradients_done(self, unit: str) -> None:
        """The parameters of `unit` have all their gradients of this backward."""
        self._complete.add(unit)
        for reader in [reader for reader in self._in_backward if unit in (reader, *self._needs[reader])]:
            self._release_if_over(reader)

    def end_backward(self) -> None:
        """Release what is left: units whose inputs or parameters got no gradient."""
        while self._in_backward:
            self._release(self._in_backward.popitem()[0])
        self._awaited.clear()
        self._inputless.clear()
        self._complete = set(self._idle)
        for weights in self.spaces:
            if weights.prefetched:  # for a unit that backward then skipped
                weights.free()

    def _hold(self, unit: str) -> None:
        for need in self._needs[unit]:
            self._begin(need)
            self.by_unit[need].hold()

    def _release(self, unit: str) -> None:
        for need in self._needs[unit]:
            self.by_unit[need].release()

    def _begin(self, unit: str) -> None:
        if self.by_unit[unit].start_gather():
            self.most_gathered = max(self.most_gathered, sum(w.gathered_bytes for w in self.spaces))
            self._journal.record(f"gather {unit}", partial(self._replay, unit))

    def _replay(self, unit: str) -> None:
        """One gather on behalf of the others."""
        self.by_unit[unit].hold()
        self.by_unit[unit].release()

    def _prefetch(self, unit: str, direction: int) -> None:
        at = self._order.index(unit) + direction
        if 0 <= at < len(self._order):
            for need in self._needs[self._order[at]]:
                self._begin(need)

    def _before_forward(self, unit: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._hold(unit)
            self._prefetch(unit, +1)
            # A recomputation inside this unit's backward gets no gradients at its inputs.
            if torch.is_grad_enabled() and unit not in self._in_backward:
                inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
                self._awaited[unit] += len(inputs)
                for tensor in inputs:
                    tensor.register_hook(lambda _: self._input_done(unit))
                if not inputs:
                    self._inputless.add(unit)

        return hook

    def _after_forward(self, unit: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            self._release(unit)
            if torch.is_grad_enabled():
                for tensor in tensors_in(output, unit):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda _: self._before_backward(unit))

        return hook

    def _before_backward(self, unit: str) -> None:
        if unit not in self._in_backward:
            self._hold(unit)
            self._in_backward[unit] = None
            self._prefetch_backward()

    def _input_done(self, unit: str) -> None:
        self._awaited[unit] -= 1
        self._release_if_over(unit)

    def _release_if_over(self, unit: str) -> None:
        # An input's gradient comes when all of the call's backward is done. Where there is none, only the gradients of
        # what the unit reads tell so, other units' parameters among them.
        awaited = self._needs[unit] if unit in self._inputless else []
        if unit in self._in_backward and self._complete.issuperset((unit, *awaited)) and self._awaited[unit] <= 0:
            del self._in_backward[unit]
            self._release(unit)
            self._prefetch_backward()

    def _prefetch_backward(self) -> None:
        """Once a single unit is in backward: at most two units' weights are here or on their way."""
        if len(self._in_backward) == 1:
            (unit,) = self._in_backward
            self._prefetch(unit, -1)


def tensors_in(output: object, unit: str) -> Iterator[Tensor]:
    """Every tensor in what a unit returned. Raises UsageError where it can't look: backward would begin unseen."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name), unit)
        elif not isinstance(leaf, (type(None), bool, int, float, complex, str, bytes)):
            raise UsageError(
                f"unit {unit} returns a {type(leaf).__name__}, in which tensors can't be found; at stage 3 return "
                "tensors, or tuples, lists, dicts and dataclasses of them"
            )
