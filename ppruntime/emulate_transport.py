"""Neighbours that do not exist, replayed: a transport whose edges lead to ranks in virtual time.

Channels between ranks that run go over a real transport. At the edges of what runs, a send is noted
with its time, and a take gives recorded or made-up tensors at the moment at which the neighbour
would have sent them, by `schedules.absent.AbsentRanks`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ppruntime.emulate_replays import Replays
from ppruntime.schedules.absent import AbsentRanks
from ppruntime.transports.base import Channel, Transport, TransportError
from ppruntime.transports.ledger import Ledger


class ReplayTransport:
    """One present rank's ends of all channels of a pipeline; see `Transport`.

    `inner` carries the channels of `inner_channels` (by id of the whole pipeline's channel), or is
    None where the rank has no present neighbour. `begin` comes before each step. On a device the
    host waits in `take` until the message would be there, so that the device may idle for one
    launch, microseconds, behind it.
    """

    def __init__(
        self,
        inner: Transport | None,
        inner_channels: Mapping[int, Channel],
        edges: Sequence[Channel],
        rank: int,
        replays: Replays,
        *,
        device: torch.device,
    ) -> None:
        self._inner, self._inner_channels = inner, inner_channels
        self._ledger = Ledger(edges, rank, device)
        self._replays = replays
        self._on_cuda = device.type == "cuda"
        self._absent: AbsentRanks | None = None
        self._unstamped: list[tuple[Channel, int, torch.cuda.Event]] = []
        self._origin: torch.cuda.Event | None = None
        self._origin_s = 0.0

    def begin(self, absent: AbsentRanks) -> None:
        """Starts a step. `absent` counts in seconds of `time.perf_counter`."""
        self._absent = absent
        self._unstamped.clear()
        if self._on_cuda:
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._origin.record()
            self._origin_s = time.perf_counter()

    def post(self, channel: Channel, micro_batch: int) -> None:
        inner = self._inner_channels.get(channel.id)
        if inner is not None:
            self._real().post(inner, micro_batch)
        else:
            self._ledger.post(channel, micro_batch)

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        inner = self._inner_channels.get(channel.id)
        if inner is not None:
            self._real().send(inner, micro_batch, tensors)
            return
        self._ledger.send(channel, micro_batch, tensors)
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._unstamped.append((channel, micro_batch, event))
        else:
            self._note(channel, micro_batch, time.perf_counter())
        self._replays.sent(channel, micro_batch, tensors)

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        inner = self._inner_channels.get(channel.id)
        if inner is not None:
            return self._real().take(inner, micro_batch)
        self._ledger.take(channel, micro_batch)
        arrival = self._arrival(channel, micro_batch)
        if (left := arrival - time.perf_counter()) > 2e-4:
            time.sleep(left - 1e-4)
        while time.perf_counter() < arrival:
            pass
        return self._replays.tensors(channel, micro_batch)

    def release(self, channel: Channel, micro_batch: int) -> None:
        inner = self._inner_channels.get(channel.id)
        if inner is not None:
            self._real().release(inner, micro_batch)
        else:
            self._ledger.release(channel, micro_batch)

    def step_end(self) -> None:
        if self._inner is not None:
            self._inner.step_end()
        self._ledger.step_end()

    def abort(self, reason: str) -> None:
        self._ledger.end(reason)
        if self._inner is not None:
            self._inner.abort(reason)

    def close(self) -> None:
        self._ledger.end("the replaying transport is closed")
        if self._inner is not None:
            self._inner.close()

    def _real(self) -> Transport:
        assert self._inner is not None, "channels without a transport that carries them"
        return self._inner

    def _arrival(self, channel: Channel, micro_batch: int) -> float:
        """The moment of `time.perf_counter` at which the message is there."""
        assert self._absent is not None, "begin comes before a step"
        forward = channel.kind == "forward"
        while True:
            arrival = self._absent.arrival(
                channel.dst_stage, forward=forward, micro_batch=micro_batch
            )
            if arrival is not None:
                return arrival
            if not self._unstamped:
                raise TransportError(
                    f"{channel}: micro-batch {micro_batch} never comes: the absent rank "
                    f"{channel.src_rank} waits for something that this rank sends later; the order "
                    "deadlocks or its channels are not the order's"
                )
            sent, number, event = self._unstamped.pop(0)
            event.synchronize()
            assert self._origin is not None, "begin comes before a step"
            milliseconds: float = self._origin.elapsed_time(event)
            self._note(sent, number, self._origin_s + milliseconds / 1e3)

    def _note(self, channel: Channel, micro_batch: int, moment: float) -> None:
        assert self._absent is not None, "begin comes before a step"
        self._absent.sent(
            channel.src_stage,
            forward=channel.kind == "forward",
            micro_batch=micro_batch,
            time=moment,
        )


def split_channels(
    channels: Sequence[Channel], present: range, rank: int
) -> tuple[dict[int, Channel], tuple[Channel, ...]]:
    """(the channels between present ranks, by id, renumbered so that present ranks begin at 0; the
    edges of `rank`: its channels from or to a rank that is absent)."""
    inner = {
        c.id: replace(c, src_rank=c.src_rank - present.start, dst_rank=c.dst_rank - present.start)
        for c in channels
        if c.src_rank in present and c.dst_rank in present
    }
    edges = tuple(c for c in channels if rank in (c.src_rank, c.dst_rank) and c.id not in inner)
    return inner, edges
