"""Break it yourself: small faults at a chosen rank, step and place, for rehearsals and tests.

From the command line, through the environment:

    ONECURVE_FAULTS='kill:rank=3,step=12,place=save' onecurve train configs/demo.toml

From Python: `arm(["raise:rank=1,place=forward"])`, `disarm()`. Several faults are parted by `;`. The code under test
calls `at(place)` where it may be hit and `poison(tensor, place)` where a tensor may be spoilt; while nothing is armed
both cost one comparison.

| action | does |
|---|---|
| `kill` | SIGKILL to this rank (`signal=TERM` … another signal; `to=parent` to the command, `to=group` to its group) |
| `stop` | SIGSTOP to this process |
| `hang` | sleeps for ever |
| `slow` | sleeps for `seconds=1`; with `times=0` at every hit, as a slow disk does at `save.block` |
| `exit` | `os._exit(code)`, `code=0` by default: leaves without a word |
| `raise` | raises `InjectedFault` |
| `io` | raises OSError, `error=ENOSPC` by default, or `EIO` … |
| `poison` | writes `value=nan` (or inf, -inf, a number) to element `index=0` of the tensor at the place |

Places of a training run: `forward`, `backward`, `exchange`, `evaluation`, `rollback`, `replay`, `save`, inside a save
`save.begin`, `save.write`, `save.block` (each piece of a file), `save.written`, `save.commit`, `save.rename`, inside a
load `load.read` and `load.block`. To poison: `logits`, and `gradient`, which is that of the logits. `step` counts the
updates that are done.

The commands `train` and `verify` refuse a fault that could never fire there: at an unknown place, or at a rank that is
not in the run. A program of your own may name places with `context.place(…)`.

Filters: `rank`, `step`, `place` (each: any where left out; `place=step` is where the loop reports a step); `after=N`
skips the first N hits in a process; `times=N` fires at most N times in a process (default 1; 0 = every time);
`once=FILE` fires only if FILE can be created, so once over all ranks and restarts.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onecurve.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT = "ONECURVE_FAULTS"
TARGETS = ("rank", "parent", "group")
ACTIONS = ("kill", "stop", "hang", "slow", "exit", "raise", "io", "poison")
_INTEGERS = ("rank", "step", "after", "times", "code", "index")
_FLOATS = ("value", "seconds")
_OPTIONS = {
    "kill": ("signal", "to"), "slow": ("seconds",), "exit": ("code",), "io": ("error",), "poison": ("value", "index"),
}  # fmt: skip
_FILTERS = ("rank", "step", "place", "after", "times", "once")
PLACES = (
    "step", "forward", "backward", "exchange", "evaluation", "rollback", "replay", "save", "save.begin", "save.write",
    "save.block", "save.written", "save.commit", "save.rename", "load.read", "load.block",
)  # fmt: skip
POISON_PLACES = ("logits", "gradient")
LONGEST_SECONDS = 1e6


class InjectedFault(RuntimeError):
    """Raised by an armed `raise` fault."""


@dataclass
class Fault:
    """One armed fault; see the module's table."""

    action: str
    rank: int | None = None
    step: int | None = None
    place: str | None = None
    after: int = 0
    times: int = 1
    once: str | None = None
    code: int = 0
    error: str = "ENOSPC"
    value: float = float("nan")
    index: int = 0
    signal: str = "KILL"
    to: str = "rank"
    seconds: float = 1.0
    fired: int = 0

    def matches(self, place: str, rank: int | None, step: int | None) -> bool:
        """Whether this fault fires here and now; counts hits, and claims the marker file of `once`."""
        if self.place not in (None, place) or self.rank not in (None, rank) or self.step not in (None, step):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times and self.fired >= self.times:
            return False
        if self.once is not None:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                return False
        self.fired += 1
        return True


# Process-wide on purpose: a fault is armed from outside, and the code under test must not carry it through its calls.
armed: list[Fault] = []
_rank: int | None = None
_step: int | None = None
_launcher = (0, 0)  # this process, and the one that started it as a rank


