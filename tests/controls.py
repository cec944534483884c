"""Run every negative control of the determinism contract and print what it changed: `python -m tests.controls`.

Exit code 1 if a control changes nothing, or if the unbroken layouts are not one curve.
"""

import sys
from pathlib import Path

import torch

from onecurve.config import Config, load_config
from onecurve.report.console import Stages, table
from onecurve.verify import Proof, prove
from onecurve.verify.controls import CONTROLS
from onecurve.verify.matrix import Combination, Leg

ODD = Path(__file__).parents[1] / "configs" / "odd.toml"
LAYOUTS = ((4, 0), (4, 1), (4, 2), (4, 3), (3, 1))  # W >= 4 with L/W >= 2, and a width that cuts unevenly


def layouts(config: Config, chosen: tuple[tuple[int, int], ...]) -> list[Combination]:
    base = config.layout.model_dump()
    return [Combination((Leg(type(config.layout)(**base | {"dp": dp, "zero": zero})),)) for dp, zero in chosen]


def run(control: str, chosen: tuple[tuple[int, int], ...] = LAYOUTS, steps: int = 6) -> Proof:
    config = load_config(ODD, [f"train.steps={steps}"])
    return prove(config, control=control, combinations=layouts(config, chosen))


def row_of(control: str, proof: Proof) -> list[object]:
    """Clause, control, layouts that it broke, and the first difference of the first of them."""
    bad = [result for result in proof.results if result.difference is not None]
    clause = CONTROLS[control].clause if control else "everything"
    broken = ", ".join(str(result.combination) for result in bad) or "none"
    found = bad[0].difference if bad else None
    if found is None:
        return [clause, control or "(none)", broken, "", "", ""]
    changed = [*found.values, *(["state"] if found.tensors else [])] or [found.failure]
    return [clause, control, broken, found.step, ", ".join(changed), f"{len(found.tensors)} of {found.all_tensors}"]


def main() -> int:
    torch.set_num_threads(1)
    names = ["", *CONTROLS]
    rows, wrong = [], []
    with Stages("controls") as stages:
        for done, name in enumerate(names):
            stages.update(done, len(names), name or "no control")
            proof = run(name)
            rows.append(row_of(name, proof))
            if proof.same == bool(name):
                wrong.append(name or "no control")
        stages.update(len(names), len(names), "")
    headers = ["clause", "control", "layouts broken", "first step", "what differs there", "tensors"]
    print("\n".join(table(headers, rows, left=(0, 1, 2, 4, 5))))
    print("\nWRONG  " + ", ".join(wrong) if wrong else f"\nCAUGHT  {len(CONTROLS)} of {len(CONTROLS)} controls")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
