"""Saves of one run, in the foreground or behind the training: one `Checkpointer` per rank.

A background save costs the training a copy of the state. A thread hashes and writes that copy, and later, on rank 0,
another one commits; they take part in no collective, for two threads of a rank would enter them in different orders on
different ranks. Instead the ranks vote at each step (`poll`), and once all threads are done the main threads share what
they have to tell:

    save: begin, copy | thread: write | poll: gather | thread on rank 0: commit, retention | poll: conclude

At most one save is in flight. What went wrong behind is raised by the next call, on all ranks alike. Where the ranks
have to wait for a save (`drain`, and every save in the foreground) they keep in touch meanwhile: see patience.py.
"""

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onecurve.checkpoint.agree import Shares, agree, attempt
from onecurve.checkpoint.errors import save_error
from onecurve.checkpoint.holdings import Saveable
from onecurve.checkpoint.lock import Fence
from onecurve.checkpoint.manifest import Manifest
from onecurve.checkpoint.mirror import Mirror
from onecurve.checkpoint.patience import PAUSE, Alive, Task, silent, wait_for_all
from onecurve.checkpoint.policy import MIN_KEEP, apply_retention
from onecurve.checkpoint.save import PendingSave
from onecurve.checkpoint.store import step_name
from onecurve.errors import InputError


class Checkpointer:
    """Saves, retention and mirror of one run. `save`, `poll` and `drain` are collective and return the manifests of the
    saves that they committed (at most two); a failed save raises, alike on all ranks, and leaves no save in flight.

    `folder`: the run's `checkpoints`; `keep`: see `policy.to_remove`; `mirror`: copies each committed checkpoint away;
    `alive`: called while this rank waits for a save and its bytes move; `patience`: seconds without one after which
    `close` gives a copy to the mirror up.
    """

    def __init__(
        self,
        folder: Path,
        optimizer: Saveable,
        *,
        background: bool = False,
        keep: int = 3,
        fence: Fence | None = None,
        mirror: Mirror | None = None,
        alive: Alive = silent,
        patience: float = math.inf,
    ) -> None:
        if keep < MIN_KEEP:
            raise InputError(f"checkpoint.keep = {keep}: at least {MIN_KEEP}")
        self.folder, self.optimizer, self.background, self.keep = folder, optimizer, background, keep
        self.mesh: Shares = optimizer.mesh
        self.fence, self.mirror, self.alive = fence, mirror, alive
        self.patience = patience
        self._scratch: list[np.ndarray] = []
        self._pending: PendingSave | None = None
        self._gathered = False
        self._protect: int | None = None
        self._task = Task()
        self._notes: list[str] = []

    @property
    def in_flight(self) -> int | None:
        """The step of the save that is not committed yet."""
        return self._pending.step if self._pending else None

    @property
    def ready(self) -> bool:
        """Whether this rank has nothing to wait for. For callers that let the vote ride on an exchange of their own:
        once all ranks are ready, `poll(True)`."""
        return self._pending is None or self._task.done

    @property
    def scratch_bytes(self) -> int:
        """Memory that the snapshots keep on this rank."""
        return sum(buffer.nbytes for buffer in self._scratch)

    def save(self, step: int, info: dict[str, Any] | None = None, *, protect: int | None = None) -> list[Manifest]:
        """Collective: save the state as it is now. In the background it is committed by a later call; an earlier save
        still in flight is waited for first. `protect`: retention keeps a checkpoint at or below this step."""
        committed = self.drain()
        self._protect = protect
        pending = PendingSave(
            self.folder,
            self.optimizer,
            step,
            info=info,
            fence=self.fence,
            background=self.background,
            scratch=self._scratch,
            count=self._task.count,
        )
        self._pending, self._gathered = pending, False
        self._task.start(pending.write)
        return committed if self.background else committed + self.drain()

    def poll(self, all_ready: bool | None = None) -> list[Manifest]:
        """Collective, once per step: take the save in flight on if all ranks are ready. `all_ready`: the verdict, the
        same on all ranks, of a vote that was held already. No exchange where nothing is in flight."""
        if self._pending is None:
            return []
        if all_ready is None:
            all_ready = all(message["ready"] for message, _ in agree(self.mesh, {"ready": self.ready}))
        return self._advance() if all_ready else []

    def drain(self) -> list[Manifest]:
        """Collective: wait for the save in flight and commit it."""
        committed: list[Manifest] = []
        while self._pending is not None:
            wait_for_all(self.mesh, self._task, self.alive, f"save of step {self._pending.step}")
            committed += self._advance()
        return committed

    def close(self) -> list[Manifest]:
        """Collective: `drain`, and wait for the mirror as long as its bytes move."""
        committed = self.drain()
        moved, since = -1, time.monotonic()
        # The ranks that wait are alive. That a copy hangs is no fault of theirs, so it is given up and not blamed.
        while any(busy == b"1" for busy in self.mesh.share(b"1" if self._copying else b"0")):
            self.alive("copy to the mirror")
            time.sleep(PAUSE)
            if self.mirror is not None and self._copying:
                if self.mirror.moved != moved:
                    moved, since = self.mirror.moved, time.monotonic()
                elif time.monotonic() - since > self.patience:
                    self.mirror.give_up(f"nothing moved for {self.patience:g} s")
        return committed

    @property
    def _copying(self) -> bool:
        return self.mirror is not None and bool(self.mirror.waiting)

    def take_notes(self) -> list[str]:
        """Rank 0: what should be said and is no reason to stop (a removal or a mirror copy that failed), once each."""
        notes, self._notes = self._notes, []
        return notes + (self.mirror.take_notes() if self.mirror is not None else [])

    def _advance(self) -> list[Manifest]:
        """Collective, once all threads are done: take the save in flight one phase on."""
        pending, self._pending = self._pending, None  # an error ends it
        assert pending is not None
        self._task.result()
        if self._gathered:
            return [pending.conclude()]
        pending.gather()
        self._pending, self._gathered = pending, True
        if self.mesh.rank == 0:
            self._task.start(lambda: pending.commit(self._after_commit))
        return []

    def _after_commit(self, manifest: Manifest) -> None:
        """On rank 0, behind the training, with the checkpoint in place: nothing here may stop the run."""
        spare: set[int] = set()
        if self.mirror is not None:
            self.mirror.submit(self.folder / step_name(manifest.step))
            spare = self.mirror.waiting
        retain = partial(apply_retention, self.folder, manifest, self.keep, protect=self._protect, spare=spare)
        notes, error = attempt(retain, partial(save_error, 0, f"can't remove old checkpoints in {self.folder}"))
        self._notes += [str(error)] if notes is None else notes
