"""One-sided transfers between processes of one host, the kind called `shared_memory`: no GPU.

A channel's slots lie in memory that both ends have mapped. The source writes a message straight
into its slot and says so on the channel's Unix socket; the destination says there what it has
released. So a hop is one copy and one wake-up, of the very thread that waits (gloo's takes four),
and the end of a process is known from its sockets, without a thread that listens.

Who has no credit for a slot must not wait for one: its message is then left to a thread of the
channel, which else sleeps.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ppruntime.transports.base import Channel
from ppruntime.transports.host_opening import checked_store
from ppruntime.transports.host_transport import CPU, JOIN_SECONDS, HostTransport, out_of_order
from ppruntime.transports.line import Line, PeerGone
from ppruntime.transports.ring import ReceiveRing, credits_needed, slot_of
from ppruntime.transports.shared_slots import SharedSlots, meet
from ppruntime.transports.slots import SlotPool, typed_views


class SharedMemoryTransport(HostTransport):
    """This rank's ends of `channels`, whose other ends are processes of this host; see `Transport`.

    Opening it is collective over the channels' ranks. A boundary crosses as one message.
    """

    def __init__(
        self, channels: Sequence[Channel], rank: int, *, timeout_seconds: float, store: Store
    ) -> None:
        super().__init__(channels, rank, timeout_seconds=timeout_seconds)
        ranks = sorted({rank}.union(*((c.src_rank, c.dst_rank) for c in channels)))
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}
        shared = meet(self._channels, rank, ranks, timeout_seconds=timeout_seconds, store=store)
        for channel in self._channels:
            if channel.src_rank == rank:
                self._outboxes[channel.id] = _Outbox(channel, shared[channel.id], self)
            else:
                self._inboxes[channel.id] = _Inbox(channel, shared[channel.id], timeout_seconds)

    def post(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.post(channel, micro_batch)
        self._inboxes[channel.id].post(micro_batch)

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        self._ledger.send(channel, micro_batch, tensors)
        self._outboxes[channel.id].send(micro_batch, tensors)
        self._ledger.check_alive(channel, micro_batch)

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        self._ledger.take(channel, micro_batch)
        inbox = self._inboxes[channel.id]
        try:
            came = inbox.next_message()
        except TimeoutError:
            self._did_not_come(channel, micro_batch)
        except PeerGone as gone:
            self.peer_is_gone(gone, channel, channel.src_rank, micro_batch)
            self._ledger.check_alive(channel, micro_batch)
            raise AssertionError("a transport ends with a reason") from gone
        number = inbox.number_of(micro_batch)
        if came != (number, micro_batch):
            self._raise(channel, micro_batch, out_of_order(number, came))
        return tuple(view.detach() for view in inbox.pool.slot_of(micro_batch).views)

    def release(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.release(channel, micro_batch)
        self._inboxes[channel.id].release(micro_batch)

    def step_end(self) -> None:
        self._ledger.step_end()
        for outbox in self._outboxes.values():
            waiting = outbox.wait_until_left(self._timeout_seconds)
            if waiting is not None:
                self._was_not_received(outbox.channel, waiting)
        self._ledger.check_alive()

    def _tell(self, reason: str | None) -> None:
        for end in self._ends():
            end.line.leave(reason)

    def _give_back(self) -> None:
        for end in self._ends():
            end.close()

    def _ends(self) -> list[_Outbox | _Inbox]:
        return [*self._outboxes.values(), *self._inboxes.values()]

    def peer_is_gone(self, gone: PeerGone, channel: Channel, peer: int, micro_batch: int) -> None:
        """Ends the transport, for what the peer said of its own end. Any thread may call it."""
        if gone.reason is not None:
            reason = gone.reason
        elif gone.was_orderly:
            what = f"{channel}: micro-batch {micro_batch}"
            reason = f"{what} cannot move, rank {peer} closed its transport"
        else:
            reason = f"rank {peer} is lost, its process has ended"
        self._end(reason)


def unavailable_reason() -> str | None:
    """Why this process cannot share memory, with the remedy; None if it can."""
    try:
        os.close(os.memfd_create("ppruntime asks"))
    except (AttributeError, OSError) as error:
        return (
            f"shared_memory needs Linux with memfd_create, here it gives: {error}; set"
            ' pp.transport = "gloo"'
        )
    return None


def open(
    channels: Sequence[Channel],
    rank: int,
    *,
    device: torch.device,
    timeout_seconds: float,
    store: Store | None,
    options: Mapping[str, object],
) -> SharedMemoryTransport:
    """Connects to the peers of `rank`; collective over the channels' ranks, on a fresh `store`."""
    store = checked_store("shared_memory", device, options, store)
    return SharedMemoryTransport(channels, rank, timeout_seconds=timeout_seconds, store=store)


