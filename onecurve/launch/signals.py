"""Signals in the parent: the first asks every rank to stop, a second ends everything at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from onecurve.launch.board import Board

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# One press of Ctrl-C, `timeout` and process managers may deliver the same request twice (to the process and to its
# group). What follows within this time is the same request.
SAME_REQUEST_SECONDS = 0.25


class StopSignals:
    """Installed while ranks run, in the main thread only: elsewhere Python allows no handlers."""

    def __init__(self, board: Board, at_once: bool) -> None:
        self.board = board
        self.at_once = at_once  # already the first signal ends everything
        self.abort = 0  # the signal that ended everything; 0 while none did
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.at_once or (self._first and now - self._first > SAME_REQUEST_SECONDS):
            self.abort = signum
        elif not self._first:
            self._first = now
            self.board.request_stop(signum)
            # Not print: a handler may run in the middle of another print to the same stream.
            text = f"{signal.Signals(signum).name}: stopping at the next step; once more ends at once\n"
            with contextlib.suppress(OSError):  # nobody reads any more: that is no reason to lose the stop
                os.write(2, text.encode())
