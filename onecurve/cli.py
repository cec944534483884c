"""The commands. Results go to stdout, everything else to stderr; `run_command` turns every error into its exit code.

torch, pydantic and rich are imported inside the commands that need them, so that `--help` comes at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from onecurve import __version__, faults
from onecurve.errors import CheckFailed, InputError
from onecurve.exits import complain, run_command
from onecurve.paths import FILE, FOLDER, need, need_place

app = typer.Typer(
    name="onecurve",
    help="Train GPT-style models: one config, one loss curve, the same bits on every layout.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
    faults.check_environment(loaded.layout.dp)
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
    faults.check_environment(loaded.train.leaves)
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
            paths, out, glob=glob or ["*.txt"], exclude=exclude, tokenizer=tokenizer, vocab=vocab,
            val_fraction=val_fraction, progress=progress.update,
        )  # fmt: skip
    for note in made.notes:
        complain(note)
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
        run, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, say=complain
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    return 0


@app.command()
def report(run: RunArg) -> int:
    """Write the run's page (not built yet)."""
    raise InputError("onecurve report is not built yet; see onecurve --help for what is")


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or RUN@STEP for that step.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new folder.")],
    form: Annotated[str, typer.Option("--format", metavar="NAME", help="Or: safetensors.")] = "transformers",
) -> int:
    """Write the weights in other formats."""
    from onecurve.export import export_run
    from onecurve.report.export import exported_lines

    _print(exported_lines(export_run(run, out, form=form, say=complain)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0 done, 1 a check failed, 2 bad input, 3 the run failed, 75 stopped on request."""
    return run_command(app, arguments)


def _print(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
