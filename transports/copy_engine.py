"""Peer memory and copy engines inside one host, the kind called `copy_engine`: no kernel, no SM.

The destination's slots are mapped by the source, which copies into them on a stream that only this
channel uses; counters that only grow tell what landed and what was released. For message n from 0:

    source, channel's stream          destination, reader's stream         credit stream
    wait   credits >= n + 1 - slots
    copy   tensors -> slot n mod slots
    stage  n + 1, then copy it   -->  wait   landed >= n + 1
                                      ... readers ..., event        -->    wait event
    credits of this rank         <--                                       stage count, copy it

Why it is right. Order: a stream runs its copies one after the other, and the staging write between
data and counter fences the stream's earlier writes system-wide, so who sees `landed` sees the data.
Lifetime: a slot is written again only after `credits` says so, which is written after the event
behind its last reader; the tensors sent are held until an event behind the copy is past. Abort: all
words that this rank waits on lie in its own memory, so it can raise them itself; it repeats that,
since a late copy of the peer may lower a word again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ppruntime.transports import meeting, opening
from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.device import DeviceTransport
from ppruntime.transports.driver import WORD_BYTES, Driver, OwnStream
from ppruntime.transports.peer_memory import (
    MappedMemory,
    allocate,
    map_peer,
    swap_descriptors,
    tensor_at,
)
from ppruntime.transports.ring import ReceiveRing, credits_needed, releasing_word, slot_of
from ppruntime.transports.slots import typed_views

OPTIONS = frozenset({"uncredited", "selftest"})
_KIND = "copy_engine"
_WORD_SPACING = 128  # a word has a cache line to itself: both GPUs write near it
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Where things lie in the two memories that two neighbours share, by channel id.

    Each rank has a memory of its own: `landed` words and `slots` are in the destination's,
    `credits` words in the source's. `num_bytes` is the size by rank; words are the first part.
    """

    word_bytes: int
    landed: Mapping[int, int]
    credits: Mapping[int, int]
    slots: Mapping[int, int]
    num_bytes: Mapping[int, int]


