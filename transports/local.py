"""Both ends of a channel in one process: tensors change hands without a copy.

Carries the hops between two stages of one rank (the turn of a V, a loop placement on few ranks),
and whole pipelines whose ranks are threads of one process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.ledger import Ledger


@dataclass(slots=True)
class _Message:
    """A boundary on its way. On CUDA `event` is passed when the sender's work so far is done."""

    micro_batch: int
    tensors: tuple[Tensor, ...]
    event: torch.cuda.Event | None


@dataclass(slots=True)
class _Mailbox:
    """What was sent on one channel and not yet taken, and what a waiting destination waits on."""

    messages: deque[_Message] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)


class LocalTransport:
    """One rank's ends of channels that stay in this process; see `Transport`.

    `take` gives the very tensors that were sent, detached: reading them is legal until `release`,
    writing never is, since the sender's graph may have saved them. Where both ends are on one rank,
    and so on one host thread, a `take` before its `send` raises at once, as waiting could not help.
    There whoever takes on another CUDA stream than the sender's keeps the tensors until `release`,
    and has the sender's stream wait for what read them before it is given more: the allocator would
    hold the memory back until the device is past, a whole step of messages if the host is ahead.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        mailboxes: Mapping[int, _Mailbox],
        *,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._rank = rank
        self._ledger = Ledger(channels, rank, device)
        self._mailboxes = mailboxes
        self._timeout_seconds = timeout_seconds
        self._on_cuda = device.type == "cuda"
        self._together: tuple[LocalTransport, ...] = (self,)

    def post(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.post(channel, micro_batch)

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        self._ledger.send(channel, micro_batch, tensors)
        event = None
        if self._on_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        message = _Message(micro_batch, tuple(t.detach() for t in tensors), event)
        mailbox = self._mailboxes[channel.id]
        with mailbox.changed:
            mailbox.messages.append(message)
            mailbox.changed.notify()

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        self._ledger.take(channel, micro_batch)
        message = self._next_message(channel, micro_batch)
        if message.micro_batch != micro_batch:
            reason = (
                f"{channel}: micro-batch {micro_batch} was expected, micro-batch"
                f" {message.micro_batch} was sent; both ends must use one order"
            )
            self.abort(reason)
            raise TransportError(reason)
        if message.event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(message.event)
            if channel.src_rank != channel.dst_rank:
                for tensor in message.tensors:
                    # The sender's allocator must not give the memory away before this stream has
                    # read it.
                    tensor.record_stream(stream)
        # Nothing is kept: the caller's references are what keeps the memory, until it drops them.
        return message.tensors

    def release(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.release(channel, micro_batch)

    def step_end(self) -> None:
        self._ledger.step_end()

    def abort(self, reason: str) -> None:
        """Ends the transports of all ranks that were opened together."""
        for transport in self._together:
            transport._ledger.end(reason)
        for mailbox in self._mailboxes.values():
            with mailbox.changed:
                mailbox.changed.notify_all()

    def close(self) -> None:
        self._ledger.end(f"the transport of rank {self._rank} is closed")
        if all(t._ledger.ended for t in self._together):
            for mailbox in self._mailboxes.values():
                mailbox.messages.clear()

    def _next_message(self, channel: Channel, micro_batch: int) -> _Message:
        mailbox = self._mailboxes[channel.id]
        with mailbox.changed:
            if not mailbox.messages and channel.src_rank == channel.dst_rank:
                raise TransportError(
                    f"{channel}: micro-batch {micro_batch} is taken before it is sent, on one rank;"
                    " the order must send it first"
                )
            arrived = mailbox.changed.wait_for(
                lambda: mailbox.messages or self._ledger.ended, self._timeout_seconds
            )
            self._ledger.check_alive(channel, micro_batch)
            if arrived:
                return mailbox.messages.popleft()
        reason = (
            f"{channel}: micro-batch {micro_batch} did not come from rank {channel.src_rank} within"
            f" {self._timeout_seconds} s"
        )
        self.abort(reason)
        raise TransportError(reason)


def open_ranks(
    channels: Sequence[Channel],
    num_ranks: int,
    *,
    device: torch.device,
    timeout_seconds: float,
) -> tuple[LocalTransport, ...]:
    """One transport per rank of a pipeline that lives in this process, each for a thread of its
    own."""
    mailboxes = {channel.id: _Mailbox() for channel in channels}
    transports = tuple(
        LocalTransport(channels, rank, mailboxes, device=device, timeout_seconds=timeout_seconds)
        for rank in range(num_ranks)
    )
    for transport in transports:
        transport._together = transports
    return transports


def open(
    channels: Sequence[Channel],
    rank: int,
    *,
    device: torch.device,
    timeout_seconds: float,
    store: Store | None = None,
    options: Mapping[str, object],
) -> LocalTransport:
    """The transport of the channels that begin and end on `rank`; the others are an error."""
    if options:
        raise TransportError(f"local takes no options, got {sorted(options)}; remove them")
    for channel in channels:
        if channel.src_rank != channel.dst_rank:
            raise TransportError(
                f"{channel} leaves the process, which local cannot; use gloo on the CPU, or one of"
                " nccl, copy_engine and put on GPUs"
            )
    mailboxes = {channel.id: _Mailbox() for channel in channels if channel.src_rank == rank}
    return LocalTransport(channels, rank, mailboxes, device=device, timeout_seconds=timeout_seconds)
