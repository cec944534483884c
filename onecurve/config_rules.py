"""What the values of a config have to do with each other, and what is not built yet. A refusal says what would work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from onecurve.config_text import refuse, show

if TYPE_CHECKING:
    from onecurve.config import Config

# Values that the interface knows and this version can't run yet: (key, is it one of those?, feature).
# Lifting a refusal is removing its row.
NOT_BUILT: list[tuple[str, Any, str]] = [
    ("layout.tp", lambda value: value > 1, "tensor parallelism"),
    ("model.slices", lambda value: value > 1, "the tensor grid"),
    ("train.dtype", lambda value: value == "bfloat16", "bfloat16 working weights"),
    ("layout.pp", lambda value: value > 1, "pipeline parallelism"),
    ("layout.schedule", lambda value: value != "1f1b", "pipeline schedules other than 1f1b"),
    ("layout.recompute", lambda value: value, "recomputing activations"),
    ("observe.tensorboard", lambda value: value, "TensorBoard output"),
    ("numerics.device", lambda value: value == "cuda", "training on GPUs"),
]

MICRO_BATCH_TOKENS = 1 << 24  # of one micro-batch
STEP_TOKENS = 1 << 28  # of one step


def check(config: Config) -> None:
    """Raises ConfigError for the first rule that `config` breaks; what can never run is told before what can't yet."""
    _check_model(config)
    _check_batch(config)
    _check_schedule(config)
    _check_data_parallel(config)
    _check_tensor_parallel(config)
    _check_pipeline(config)
    for name, is_missing, feature in NOT_BUILT:
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if is_missing(value):
            default = type(getattr(config, section)).model_fields[key].default
            refuse(name, value, f"not built yet ({feature})", f"leave it at {show(default)}")


def _check_model(config: Config) -> None:
    model = config.model
    if model.width % model.heads:
        heads = ", ".join(map(str, _divisors(model.width)))
        below = model.width // model.heads * model.heads
        widths = f"{below} or {below + model.heads}" if below else str(model.heads)
        allowed = f"it must divide model.width = {model.width}"
        refuse("model.heads", model.heads, allowed, f"heads that work: {heads}; or take width {widths}")
    # Slices cut the heads, and with them 4 x width, which is a multiple of the heads.
    if model.slices & (model.slices - 1):
        below = 1 << (model.slices.bit_length() - 1)
        refuse("model.slices", model.slices, "it must be a power of two", f"take {below} or {2 * below}")
    if model.heads % model.slices:
        allowed = f"it must divide model.heads = {model.heads}"
        refuse("model.slices", model.slices, allowed, f"slices that work: {_powers_of_two(model.heads)}")


def _check_batch(config: Config) -> None:
    context, rows = config.model.context, config.train.micro_batch
    if rows * context > MICRO_BATCH_TOKENS:
        allowed = f"micro_batch x model.context must be at most {MICRO_BATCH_TOKENS} tokens: it is computed at once"
        cure = f"take at most {max(MICRO_BATCH_TOKENS // context, 1)} and more leaves or accumulate"
        refuse("train.micro_batch", rows, allowed, cure)
    leaves, accumulate = config.train.leaves, config.train.accumulate
    if leaves * accumulate * rows * context > STEP_TOKENS:
        allowed = (
            f"leaves x accumulate x micro_batch x model.context must be at most {STEP_TOKENS} tokens: it is one step"
        )
        most = STEP_TOKENS // (leaves * rows * context)
        refuse("train.accumulate", accumulate, allowed, f"take at most {most}" if most else "lower train.leaves first")


def _check_schedule(config: Config) -> None:
    rates, steps, fault = config.optimizer, config.train.steps, config.faults.lr_multiplier
    if rates.warmup_steps > steps:
        allowed = f"it must be at most train.steps = {steps}"
        refuse("optimizer.warmup_steps", rates.warmup_steps, allowed, "warm up for fewer steps, or train more")
    if rates.decay != "constant" and rates.min_lr > rates.lr:
        allowed = f"it must be at most optimizer.lr = {rates.lr}"
        refuse("optimizer.min_lr", rates.min_lr, allowed, "the rate decays from lr to min_lr; lower min_lr")
    if 0 < config.guard.spike_factor <= 1:
        allowed = "it must be 0 (off) or more than 1"
        refuse("guard.spike_factor", config.guard.spike_factor, allowed, "take 2.0: a loss twice the last is a spike")
    if fault is not None and fault.step > steps:
        allowed = f"it must be at most train.steps = {steps}"
        refuse("faults.lr_multiplier.step", fault.step, allowed, "it would never fire; take an earlier step")


def _check_data_parallel(config: Config) -> None:
    dp, leaves = config.layout.dp, config.train.leaves
    if dp > leaves:
        allowed = f"it must be at most train.leaves = {leaves}, a rank without a leaf has no work"
        cure = f"set layout.dp to {leaves} or less, or train.leaves to {dp} or more (another curve)"
        refuse("layout.dp", dp, allowed, cure)


def _check_tensor_parallel(config: Config) -> None:
    tp, slices, heads = config.layout.tp, config.model.slices, config.model.heads
    if slices % tp:
        cure = f"tp that works: {_powers_of_two(slices)}"
        if str(tp) in _powers_of_two(heads).split(", "):
            cure += f"; or set model.slices to {tp} (another curve)"
        refuse("layout.tp", tp, f"it must divide model.slices = {slices}", cure)


def _check_pipeline(config: Config) -> None:
    """A stage is at least one unit, and while it works on one micro-batch each other stage must have one of its own."""
    pp, units = config.layout.pp, config.model.layers + 2
    if pp > units:
        allowed = f"it must be at most model.layers + 2 = {units}: the blocks, the embedding and the head"
        refuse(
            "layout.pp", pp, allowed, f"set layout.pp to {units} or less, or model.layers to {pp - 2} (another curve)"
        )
    dp, leaves, accumulate = config.layout.dp, config.train.leaves, config.train.accumulate
    fewest = leaves // dp  # leaves of the rank that has the fewest
    if pp > fewest * accumulate:
        allowed = (
            f"it must be at most {fewest * accumulate}, the micro-batches that a rank has per step: "
            f"train.leaves {leaves} // layout.dp {dp} x train.accumulate {accumulate}"
        )
        cure = f"set layout.pp to {fewest * accumulate} or less"
        if widest := leaves // -(-pp // accumulate):
            cure += f", layout.dp to {widest} or less"
        refuse("layout.pp", pp, allowed, f"{cure}, or train.accumulate to {-(-pp // fewest)} or more (another curve)")


def _powers_of_two(number: int) -> str:
    """Those that divide `number`."""
    return ", ".join(str(1 << n) for n in range(number.bit_length()) if number % (1 << n) == 0)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