def plan_pair(channels: Sequence[Channel]) -> PairLayout:
    """The layout for all channels between two ranks, the same on both."""
    ordered = sorted(channels, key=lambda c: c.id)
    landed = {c.id: 2 * i * _WORD_SPACING for i, c in enumerate(ordered)}
    credits = {c.id: (2 * i + 1) * _WORD_SPACING for i, c in enumerate(ordered)}
    word_bytes = -(-2 * len(ordered) * _WORD_SPACING // _PAGE_BYTES) * _PAGE_BYTES
    num_bytes = {rank: word_bytes for c in ordered for rank in (c.src_rank, c.dst_rank)}
    slots = {}
    for channel in ordered:
        slots[channel.id] = num_bytes[channel.dst_rank]
        num_bytes[channel.dst_rank] += channel.slots * channel.boundary.slot_bytes
    return PairLayout(word_bytes, landed, credits, slots, num_bytes)


class _Words:
    """Tells the peer a count: staged in a word of our own, from where the copy engine takes it. A
    stream's write of the next count is behind the copy of the last one, so one word suffices."""

    def __init__(self, driver: Driver, staging: Tensor, peer_address: int) -> None:
        self._driver, self._staging, self._peer_address = driver, staging, peer_address
        self._address = staging.data_ptr()

    def tell(self, stream: int, count: int) -> None:
        self._driver.write_word(stream, self._address, count)
        self._driver.copy(stream, self._peer_address, self._address, WORD_BYTES)


class _Source:
    """The source's end; `credit_address` is the word in our memory that the destination raises."""

    def __init__(
        self,
        driver: Driver,
        stream: OwnStream,
        channel: Channel,
        *,
        slots_address: int,
        credit_address: int | None,
        landed: _Words,
    ) -> None:
        self.stream, self.streams = stream, (stream,)
        self._driver, self._channel = driver, channel
        self._slots_address, self._credit_address = slots_address, credit_address
        self._landed, self._offsets = landed, channel.boundary.offsets
        self.num_waited = 0

    def push(self, message: int, tensors: tuple[Tensor, ...], ready: torch.cuda.Event) -> None:
        stream, channel = self.stream.handle, self._channel
        needed = credits_needed(message, channel.slots)
        if needed and self._credit_address is not None:
            self._driver.wait_word(stream, self._credit_address, needed)
            self.num_waited = needed
        slot = self._slots_address + slot_of(message, channel.slots) * channel.boundary.slot_bytes
        for offset, tensor in zip(self._offsets, tensors, strict=True):
            self._driver.copy(stream, slot + offset, tensor.data_ptr(), tensor.nbytes)
        self._landed.tell(stream, message + 1)

    def release_waits(self, stream: int) -> None:
        if self._credit_address is not None:
            word = releasing_word(self.num_waited)
            self._driver.write_word(stream, self._credit_address, word)


class _Destination:
    """The destination's end; `landed_address` is the word in our memory that the source raises.
    `credits` is None where the order proves that the source never comes too early."""

    def __init__(
        self,
        driver: Driver,
        stream: OwnStream,
        channel: Channel,
        *,
        slots: Tensor,
        landed_address: int,
        credits: _Words | None,
    ) -> None:
        self.stream, self.streams = stream, (stream,)
        self._driver, self._channel = driver, channel
        self._landed_address, self._credits = landed_address, credits
        size = channel.boundary.slot_bytes
        self._views = [
            typed_views(channel.boundary, slots[i * size : (i + 1) * size])
            for i in range(channel.slots)
        ]
        self._ring = ReceiveRing(channel)
        self.num_waited = 0

    def post(self, message: int) -> None:
        """Bookkeeping only: the source writes when it is ready."""
        self._ring.reserve()

    def wait(self, message: int, current: torch.cuda.Stream) -> None:
        self._driver.wait_word(current.cuda_stream, self._landed_address, message + 1)
        self.num_waited = message + 1

    def views(self, message: int) -> tuple[Tensor, ...]:
        # New tensors on the slot: what the caller sets on them ends with this message.
        return tuple(v.detach() for v in self._views[slot_of(message, self._channel.slots)])

    def give_back(self, message: int, released: torch.cuda.Event) -> None:
        # The credit follows this message's readers and, in the stream's order, all earlier ones.
        self.stream.torch.wait_event(released)
        if self._ring.release(message) and self._credits is not None:
            self._credits.tell(self.stream.handle, self._ring.num_released)

    def release_waits(self, stream: int) -> None:
        self._driver.write_word(stream, self._landed_address, releasing_word(self.num_waited))


class _Fabric:
    """The memories, and the stream that an abort writes on, which never waits for anything."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._driver, self._device = driver, device
        self._stream = OwnStream(driver, device)
        self._memories: list[MappedMemory] = []
        self.outside_bytes = 0
        self.sources: dict[int, _Source] = {}
        self.destinations: dict[int, _Destination] = {}

    def connect(
        self,
        channels: Sequence[Channel],
        rank: int,
        peer: int,
        *,
        store: Store,
        uncredited: frozenset[int],
        timeout_seconds: float,
    ) -> None:
        """Makes this rank's ends of all `channels` that it shares with `peer`; both call it."""
        driver, device = self._driver, self._device
        layout = plan_pair(channels)
        own, descriptor = allocate(driver, device.index, layout.num_bytes[rank])
        self._memories.append(own)
        self.outside_bytes += own.num_bytes
        memory = tensor_at(own.address, own.num_bytes, device)
        memory[: layout.word_bytes].zero_()
        # One local word per channel, to stage counts in; zero before any count is staged.
        staging = torch.zeros(len(channels), dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
        try:
            their_descriptor, their_bytes = swap_descriptors(
                store,
                f"memory of ranks {min(rank, peer)} and {max(rank, peer)}",
                descriptor,
                own.num_bytes,
                is_first=rank < peer,
                timeout_seconds=timeout_seconds,
            )
        finally:
            os.close(descriptor)
        try:
            theirs = map_peer(driver, device.index, their_descriptor, their_bytes)
        finally:
            os.close(their_descriptor)
        self._memories.append(theirs)
        for i, channel in enumerate(channels):
            stream, word = OwnStream(driver, device), staging[i]
            has_credits = channel.id not in uncredited
            if channel.src_rank == rank:
                self.sources[channel.id] = _Source(
                    driver,
                    stream,
                    channel,
                    slots_address=theirs.address + layout.slots[channel.id],
                    credit_address=own.address + layout.credits[channel.id]
                    if has_credits
                    else None,
                    landed=_Words(driver, word, theirs.address + layout.landed[channel.id]),
                )
                continue
            first = layout.slots[channel.id]
            size = channel.slots * channel.boundary.slot_bytes
            self.destinations[channel.id] = _Destination(
                driver,
                stream,
                channel,
                slots=memory[first : first + size],
                landed_address=own.address + layout.landed[channel.id],
                credits=_Words(driver, word, theirs.address + layout.credits[channel.id])
                if has_credits
                else None,
            )

    def unblock(self) -> bool:
        for source in self.sources.values():
            source.release_waits(self._stream.handle)
        for destination in self.destinations.values():
            destination.release_waits(self._stream.handle)
        return True

    def close(self, *, orderly: bool) -> None:
        # Credits may still be on their way to the peer; nothing that they wait for is missing.
        torch.cuda.synchronize(self._device)
        for memory in self._memories:
            memory.free()
        self._stream.destroy()


def unavailable_reason() -> str | None:
    """Why this process cannot use copy_engine, with the remedy; None if it can. Whether both ends
    of a channel are on one host shows when it is opened."""
    return meeting.no_cuda_reason(_KIND) or meeting.queue_reason(_KIND, meeting.environment())


def open(
    channels: Sequence[Channel],
    rank: int,
    *,
    device: torch.device,
    timeout_seconds: float,
    store: Store | None,
    options: Mapping[str, object],
) -> DeviceTransport:
    """Opens the ends that `rank` has of `channels`; collective over their ranks, on a fresh store.

    Options: `uncredited`, the ids of channels whose order proves that a slot is released before its
    next message is sent; `selftest`, False to leave the start-up test out. Raises TransportError
    where ends are on different hosts or share a GPU.
    """
    return opening.open_ends(
        _KIND,
        channels,
        rank,
        device=device,
        timeout_seconds=timeout_seconds,
        store=store,
        options=options,
        taken=OPTIONS,
        reason=unavailable_reason(),
        connect=_connect,
    )


def _connect(start: opening.Start) -> opening.Ends:
    rank, peers = start.rank, start.peers
    check_places(start.channels, start.places)
    driver = Driver(start.device)
    fabric = _Fabric(driver, start.device)
    for peer in peers:  # ascending on every rank, so the smallest pair that is left proceeds
        start.limit.doing = f"maps the memory of rank {peer}"
        fabric.connect(
            [c for c in start.channels if peer in (c.src_rank, c.dst_rank)],
            rank,
            peer,
            store=start.store,
            uncredited=start.options.uncredited,
            timeout_seconds=start.timeout_seconds,
        )
    # A rank is open with all its peers or with none: one that cannot map a memory says so before
    # another sends to it. Words are zero by then, before their memory is handed over.
    meeting.swap_texts(start.store, "readiness", "open", rank, peers, start.timeout_seconds)
    return opening.Ends(driver, fabric.sources, fabric.destinations, fabric)


def check_places(channels: Sequence[Channel], places: Mapping[int, meeting.Place]) -> None:
    """Raises TransportError, alike on both ends, where a channel's ends are on different hosts.
    `places` are by rank."""
    for channel in channels:
        here, there = places[channel.src_rank], places[channel.dst_rank]
        if here.host != there.host:
            raise TransportError(
                f"{_KIND} cannot carry the {channel}: rank {channel.src_rank} is on {here.host},"
                f" rank {channel.dst_rank} on {there.host}, no copy engine reaches another host;"
                ' set pp.transport = "auto", "put" or "nccl"'
            )
