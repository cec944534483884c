"""What a worker function is handed: who it is, and the few words it exchanges with the launcher."""

from __future__ import annotations

from pathlib import Path

from onecurve import faults
from onecurve.launch.board import Board


class RankContext:
    """One rank's view of the run.

    `rank` and `world` are global; `folder` is the run folder. Everything here is local to the rank (no collective) and
    costs about a microsecond.
    """

    def __init__(self, rank: int, world: int, folder: Path, board: Board, slot: int | None = None) -> None:
        self.rank = rank
        self.world = world
        self.folder = folder
        self.step = 0
        self.current_place = ""
        self._board = board
        self._slot = rank if slot is None else slot  # under torchrun each rank has a board of its own

    def progress(self, step: int, total: int | None = None, text: str = "") -> None:
        """A sign of life, at step `step` of `total`; rank 0's values and `text` reach the parent's `progress=`.

        It is a point for faults, too: `place=step`.
        """
        self.step = step
        faults.here(self.rank, step)
        self._board.mark_progress(self._slot, step, total, text)
        if faults.armed:
            faults.at("step", rank=self.rank, step=step)

    def place(self, name: str) -> None:
        """Mark where the rank is ("forward", "exchange", "save" …): for hang reports, errors and fault injection."""
        self.current_place = name
        self._board.mark_place(self._slot, name)
        if faults.armed:
            faults.at(name, rank=self.rank, step=self.step)

    def alive(self, place: str) -> None:
        """A sign of life in the midst of something long, which is shown as the place; no point for faults."""
        self.current_place = place
        self._board.mark_place(self._slot, place)

    @property
    def stop_requested(self) -> bool:
        """SIGTERM or SIGINT was seen by any rank or by the parent (under torchrun: by this rank).

        Ranks may see it at different moments: agree on the step in an exchange before acting on it.
        """
        return self._board.stop_signal != 0
