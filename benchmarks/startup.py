"""What a command takes before it does anything, beside the import of torch that any program of this kind must make.

Each round starts every command once, one after another, so that what else the machine does falls on all alike. A ratio
is that of two commands of the same round.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import measure

ROOT = Path(__file__).resolve().parent.parent
BASE = "import torch, torch.distributed"
COMMANDS: dict[str, tuple[list[str], float | None]] = {  # arguments of python, and the ratio that it must keep to
    BASE: (["-c", BASE], None),
    "code/main.py": (["code/main.py"], 2.0),
    "onecurve --help": (["-m", "onecurve.cli", "--help"], 0.2),
    "onecurve plan configs/demo.toml": (["-m", "onecurve.cli", "plan", "configs/demo.toml"], None),
}


def seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> int:
    options = measure.arguments(__doc__, rounds=9).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    where = measure.machine()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(-1, options.rounds):
        for name, (arguments, _) in COMMANDS.items():
            if turn < 0:
                seconds(arguments)  # what is not yet in the page cache is read now
            else:
                taken[name].append(seconds(arguments))
    ratios = {name: measure.Spread.of([a / b for a, b in zip(taken[name], taken[BASE], strict=True)]) for name in taken}
    rows = [
        [name, f"{measure.Spread.of(taken[name]).median:.2f}", ratios[name], "" if limit is None else f"{limit:.1f}"]
        for name, (_, limit) in COMMANDS.items()
    ]
    measure.report(["command", "seconds", "ratio [quartiles]", "at most"], rows)
    measure.write_json(options.json, machine=where, seconds=taken, ratios={n: s._asdict() for n, s in ratios.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
