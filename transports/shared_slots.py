"""How the two ends of a `shared_memory` channel find each other: a socket, and mapped slots.

Every rank that receives listens on an unnamed socket of the host; a source calls, says by which
channel, and gets the memory's descriptor. Nothing has a name in the file system, so nothing is left
over whichever way the processes end.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ppruntime.transports import agree
from ppruntime.transports.base import ALIGNMENT_BYTES, Channel, TransportError
from ppruntime.transports.lives import host_name

_HELLO = struct.Struct("=16sq")
"""How the source introduces itself: the listener's token and the channel's id."""


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """What the two ends of a channel share: a socket, and the bytes of each slot."""

    end: socket.socket
    buffers: tuple[Tensor, ...]


def meet(
    channels: Sequence[Channel],
    rank: int,
    ranks: Sequence[int],
    *,
    timeout_seconds: float,
    store: Store,
) -> dict[int, SharedSlots]:
    """What `rank` shares with the other ends of `channels`, by channel id; collective over `ranks`.

    `channels` are those that `rank` is an end of. Raises TransportError if the ranks are not on one
    host, or a peer does not come.
    """
    token = secrets.token_bytes(16)
    # Closed, whatever was opened, unless all goes well.
    with contextlib.ExitStack() as opened, socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # Linux picks a name that no file stands for
        listener.listen(len(channels) + 1)
        card = json.dumps([host_of_sockets(), listener.getsockname().hex(), token.hex()])
        what = "opening shared_memory"
        texts = agree.gather(store, rank, ranks, card, timeout_seconds=timeout_seconds, what=what)
        cards = {r: json.loads(text) for r, text in texts.items()}
        check_one_host({r: host for r, (host, _, _) in cards.items()})
        meeting = _Meeting(rank, timeout_seconds, opened)
        # All call before anyone waits for what the others answer: so nobody waits in a cycle.
        called = {}
        for channel in (c for c in channels if c.src_rank == rank):
            _, address, peer_token = cards[channel.dst_rank]
            called[channel] = meeting.call(channel, bytes.fromhex(address), peer_token)
        awaited = [c for c in channels if c.dst_rank == rank]
        shared = meeting.let_in(awaited, listener, token)
        for channel, end in called.items():
            shared[channel.id] = meeting.given_slots(channel, end)
        opened.pop_all()
    return shared


def host_of_sockets() -> str:
    """This host as far as its Unix sockets are seen: two network namespaces are two hosts."""
    return f"{host_name()} {os.readlink('/proc/self/ns/net')}"


def check_one_host(host_of: Mapping[int, str]) -> None:
    """Raises TransportError if the ranks, each with its `host_of_sockets`, are not on one host."""
    if len(set(host_of.values())) > 1:
        where = ", ".join(f"rank {rank} is on {host}" for rank, host in sorted(host_of.items()))
        raise TransportError(
            f'shared_memory stays inside a host, {where}; set pp.transport = "gloo"'
        )


class _Meeting:
    """One rank's part in `meet`. Its sockets are registered with `opened`."""

    def __init__(self, rank: int, timeout_seconds: float, opened: contextlib.ExitStack) -> None:
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._opened = opened

    def call(self, channel: Channel, address: bytes, token: str) -> socket.socket:
        """Connects to the destination of `channel`, whose listener has this address and token."""
        end = self._opened.enter_context(socket.socket(socket.AF_UNIX))
        try:
            end.connect(address)
            end.sendall(_HELLO.pack(bytes.fromhex(token), channel.id))
        except OSError as error:
            raise self._not_connected(channel.dst_rank, f" ({error})") from error
        return end

    def let_in(
        self, channels: Sequence[Channel], listener: socket.socket, token: bytes
    ) -> dict[int, SharedSlots]:
        """Waits for the sources of `channels`; makes each channel's slots and shares them."""
        awaited = {channel.id: channel for channel in channels}
        shared = {}
        while awaited:
            listener.settimeout(self._seconds_left())
            try:
                end = self._opened.enter_context(listener.accept()[0])
                end.settimeout(self._seconds_left())
                hello = end.recv(_HELLO.size, socket.MSG_WAITALL)
            except OSError as error:
                missing = next(iter(awaited.values()))
                raise self._not_connected(missing.src_rank) from error
            told, number = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
            if told != token or number not in awaited:
                end.close()  # someone else's
                continue
            channel = awaited.pop(number)
            try:
                descriptor = os.memfd_create(str(channel))
                os.ftruncate(descriptor, _num_bytes(channel))
                socket.send_fds(end, [b"s"], [descriptor])
            except OSError as error:
                raise self._not_connected(channel.src_rank, f" ({error})") from error
            shared[number] = SharedSlots(end, _map(channel, descriptor))
        return shared

    def given_slots(self, channel: Channel, end: socket.socket) -> SharedSlots:
        """The slots that the destination of `channel` shares with its source, which has called."""
        end.settimeout(self._seconds_left())
        try:
            _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        except OSError as error:
            raise self._not_connected(channel.dst_rank) from error
        if not descriptors:
            raise self._not_connected(channel.dst_rank, " (it has closed the connection)")
        return SharedSlots(end, _map(channel, descriptors[0]))

    def _seconds_left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _not_connected(self, peer: int, why: str = "") -> TransportError:
        return TransportError(
            f"rank {self._rank} could not connect to rank {peer} within {self._timeout_seconds} s"
            f"{why}; see why rank {peer} did not open its transport"
        )


def _num_bytes(channel: Channel) -> int:
    return max(ALIGNMENT_BYTES, channel.slots * channel.boundary.slot_bytes)


def _map(channel: Channel, descriptor: int) -> tuple[Tensor, ...]:
    """The bytes of each slot, in the memory behind the descriptor, which this closes. It stays
    mapped as long as a tensor uses it."""
    try:
        memory = mmap.mmap(descriptor, _num_bytes(channel))
    finally:
        os.close(descriptor)
    window = torch.frombuffer(memory, dtype=torch.uint8)
    size = channel.boundary.slot_bytes
    return tuple(window[i * size : (i + 1) * size] for i in range(channel.slots))
