"""Times of calls on the device that does their work, without the host's.

An event behind an idle stream is recorded at once; the call's first kernel starts when the host
has launched it, and a call of many small kernels is then measured at the host's pace. In a training
step the host runs ahead, so here it does too: a kernel that only waits holds the stream until the
whole call is enqueued.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")

_CYCLES_PER_MILLISECOND = 2_000_000
"""An H200's clock is at most 1,980 MHz: a wait is a little longer than asked for, never shorter."""

_LONGEST_CALL_MS = 40.0
"""A host that takes longer waits for the device, or compiles: no wait makes up for that."""


@dataclass
class Clock:
    """Times calls on the current stream of `device`; on a CPU, by the wall.

    `host_milliseconds` is how long the host took for the last call; where a call waits for the
    device itself, that is part of it.
    """

    device: torch.device
    host_milliseconds: float = 0.0
    _recent: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=8))

    def __call__(self, call: Callable[[], object]) -> float:
        """Milliseconds."""
        return self.timed(call)[0]

    def expect(self, host_milliseconds: float) -> None:
        """Says how long the host may take next: ranks that meet in a call have to wait alike."""
        self._recent.append(host_milliseconds)

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """Milliseconds, and what the call gave."""
        start = time.perf_counter()
        if self.device.type != "cuda":
            result = call()
            self.host_milliseconds = 1e3 * (time.perf_counter() - start)
            return self.host_milliseconds, result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # By the last calls' times: a bench repeats them, and does not count its first.
        wait = 0.3 + 1.5 * min(max(self._recent), _LONGEST_CALL_MS)
        torch.cuda._sleep(int(wait * _CYCLES_PER_MILLISECOND))  # type: ignore[no-untyped-call]
        begin.record()
        start = time.perf_counter()
        result = call()
        end.record()
        self.host_milliseconds = 1e3 * (time.perf_counter() - start)
        self._recent.append(self.host_milliseconds)
        end.synchronize()
        return float(begin.elapsed_time(end)), result
