"""The commands. Results go to stdout, everything else to stderr; `main` turns every error into its exit code.

torch, pydantic and rich are imported inside the commands that need them, so that `--help` comes at once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from onecurve import __version__
from onecurve.errors import CheckFailed, InputError, OnecurveError
from onecurve.paths import FILE, FOLDER, need, need_place, refusal
from onecurve.report.console import printable, say_on

app = typer.Typer(
    name="onecurve",
    help="Train GPT-style models: one config, one loss curve, the same bits on every layout.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Some versions of typer carry click inside, others use the package: ClickException is reached through typer's own name.
USAGE_ERRORS = cast(tuple[type[Exception], ...], (typer.BadParameter.__mro__[2],))
EMPTY_OPTION = re.compile(r"--(?!prompt=)[a-z-]+=")
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell shows for any program whose reader went away

ConfigArg = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, see configs/.")]
RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
SetOption = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override; repeatable.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"onecurve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the run here instead of a temporary folder.")
    ] = None,
) -> int:
    """Train on 4 ranks, prove four invariants, resume byte for byte."""
    from onecurve.capstone import load_capstone

    if run is not None:
        need_place(run, FOLDER, "--run", "name a folder, new or not")
    return load_capstone().main(run)


@app.command()
def train(
    config: ConfigArg,
    set_: SetOption = [],  # noqa: B006 - typer copies it
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder. [default: runs/NAME-CURVE]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="RUN[@STEP]", help="Start a new curve from that state.")
    ] = None,
    restarts: Annotated[int, typer.Option(metavar="N", min=0, help="Start again after a failure, N times.")] = 0,
) -> int:
    """Train."""
    from onecurve.config import load_config

    if resume and from_ is not None:
        raise InputError("--resume and --from exclude each other: --resume goes on with a run, --from starts a new one")
    loaded = load_config(config, set_)
    from onecurve.train.run import train as train_run

    return train_run(loaded, run, resume, from_, restarts, source=config, overrides=set_)


@app.command()
def plan(config: ConfigArg, set_: SetOption = []) -> int:  # noqa: B006
    """Show mesh, memory per rank, traffic and disk; starts no process."""
    from onecurve.config import load_config
    from onecurve.report.plan import plan_lines
    from onecurve.train.corpora import check_corpora

    loaded = load_config(config, set_)
    check_corpora(loaded)
    _print(plan_lines(loaded))
    return 0


@app.command()
def verify(
    config: ConfigArg,
    set_: SetOption = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="A few combinations instead of all.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The proof.")] = Path("verify.json"),
) -> int:
    """Prove on this config that every layout gives the same bits."""
    from onecurve.config import load_config
    from onecurve.report.console import Stages

    loaded = load_config(config, set_)
    need_place(out, FILE, "--out", "give another file")
    need(out.parent, FOLDER, f"--out {out}: its folder", "make it, or give another file")
    from onecurve.train.records import write_json
    from onecurve.verify import controls, prove

    with Stages("layouts") as stages:
        proof = prove(loaded, quick=quick, control=controls.from_environment(), progress=stages.update)
    write_json(out, proof.to_json())
    _print(proof.lines())
    return 0 if proof.same else CheckFailed.exit_code


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    b: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.")],
) -> int:
    """Say whether two runs have the same curve, or the first step that differs."""
    from onecurve.report.compare import compare_runs

    result = compare_runs(a, b)
    _print(result.lines())
    return 0 if result.same else CheckFailed.exit_code


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A step-NNNNNNNN folder.")],
    check: Annotated[bool, typer.Option("--check", help="Verify every hash.")] = False,
) -> int:
    """Show a checkpoint's manifest as a table."""
    from onecurve.report.inspect import inspect_checkpoint

    lines, problems = inspect_checkpoint(checkpoint, check=check)
    _print(lines)
    if check:
        _print(["", *(f"WRONG  {problem}" for problem in problems)] if problems else ["", "WHOLE  every hash is right"])
    return CheckFailed.exit_code if problems else 0


@app.command()
def prepare(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new corpus folder.")],
    glob: Annotated[list[str], typer.Option(metavar="PATTERN", help="What of a folder [default: *.txt].")] = [],  # noqa: B006
    exclude: Annotated[list[str], typer.Option(metavar="PATTERN", help="Which not; repeatable.")] = [],  # noqa: B006
    tokenizer: Annotated[str, typer.Option(metavar="NAME", help="byte, or bpe with --vocab.")] = "byte",
    vocab: Annotated[int | None, typer.Option(metavar="N", help="Size of a BPE vocabulary.")] = None,
    val_fraction: Annotated[float, typer.Option("--val-fraction", metavar="F", help="Share held out.")] = 0.05,
) -> int:
    """Turn text into a corpus."""
    from onecurve.data.prepare import prepare as prepare_corpus
    from onecurve.report.console import ByteProgress
    from onecurve.report.corpus import prepared_lines

    with ByteProgress() as progress:
        made = prepare_corpus(
            paths,
            out,
            glob=glob or ["*.txt"],
            exclude=exclude,
            tokenizer=tokenizer,
            vocab=vocab,
            val_fraction=val_fraction,
            progress=progress.update,
        )
    for note in made.notes:
        _complain(note)
    _print(prepared_lines(made))
    return 0


@app.command()
def sample(
    run: RunArg,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="How many.")] = 256,
    temperature: Annotated[float, typer.Option(metavar="T", min=0.0, help="0 = the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", metavar="K", min=0, help="Of the K likeliest; 0 = all.")] = 0,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="The same seed gives the same text.")] = 0,
) -> int:
    """Write text from the newest whole checkpoint."""
    from onecurve.sample import sample as sample_run

    pieces = sample_run(
        run, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, say=_complain
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    return 0


@app.command()
def report(run: RunArg) -> int:
    """Write the run's page."""
    raise _not_built("report")


@app.command()
def export(run: RunArg) -> int:
    """Write the weights in other formats."""
    raise _not_built("export")


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0 done, 1 a check failed, 2 bad input, 3 the run failed, 75 stopped on request."""
    # Closed by whoever started us, as daemons do: what is written then goes nowhere, and is no failure.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without our characters is no failure
    if threading.current_thread() is not threading.main_thread():
        return _run(arguments)
    before = signal.signal(signal.SIGTERM, _interrupt)  # where no ranks run there is nothing to save
    try:
        return _run(arguments)
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _run(arguments: list[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
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
        _complain(printable(text.strip()) if error.exit_code == InputError.exit_code else text)
        return error.exit_code
    except USAGE_ERRORS as error:
        place: Any = getattr(error, "ctx", None)
        path = place.command_path if place is not None else "onecurve"
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        _complain(printable(f"{message}. See {path} --help."))
        return InputError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        return 75
    except Exception as error:
        if line := refusal(error):
            _complain(line)
            return InputError.exit_code
        # a mistake of ours, and not exit code 1: that one says that a check was made and failed
        traceback.print_exc()
        return 3


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _not_built(command: str) -> InputError:
    return InputError(f"onecurve {command} is not built yet; see onecurve --help for what is")


def _print(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


def _complain(text: str) -> None:
    say_on(sys.stderr, f"onecurve: {text}")


if __name__ == "__main__":
    sys.exit(main())
