"""The config: one TOML file in three parts. Only the curve may change a bit of the result.

    curve      model, data, train, optimizer, guard, faults        what is trained
    layout     layout, checkpoint, observe, limits                 how it is run
    numerics   numerics                                            the environment the bits hold in

Each field says its type and bounds once; messages are made from them (`config_text.py`). Defaults are the demo's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from onecurve.config_rules import check
from onecurve.config_text import apply_overrides, explain, read_toml, refuse, show, to_toml
from onecurve.errors import ConfigError
from onecurve.urls import without_secrets

CURVE_SECTIONS = ("model", "data", "train", "optimizer", "guard", "faults")
RUN_SECTIONS = ("layout", "checkpoint", "observe", "limits")  # what a resumed run may change

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrOff = Annotated[int, Field(ge=0, le=2**31 - 1)]
Rate = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def _from_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # TOML has lists only


def _none_if_empty(value: Any) -> Any:
    return None if value == {} else value  # so that --set can take a fault away


class Section(BaseModel):
    """A frozen table. Strict: text is never taken for a number, nor 1.0 for 1; NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The GPT."""

    layers: Annotated[int, Field(ge=1, le=1024)] = 2  # transformer blocks
    width: Count = 32  # embedding dimension
    heads: Count = 4  # attention heads; divides width
    vocab: Annotated[int, Field(ge=2, le=2**31 - 1)] = 64  # token ids 0 … vocab - 1
    context: Count = 16  # tokens per sequence
    tied: bool = False  # the output head shares the token embedding
    dropout: Fraction = 0.0  # probability, at every site
    slices: Count = 1  # the tensor grid, a power of two; layout.tp must divide it


class DataConfig(Section):
    """The corpus."""

    source: Annotated[str, Field(min_length=1)] = "cycle"  # the built-in corpus, or a folder made by `onecurve prepare`


class TrainConfig(Section):
    """How much is trained, in which grain."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 41  # of weights, data order and dropout
    steps: Count = 20  # optimizer updates in all
    leaves: Annotated[int, Field(ge=1, le=65_536)] = 4  # the most data-parallel ranks this curve can use
    accumulate: Count = 1  # micro-batches per leaf
    micro_batch: Count = 4  # sequences per micro-batch
    dtype: Literal["float32", "bfloat16"] = "float32"  # of working weights; the master stays fp32


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: Rate = 5e-3  # peak learning rate
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(_from_list)] = (0.9, 0.95)  # decay of the moments
    eps: Annotated[float, Field(gt=0.0)] = 1e-8  # added to the root of the second moment
    weight_decay: Rate = 0.0  # matrices only
    clip: Rate = 0.0  # global gradient norm; 0 = off
    warmup_steps: CountOrOff = 0  # linear, from 0 to lr
    decay: Literal["constant", "cosine", "linear"] = "constant"  # after the warm-up, to min_lr at the last step
    min_lr: Rate = 0.0  # where the decay ends


class GuardConfig(Section):
    """When a step is rolled back. Non-finite values always are."""

    spike_factor: Rate = 2.0  # loss above this factor of the previous accepted one; 0 = off
    max_rollbacks: CountOrOff = 3  # in a row without an accepted new step


class LrMultiplier(Section):
    """One step with its learning rate multiplied."""

    step: Count  # the update it fires at
    factor: Annotated[float, Field(gt=0.0)]  # multiplies the learning rate


class FaultsConfig(Section):
    """Rehearsals of trouble that belong to the curve; each fires once per curve."""

    lr_multiplier: Annotated[LrMultiplier | None, BeforeValidator(_none_if_empty)] = None  # fires at one step


class LayoutConfig(Section):
    """Ranks = dp · tp · pp, and what each of them holds."""

    dp: Count = 4  # data-parallel ranks; at most train.leaves
    tp: Count = 1  # tensor-parallel ranks; divides model.slices
    pp: Count = 1  # pipeline stages
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"  # of the pipeline
    zero: Annotated[int, Field(ge=0, le=3)] = 1  # what is sharded: 1 optimizer, 2 and gradients, 3 and weights
    recompute: bool = False  # activations again in backward instead of keeping them
    transport: Literal["auto", "alltoall", "p2p", "shm"] = "auto"  # how the bytes of an exchange move


