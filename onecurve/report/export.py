"""What `onecurve export` made, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onecurve.report.console import printable, table

if TYPE_CHECKING:
    from onecurve.export import Exported


def exported_lines(made: Exported) -> list[str]:
    """Where it is and came from, its files, and how to load it."""
    rows = [(name, f"{size:,}") for name, size in made.files.items()]
    return [
        f"exported    {printable(str(made.folder))}",
        f"from        {printable(str(made.run))}, step {made.step}, curve {made.curve_id[:8]}",
        f"parameters  {made.parameters:,}, float32",
        "",
        *table(["file", "bytes"], rows),
        "",
        f"load it     {printable(_loading(made))}",
    ]


def _loading(made: Exported) -> str:
    """Python that loads it."""
    folder = str(made.folder)
    if made.form == "transformers":
        return f"transformers.AutoModelForCausalLM.from_pretrained({folder!r})"
    arguments, weights = f"{folder}/model.json", f"{folder}/model.safetensors"
    return (
        f"model = onecurve.model.GPT(**json.load(open({arguments!r}))['model']); "
        f"safetensors.torch.load_model(model, {weights!r})"
    )
