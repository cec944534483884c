"""`onecurve export`: from a checkpoint to a folder that other programs load.

verify      every hash of the checkpoint; its fp32 masters become our GPT              → trained
translate   names, shapes, config; tensors stay views until they are written           → files
write       into a private folder beside DIR, each file to the disk, the folder renamed → DIR, whole or not at all
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onecurve import __version__
from onecurve.checkpoint import parse_place
from onecurve.checkpoint.shard import Spec, file_layout, raw, write_new
from onecurve.data.folder import new_folder
from onecurve.data.sources import show
from onecurve.errors import InputError
from onecurve.export.gpt2 import gpt2_config, gpt2_tensors
from onecurve.export.tokenizer import tokenizer_files
from onecurve.trained import Say, Trained, open_trained

WEIGHTS = "model.safetensors"
Parts = Iterable[memoryview | bytes]


@dataclass(frozen=True)
class Exported:
    """What was written, in the format `form`: `files` and their bytes. `parameters` counts the trained ones, a tied
    matrix once."""

    folder: Path
    form: str
    run: Path
    step: int
    curve_id: str
    parameters: int
    files: dict[str, int]


def export_run(place: str, out: Path, *, form: str = "transformers", say: Say) -> Exported:
    """Makes the folder `out` of the checkpoint that `place` ("RUN[@STEP]") names, in one of FORMATS. `say` is told, a
    line each, what the user should know. Raises InputError, and then leaves nothing behind."""
    if form not in FORMATS:
        raise InputError(f"--format {show(form)}: there is no such format; allowed are {' and '.join(FORMATS)}")
    where, out = parse_place(place), out.expanduser()
    with new_folder(out) as folder:  # before the long reading, so that a place that can't be used is found at once
        trained = open_trained(where, say)
        files = FORMATS[form](trained)
        for name, parts in files.items():
            write_new(folder / name, parts)
        sizes = {name: (folder / name).stat().st_size for name in sorted(files)}
    if form == "transformers" and trained.tokenizer is None:
        say("its corpus is no text: there is no tokenizer to write, the model takes token ids")
    manifest = trained.manifest
    parameters = sum(tensor.slice_numel * tensor.slices for tensor in manifest.tensors)
    return Exported(out, form, where.run, manifest.step, manifest.curve_id, parameters, sizes)


def _for_transformers(trained: Trained) -> dict[str, Parts]:
    model, tokenizer, m = trained.model, trained.tokenizer, trained.config.model
    end = tokenizer.end_of_document if tokenizer else None
    config = gpt2_config(model, heads=m.heads, dropout=m.dropout, end_of_document=end)
    described = tokenizer_files(tokenizer, model.context) if tokenizer else {}
    return {
        WEIGHTS: _weights(dict(gpt2_tensors(model)), {"format": "pt"}),
        "config.json": _text(config | {"onecurve": _origin(trained)}),
        **{name: _text(content) for name, content in described.items()},
    }


def _under_own_names(trained: Trained) -> dict[str, Parts]:
    model, m = trained.model, trained.config.model
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in model.tied_uses}
    arguments = {
        "layers": m.layers, "width": m.width, "heads": m.heads, "vocab": m.vocab, "context": m.context,
        "tied": m.tied, "dropout": m.dropout,
    }  # fmt: skip
    return {
        # a name that shares another's tensor is metadata, as safetensors.torch.save_model writes it
        WEIGHTS: _weights(tensors, {"format": "pt", **model.tied_uses}),
        "model.json": _text({"model": arguments, "onecurve": _origin(trained)}),
    }


FORMATS: dict[str, Callable[[Trained], dict[str, Parts]]] = {
    "transformers": _for_transformers,
    "safetensors": _under_own_names,
}


def _origin(trained: Trained) -> dict[str, Any]:
    manifest = trained.manifest
    return {
        "version": __version__,
        "curve_id": manifest.curve_id,
        "step": manifest.step,
        "state_digest": manifest.state_digest,
    }


def _weights(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[memoryview | bytes]:
    """A safetensors file in parts; what is not contiguous is copied when its turn comes."""
    specs = [Spec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    yield file_layout(0, specs, metadata).header
    for tensor in tensors.values():
        yield raw(tensor.contiguous())


def _text(content: dict[str, Any]) -> list[bytes]:
    return [(json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()]
