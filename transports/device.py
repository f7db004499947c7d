"""What nccl, copy_engine and put have in common: order, slots, events, deadlines and the abort.

Each kind gives one end per channel (how bytes move, how a stream waits) and one fabric (what the
ends share). Per message the streams do, `|` marking what the other rank does meanwhile:

    source: compute -- ready --> [channel's stream: wait for the slot, move, signal] -- left
    destination: compute: begun, wait for the signal | , landed, readers ..., release -- credit -->

The host only enqueues. `left` lets go of the tensors, `landed` and `left` tell the watchdog.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ppruntime.transports.background import Background
from ppruntime.transports.base import Channel
from ppruntime.transports.driver import Driver, OwnStream, new_event
from ppruntime.transports.ledger import Ledger
from ppruntime.transports.lives import Life
from ppruntime.transports.watchdog import Pending, PendingList, Watchdog

if TYPE_CHECKING:
    from ppruntime.transports.selftest import SelfTest

_DRAIN_SECONDS = 5.0
_SPREAD_SECONDS = 1.5
"""From the announcement of an abort until waits are let go. Streams that go on without data would
send what they make of it, in order and on time: by then every rank has to know not to use it."""
_POLL_SECONDS = 50e-6
_GIVE_BACK_SECONDS = 5.0
_LEFT_BEHIND: list[DeviceTransport] = []
"""Closed with work of theirs on the GPU."""
_LOST_SECONDS = 2.0  # for a close that a peer has done its part in before its process ended


class SendEnd(Protocol):
    """The source's end of one channel."""

    stream: OwnStream

    @property
    def streams(self) -> tuple[OwnStream, ...]:
        """All that this end alone uses, `stream` first."""

    def push(self, message: int, tensors: tuple[Tensor, ...], ready: torch.cuda.Event) -> None:
        """Enqueues on `stream`: wait until the slot is free, move the tensors, tell the peer. When
        the stream is past it the tensors may be overwritten. `stream` has waited for `ready`, which
        is behind the tensors' writers; other streams of the end have not."""


class ReceiveEnd(Protocol):
    """The destination's end of one channel."""

    stream: OwnStream

    @property
    def streams(self) -> tuple[OwnStream, ...]:
        """All that this end alone uses, `stream` first."""

    def post(self, message: int) -> None:
        """The message is expected next. Raises TransportError if its slot is not free."""

    def wait(self, message: int, current: torch.cuda.Stream) -> None:
        """Makes `current` wait until the message lies in its slot."""

    def views(self, message: int) -> tuple[Tensor, ...]:
        """The boundary's tensors in the message's slot."""

    def give_back(self, message: int, released: torch.cuda.Event) -> None:
        """Once `released` is past the message's slot may be overwritten."""


class Fabric(Protocol):
    """What the channel ends of one rank share."""

    @property
    def outside_bytes(self) -> int:
        """See `base.HoldsDeviceMemory`."""

    def unblock(self) -> bool:
        """Lets every wait that this rank's streams are in pass, without data. Called after an
        abort, again and again until none waits; returns at once. False if nothing can, or nothing
        did in its time: the process must end."""

    def close(self, *, orderly: bool) -> None:
        """Gives back groups and buffers; nothing of them is in use on this GPU any more. May wait
        for peers to close too, but not after an abort (not `orderly`): they may be gone. In a
        thread of its own, as calls into CUDA and NCCL may hang."""


PENDING_WAIT_EXIT_CODE = 86
"""Of a process that had to end because a wait on its GPU cannot be undone."""


def end_process(report: str) -> NoReturn:
    """Writes the report and ends the process at once: for waits that nothing can undo."""
    print(report, file=sys.stderr, flush=True)
    os._exit(PENDING_WAIT_EXIT_CODE)


@dataclass(slots=True)
class _Sending:
    end: SendEnd
    num_sent: int = 0


@dataclass(slots=True)
class _Receiving:
    end: ReceiveEnd
    num_posted: int = 0
    message_of: dict[int, int] = field(default_factory=dict)
    """Of every micro-batch that is posted or taken: the number of its message."""