class CheckpointConfig(Section):
    """When the state is saved and where it is kept."""

    every_steps: CountOrOff = 10  # 0 = off; the last step is always saved
    every_minutes: Rate = 0.0  # of wall clock; 0 = off
    keep: Annotated[int, Field(ge=2, le=2**31 - 1)] = (
        3  # the newest ones; two, so that a failed save leaves a whole one
    )
    background: bool = True  # hash and write while training goes on
    mirror: str = ""  # a second place, any fsspec URL


class ObserveConfig(Section):
    """What is looked at."""

    log_every: CountOrOff = 1  # steps between console lines off a terminal; 0 = none
    eval_every: CountOrOff = 0  # steps between evaluations; 0 = off
    check_replicas_every: CountOrOff = 10  # steps between digests of the replicas; 0 = off
    tensorboard: bool = False  # scalars for TensorBoard


class LimitsConfig(Section):
    """When waiting ends."""

    stall_seconds: Annotated[float, Field(gt=0.0)] = 300.0  # a rank that makes no progress for so long is hung


class NumericsConfig(Section):
    """The environment that the bits hold in."""

    device: Literal["cpu", "cuda"] = "cpu"  # where the tensors live
    threads: Annotated[int, Field(ge=1, le=1024)] = 1  # per rank
    on_change: Literal["record", "refuse"] = "record"  # on resume in another numeric environment


class Config(Section):
    """The whole config, checked: each value by its field, then each against the others."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    guard: GuardConfig = GuardConfig()
    faults: FaultsConfig = FaultsConfig()
    layout: LayoutConfig = LayoutConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    limits: LimitsConfig = LimitsConfig()
    numerics: NumericsConfig = NumericsConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        # ConfigError is no ValueError, so pydantic lets it through as it is.
        check(self)
        return self


def make_config(tables: Mapping[str, Any]) -> Config:
    """A config from plain tables. ConfigError, in one line, for the first thing that is wrong."""
    try:
        return Config(**tables)
    except ValidationError as error:
        errors = sorted(
            error.errors(), key=lambda item: item["type"] != "extra_forbidden"
        )  # a misspelt key explains the rest
        raise ConfigError(explain(errors[0], Config, tables)) from None


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides in order, check. ConfigError in one line."""
    tables = read_toml(Path(path))
    apply_overrides(tables, overrides, Config)
    return make_config(tables)


def resume_config(given: Config, stored: Config, overrides: Iterable[str] = ()) -> tuple[Config, list[str]]:
    """The config of a resumed run: `stored`'s curve and numerics, `given`'s layout, checkpoint, observe and limits.

    `given` is the config on the command line, `overrides` its --set. Returns the config and one line for each key of
    the file that is not applied. ConfigError if an override asks for another curve.
    """
    asked = {text.split("=", 1)[0].strip() for text in overrides}
    kept = [name for name in Config.model_fields if name not in RUN_SECTIONS]
    notes = []
    for section in kept:
        new, old = getattr(given, section).model_dump(), getattr(stored, section).model_dump()
        for key in (key for key in new if new[key] != old[key]):
            name = f"{section}.{key}"
            if any(name == text or text.startswith(name + ".") for text in asked):
                may = ", ".join(RUN_SECTIONS)
                allowed = f"this run was started with {show(old[key])} and a resumed run may change {may} only"
                refuse(name, new[key], allowed, "start a new curve with --from RUN")
            goes_on = f"the run goes on with {show(old[key])}; to change it, start a new curve with --from RUN"
            notes.append(f"{name} = {show(new[key])} is not applied: {goes_on}")
    parts = {name: getattr(stored if name in kept else given, name).model_dump() for name in Config.model_fields}
    return make_config(parts), notes


def curve_part(config: Config) -> dict[str, Any]:
    """The sections that decide the bits, as plain values."""
    return {name: getattr(config, name).model_dump(mode="json") for name in CURVE_SECTIONS}


def config_to_toml(config: Config) -> str:
    """The resolved config as TOML that `load_config` reads; secrets in the mirror's URL are removed."""
    tables = config.model_dump(mode="json", exclude_none=True)
    tables["checkpoint"]["mirror"] = without_secrets(tables["checkpoint"]["mirror"])
    return to_toml(tables)