class _Outbox:
    """The source's end of a channel."""

    def __init__(
        self, channel: Channel, shared: SharedSlots, transport: SharedMemoryTransport
    ) -> None:
        self.channel = channel
        self.line = Line(shared.end, timeout_seconds=None)
        self._transport = transport
        self._slots = tuple(typed_views(channel.boundary, buffer) for buffer in shared.buffers)
        self._num_sent = 0
        self._num_released = 0
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Sequence[Tensor]]] = deque()
        """Messages without a credit. While there are some, the thread alone reads the line."""
        self._is_over = False
        # From the start on, so that no step holds a thread more than another.
        self._thread = threading.Thread(target=self._send_waiting, name=str(channel), daemon=True)
        self._thread.start()

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        with self._changed:
            try:
                if not self._waiting:
                    self._read_credits()
                    if self._has_credit():
                        self._write(micro_batch, tensors)
                        return
            except PeerGone as gone:
                self._transport.peer_is_gone(gone, self.channel, self.channel.dst_rank, micro_batch)
                return
            self._waiting.append((micro_batch, tuple(tensors)))
            self._changed.notify_all()

    def wait_until_left(self, seconds: float) -> int | None:
        """The oldest micro-batch that is not on its way within the time; None if all are, or the
        transport has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._is_over, seconds)
            return None if self._is_over or not self._waiting else self._waiting[0][0]

    def close(self) -> None:
        """Once the transport has ended: gives back the socket and the memory."""
        with self._changed:
            self._is_over = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(JOIN_SECONDS)
        self._slots = ()
        self.line.close()

    def _has_credit(self) -> bool:
        return self._num_released >= credits_needed(self._num_sent, len(self._slots))

    def _read_credits(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self._has_credit():
                self._num_released, _ = self.line.receive(socket.MSG_DONTWAIT)

    @torch.no_grad()  # sent tensors may require gradients
    def _write(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        slot = self._slots[slot_of(self._num_sent, len(self._slots))]
        for view, tensor in zip(slot, tensors, strict=True):
            view.copy_(tensor)
        try:
            self.line.send(self._num_sent, micro_batch)
        except OSError:
            while True:  # until the other end's last words, if it had any
                self.line.receive()
        self._num_sent += 1

    def _send_waiting(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if self._is_over:
                    return
                micro_batch = self._waiting[0][0]
            try:
                released, _ = self.line.receive()
                with self._changed:
                    self._num_released = released
                    while self._waiting and self._has_credit():
                        self._write(*self._waiting[0])
                        self._waiting.popleft()
                    self._changed.notify_all()
            except PeerGone as gone:
                self._transport.peer_is_gone(gone, self.channel, self.channel.dst_rank, micro_batch)
                with self._changed:
                    self._is_over = True
                    self._changed.notify_all()
                return


class _Inbox:
    """The destination's end of a channel."""

    def __init__(self, channel: Channel, shared: SharedSlots, timeout_seconds: float) -> None:
        self.line = Line(shared.end, timeout_seconds)
        self.pool = SlotPool(channel, CPU, buffers=shared.buffers)
        self._ring = ReceiveRing(channel)
        self._numbers: dict[int, int] = {}

    def post(self, micro_batch: int) -> None:
        self.pool.reserve(micro_batch)
        self._numbers[micro_batch] = self._ring.num_reserved
        self._ring.reserve()

    def number_of(self, micro_batch: int) -> int:
        return self._numbers[micro_batch]

    def next_message(self) -> tuple[int, int]:
        """Waits for the next message: its number and micro-batch. Raises PeerGone, TimeoutError."""
        return self.line.receive()

    def release(self, micro_batch: int) -> None:
        self.pool.release(micro_batch)
        if self._ring.release(self._numbers.pop(micro_batch)):
            # A source that has gone needs no credit; whoever needs its messages finds out.
            with contextlib.suppress(OSError):
                self.line.send(self._ring.num_released, 0)

    def close(self) -> None:
        """Once the transport has ended: gives back the socket. Tensors that were taken stay
        readable for as long as someone holds them."""
        self.line.close()