class DeviceTransport:
    """A `Transport` over CUDA streams. `take` makes the current stream wait, never the host."""

    def __init__(
        self,
        kind: str,
        rank: int,
        channels: Sequence[Channel],
        *,
        driver: Driver,
        device: torch.device,
        timeout_seconds: float,
        store: Store,
        senders: Mapping[int, SendEnd],
        receivers: Mapping[int, ReceiveEnd],
        fabric: Fabric,
        lives: Mapping[int, Life],
    ) -> None:
        self.kind, self._rank, self._device, self._driver = kind, rank, device, driver
        self._timeout_seconds, self._fabric, self._lives = timeout_seconds, fabric, dict(lives)
        self._ledger = Ledger(channels, rank, device)
        self._sending = {i: _Sending(end) for i, end in senders.items()}
        self._receiving = {i: _Receiving(end) for i, end in receivers.items()}
        self._pending = PendingList()
        self._lock = threading.Lock()
        self._gave_up_at = math.inf
        self._closed = False
        self.on_abort: Callable[[str], None] | None = None
        """Is told the reason of an abort before waits are let go: by then those have to know who
        would be sent what a stream makes without its data."""
        self.start_up: SelfTest | None = None
        """What the start-up test found; None if it was left out."""
        self._watchdog = Watchdog(
            self._pending,
            driver,
            store,
            rank=rank,
            timeout_seconds=timeout_seconds,
            lives=lives,
            expire=self.abort,
            tick=self._after_abort,
        )

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """The streams of all channel ends of this rank; for the start-up test and profiles."""
        return tuple(stream.torch for stream in self._own_streams())

    @property
    def outside_bytes(self) -> int:
        """See `base.HoldsDeviceMemory`."""
        return self._fabric.outside_bytes

    def stream_of(self, channel: Channel) -> torch.cuda.Stream:
        """The stream of this rank's end of the channel."""
        end = self._sending.get(channel.id) or self._receiving[channel.id]
        return end.end.stream.torch

    def check_alive(self) -> None:
        """Raises TransportError with the reason if the transport has ended."""
        self._ledger.check_alive()

    def post(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.post(channel, micro_batch)
        receiving = self._receiving[channel.id]
        message, receiving.num_posted = receiving.num_posted, receiving.num_posted + 1
        receiving.message_of[micro_batch] = message
        receiving.end.post(message)

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        self._ledger.send(channel, micro_batch, tensors)
        sending = self._sending[channel.id]
        whole = tuple(t.detach().contiguous() for t in tensors)
        stream = sending.end.stream.torch
        ready, begun, left = new_event(), new_event(), new_event()
        ready.record(torch.cuda.current_stream(self._device))
        stream.wait_event(ready)
        begun.record(stream)
        message, sending.num_sent = sending.num_sent, sending.num_sent + 1
        sending.end.push(message, whole, ready)
        left.record(stream)
        text = f"micro-batch {micro_batch} to leave on the {channel}, to rank {channel.dst_rank}"
        self._pending.add(Pending(text, channel.dst_rank, begun, left, is_send=True, holds=whole))
        self._pending.prune(time.monotonic())

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        self._ledger.take(channel, micro_batch)
        receiving = self._receiving[channel.id]
        message = receiving.message_of[micro_batch]
        current = torch.cuda.current_stream(self._device)
        begun, landed = new_event(), new_event()
        begun.record(current)
        receiving.end.wait(message, current)
        landed.record(current)
        text = f"micro-batch {micro_batch} on the {channel}, from rank {channel.src_rank}"
        self._pending.add(Pending(text, channel.src_rank, begun, landed, is_send=False))
        return receiving.end.views(message)

    def release(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.release(channel, micro_batch)
        receiving = self._receiving[channel.id]
        message = receiving.message_of.pop(micro_batch)
        released = new_event()
        released.record(torch.cuda.current_stream(self._device))
        receiving.end.give_back(message, released)

    def step_end(self) -> None:
        self._ledger.step_end()
        self._wait_until_past()

    def abort(self, reason: str) -> None:
        with self._lock:
            if self._closed or not self._ledger.end(f"{self.kind}, rank {self._rank}: {reason}"):
                return
        self._watchdog.announce(reason)
        if self.on_abort is not None:
            self.on_abort(reason)
        self._gave_up_at = time.monotonic()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
        try:
            if self._ledger.ended is None:
                self._wait_until_past()
        finally:
            drained = self._drain()
            orderly = self._ledger.ended is None
            with self._lock:
                self._closed = True
            self._ledger.end(f"{self.kind}, rank {self._rank}: the transport is closed")
            self._watchdog.close()
            if drained:
                self._give_back(orderly=orderly)
            else:
                # Giving back would wait for what still waits, for ever. It may yet write to slots
                # and read what was sent, so nobody else gets that memory.
                _LEFT_BEHIND.append(self)

    def _give_back(self, *, orderly: bool) -> None:
        """Closes the fabric, or says that it does not close in time and leaves it to the end of the
        process: a peer that ended takes its part in closing along."""

        def close() -> None:
            self._driver.enter_thread()
            torch.cuda.set_device(self._device)
            self._fabric.close(orderly=orderly)
            for stream in self._own_streams():
                stream.destroy()

        lost_at = math.inf

        def is_hopeless() -> bool:
            nonlocal lost_at
            if lost_at == math.inf and any(life.has_ended for life in self._lives.values()):
                lost_at = time.monotonic()
            return time.monotonic() - lost_at > _LOST_SECONDS

        closing = Background("transport close", close)
        limit = self._timeout_seconds if orderly else _GIVE_BACK_SECONDS
        start = time.monotonic()
        if not closing.wait(limit, give_up=is_hopeless):
            why = "a peer has ended" if lost_at < math.inf else "no peer closed, or the GPU hangs"
            print(
                f"rank {self._rank}: {self.kind} did not close within"
                f" {time.monotonic() - start:.1f} s ({why}); its buffers stay until the process"
                " ends",
                file=sys.stderr,
                flush=True,
            )
        elif closing.error is not None:
            raise closing.error

    def _own_streams(self) -> list[OwnStream]:
        ends = [s.end for s in self._sending.values()], [r.end for r in self._receiving.values()]
        return [stream for kind in ends for end in kind for stream in end.streams]

    def _wait_until_past(self) -> None:
        # What was taken too: an abort lets the GPU go on without its data, and who had left the
        # step by then would update weights with it. Here it is landed, or `check_alive` raises.
        # Polls rather than synchronises: the watchdog ends it, also where a wait has no end.
        while self._pending.prune(time.monotonic()):
            self._ledger.check_alive()
            time.sleep(_POLL_SECONDS)
        self._ledger.check_alive()

    def _drain(self) -> bool:
        # Longer than the watchdog waits, which ends the process where nothing else helps.
        deadline = time.monotonic() + 2 * _DRAIN_SECONDS
        try:
            while self._pending.prune(time.monotonic()):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            # What some kernel left behind: every call into CUDA reports it from now on, and whoever
            # closes has the error that came of it. Nothing can be given back.
            return False
        return True

    def _after_abort(self, left: Sequence[Pending]) -> None:
        """What the watchdog does at every poll after an abort, until nothing waits any more."""
        seconds = time.monotonic() - self._gave_up_at
        if not left or seconds < _SPREAD_SECONDS or self._fabric.unblock():
            return
        waiting = [p for p in left if p.waits_since is not None]
        if waiting and seconds > _DRAIN_SECONDS:
            lines = "\n".join(f"  waits for {p.text}" for p in waiting)
            end_process(
                f"rank {self._rank}: {self.kind} gave up: {self._ledger.ended}\n{lines}\n"
                "  Nothing can undo these waits on the GPU, so the process ends here."
            )
