"""A run's trained model, read back in one process: from a checkpoint that verifies whole, whatever layout saved it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from onecurve.checkpoint import Manifest, Place, find_checkpoint, read_manifest, read_parameters
from onecurve.checkpoint.reshard import check_fits
from onecurve.config import Config, load_config
from onecurve.data.text import load_tokenizer
from onecurve.data.text import read_manifest as read_description
from onecurve.data.tokenizer import Tokenizer
from onecurve.errors import InputError
from onecurve.model import GPT
from onecurve.parallel.units import survey
from onecurve.paths import FILE, FOLDER, show, trouble

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """`model` holds the fp32 masters, in eval mode; `manifest` is the checkpoint's; `tokenizer` is None where the ids
    stand for no text."""

    config: Config
    model: GPT
    manifest: Manifest
    tokenizer: Tokenizer | None


def open_trained(place: Place, say: Say) -> Trained:
    """The model of a run at a checkpoint (see `find_checkpoint`), and what its ids mean. Raises InputError."""
    run = place.run
    problem = trouble(run, FOLDER)
    for name in ("config.toml", "run.json"):
        if not problem and (fault := trouble(run / name, FILE)):
            problem = f"{name}: {fault}"
    if problem:
        raise InputError(f"{show(run)}: no run there ({problem}); give the folder of a run that `onecurve train` made")
    config = load_config(run / "config.toml")
    path = find_checkpoint(place, say, curve_id=_curve_of(run))
    manifest = read_manifest(path)
    m = config.model
    model = GPT(layers=m.layers, width=m.width, heads=m.heads, vocab=m.vocab, context=m.context, tied=m.tied)
    check_fits(manifest, survey(model, None).specs, str(path))
    with torch.no_grad():
        for name, values in read_parameters(path, check=False).items():  # its hashes have just been compared
            model.get_parameter(name).copy_(values)
    return Trained(config, model.eval(), manifest, _tokenizer_of(config, run / "corpus"))


def _tokenizer_of(config: Config, described: Path) -> Tokenizer | None:
    if config.data.source == "cycle":
        return None
    try:
        return None if read_description(described).tokenizer == "ids" else load_tokenizer(described)
    except InputError as error:
        problem = str(error).rpartition("; ")[0] or str(error)  # its cure is one for the corpus
        raise InputError(
            f"{problem}; copy manifest.json, and tokenizer.json where there is one, from the corpus "
            f"{show(config.data.source)} into {show(described)}"
        ) from None


def _curve_of(run: Path) -> str:
    try:
        return str(json.loads((run / "run.json").read_text(encoding="utf-8"))["curve_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run / 'run.json'} can't be read ({error}); give another run") from None
