"""The streams on which a rank's stages compute while pairs overlap; who waits for whom is
`schedules.lanes`.

The first stage's lane is the stream that is current when a step begins: what runs between steps,
such as the optimizer, shares its memory with it, and a rank of two stages has two pools of memory,
not three. A pool's free memory is of no use to the other lane, until the device has no more and the
allocator gives all of it back.

What else two lanes might share: modules keep no scratch memory over calls, and what they keep for
good (layouts of rows) is made while a stage warms up; products draw tickets from counters of their
own call, and packages (deep_gemm, FlashMLA, cuDNN's frontend) take the current stream and memory of
the call; cuBLAS has a workspace for each stream. A dispatcher that holds buffers or a communicator
is there once for each stage (`build`). Sends, copies to the host and back, Engram's lookups and
FSDP's gathers wait for the stream that is current, which is the lane, and hold what they read until
they are past; autograd runs each node on the stream of its forward. Where another lane reads a
tensor, `record_stream` is not the way: its memory would come back when the device is past, while
the host is a step ahead.

Kernels that wait for a peer on their multiprocessors (the fused layer's products and meetings,
deep_ep's and NCCL's transfers) may be there from both halves, in another order on each rank. Those
of both must fit the GPU together; all others end by themselves and make room. deep_ep's and NCCL's
are few thread blocks; the fused layer's take what `pp.pair_gemm_sms` gives each half, which
`gemm_budget` wants to fit together. Hosts hand over the same work in the same order on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from ppruntime.config import ConfigError
from ppruntime.transports.driver import Driver, OwnStream, is_past, new_event

_HELD_SECONDS = 0.2
"""How long a few microseconds of another stream's work may take before it counts as held."""


class Lanes(Protocol):
    """Where the work of a rank's stages is enqueued."""

    @property
    def overlap(self) -> bool:
        """Whether there is more than one."""

    def step(self) -> AbstractContextManager[None]:
        """Around a step. Every lane waits for what the current stream was given before; behind the
        step that one is current again, also where it fails, and waits for every lane."""

    def enter(self, stage: int, joins: Sequence[int]) -> None:
        """Lets the lanes of the stages `joins` wait for all that any lane was given so far, and
        makes that of `stage` current."""


class OneLane:
    """Everything is done where it is called: on a CPU, or one op after another."""

    overlap = False

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def enter(self, stage: int, joins: Sequence[int]) -> None:
        pass


class StreamLanes:
    """A stream for each stage of the rank but the first, which computes on the current one. They
    stay for the process's life, as the allocator's memory of them does."""

    overlap = True

    def __init__(self, stages: Sequence[int], streams: Sequence[torch.cuda.Stream]) -> None:
        """`streams`: of the stages behind the first. `stages` in ascending order."""
        assert len(stages) == len(streams) + 1, (stages, streams)
        self._first = stages[0]
        self._streams = dict(zip(stages[1:], streams, strict=True))
        self._given = dict.fromkeys(stages, 0)
        """How often each lane was entered."""
        self._seen = {stage: dict.fromkeys(stages, 0) for stage in stages}
        """By lane, how much of the others it has waited for."""

    @contextmanager
    def step(self) -> Iterator[None]:
        outer = torch.cuda.current_stream()
        self._streams[self._first] = outer
        # It was given work between the steps, and may be another stream than it was.
        self._given[self._first] += 1
        self._seen[self._first] = dict.fromkeys(self._given, -1)
        self._join(*self._given)
        try:
            yield
        finally:
            torch.cuda.set_stream(outer)
        self._join(self._first)

    def enter(self, stage: int, joins: Sequence[int]) -> None:
        self._join(*joins)
        torch.cuda.set_stream(self._streams[stage])
        self._given[stage] += 1

    def _join(self, *stages: int) -> None:
        """All of them wait for the same moment: none for what another is given behind it."""
        ends: dict[int, torch.cuda.Event] = {}
        for stage in stages:
            seen = self._seen[stage]
            for other, given in self._given.items():
                if other == stage or seen[other] == given:
                    continue
                seen[other] = given
                if other not in ends:
                    ends[other] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    ends[other].record(self._streams[other])
                self._streams[stage].wait_event(ends[other])


def open_lanes(stages: Sequence[int], device: torch.device, *, overlap: bool) -> Lanes:
    """The lanes of one rank's stages, in ascending order; one where nothing is to `overlap`, or on
    a CPU. Raises ConfigError where the GPU runs streams one after another."""
    if not overlap or device.type != "cuda" or len(stages) < 2:
        return OneLane()
    driver = Driver(device)
    own = [OwnStream(driver, device, high_priority=False) for _ in stages[1:]]
    for stream in own:
        _check_apart(driver, stream, device)
    return StreamLanes(stages, [stream.torch for stream in own])


def _check_apart(driver: Driver, waiting: OwnStream, device: torch.device) -> None:
    """The current stream must run while `waiting` waits: kernels that wait for a peer would else
    keep the other half from running, and with it the peer."""
    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    number = torch.zeros(1, device=device)
    number.add_(1)  # what loads code may wait for the whole GPU
    torch.cuda.synchronize(device)
    driver.wait_word(waiting.handle, word.data_ptr(), 1)
    number.add_(1)
    end = new_event()
    end.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + _HELD_SECONDS
    while not is_past(end) and time.monotonic() < deadline:
        time.sleep(1e-4)
    is_held = not is_past(end)
    word[0] = 1
    torch.cuda.synchronize(device)
    if is_held:
        raise ConfigError(
            "pp.overlap_pairs = true: a stream that waits held another one, they share a hardware"
            " queue; set CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts"
        )
