"""Time stamps of ops: the host's clock, or events on a device's stream read after the step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

Stamp = TypeVar("Stamp")


@dataclass(frozen=True, slots=True)
class OpTimes(Generic[Stamp]):
    """When an op was reached, had what it reads, and was done. `ready - start` is waiting."""

    op: str
    start: Stamp
    ready: Stamp
    end: Stamp


class Clock(Protocol[Stamp]):
    """Stamps for the ops of one rank."""

    def start_step(self) -> None:
        """Called before a step's first stamp."""

    def __call__(self) -> Stamp:
        """The present moment, of the host or of the device's current stream. Never waits."""

    def resolve(self, times: Sequence[OpTimes[Stamp]]) -> list[OpTimes[int]]:
        """The stamps of the last step in ns of `time.perf_counter_ns`. May wait for the device."""


class HostClock:
    """For stages that compute on the host."""

    def start_step(self) -> None:
        pass

    def __call__(self) -> int:
        return time.perf_counter_ns()

    def resolve(self, times: Sequence[OpTimes[int]]) -> list[OpTimes[int]]:
        return list(times)


class CudaClock:
    """For stages that compute on a GPU: one event a stamp, on the stream current at the time.

    Waits for the device when a step starts, to tie its clock to the host's (to about 10 us), and
    when stamps are resolved; never in between.
    """

    def __init__(self) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._origin_ns = 0

    def start_step(self) -> None:
        torch.cuda.synchronize()
        self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._origin.record()
        self._origin_ns = time.perf_counter_ns()

    def __call__(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def resolve(self, times: Sequence[OpTimes[torch.cuda.Event]]) -> list[OpTimes[int]]:
        torch.cuda.synchronize()

        def at(event: torch.cuda.Event) -> int:
            milliseconds: float = self._origin.elapsed_time(event)
            return self._origin_ns + round(milliseconds * 1e6)

        return [OpTimes(t.op, at(t.start), at(t.ready), at(t.end)) for t in times]
