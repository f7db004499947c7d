"""Two-sided transfers over gloo, the kind called `gloo`: host memory, hosts that reach each other.

Every end of a channel has a thread of its own and every channel a 2-rank group (its own sockets),
for reasons that lie in gloo's behaviour (tried with torch 2.13):

- A send completes only once the peer has posted the receive, and its Work tells so to `wait` alone:
  `is_completed` stays False until then. Reaping sends without blocking takes a thread that waits.
- Starting a send or a receive takes 40 to 300 us of the calling thread, handing it over 3 us.
- A `wait` that times out closes the two ranks' connection in that group, and all else that is
  pending on it fails. So the host thread keeps the time limit itself, on a queue, and never asks
  gloo to; and a receive that times out on purpose is how `abort` ends the waits of the threads.
- A message longer than the posted receive kills the process by SIGABRT, a shorter one passes
  silently. So all messages of a channel have one size, which both ends compare when they open it.
- A transfer that is under way when its connection is closed may never return, on either end. So the
  host thread waits for the queue only, and a second connection to each peer tells of the peer's
  end.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.connection import NOTICE_SECONDS, Connection, Link
from ppruntime.transports.host_opening import checked_store
from ppruntime.transports.host_transport import CPU, JOIN_SECONDS, HostTransport, out_of_order
from ppruntime.transports.slots import Slot, SlotPool, aligned_bytes, typed_views

_HEADER = struct.Struct("=qq")
"""Behind the tensors of a message: its number on the channel and its micro-batch, two int64."""
_HEADER_BYTES = _HEADER.size


class GlooTransport(HostTransport):
    """This rank's ends of `channels` over gloo; see `Transport`.

    Opening it is collective over the channels' ranks. A boundary is packed into one message, so a
    hop is one transfer however many tensors cross. Close it before the process ends, or the peers
    take the end for a loss.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        *,
        timeout_seconds: float,
        store: Store,
    ) -> None:
        super().__init__(channels, rank, timeout_seconds=timeout_seconds)
        self._store = store
        self._links: dict[int, Link] = {}
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}
        try:
            self._connect_all()
        except TransportError:
            self.close()
            raise

    def _connect_all(self) -> None:
        # All ranks connect in one order: links by their ranks, then channels by id. Both ends of
        # the first one that is not connected yet have come to it, so they never wait in a cycle.
        rank = self._rank
        peers = {c.src_rank + c.dst_rank - rank for c in self._channels}
        for low, high in sorted((min(rank, peer), max(rank, peer)) for peer in peers):
            peer = low + high - rank
            connection = self._connect(f"link {low} {high}", peer, is_first=rank == low)
            self._links[peer] = Link(peer, connection, self._end)
        for channel in self._channels:
            is_source = channel.src_rank == rank
            peer = channel.dst_rank if is_source else channel.src_rank
            connection = self._connect(f"channel {channel.id}", peer, is_first=is_source)
            parts = (channel, connection, self._links[peer], self._end)
            if is_source:
                self._outboxes[channel.id] = _Outbox(*parts)
            else:
                self._inboxes[channel.id] = _Inbox(*parts)

    def post(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.post(channel, micro_batch)
        self._inboxes[channel.id].post(micro_batch)

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        self._ledger.send(channel, micro_batch, tensors)
        self._outboxes[channel.id].send(micro_batch, tensors)

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        self._ledger.take(channel, micro_batch)
        inbox = self._inboxes[channel.id]
        if not _wait(inbox.arrived, self._timeout_seconds):
            self._did_not_come(channel, micro_batch)
        return inbox.tensors(micro_batch)

    def release(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.release(channel, micro_batch)
        self._inboxes[channel.id].pool.release(micro_batch)

    def step_end(self) -> None:
        self._ledger.step_end()
        for outbox in self._outboxes.values():
            while outbox.pending:
                if not _wait(outbox.left, self._timeout_seconds):
                    self._was_not_received(outbox.channel, outbox.pending[0])
                outbox.pending.popleft()

    def _tell(self, reason: str | None) -> None:
        # Copies of the lists: a peer may end while the host thread connects to others.
        for inbox in list(self._inboxes.values()):
            inbox.arrived.put(False)
        for outbox in list(self._outboxes.values()):
            outbox.left.put(False)
        # The notices first: a peer that sees a connection break then knows why.
        for link in list(self._links.values()):
            link.notify(reason or "")
        self._close_connections()

    def _give_back(self) -> None:
        for box in self._boxes():
            box.stop()
        self._close_connections()  # of a transport that ended while it was being opened
        for part in (*self._boxes(), *self._links.values()):
            part.thread.join(JOIN_SECONDS)

    def _boxes(self) -> list[_Outbox | _Inbox]:
        return [*self._outboxes.values(), *self._inboxes.values()]

    def _close_connections(self) -> None:
        for part in (*self._links.values(), *self._boxes()):
            part.connection.close()

    def _connect(self, name: str, peer: int, *, is_first: bool) -> Connection:
        try:
            return Connection(
                PrefixStore(name, self._store),
                is_first=is_first,
                timeout_seconds=self._timeout_seconds,
            )
        except RuntimeError as error:
            if peer in self._links:
                self._links[peer].news_came.wait(NOTICE_SECONDS)
            if self._ledger.ended is not None:
                raise TransportError(f"{name} cannot be opened: {self._ledger.ended}") from error
            reason = (
                f"{name}: rank {self._rank} could not connect to rank {peer} within"
                f" {self._timeout_seconds} s; see why rank {peer} did not open its transport"
            )
            self.abort(reason)
            raise TransportError(reason) from error


def open(
    channels: Sequence[Channel],
    rank: int,
    *,
    device: torch.device,
    timeout_seconds: float,
    store: Store | None,
    options: Mapping[str, object],
) -> GlooTransport:
    """Connects to the peers of `rank`; collective over the channels' ranks, on a fresh `store`."""
    store = checked_store("gloo", device, options, store)
    return GlooTransport(channels, rank, timeout_seconds=timeout_seconds, store=store)


def _wait(tokens: SimpleQueue[bool], timeout_seconds: float) -> bool:
    """Waits for a token: True for a transfer that is done; False if the transport ended or time is
    up."""
    try:
        return tokens.get(timeout=timeout_seconds)
    except Empty:
        return False


class _Outbox:
    """The source's end of a channel. `left` gets a token for every message that has left."""

    def __init__(
        self, channel: Channel, connection: Connection, link: Link, end: Callable[[str], None]
    ) -> None:
        self.channel = channel
        self.connection = connection
        self.pending: deque[int] = deque()
        self.left: SimpleQueue[bool] = SimpleQueue()
        self._message = aligned_bytes(channel.boundary.slot_bytes + _HEADER_BYTES, CPU)
        self._views = typed_views(channel.boundary, self._message)
        self._header = _header(self._message)
        self._work: SimpleQueue[tuple[int, Sequence[Tensor]] | None] = SimpleQueue()
        self.thread = _start_thread(channel, self._work, self._move, link, end)

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        self.pending.append(micro_batch)
        self._work.put((micro_batch, tuple(tensors)))

    def stop(self) -> None:
        self._work.put(None)

    def _move(self, number: int, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        _HEADER.pack_into(self._header, 0, number, micro_batch)
        self.connection.send(self._message)
        self.left.put(True)


class _Inbox:
    """The destination's end of a channel. `arrived` gets a token for every message that has
    come."""

    def __init__(
        self, channel: Channel, connection: Connection, link: Link, end: Callable[[str], None]
    ) -> None:
        self.channel = channel
        self.connection = connection
        self.pool = SlotPool(channel, CPU, trailer_bytes=_HEADER_BYTES)
        self._tensors: dict[int, tuple[Tensor, ...]] = {}
        self._headers = [_header(slot.buffer) for slot in self.pool.slots]
        self.arrived: SimpleQueue[bool] = SimpleQueue()
        self._end = end
        self._work: SimpleQueue[tuple[int, Slot] | None] = SimpleQueue()
        self.thread = _start_thread(channel, self._work, self._move, link, end)

    def post(self, micro_batch: int) -> None:
        slot = self.pool.reserve(micro_batch)
        self._work.put((micro_batch, slot))
        # New tensors on the slot's memory: what the caller sets on them (requires_grad, grad) ends
        # with this micro-batch. Made here, since whoever takes them has waited long enough.
        self._tensors[micro_batch] = tuple(view.detach() for view in slot.views)

    def tensors(self, micro_batch: int) -> tuple[Tensor, ...]:
        return self._tensors.pop(micro_batch)

    def stop(self) -> None:
        self._work.put(None)

    def _move(self, number: int, micro_batch: int, slot: Slot) -> None:
        self.connection.receive(slot.buffer)
        came: tuple[int, int] = _HEADER.unpack_from(self._headers[slot.index])
        if came == (number, micro_batch):
            self.arrived.put(True)
        else:
            what = out_of_order(number, came)
            self._end(f"{self.channel}: micro-batch {micro_batch} {what}")


_Item = TypeVar("_Item")


def _start_thread(
    channel: Channel,
    work: SimpleQueue[tuple[int, _Item] | None],
    move: Callable[[int, int, _Item], None],
    link: Link,
    end: Callable[[str], None],
) -> threading.Thread:
    """A thread that moves the messages of one channel, one after the other, until None comes."""

    @torch.no_grad()  # the mode is each thread's own, and sent tensors may require gradients
    def run() -> None:
        for number in itertools.count():
            job = work.get()
            if job is None:
                return
            micro_batch = job[0]
            try:
                move(number, *job)
            except RuntimeError as error:
                link.news_came.wait(NOTICE_SECONDS)  # if the peer has ended, the link knows why
                why = "closed its transport" if link.peer_closed else f"cannot be reached ({error})"
                end(f"{channel}: micro-batch {micro_batch} cannot move, rank {link.peer} {why}")
                return
            del job  # the sent tensors are free as soon as they have left

    thread = threading.Thread(target=run, name=str(channel), daemon=True)
    thread.start()
    return thread


def _header(message: Tensor) -> memoryview:
    # Read and written without a torch op: a few of those take as long as gloo's hop.
    return message[-_HEADER_BYTES:].numpy().data
