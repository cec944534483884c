"""How a model is cut into units, and what the ownership table has to know of its parameters."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onecurve.errors import InputError
from onecurve.parallel.ownership import ParamSpec

Units = Sequence[tuple[str, nn.Module]]
ROOT = "root"  # the unit of parameters that no other unit holds


@dataclass(frozen=True)
class Trained:
    """The trained parameters of a model, in canonical order.

    `parameters`: by name. `specs`: one per name. `tied`: a second use over the storage of another parameter,
    {name of the second use: (its Parameter, name of the first)}. `modules`: unit -> module. `unit_of_use`: the unit in
    which each parameter, second uses included, is used. `needs`: unit -> units whose weights its module reads.
    """

    parameters: dict[str, nn.Parameter]
    specs: list[ParamSpec]
    tied: dict[str, tuple[nn.Parameter, str]]
    modules: dict[str, nn.Module]
    unit_of_use: dict[str, str]
    needs: dict[str, list[str]]

    @property
    def gradients_of(self) -> dict[str, nn.Parameter]:
        """Every parameter object that autograd makes a gradient of: the parameters, and the tied second uses."""
        return {**self.parameters, **{name: p for name, (p, _) in self.tied.items()}}

    @property
    def working_dtype(self) -> torch.dtype | None:
        """The dtype of the working weights, None where they have several."""
        dtypes = {p.dtype for p in self.parameters.values()}
        return dtypes.pop() if len(dtypes) == 1 else None


def default_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's own `units()` where it has one; else its children, with containers opened."""
    if own := _method(model, "units"):
        return list(own())
    return [unit for name, child in model.named_children() for unit in _opened(name, child)]


def _method(model: nn.Module, name: str) -> Callable | None:
    """The model's method of that name, None where it has none (an attribute of the name is something else)."""
    return getattr(model, name) if callable(getattr(type(model), name, None)) else None


def _opened(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A unit must be called as a module, for that is when it is gathered; containers are not, their parts are."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        for part, child in module.named_children():
            yield from _opened(f"{name}.{part}", child)
    elif not isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        yield name, module


def survey(model: nn.Module, units: Units | None) -> Trained:
    """Collect the trained parameters of `model`. Raises InputError for what can't be trained bit for bit."""
    refuse_layers(model)
    cut = list(units) if units is not None else default_units(model)
    modules = dict(cut)
    if len(modules) < len(cut):
        raise InputError(f"units = {', '.join(name for name, _ in cut)}: two have one name")
    second = dict(getattr(model, "tied_uses", {}))
    undecayed = _method(model, "undecayed")
    without_decay: set[str] = undecayed() if undecayed else set()
    unit_of: dict[int, str] = {}
    reads: dict[str, list[nn.Parameter]] = {unit: list(module.parameters()) for unit, module in cut}
    for unit, parameters in reads.items():
        for p in parameters:
            unit_of.setdefault(id(p), unit)
    if any(id(p) not in unit_of for p in model.parameters()):
        modules[ROOT] = model
        reads[ROOT] = [p for p in model.parameters() if id(p) not in unit_of]

    named = dict(model.named_parameters())
    refuse_shared_memory(named, second)
    trained = {name: p for name, p in named.items() if p.requires_grad and name not in second}
    if not trained:
        raise InputError("the model has no parameter with requires_grad=True: nothing to train")
    for name, p in trained.items():
        if not p.dtype.is_floating_point or p.dtype.itemsize > 4:
            raise InputError(
                f"parameter {name} is {p.dtype}: the masters are fp32, so float32 and narrower can be trained"
            )
    order = {unit: i for i, unit in enumerate(modules)}
    by_unit = sorted(trained, key=lambda name: order[unit_of.get(id(trained[name]), ROOT)])  # stable: canonical order
    specs = [
        ParamSpec(
            name=name,
            shape=tuple(trained[name].shape),
            dtype=str(trained[name].dtype).removeprefix("torch."),
            unit=unit_of.get(id(trained[name]), ROOT),
            decay=trained[name].ndim >= 2 and name not in without_decay,
        )
        for name in by_unit
    ]
    tied = {name: (named[name], source) for name, source in second.items() if named[name].requires_grad}
    home = {id(trained[spec.name]): spec.unit for spec in specs}
    home |= {id(p): home[id(trained[source])] for p, source in tied.values()}
    needs = {
        unit: sorted({home[id(p)] for p in reads[unit] if id(p) in home}, key=order.__getitem__) for unit in modules
    }
    uses = {spec.name: spec.unit for spec in specs} | {name: unit_of.get(id(p), ROOT) for name, (p, _) in tied.items()}
    return Trained({spec.name: trained[spec.name] for spec in specs}, specs, tied, modules, uses, needs)


def extras(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and persistent buffers by name: state that is not trained, but belongs to the model."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    kept = model.state_dict(keep_vars=True)
    return frozen | {name: b for name, b in model.named_buffers() if name in kept}


def refuse_layers(model: nn.Module) -> None:
    """Raise InputError for a layer whose result would depend on which leaves a rank runs."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        kind = type(module).__name__
        p = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            p = module.dropout
        if p:
            raise InputError(
                f"{name} is a {kind} with dropout {p:g}: it draws from the global generator, so the bits would depend "
                "on the layout; set it to 0, or use onecurve.model.randomness.dropout with a key"
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise InputError(
                f"{name} is a {kind}: its running statistics would depend on which leaves a rank runs; "
                "use LayerNorm or GroupNorm, or track_running_stats=False"
            )


def refuse_shared_memory(named: Mapping[str, nn.Parameter], tied_uses: Mapping[str, str]) -> None:
    """Raise InputError for parameters over the same memory that would part: undeclared ones, and pairs of which one is
    frozen."""
    for second, first in tied_uses.items():
        for name in (second, first):
            if name not in named:
                raise InputError(f"tied_uses = {dict(tied_uses)}: the model has no parameter {name}")
        if named[second].requires_grad != named[first].requires_grad:
            frozen, trained = (second, first) if named[first].requires_grad else (first, second)
            raise InputError(f"{frozen} is frozen and tied to {trained}, which is trained; freeze both or none")
    spans = sorted((*_span(p), name) for name, p in named.items() if name not in tied_uses and p.numel())
    for (_, stop, a), (start, _, b) in itertools.pairwise(spans):
        if start < stop:
            raise InputError(
                f"parameters {a} and {b} share memory; make them one nn.Parameter, or name them in the model's "
                "tied_uses = {second: first}"
            )


def _span(p: nn.Parameter) -> tuple[int, int]:
    """The addresses from the parameter's first element to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
    return p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size()
