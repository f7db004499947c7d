"""What a process does when it is asked to end by SIGTERM: it says why first, and then ends.

A launcher asks all ranks to end as soon as one has died, often before they have noticed. So a rank
goes on for some seconds after the request: if another rank is lost, it fails within them and tells
which; if not, the request came from a person or a scheduler, and it stops.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType


class StoppedError(Exception):
    """Asked to end by SIGTERM, for no reason that this process found."""


class Termination:
    """A context: within it SIGTERM raises StoppedError in the main thread, `grace_seconds` after it
    came. A process that `ends_by_signal` leaves the context by the SIGTERM that it was sent, so its
    launcher sees the end it asked for. Enter it in the main thread; it uses SIGALRM."""

    def __init__(self, *, grace_seconds: float, ends_by_signal: bool) -> None:
        self._grace_seconds = grace_seconds
        self._ends_by_signal = ends_by_signal
        self.asked = False

    def __enter__(self) -> Termination:
        self._before = (
            signal.signal(signal.SIGTERM, self._ask),
            signal.signal(signal.SIGALRM, self._stop),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGTERM, signal.SIGALRM), self._before, strict=True):
            signal.signal(number, handler)
        if self.asked and self._ends_by_signal:
            os.kill(os.getpid(), signal.SIGTERM)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked = True
            signal.setitimer(signal.ITIMER_REAL, self._grace_seconds)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        raise StoppedError("stopped by SIGTERM")
