"""What the launching process decided and every rank is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecurve.checkpoint import Fence
from onecurve.config import Config, make_config


@dataclass(frozen=True)
class Plan:
    """`folder` is locked and holds config.toml and run.json. `parent`: a checkpoint of another run that this curve
    starts from, `parent_digest` its state digest. `through`: the step to end with, before the curve's last one (0: the
    last). `quiet`: nothing on stderr."""

    config: Config
    folder: Path
    curve_id: str
    fence: Fence | None
    resume: bool
    parent: Path | None = None
    parent_digest: str = ""
    through: int = 0
    quiet: bool = False

    @property
    def last_step(self) -> int:
        return min(self.through or self.config.train.steps, self.config.train.steps)

    def to_json(self) -> dict[str, Any]:
        """Plain values: ranks in fresh interpreters get their orders as JSON."""
        return {
            "config": self.config.model_dump(mode="json"),
            "folder": str(self.folder),
            "curve_id": self.curve_id,
            "fence": [str(self.fence.path), self.fence.token] if self.fence else None,
            "resume": self.resume,
            "parent": str(self.parent) if self.parent else None,
            "parent_digest": self.parent_digest,
            "through": self.through,
            "quiet": self.quiet,
        }

    def identity(self, data_fingerprint: str) -> dict[str, str]:
        """What run.json says of the curve: enough to go on with it, also where nothing was saved yet."""
        return {
            "curve_id": self.curve_id,
            "parent": self.parent_digest,
            "parent_path": str(self.parent.resolve()) if self.parent else "",
            "data_fingerprint": data_fingerprint,
        }

    @classmethod
    def from_json(cls, order: dict[str, Any]) -> "Plan":
        fence, parent = order["fence"], order["parent"]
        return cls(
            **order
            | {
                "config": make_config(order["config"]),
                "folder": Path(order["folder"]),
                "fence": Fence(Path(fence[0]), fence[1]) if fence else None,
                "parent": Path(parent) if parent else None,
            }
        )
