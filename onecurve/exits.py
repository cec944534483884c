"""How a command ends: every error becomes its exit code and, where a person can act on it, one line on stderr."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from itertools import pairwise
from typing import Any, cast

import typer

from onecurve.errors import InputError, OnecurveError, Stopped
from onecurve.paths import refusal
from onecurve.report.console import printable, say_on

# Some versions of typer carry click inside, others use the package: ClickException is reached through typer's own name.
USAGE_ERRORS = cast(tuple[type[Exception], ...], (typer.BadParameter.__mro__[2],))
EMPTY_OPTION = re.compile(r"--(?!prompt=)[a-z-]+=")
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell shows for any program whose reader went away


def run_command(app: typer.Typer, arguments: list[str] | None) -> int:
    """Run one command; without `arguments` that of this process, which ends with it. Returns 0 done, 1 a check failed,
    2 bad input, 3 the run failed, 75 stopped on request."""
    # Closed by whoever started us, as daemons do: what is written then goes nowhere, and is no failure.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without our characters is no failure
    if threading.current_thread() is not threading.main_thread():
        return _run(app, arguments)
    signals = [signal.SIGTERM]  # where no ranks run there is nothing to save
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started us wants it ignored
        signals.append(signal.SIGINT)
    before = {signum: signal.signal(signum, _interrupt) for signum in signals}
    try:
        return _run(app, arguments)
    finally:
        for signum, handler in before.items():
            # The exit code is known. An interpreter that ends by itself must not be ended by a late signal instead.
            signal.signal(signum, signal.SIG_IGN if arguments is None else handler or signal.SIG_DFL)


def _run(app: typer.Typer, arguments: list[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not _stands_somewhere():  # torch's own libraries end the process without a word of sense
            raise InputError("the folder where this runs was removed; cd to one that is there")
        for before, word in pairwise(["", *words]):
            # a variable that is not set; as a path it would be taken for the folder where the command runs
            if before != "--prompt" and (not word or EMPTY_OPTION.fullmatch(word)):
                what = word or f"the argument after {before or 'onecurve'}"
                raise InputError(f"{what} is empty; give a value, or leave it out")
        # not click's own main(): it answers a broken pipe with 1 and an interrupt with 130
        command = typer.main.get_command(app)
        with command.make_context("onecurve", words) as context:
            code = command.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as done:
        sys.stdout.flush()
        return done.exit_code
    except BrokenPipeError:
        # the interpreter flushes stdout once more as it ends; give it somewhere to write to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OnecurveError as error:
        text = str(error)
        complain(printable(text.strip()) if error.exit_code == InputError.exit_code else text)
        return error.exit_code
    except USAGE_ERRORS as error:
        place: Any = getattr(error, "ctx", None)
        path = place.command_path if place is not None else "onecurve"
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        complain(printable(f"{message}. See {path} --help."))
        return InputError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return 75
    except Exception as error:
        if line := refusal(error):
            complain(line)
            return InputError.exit_code
        # a mistake of ours, and not exit code 1: that one says that a check was made and failed
        traceback.print_exc()
        return 3


def _stands_somewhere() -> bool:
    try:
        return bool(os.getcwd())  # noqa: PTH109 - Path.cwd is no different
    except OSError:
        return False


def _interrupt(_signum: int, _frame: object) -> None:
    if not isinstance(sys.exc_info()[1], Stopped):  # which is on its way up: all is saved, the rest is to say so
        raise KeyboardInterrupt


def complain(text: str) -> None:
    say_on(sys.stderr, f"onecurve: {text}")
