"""What a process does when it is asked to end, by SIGTERM or Ctrl-C: finish the step, say why, end.

Whoever runs the steps looks at `asked` between them. A step that does not end in time is left
unfinished: after the grace time the request raises wherever the process is. Until then a rank that
a launcher asks to end, because another one has died, finds that loss itself and tells which it was.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class StoppedError(Exception):
    """Asked to end, for no reason that this process found."""


class InterruptedTwiceError(StoppedError):
    """Asked by Ctrl-C to end, and asked again."""


class Termination:
    """A context in which requests to end, SIGTERM and Ctrl-C, are written down in `asked`.

    One that is not heeded within `grace_seconds` raises StoppedError in the main thread, a second
    Ctrl-C raises InterruptedTwiceError there at once. A process that `ends_by_signal` leaves the
    context by SIGTERM if it was asked, so its launcher sees the end it asked for. Enter it in the
    main thread; it uses SIGALRM.
    """

    def __init__(self, *, grace_seconds: float, ends_by_signal: bool) -> None:
        self._grace_seconds = grace_seconds
        self._ends_by_signal = ends_by_signal
        self.asked: str | None = None
        """The request that came first, "SIGTERM" or "Ctrl-C"; None without any."""

    def __enter__(self) -> Termination:
        self._before = {number: signal.signal(number, self._ask) for number in _NAMES}
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.asked and self._ends_by_signal:
            os.kill(os.getpid(), signal.SIGTERM)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        name = _NAMES[signal.Signals(number)]
        if self.asked is None:
            self.asked = name
            signal.setitimer(signal.ITIMER_REAL, self._grace_seconds)
        elif self.asked == name == "Ctrl-C":
            raise InterruptedTwiceError("stopped at once by a second Ctrl-C")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        raise StoppedError(
            f"stopped by {self.asked}, {self._grace_seconds:g} s after it came; the step under way"
            " is lost"
        )
