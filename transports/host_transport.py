"""What the transports of host memory share: how they end, and what they say of a message that did
not move. Not a kind of its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import torch

from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.ledger import Ledger

CPU = torch.device("cpu")
JOIN_SECONDS = 2.0
"""How long `close` waits for a thread that has been told to end."""


class HostTransport(ABC):
    """The ledger of this rank's ends of `channels`, and one end for all reasons: the first stays.

    `_end` may be called on any thread, also while the transport is being opened.
    """

    def __init__(self, channels: Sequence[Channel], rank: int, *, timeout_seconds: float) -> None:
        ends = (c for c in channels if rank in (c.src_rank, c.dst_rank))
        self._channels = tuple(sorted(ends, key=lambda c: c.id))
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._ledger = Ledger(self._channels, rank, CPU)
        self._ending = threading.Lock()
        self._closed = False

    def abort(self, reason: str) -> None:
        self._end(f"rank {self._rank} ended the transfers: {reason}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end(f"the transport of rank {self._rank} is closed", orderly=True)
        self._give_back()

    @abstractmethod
    def _tell(self, reason: str | None) -> None:
        """Tells the peers, and the threads here, that all is over; None says that it is in order.
        Called once."""

    @abstractmethod
    def _give_back(self) -> None:
        """Joins threads and closes what is open; after `_tell`, once."""

    def _end(self, reason: str, *, orderly: bool = False) -> None:
        """Ends all transfers. Returns once all peers are told, also where another thread tells
        them."""
        with self._ending:
            if self._ledger.end(reason):
                self._tell(None if orderly else reason)

    def _did_not_come(self, channel: Channel, micro_batch: int) -> NoReturn:
        """Raises at the destination, whose time is up."""
        self._raise(
            channel,
            micro_batch,
            f"did not come from rank {channel.src_rank} within {self._timeout_seconds} s",
        )

    def _was_not_received(self, channel: Channel, micro_batch: int) -> NoReturn:
        """Raises at the source, whose time is up."""
        self._raise(
            channel,
            micro_batch,
            f"was not received by rank {channel.dst_rank} within {self._timeout_seconds} s after"
            " the step's end",
        )

    def _raise(self, channel: Channel, micro_batch: int, what: str) -> NoReturn:
        """Raises because of `what`, unless the transport has ended before for another reason."""
        self._ledger.check_alive(channel, micro_batch)
        reason = f"{channel}: micro-batch {micro_batch} {what}"
        self.abort(reason)
        raise TransportError(reason)


def out_of_order(number: int, came: tuple[int, int]) -> str:
    """What is said of a micro-batch that was due as message `number` when another came: `came` is
    that message's number and micro-batch."""
    return (
        f"was expected as message {number}, micro-batch {came[1]} came as message {came[0]}; both"
        " ends must use one order"
    )
