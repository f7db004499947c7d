"""A call that may never return, in a thread of its own, so that whoever needs it can go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_POLL_SECONDS = 0.02


class Background:
    """Runs `call()` at once, in a daemon thread: it does not keep the process from ending."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._call = call
        self.started_at = time.monotonic()
        self.error: BaseException | None = None
        """What the call raised, once it has returned."""
        self._returned = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # kept for whoever waits
            self.error = error
        finally:
            self._returned.set()

    def wait(self, seconds: float, *, give_up: Callable[[], bool] = lambda: False) -> bool:
        """True once the call has returned, False when `seconds` are over or `give_up()` says so."""
        deadline = time.monotonic() + seconds
        while not self._returned.wait(_POLL_SECONDS):
            if time.monotonic() > deadline or give_up():
                return self._returned.is_set()
        return True
