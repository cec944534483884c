"""A rank in a fresh interpreter: the worker travels as its name and JSON arguments, never as a pickle."""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onecurve.errors import InputError

if TYPE_CHECKING:
    from onecurve.launch.rank import Seat

PROGRAM = (
    "import json, sys; order = json.load(open(int(sys.argv[1]))); sys.path[:] = order['path'];"
    "from onecurve.launch.spawned import main; main(order)"
)


def order(seat: Seat, worker: Callable[..., Any], page: int) -> bytes:
    """What tells a fresh interpreter to run `worker` in the rank `seat`; `page` is the descriptor behind the board."""
    return json.dumps({"path": sys.path, "seat": seat.to_json(), "worker": _name(worker), "page": page}).encode()


def command(descriptor: int) -> list[str]:
    """The command line of a rank whose order is in the open file `descriptor`: everybody may read a command line, and a
    worker's arguments may hold a mirror's password."""
    return [sys.executable, "-c", PROGRAM, str(descriptor)]


def _name(worker: Callable[..., Any]) -> dict[str, Any]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    function = worker
    while isinstance(function, functools.partial):
        args, kwargs, function = [*function.args, *args], {**function.keywords, **kwargs}, function.func
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<locals>")
    if module is None or "<" in name:
        raise InputError(
            f"worker {name!r}: ranks started in fresh interpreters (threads > 1, or CUDA) need a function at the "
            "top of a module, or a functools.partial of one with JSON arguments"
        )
    file = None
    if module == "__main__":
        main_module = sys.modules["__main__"]
        spec = getattr(main_module, "__spec__", None)
        module, file = (spec.name, None) if spec is not None else (module, getattr(main_module, "__file__", None))
    try:
        json.dumps([args, kwargs])
    except TypeError as error:
        raise InputError(
            f"worker {name!r}: its arguments must be JSON values to reach a fresh interpreter: {error}"
        ) from None
    return {"module": module, "name": name, "file": file, "args": args, "kwargs": kwargs}


def _find(worker: dict[str, Any]) -> Callable[..., Any]:
    if worker["file"] is not None:
        found: Any = runpy.run_path(worker["file"], run_name="__onecurve_rank__")
        first, *rest = worker["name"].split(".")
        found = found[first]
    else:
        found, rest = importlib.import_module(worker["module"]), worker["name"].split(".")
    for part in rest:
        found = getattr(found, part)
    return functools.partial(found, *worker["args"], **worker["kwargs"])


def main(order: dict[str, Any]) -> None:
    from onecurve import faults
    from onecurve.launch.board import Board
    from onecurve.launch.rank import Seat, run_rank

    seat = Seat(**order["seat"])
    faults.arm_from_environment()
    run_rank(seat, Board(seat.world, order["page"]), lambda: _find(order["worker"]))
