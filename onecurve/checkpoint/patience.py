"""Long work without silence: what moves bytes runs on a thread, and meanwhile the ranks keep in touch.

A slow disk is no hang, and neither is a rank that waits for one with a slow disk. So no rank waits inside a collective
for another's disk: all go round in `wait_for_all`, one small exchange every PAUSE seconds, until the last thread has
ended. In each round a rank gives a sign of life if its own work moved bytes since the last one, or is done. A rank
whose disk really hangs falls silent, it alone, and whoever watches the ranks can name it.
"""

import _thread
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from onecurve.checkpoint.agree import Shares

PAUSE = 0.1
T = TypeVar("T")
Alive = Callable[[str], None]  # a sign of life, in the midst of what the text names
Count = Callable[[int], None]  # so many bytes were moved


def silent(_: object) -> None:
    """For callers whom nobody watches."""


class Task:
    """One piece of work at a time, on a thread of its own. `moved` counts its bytes, roughly: it grows with them."""

    def __init__(self) -> None:
        self.moved = 0
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        self._done.clear()
        self._result = self._error = None

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:
                self._error = error
            finally:
                self._done.set()

        # Thread.start() would wait until the thread runs, for milliseconds where ranks outnumber cores.
        _thread.start_new_thread(run, ())

    def count(self, nbytes: int) -> None:
        self.moved += nbytes

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def result(self) -> Any:
        """What the work returned, or its exception; waits for its end."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def wait_for_all(mesh: Shares, task: Task, alive: Alive, what: str) -> None:
    """Collective: until every rank's task is done. `what` this rank is in, for its signs of life."""
    moved = -1
    while True:
        done = task.wait(PAUSE)
        if done or task.moved != moved:
            moved = task.moved
            alive(what)
        if all(told == b"1" for told in mesh.share(b"1" if done else b"0")):
            return


def together(mesh: Shares, work: Callable[[Count], T], alive: Alive, what: str) -> T:
    """Collective: each rank's `work`, which calls back with the bytes that it has moved; its result here."""
    task = Task()
    task.start(lambda: work(task.count))
    wait_for_all(mesh, task, alive, what)
    result: T = task.result()
    return result
