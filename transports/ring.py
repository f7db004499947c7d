"""Which slot a message lies in, and when it may be written: pure arithmetic of both ends.

Messages of a channel are numbered from 0 over the whole run, never per step. Message m lies in slot
m mod S, so both ends know the slot without telling each other, and message m may be written once
message m - S has been released. The receiver tells the sender only how many messages, counted
without a gap from the first, it has released: the credit count.
"""

from __future__ import annotations

from ppruntime.transports.base import Channel, TransportError

WORD = 1 << 32
HALF_WORD = 1 << 31


def slot_of(message: int, num_slots: int) -> int:
    """The slot that holds the message."""
    return message % num_slots


def credits_needed(message: int, num_slots: int) -> int:
    """How many messages have to be released before this one may be written; 0 for the first S."""
    return max(0, message - num_slots + 1)


def has_reached(word: int, value: int) -> bool:
    """What the hardware's wait tests: `value` is not ahead of `word`, both modulo 2**32.

    True for any count that is at most 2**31 - 1 ahead, so counters may wrap.
    """
    return (word - value) % WORD < HALF_WORD


def releasing_word(count: int) -> int:
    """A word that lets every wait for the next 2**30 counts pass: what an abort writes."""
    return (count + (1 << 30)) % WORD


class ReceiveRing:
    """The receiver's account of one channel: which messages are reserved and released."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self.num_slots = channel, channel.slots
        self.num_reserved = 0
        self.num_released = 0
        """Messages released without a gap from the first: the credit count."""
        self._early: set[int] = set()

    @property
    def is_full(self) -> bool:
        """No slot is free: the next message's slot still holds an unreleased one."""
        return self.num_reserved - self.num_released >= self.num_slots

    def reserve(self) -> None:
        """The next message's slot is in use from now on. Raises TransportError if it is already."""
        if self.is_full:
            late = self.num_reserved - self.num_slots
            raise TransportError(
                f"{self._channel}: message {self.num_reserved} has to come to the slot of message"
                f" {late}, which is not released yet; slots that a peer writes are filled in turn,"
                " so release in the order of the posts or open the channel with more slots"
            )
        self.num_reserved += 1

    def release(self, message: int) -> int:
        """The slot may be overwritten; by how much the credit count grew (0 after a gap)."""
        assert self.num_released <= message < self.num_reserved, f"message {message} is not held"
        assert message not in self._early, f"message {message} was released before"
        self._early.add(message)
        before = self.num_released
        while self.num_released in self._early:
            self._early.remove(self.num_released)
            self.num_released += 1
        return self.num_released - before
