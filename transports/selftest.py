"""Start-up test of an open GPU transport: does every channel carry the right bytes, does a stream
that waits hold others, how fast is it. Takes well under a second plus the time of one message.

Collective over the transport's ranks, before the first step. It goes through the transport's own
calls, so what it proves is the path that training takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.device import DeviceTransport
from ppruntime.transports.driver import is_past, new_event, new_stream

ALIAS_SECONDS = 0.2
"""How long another stream's few microseconds of work may take before it counts as held."""


@dataclass(frozen=True, slots=True)
class ChannelTime:
    """One message of a channel, while the ranks do nothing else: seconds on the channel's stream
    from its start until it has left."""

    channel: str
    num_bytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.num_bytes / self.seconds / 1e9

    def __str__(self) -> str:
        return (
            f"{self.channel}: {self.num_bytes / 1e6:.1f} MB in {self.seconds * 1e3:.3f} ms,"
            f" {self.gigabytes_per_second:.0f} GB/s"
        )


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What one rank found: the channels out of it, and how long the whole test took."""

    times: tuple[ChannelTime, ...]
    num_streams: int
    seconds: float


def run_selftest(
    transport: DeviceTransport,
    channels: Sequence[Channel],
    rank: int,
    *,
    device: torch.device,
    store: Store,
    timeout_seconds: float,
) -> SelfTest:
    """Runs all three tests on the channels at `rank`, in id order, on a fresh `store`.

    Raises TransportError naming the channel and the first wrong byte, or the streams that a waiting
    one held. Leaves the transport as after a step.
    """
    start = time.monotonic()
    mine = sorted((c for c in channels if rank in (c.src_rank, c.dst_rank)), key=lambda c: c.id)
    times = []
    for channel in mine:
        if channel.src_rank == rank:
            times.append(_serve(transport, channel, device, store, timeout_seconds))
        else:
            _check(transport, channel, device, store)
    return SelfTest(tuple(times), len(transport.streams), time.monotonic() - start)


def test_once(
    transport: DeviceTransport,
    channels: Sequence[Channel],
    rank: int,
    *,
    device: torch.device,
    store: Store,
    timeout_seconds: float,
) -> None:
    """Tests the transport just opened and leaves the result in it. Aborts and closes it if the test
    fails. `store` is the one that it was opened with."""
    try:
        transport.start_up = run_selftest(
            transport,
            channels,
            rank,
            device=device,
            store=PrefixStore("selftest", store),
            timeout_seconds=timeout_seconds,
        )
    except BaseException as error:
        transport.abort(f"the start-up test failed: {error}")
        transport.close()
        raise


def payload(channel: Channel, message: int, device: torch.device) -> tuple[Tensor, ...]:
    """Irregular bytes in the boundary's shapes, other ones for every message; both ends make them
    by themselves, whatever their device."""
    return tuple(
        irregular_bytes(spec.num_bytes, (channel.id << 20) + (message << 4) + index, device)
        .view(spec.dtype)
        .view(spec.shape)
        for index, spec in enumerate(channel.boundary.tensors)
    )


def irregular_bytes(num_bytes: int, seed: int, device: torch.device) -> Tensor:
    """Integer arithmetic that wraps, so every device gets the same bytes (uint8)."""
    words = torch.arange(-(-num_bytes // 4), dtype=torch.int32, device=device)
    words.mul_(747796405).add_((seed * 2891336453 + 1) % (1 << 31))
    words.bitwise_xor_(words >> 15)
    words.mul_(277803737)
    words.bitwise_xor_(words >> 13)
    return words.view(torch.uint8)[:num_bytes]


def first_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str | None:
    """Where two payloads differ, bit by bit; None if they do not."""
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        bytes_a, bytes_b = (t.reshape(-1).view(torch.uint8) for t in (a, b))
        if not torch.equal(bytes_a, bytes_b):
            wrong = (bytes_a != bytes_b).nonzero().reshape(-1)
            first = int(wrong[0])
            return (
                f"tensor {index} differs in {len(wrong)} of {len(bytes_a)} bytes, first at byte"
                f" {first}: {int(bytes_a[first])} instead of {int(bytes_b[first])}"
            )
    return None


def _serve(
    transport: DeviceTransport,
    channel: Channel,
    device: torch.device,
    store: Store,
    timeout_seconds: float,
) -> ChannelTime:
    """The source's part: the first message once the destination knows what its wait held, the
    second, which is timed, once the first was found right."""
    first, second = payload(channel, 0, device), payload(channel, 1, device)
    torch.cuda.current_stream(device).synchronize()
    _await(store, _key(channel, "waits"), transport, channel, timeout_seconds)
    transport.send(channel, 0, first)
    _await(store, _key(channel, "is right"), transport, channel, timeout_seconds)
    stream = transport.stream_of(channel)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record(stream)
    transport.send(channel, 1, second)
    end.record(stream)
    transport.step_end()
    end.synchronize()
    # Without credits nothing else keeps the first step's messages off the slot just read.
    _await(store, _key(channel, "is right again"), transport, channel, timeout_seconds)
    return ChannelTime(str(channel), channel.boundary.num_bytes, start.elapsed_time(end) * 1e-3)


def _check(
    transport: DeviceTransport, channel: Channel, device: torch.device, store: Store
) -> None:
    """The destination's part. The first message is awaited on a stream of its own before it can
    come, and the other streams must run meanwhile."""
    waiting = new_stream(device)
    own = transport.stream_of(channel)  # nccl's waits for its receive, as it should
    channels_streams = [s for s in transport.streams if s.cuda_stream != own.cuda_stream]
    others = _Others(
        (torch.cuda.current_stream(device), *channels_streams, new_stream(device)), device
    )
    transport.post(channel, 0)
    with torch.cuda.stream(waiting):
        views = transport.take(channel, 0)
    num_held = others.num_held()
    store.set(_key(channel, "waits"), "")
    torch.cuda.current_stream(device).wait_stream(waiting)
    _compare(transport, channel, 0, views, device)
    store.set(_key(channel, "is right"), "")
    transport.post(channel, 1)
    _compare(transport, channel, 1, transport.take(channel, 1), device)
    if num_held:  # before the source hears that all is well: it hears this then
        otherwise = "" if transport.kind == "nccl" else ', or set pp.transport = "nccl"'
        raise TransportError(
            f"{transport.kind}: a stream that waits for the {channel} held {num_held} of"
            f" {len(others.streams)} other streams, they share a hardware queue; set"
            f" CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts{otherwise}"
        )
    store.set(_key(channel, "is right again"), "")
    transport.step_end()


def _compare(
    transport: DeviceTransport,
    channel: Channel,
    message: int,
    views: Sequence[Tensor],
    device: torch.device,
) -> None:
    torch.cuda.current_stream(device).synchronize()
    difference = first_difference(views, payload(channel, message, device))
    transport.release(channel, message)
    if difference is not None:
        raise TransportError(f"{transport.kind}: the {channel} carries wrong bytes: {difference}")


class _Others:
    """Streams that must run on while one waits. All that loads code or takes memory happens here,
    before the wait: it may synchronise the GPU, and the message comes only after the test."""

    def __init__(self, streams: Sequence[torch.cuda.Stream], device: torch.device) -> None:
        self.streams = streams
        self._words = torch.zeros(len(streams), dtype=torch.int32, device=device)
        self._touch()
        torch.cuda.synchronize(device)

    def num_held(self) -> int:
        """How many of the streams do not end a few microseconds of work in time."""
        ends = self._touch()
        deadline = time.monotonic() + ALIAS_SECONDS
        while not all(map(is_past, ends)) and time.monotonic() < deadline:
            time.sleep(1e-4)
        return sum(not is_past(end) for end in ends)

    def _touch(self) -> list[torch.cuda.Event]:
        ends = []
        for i, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                self._words[i].add_(1)
            end = new_event()
            end.record(stream)
            ends.append(end)
        return ends


def _await(
    store: Store, key: str, transport: DeviceTransport, channel: Channel, timeout_seconds: float
) -> None:
    """Waits for the destination's word; ends early if the transport does."""
    deadline = time.monotonic() + timeout_seconds
    while not store.check([key]):
        transport.check_alive()
        if time.monotonic() > deadline:
            raise TransportError(
                f"rank {channel.dst_rank} did not answer within {timeout_seconds:g} s in the"
                f" start-up test of the {channel}"
            )
        time.sleep(2e-4)


def _key(channel: Channel, what: str) -> str:
    return f"channel {channel.id} {what}"
