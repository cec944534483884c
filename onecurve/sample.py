"""`onecurve sample`: text from a run's newest whole checkpoint, in one process.

run folder   config.toml, the curve's id, what its token ids mean (corpus/, copied there when the run began)
checkpoint   the newest that verifies whole and is finite; fp32 masters, whatever layout saved them
prompt       to ids; without one the text begins as a document does
generate     id by id, to characters that a terminal can't act on, as they come
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from onecurve.checkpoint import latest_checkpoint, read_manifest, read_parameters
from onecurve.checkpoint.reshard import check_fits
from onecurve.config import Config, load_config
from onecurve.data.text import load_tokenizer, open_corpus
from onecurve.data.text import read_manifest as read_description
from onecurve.data.tokenizer import Tokenizer
from onecurve.errors import InputError
from onecurve.model import GPT
from onecurve.model.sampling import generate
from onecurve.report.plan import parameters
from onecurve.report.terminal import TerminalText

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """A run as sampling needs it; `tokenizer` is None where the ids stand for no text."""

    config: Config
    model: GPT
    step: int
    tokenizer: Tokenizer | None


def sample(
    run: Path, *, prompt: str = "", tokens: int = 256, temperature: float = 1.0, top_k: int = 0, seed: int = 0, say: Say
) -> Iterator[str]:
    """The prompt and what the model makes of it, in pieces that are safe to print; a function of the checkpoint and the
    arguments. `say` is told, a line each, what the reader should know beside it.

    The text ends after `tokens` ids, or where the model ends the document. Without a tokenizer both prompt and output
    are ids. Raises InputError.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise InputError(f"--temperature {temperature}: it must be a finite number, 0 or more")
    trained = open_trained(run, say)
    model, tokenizer = trained.model, trained.tokenizer
    ids = prompt_ids(trained, prompt)
    say(f"step {trained.step} of {run}" + ("" if tokenizer else "; its corpus is no text: token ids"))
    if len(ids) > model.context:
        say(f"the prompt has {len(ids)} tokens, the model sees {model.context}: it reads the last {model.context}")
    following = generate(model, ids, temperature=temperature, top_k=top_k, seed=seed)
    if tokenizer is None:
        yield " ".join(map(str, ids))
        for token in islice(following, tokens):
            yield f" {token}"
        yield "\n"
        return
    text = TerminalText()
    yield text.feed(tokenizer.decode_bytes(ids))
    count, token = 0, -1
    while count < tokens and token != tokenizer.end_of_document:
        count, token = count + 1, next(following)
        yield text.feed(tokenizer.decode_bytes([token]))
    yield text.end() + "\n"
    if count < tokens:
        say(f"the model ended the document after {count} of {tokens} tokens")


def open_trained(run: Path, say: Say) -> Trained:
    """The model of a run at its newest whole checkpoint. Raises InputError."""
    for name in ("config.toml", "run.json"):
        if not (run / name).is_file():
            raise InputError(f"{run}: no run there (no {name}); give the folder of a run that `onecurve train` made")
    config = load_config(run / "config.toml")
    path, reasons = latest_checkpoint(run / "checkpoints", curve_id=_curve_of(run), finite=True)
    for reason in reasons:
        say(f"passed over {reason}")
    if path is None:
        raise InputError(f"{run}: it has no whole checkpoint; train on (--resume) until one is saved")
    manifest = read_manifest(path)
    check_fits(manifest, parameters(config.model), str(path))
    m = config.model
    model = GPT(layers=m.layers, width=m.width, heads=m.heads, vocab=m.vocab, context=m.context, tied=m.tied)
    with torch.no_grad():
        for name, values in read_parameters(path, check=False).items():  # its hashes have just been compared
            model.get_parameter(name).copy_(values)
    return Trained(config, model.eval(), manifest.step, _tokenizer_of(config, run / "corpus"))


def prompt_ids(trained: Trained, prompt: str) -> list[int]:
    """At least one id. Without a prompt: the end of a document, as before each one in training, or where there is no
    text the first id of the corpus. Raises InputError."""
    config, tokenizer = trained.config, trained.tokenizer
    if tokenizer is not None:
        return tokenizer.encode(prompt) if prompt else [tokenizer.end_of_document]
    vocab, given = config.model.vocab, prompt.replace(",", " ").split()
    if not given:
        cycle = open_corpus("cycle", vocab=vocab, context=config.model.context, seed=config.train.seed)
        return [int(cycle.tokens[0]) if config.data.source == "cycle" else 0]
    for word in given:
        if not (word.isascii() and word.isdigit() and int(word) < vocab):
            raise InputError(
                f"--prompt: {word!r} is no token id; this run's corpus is no text: write ids 0 … {vocab - 1}"
            )
    return [int(word) for word in given]


def _tokenizer_of(config: Config, described: Path) -> Tokenizer | None:
    if config.data.source == "cycle" or read_description(described).tokenizer == "ids":
        return None
    return load_tokenizer(described)


def _curve_of(run: Path) -> str:
    try:
        return str(json.loads((run / "run.json").read_text(encoding="utf-8"))["curve_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run / 'run.json'} can't be read ({error}); give another run") from None
