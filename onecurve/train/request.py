"""What the command line asks for, and the command that goes on with it."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from onecurve.config import Config
from onecurve.launch.torchrun import under_torchrun
from onecurve.urls import without_secrets


@dataclass(frozen=True)
class Request:
    """See `onecurve.train.run.train`. `source`: the config's file, as it was named."""

    config: Config
    run: Path | None = None
    resume: bool = False
    from_: str | None = None
    restarts: int = 0
    source: Path = Path("run.toml")
    overrides: tuple[str, ...] = ()

    def again(self, folder: Path) -> str:
        """The command that resumes the run in `folder`. Secrets in the mirror's URL are left out."""
        start = ["onecurve"]
        if under_torchrun():
            start = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "--", "onecurve.cli"]
        sets = [part for text in self.overrides for part in ("--set", without_secrets(text))]
        restarts = ["--restarts", str(self.restarts)] if self.restarts else []
        return shlex.join([*start, "train", str(self.source), *sets, "--run", str(folder), "--resume", *restarts])
