"""What every transport writes down: which micro-batch of which channel is in which state on this
rank.

All kinds of transport share these checks, so a wrong call raises the same error before anything
moves whatever carries the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppruntime.transports.base import Boundary, Channel, TransportError


@dataclass(slots=True)
class _Source:
    """This rank's end of a channel that it sends on."""

    channel: Channel
    sent: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Destination:
    """This rank's end of a channel that it receives on. Each micro-batch is in one of three
    states.

    Slots go round as a ring, in the order of the posts: a peer that writes them knows no other. So
    a slot is free again once its micro-batch and all that were posted before it are released.
    """

    channel: Channel
    posted: deque[int] = field(default_factory=deque)
    taken: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    ring: deque[int] = field(default_factory=deque)
    """Micro-batches whose slots are not free, oldest first."""


class Ledger:
    """The states of all messages of the current step at this rank's ends of `channels`.

    Call the method of the same name first in `post`, `send`, `take`, `release` and `step_end`: it
    raises TransportError if the call is not legal now, or if the transport has ended. One host
    thread uses it; only `end` and `ended` may be used from any thread.
    """

    def __init__(self, channels: Iterable[Channel], rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device_type = device.type
        self._on_cuda = device.type == "cuda"
        self._sources = {c.id: _Source(c) for c in channels if c.src_rank == rank}
        self._destinations = {c.id: _Destination(c) for c in channels if c.dst_rank == rank}
        self._ended: str | None = None

    @property
    def ended(self) -> str | None:
        """Why the transport no longer works, or None while it does."""
        return self._ended

    def end(self, reason: str) -> bool:
        """From now on every call raises with `reason`. False if the transport had ended before: the
        first reason stays."""
        if self._ended is not None:
            return False
        self._ended = reason
        return True

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Checks the payload and that `micro_batch` was not sent before in this step."""
        self.check_alive(channel, micro_batch)
        source = self._sources.get(channel.id)
        if source is None or (source.channel is not channel and source.channel != channel):
            raise TransportError(f"rank {self._rank} cannot send on {channel}: {self._opened()}")
        self._check_payload(channel, micro_batch, tensors)
        if micro_batch in source.sent:
            raise TransportError(
                f"{channel}: micro-batch {micro_batch} was sent already in this step;"
                " send each once"
            )
        source.sent.add(micro_batch)

    def post(self, channel: Channel, micro_batch: int) -> None:
        """Checks that a slot is free and that `micro_batch` was not posted before in this step."""
        self.check_alive(channel, micro_batch)
        end = self._destination(channel)
        if micro_batch in end.posted or micro_batch in end.taken or micro_batch in end.released:
            raise TransportError(
                f"{channel}: micro-batch {micro_batch} was posted already in this step;"
                " post each once"
            )
        if len(end.ring) >= channel.slots:
            raise TransportError(
                f"{channel}: no slot is free for micro-batch {micro_batch}: the {channel.slots} go"
                f" round as a ring, the oldest is micro-batch {end.ring[0]}'s (posted"
                f" {list(end.posted)}, taken {sorted(end.taken)}); release that one first or open"
                " the channel with more slots"
            )
        end.posted.append(micro_batch)
        end.ring.append(micro_batch)

    def take(self, channel: Channel, micro_batch: int) -> None:
        """Checks that `micro_batch` is the oldest one that is posted and not yet taken."""
        self.check_alive(channel, micro_batch)
        end = self._destination(channel)
        if not end.posted or end.posted[0] != micro_batch:
            raise TransportError(
                f"{channel}: micro-batch {micro_batch} {_why_no_take(end, micro_batch)}"
            )
        end.posted.popleft()
        end.taken.add(micro_batch)

    def release(self, channel: Channel, micro_batch: int) -> None:
        """Checks that `micro_batch` is taken and not yet released."""
        self.check_alive(channel, micro_batch)
        end = self._destination(channel)
        if micro_batch not in end.taken:
            was = "was released already" if micro_batch in end.released else "is not taken"
            raise TransportError(
                f"{channel}: micro-batch {micro_batch} {was}; release each once, after its take"
            )
        end.taken.remove(micro_batch)
        end.released.add(micro_batch)
        while end.ring and end.ring[0] in end.released:
            end.ring.popleft()

    def step_end(self) -> None:
        """Checks that nothing is posted or taken, and starts a new step."""
        self.check_alive()
        for end in self._destinations.values():
            if end.posted or end.taken:
                raise TransportError(
                    f"{end.channel}: the step ended with micro-batches {list(end.posted)} posted"
                    f" but not taken and {sorted(end.taken)} taken but not released; the order"
                    " lacks these ops"
                )
        for end in self._destinations.values():
            end.released.clear()
        for source in self._sources.values():
            source.sent.clear()

    def check_alive(self, channel: Channel | None = None, micro_batch: int | None = None) -> None:
        """Raises TransportError with the reason if the transport has ended; it names what cannot
        move."""
        if self._ended is not None:
            what = "the step" if channel is None else f"{channel}: micro-batch {micro_batch}"
            raise TransportError(f"{what} cannot go on: {self._ended}")

    def _destination(self, channel: Channel) -> _Destination:
        end = self._destinations.get(channel.id)
        if end is None or (end.channel is not channel and end.channel != channel):
            raise TransportError(f"rank {self._rank} cannot receive on {channel}: {self._opened()}")
        return end

    def _opened(self) -> str:
        return (
            f"it was opened to send on channels {sorted(self._sources)} and to receive on"
            f" {sorted(self._destinations)}"
        )

    def _check_payload(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        specs = channel.boundary.tensors
        if len(tensors) != len(specs):
            raise TransportError(
                f"{channel}: micro-batch {micro_batch} has {len(tensors)} tensors, the boundary"
                f" {len(specs)}: {describe(channel.boundary)}"
            )
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
                raise TransportError(
                    f"{channel}: micro-batch {micro_batch}: tensor {spec.name!r} is"
                    f" {tensor.dtype} {tuple(tensor.shape)}, the boundary has {spec.dtype}"
                    f" {spec.shape}; shapes are fixed when the transport is opened"
                )
            if tensor.is_cuda is not self._on_cuda:  # cheaper than asking for the device
                raise TransportError(
                    f"{channel}: micro-batch {micro_batch}: tensor {spec.name!r} is on"
                    f" {tensor.device}, the transport was opened for {self._device_type}"
                )


def describe(boundary: Boundary) -> str:
    """The boundary for people: `hidden float32 (2, 8), slots int32 (4,)`."""
    return ", ".join(
        f"{s.name} {str(s.dtype).removeprefix('torch.')} {s.shape}" for s in boundary.tensors
    )


def _why_no_take(end: _Destination, micro_batch: int) -> str:
    if micro_batch in end.taken:
        return "is taken already; take each once"
    if micro_batch in end.released:
        return "was taken and released already; take each once"
    if micro_batch not in end.posted:
        return "was never posted; post it before the take"
    return f"is not next, {end.posted[0]} was posted before it; take in the order of the posts"
