"""The house: imports point down one list, the one in the README, and files stay small."""

import ast
import re
from pathlib import Path

from tests.commands import ROOT

PACKAGE = ROOT / "onecurve"


def room(path: str) -> str:
    """The part of the package that a module belongs to; the config is one part in three files."""
    name = path.split("/")[0].split(".")[0]
    return "config" if name.startswith("config_") else name


def order() -> list[str]:
    """The parts as the README's tree lists them, from top to bottom."""
    tree = (ROOT / "README.md").read_text().split("\nonecurve/\n")[1].split("\ntests/")[0]
    names = [re.match(r"  ((\w+(/|\.py) *)+)", line) for line in tree.splitlines()]
    return [name.rstrip("/").removesuffix(".py") for found in names if found for name in found[1].split()]


def imported(source: str, own: str = "") -> set[str]:
    """The parts that a module's source imports, at run time or for its types; its own left out."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "onecurve":
            modules |= {f"onecurve.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    parts = {module.split(".")[1] for module in modules if module.startswith("onecurve.")}
    return {room(part) for part in parts} - {"__version__", own}


def imported_by(file: Path) -> set[str]:
    return imported(file.read_text(), room(name_of(file)))


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def files() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]


def test_the_readme_lists_every_part():
    assert sorted(order()) == sorted({room(name_of(file)) for file in files()})


def test_imports_point_down_the_list():
    rank = {part: i for i, part in enumerate(order())}
    wrong = [
        f"{name_of(file)} imports {other}"
        for file in files()
        for other in sorted(imported_by(file))
        if rank[other] < rank[room(name_of(file))]
    ]
    assert not wrong


def test_the_model_holds_no_collective_and_the_parallel_parts_know_no_training():
    assert imported_by(PACKAGE / "model" / "gpt.py") == set()
    for file in (PACKAGE / "parallel").glob("*.py"):
        assert imported_by(file) <= {"optim", "errors"}, file


def test_files_can_be_held_in_the_head():
    longest = {name_of(file): len(file.read_text().splitlines()) for file in files()}
    assert {name: lines for name, lines in longest.items() if lines > 320} == {}


def test_every_kind_of_import_is_seen():
    source = (
        "from onecurve.train import loop\nimport onecurve.cli\ndef f():\n    from onecurve import verify, __version__\n"
    )
    assert imported(source) == {"train", "cli", "verify"}
    assert imported(source, "train") == {"cli", "verify"}
