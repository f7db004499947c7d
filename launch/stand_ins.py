"""Transports around transports, for benches: one that moves nothing, one whose transfers are slow.

Both keep what matters of the real one: the order of messages, the waits, the host's calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ppruntime.transports.base import Boundary, Channel, Transport

Contents = Mapping[int, tuple[Tensor, ...]]
"""Of each channel between ranks, by id: tensors that its destination has once received."""

_CALIBRATION_BYTES = 256 << 20


def hollow_channels(channels: Sequence[Channel]) -> tuple[Channel, ...]:
    """The channels of `HollowTransport`'s inner transport: between ranks nothing but the message
    itself crosses, inside a rank all that did before."""
    return tuple(
        c if c.src_rank == c.dst_rank else replace(c, boundary=Boundary(())) for c in channels
    )


class HollowTransport:
    """Messages without bytes: a take waits for its message and gives tensors that came before.

    So a step over it has the order's own waits and nothing of transfers: neither their time nor
    what they take from the compute beside them. `inner` was opened with `hollow_channels`. The
    numbers of such a step mean nothing. See `Transport`.
    """

    def __init__(self, inner: Transport, channels: Sequence[Channel], contents: Contents) -> None:
        self._inner, self._contents = inner, contents
        self._hollow = {c.id: c for c in hollow_channels(channels)}
        self.step_end, self.abort, self.close = inner.step_end, inner.abort, inner.close

    def post(self, channel: Channel, micro_batch: int) -> None:
        self._inner.post(self._hollow[channel.id], micro_batch)

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        hollow = self._hollow[channel.id]
        self._inner.send(hollow, micro_batch, tensors if hollow is channel else ())

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        hollow = self._hollow[channel.id]
        taken = self._inner.take(hollow, micro_batch)
        if hollow.boundary == channel.boundary:
            return taken
        return tuple(t.detach() for t in self._contents[channel.id])

    def release(self, channel: Channel, micro_batch: int) -> None:
        self._inner.release(self._hollow[channel.id], micro_batch)


class ObservedTransport:
    """The inner transport; see `Transport`. `contents` keeps a copy of what each channel between
    ranks brought first, `enqueued_at` is the host's time when the step's last op was enqueued."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.contents: dict[int, tuple[Tensor, ...]] = {}
        self.enqueued_at = 0.0
        self.post, self.send, self.release = inner.post, inner.send, inner.release
        self.abort, self.close = inner.abort, inner.close

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        taken = self._inner.take(channel, micro_batch)
        if channel.id not in self.contents and channel.src_rank != channel.dst_rank:
            self.contents[channel.id] = tuple(t.detach().clone() for t in taken)
        return taken

    def step_end(self) -> None:
        self.enqueued_at = time.perf_counter()
        self._inner.step_end()


class Pacer:
    """Holds a stream for a given time without an SM: copies that long to pinned host memory.

    Which is what a network card does with a message too: it reads GPU memory over PCIe, at a rate
    near that of one InfiniBand port. One per rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._source = torch.empty(_CALIBRATION_BYTES, dtype=torch.uint8, device=device)
        self._target = torch.empty(
            _CALIBRATION_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self._target.copy_(self._source)  # pages are touched before any is timed
        self.bytes_per_second = self._measured(device)

    def hold(self, seconds: float) -> None:
        """The current stream gets here `seconds` later; the host does not wait."""
        left = int(seconds * self.bytes_per_second)
        while left > 0:
            part = min(left, _CALIBRATION_BYTES)
            self._target[:part].copy_(self._source[:part], non_blocking=True)
            left -= part

    def _measured(self, device: torch.device) -> float:
        def synchronize() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        synchronize()
        start = time.perf_counter()
        for _ in range(4):
            self._target.copy_(self._source, non_blocking=True)
        synchronize()
        return 4 * _CALIBRATION_BYTES / (time.perf_counter() - start)


class PacedTransport:
    """Messages between ranks start `seconds` later and one after another per channel, on a stream
    of their own: the compute stream goes on. `hold(seconds)` holds the current stream.

    The inner transport is one of those on GPUs, which read the current stream at `send`.
    """

    def __init__(
        self,
        inner: Transport,
        channels: Sequence[Channel],
        rank: int,
        device: torch.device,
        *,
        seconds: float,
        hold: Callable[[float], None],
    ) -> None:
        self._inner, self._device, self._seconds, self._hold = inner, device, seconds, hold
        self._streams: dict[int, torch.cuda.Stream] = {
            c.id: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for c in channels
            if c.src_rank == rank != c.dst_rank
        }
        self.post, self.take, self.release = inner.post, inner.take, inner.release
        self.step_end, self.abort, self.close = inner.step_end, inner.abort, inner.close

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        stream = self._streams.get(channel.id)
        if stream is None:
            self._inner.send(channel, micro_batch, tensors)
            return
        # Laid out on the stream that made them: what comes after only reads.
        whole = tuple(t.detach().contiguous() for t in tensors)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._hold(self._seconds)
            self._inner.send(channel, micro_batch, whole)