def parse(spec: str) -> Fault:
    """One fault from `action:key=value,key=value`. Raises InputError with what is allowed."""
    action, _, rest = spec.strip().partition(":")
    if action not in ACTIONS:
        raise InputError(f"fault {spec!r}: unknown action {action!r}; allowed: {', '.join(ACTIONS)}")
    allowed = _FILTERS + _OPTIONS.get(action, ())
    fault = Fault(action)
    for item in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in allowed or not equals:
            raise InputError(f"fault {spec!r}: unknown option {item!r}; allowed for {action}: {', '.join(allowed)}")
        try:
            setattr(fault, key, int(value) if key in _INTEGERS else float(value) if key in _FLOATS else value)
        except ValueError:
            raise InputError(f"fault {spec!r}: {key} must be a number, not {value!r}") from None
    if action == "io" and not hasattr(errno, fault.error):
        raise InputError(f"fault {spec!r}: unknown error {fault.error!r}; use a name from errno, such as ENOSPC or EIO")
    if action == "kill" and not hasattr(signal, f"SIG{fault.signal}"):
        raise InputError(f"fault {spec!r}: unknown signal {fault.signal!r}; use a name such as KILL, TERM or SEGV")
    if not 0 <= fault.seconds <= LONGEST_SECONDS:
        raise InputError(f"fault {spec!r}: seconds must be from 0 to {LONGEST_SECONDS:,.0f}; one without end is `hang`")
    if fault.to not in TARGETS:
        raise InputError(f"fault {spec!r}: unknown target {fault.to!r}; allowed: {', '.join(TARGETS)}")
    return fault


def arm(specs: str | Iterable[str | Fault]) -> None:
    """Arm these faults in place of those that were armed. Ranks forked later inherit them."""
    items = specs.split(";") if isinstance(specs, str) else list(specs)
    faults = [item if isinstance(item, Fault) else parse(item) for item in items if item]
    armed[:] = faults


def disarm() -> None:
    armed.clear()


def arm_from_environment() -> None:
    """Arm what ONECURVE_FAULTS says, if anything and if nothing is armed yet."""
    if not armed and (specs := os.environ.get(ENVIRONMENT, "").strip()):
        arm(specs)


def check_environment(world: int) -> None:
    """Refuse what ONECURVE_FAULTS says where it could never fire in a training run of `world` ranks. InputError."""
    for spec in filter(None, os.environ.get(ENVIRONMENT, "").strip().split(";")):
        fault = parse(spec)
        places = POISON_PLACES if fault.action == "poison" else PLACES
        if fault.place is not None and fault.place not in places:
            known = ", ".join(places)
            raise InputError(
                f"{ENVIRONMENT}: fault {spec!r}: unknown place {fault.place!r}; {fault.action} at: {known}"
            )
        if fault.rank is not None and not 0 <= fault.rank < world:
            raise InputError(f"{ENVIRONMENT}: fault {spec!r}: there is no such rank; they are 0 to {world - 1}")


def here(rank: int | None, step: int | None) -> None:
    """The rank and step that `at` and `poison` assume where they are not told."""
    global _rank, _step, _launcher
    if _launcher[0] != os.getpid():
        _launcher = (os.getpid(), os.getppid())
    _rank, _step = rank, step


def at(place: str, *, rank: int | None = None, step: int | None = None) -> None:
    """A point that a fault may hit."""
    if not armed:
        return
    rank = _rank if rank is None else rank
    step = _step if step is None else step
    for fault in armed:
        if fault.action != "poison" and fault.matches(place, rank, step):
            _fire(fault, f"rank={rank}, step={step}, place={place}")


def poison(tensor: Tensor, place: str, *, rank: int | None = None, step: int | None = None) -> Tensor:
    """Spoil one element of `tensor` in place if a fault says so; any shape and floating dtype. Returns `tensor`."""
    if not armed:
        return tensor
    rank = _rank if rank is None else rank
    step = _step if step is None else step
    for fault in armed:
        if fault.action == "poison" and tensor.numel() and fault.matches(place, rank, step):
            rest, where = fault.index % tensor.numel(), []
            for size in reversed(tensor.shape):
                rest, last = divmod(rest, size)
                where.append(last)
            tensor.detach()[tuple(reversed(where))] = fault.value
    return tensor


def _fire(fault: Fault, where: str) -> None:
    if fault.action == "kill":
        signum, launcher = getattr(signal, f"SIG{fault.signal}"), os.getppid()
        if fault.to == "rank":
            os.kill(os.getpid(), signum)
        elif (os.getpid(), launcher) == _launcher:  # an orphan's parent is somebody else, who must not be hit
            os.killpg(os.getpgid(launcher), signum) if fault.to == "group" else os.kill(launcher, signum)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "hang":
        while True:
            time.sleep(3600)
    elif fault.action == "slow":
        time.sleep(fault.seconds)
    elif fault.action == "exit":
        os._exit(fault.code)
    elif fault.action == "io":
        number = getattr(errno, fault.error)
        raise OSError(number, f"{os.strerror(number)} (injected at {where})")
    else:
        raise InjectedFault(f"injected at {where}")
