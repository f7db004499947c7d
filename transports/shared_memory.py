"""One-sided transfers between processes of one host, the kind called `shared_memory`: no GPU.

A channel's slots lie in memory that both ends have mapped. The source writes a message straight
into its slot and says so on the channel's Unix socket; the destination says there what it has
released. So a hop is one copy and one wake-up, of the very thread that waits (gloo's takes four),
and the end of a process is known from its sockets, without a thread that listens.

Who has no credit for a slot must not wait for one: its message is then left to a thread of the
channel, which is started at the first such message.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ppruntime.transports import agree
from ppruntime.transports.base import ALIGNMENT_BYTES, Channel, TransportError
from ppruntime.transports.ledger import Ledger
from ppruntime.transports.lives import host_name
from ppruntime.transports.ring import ReceiveRing, credits_needed, slot_of
from ppruntime.transports.slots import SlotPool, typed_views

_CPU = torch.device("cpu")
_RECORD = struct.Struct("=qq")
"""What crosses a socket. From the source: a message's number on the channel and its micro-batch.
From the destination: how many messages it has released, and 0. From an end that goes: a negative
number and the size of the text that follows."""
_ABORTED, _CLOSED = -1, -2
_HELLO = struct.Struct("=16sq")
"""How the source introduces itself: the listener's token and the channel's id."""
_MOST_REASON_BYTES = 4096
_JOIN_SECONDS = 2.0


class SharedMemoryTransport:
    """This rank's ends of `channels`, whose other ends are processes of this host; see `Transport`.

    Opening it is collective over the channels' ranks. A boundary crosses as one message.
    """

    def __init__(
        self, channels: Sequence[Channel], rank: int, *, timeout_seconds: float, store: Store
    ) -> None:
        mine = sorted((c for c in channels if rank in (c.src_rank, c.dst_rank)), key=lambda c: c.id)
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._ledger = Ledger(mine, rank, _CPU)
        self._ending = threading.Lock()
        self._closed = False
        ranks = sorted({rank}.union(*((c.src_rank, c.dst_rank) for c in channels)))
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}
        sockets, windows = _meet(mine, rank, ranks, timeout_seconds, store)
        for channel in mine:
            end_at = sockets[channel.id], windows[channel.id]
            if channel.src_rank == rank:
                self._outboxes[channel.id] = _Outbox(channel, *end_at, self)
            else:
                self._inboxes[channel.id] = _Inbox(channel, *end_at, timeout_seconds)

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
            self._raise(
                channel,
                micro_batch,
                f"did not come from rank {channel.src_rank} within {self._timeout_seconds} s",
            )
        except _Gone as gone:
            self.peer_is_gone(gone, channel, channel.src_rank, micro_batch)
            self._ledger.check_alive(channel, micro_batch)
            raise AssertionError("a transport ends with a reason") from gone
        expected = inbox.number_of(micro_batch), micro_batch
        if came != expected:
            self._raise(
                channel,
                micro_batch,
                f"was expected as message {expected[0]}, micro-batch {came[1]} came as message"
                f" {came[0]}; both ends must use one order",
            )
        return tuple(view.detach() for view in inbox.pool.slot_of(micro_batch).views)

    def release(self, channel: Channel, micro_batch: int) -> None:
        self._ledger.release(channel, micro_batch)
        self._inboxes[channel.id].release(micro_batch)

    def step_end(self) -> None:
        self._ledger.step_end()
        for outbox in self._outboxes.values():
            waiting = outbox.wait_until_left(self._timeout_seconds)
            if waiting is not None:
                self._raise(
                    outbox.channel,
                    waiting,
                    f"was not received by rank {outbox.channel.dst_rank} within"
                    f" {self._timeout_seconds} s after the step's end",
                )
        self._ledger.check_alive()

    def abort(self, reason: str) -> None:
        self._end(f"rank {self._rank} ended the transfers: {reason}", _ABORTED)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end(f"the transport of rank {self._rank} is closed", _CLOSED)
        for end in self._ends():
            end.close()

    def _ends(self) -> list[_Outbox | _Inbox]:
        return [*self._outboxes.values(), *self._inboxes.values()]

    def peer_is_gone(self, gone: _Gone, channel: Channel, peer: int, micro_batch: int) -> None:
        """Ends the transport, for what the peer said of its own end. Any thread may call it."""
        if gone.reason is not None:
            reason = gone.reason
        elif gone.was_orderly:
            what = f"{channel}: micro-batch {micro_batch}"
            reason = f"{what} cannot move, rank {peer} closed its transport"
        else:
            reason = f"rank {peer} is lost, its process has ended"
        self._end(reason, _ABORTED)

    def _raise(self, channel: Channel, micro_batch: int, what: str) -> NoReturn:
        """Raises because of `what`, unless the transport has ended before for another reason."""
        self._ledger.check_alive(channel, micro_batch)
        reason = f"{channel}: micro-batch {micro_batch} {what}"
        self.abort(reason)
        raise TransportError(reason)

    def _end(self, reason: str, kind: int) -> None:
        """Ends all transfers and tells the peers, on whichever thread; the first reason stays."""
        with self._ending:
            if self._ledger.end(reason):
                for end in self._ends():
                    end.line.leave(kind, reason if kind == _ABORTED else "")


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
    if device.type != "cpu":
        raise TransportError(
            f"shared_memory moves host memory, the device is {device}; use nccl, copy_engine or put"
        )
    if options:
        raise TransportError(f"shared_memory takes no options, got {sorted(options)}; remove them")
    if store is None:
        raise TransportError(
            "shared_memory needs a store by which the ranks find each other; pass store="
        )
    return SharedMemoryTransport(channels, rank, timeout_seconds=timeout_seconds, store=store)


class _Gone(Exception):
    """The other end of a line has gone: with its reason, in order (None), or without a word."""

    def __init__(self, reason: str | None, *, was_orderly: bool) -> None:
        super().__init__(reason)
        self.reason, self.was_orderly = reason, was_orderly


class _Line:
    """One end of a channel's socket, on which records cross. At most a few are ever under way (a
    message needs a slot), so that sending one never waits."""

    def __init__(self, end: socket.socket, timeout_seconds: float | None) -> None:
        self._socket = end
        end.settimeout(timeout_seconds)

    def send(self, number: int, value: int) -> None:
        """Raises OSError if the other end has gone."""
        self._socket.send(_RECORD.pack(number, value))

    def receive(self, flags: int = 0) -> tuple[int, int]:
        """The next record. Raises _Gone; TimeoutError when the line's time is up; BlockingIOError
        if there is none and `flags` are not to wait for it."""
        number, value = _RECORD.unpack(self._read(_RECORD.size, flags))
        if number >= 0:
            return number, value
        reason = self._read(value).decode(errors="ignore") if value else None
        raise _Gone(reason, was_orderly=number == _CLOSED)

    def leave(self, kind: int, reason: str) -> None:
        """Tells the other end that this one goes, and ends what waits on this end. Idempotent, from
        any thread."""
        text = reason.encode()[:_MOST_REASON_BYTES]
        with contextlib.suppress(OSError):
            self._socket.send(_RECORD.pack(kind, len(text)) + text, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, flags: int = 0) -> bytes:
        parts = b""
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts), 0 if parts else flags)
            except (BlockingIOError, TimeoutError):
                raise
            except OSError:
                part = b""
            if not part:
                raise _Gone(None, was_orderly=False)
            parts += part
        return parts


class _Outbox:
    """The source's end of a channel."""

    def __init__(
        self,
        channel: Channel,
        end: socket.socket,
        window: Tensor,
        transport: SharedMemoryTransport,
    ) -> None:
        self.channel = channel
        self.line = _Line(end, timeout_seconds=None)
        self._transport = transport
        self._slots = tuple(
            typed_views(channel.boundary, buffer) for buffer in _slot_buffers(channel, window)
        )
        self._num_sent = 0
        self._num_released = 0
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Sequence[Tensor]]] = deque()
        """Messages without a credit. While there are some, the thread alone reads the line."""
        self._is_over = False
        self._thread: threading.Thread | None = None

    def send(self, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        with self._changed:
            try:
                if not self._waiting:
                    self._read_credits()
                    if self._has_credit():
                        self._write(micro_batch, tensors)
                        return
            except _Gone as gone:
                self._transport.peer_is_gone(gone, self.channel, self.channel.dst_rank, micro_batch)
                return
            self._waiting.append((micro_batch, tuple(tensors)))
            if self._thread is None:
                name = str(self.channel)
                self._thread = threading.Thread(target=self._send_waiting, name=name, daemon=True)
                self._thread.start()
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
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
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
            except _Gone as gone:
                self._transport.peer_is_gone(gone, self.channel, self.channel.dst_rank, micro_batch)
                with self._changed:
                    self._is_over = True
                    self._changed.notify_all()
                return


class _Inbox:
    """The destination's end of a channel."""

    def __init__(
        self, channel: Channel, end: socket.socket, window: Tensor, timeout_seconds: float
    ) -> None:
        self.line = _Line(end, timeout_seconds)
        self.pool = SlotPool(channel, _CPU, buffers=_slot_buffers(channel, window))
        self._ring = ReceiveRing(channel)
        self._numbers: dict[int, int] = {}

    def post(self, micro_batch: int) -> None:
        self.pool.reserve(micro_batch)
        self._numbers[micro_batch] = self._ring.num_reserved
        self._ring.reserve()

    def number_of(self, micro_batch: int) -> int:
        return self._numbers[micro_batch]

    def next_message(self) -> tuple[int, int]:
        """Waits for the next message: its number and micro-batch. Raises _Gone, TimeoutError."""
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


def _window_bytes(channel: Channel) -> int:
    return max(ALIGNMENT_BYTES, channel.slots * channel.boundary.slot_bytes)


def _slot_buffers(channel: Channel, window: Tensor) -> tuple[Tensor, ...]:
    size = channel.boundary.slot_bytes
    return tuple(window[i * size : (i + 1) * size] for i in range(channel.slots))


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """The memory behind the descriptor, which this closes, as bytes; mapped as long as a tensor
    uses it."""
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _meet(
    channels: Sequence[Channel],
    rank: int,
    ranks: Sequence[int],
    timeout_seconds: float,
    store: Store,
) -> tuple[dict[int, socket.socket], dict[int, Tensor]]:
    """The socket and the shared memory of each of this rank's channels, by its id."""
    deadline = time.monotonic() + timeout_seconds
    token = secrets.token_bytes(16)
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo, socket.socket(socket.AF_UNIX) as listener:
        undo.callback(_close_all, sockets)
        listener.bind("")  # Linux picks a name that no file stands for
        listener.listen(len(channels) + 1)
        card = json.dumps([host_of_sockets(), listener.getsockname().hex(), token.hex()])
        what = "opening shared_memory"
        cards = {
            r: json.loads(text)
            for r, text in agree.gather(
                store, rank, ranks, card, timeout_seconds=timeout_seconds, what=what
            ).items()
        }
        check_one_host({r: host for r, (host, _, _) in cards.items()})
        # All connect before anyone waits for what the others answer: so nobody waits in a cycle.
        for channel in (c for c in channels if c.src_rank == rank):
            _, address, peer_token = cards[channel.dst_rank]
            hello = _HELLO.pack(bytes.fromhex(peer_token), channel.id)
            sockets[channel.id] = _call(bytes.fromhex(address), hello, channel.dst_rank, rank)
        windows = _answer(
            listener,
            token,
            {c.id: c for c in channels if c.dst_rank == rank},
            sockets,
            rank,
            deadline,
            timeout_seconds,
        )
        for channel in (c for c in channels if c.src_rank == rank):
            end = sockets[channel.id]
            end.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
            except OSError:
                descriptors = []
            if not descriptors:
                raise _not_connected(rank, channel.dst_rank, timeout_seconds)
            windows[channel.id] = _map(descriptors[0], _window_bytes(channel))
        undo.pop_all()
    return sockets, windows


def _close_all(sockets: Mapping[int, socket.socket]) -> None:
    for end in sockets.values():
        end.close()


def _call(address: bytes, hello: bytes, peer: int, rank: int) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(address)
        end.sendall(hello)
    except OSError as error:
        end.close()
        reason = f"rank {rank} could not connect to rank {peer} ({error})"
        raise TransportError(f"{reason}; see why rank {peer} did not open its transport") from error
    return end


def _answer(
    listener: socket.socket,
    token: bytes,
    awaited: dict[int, Channel],
    sockets: dict[int, socket.socket],
    rank: int,
    deadline: float,
    timeout_seconds: float,
) -> dict[int, Tensor]:
    """Lets in the sources of the `awaited` channels and gives each the slots' memory."""
    windows: dict[int, Tensor] = {}
    while awaited:
        missing = next(iter(awaited.values()))
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            end, _ = listener.accept()
            end.settimeout(max(0.001, deadline - time.monotonic()))
            hello = end.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError as error:
            raise _not_connected(rank, missing.src_rank, timeout_seconds) from error
        told, number = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
        if told != token or number not in awaited:
            end.close()  # someone else's
            continue
        channel = awaited.pop(number)
        sockets[number] = end
        descriptor = os.memfd_create(f"ppruntime channel {number}")
        os.ftruncate(descriptor, _window_bytes(channel))
        socket.send_fds(end, [b"w"], [descriptor])
        windows[number] = _map(descriptor, _window_bytes(channel))
    return windows


def _not_connected(rank: int, peer: int, timeout_seconds: float) -> TransportError:
    return TransportError(
        f"rank {rank} could not connect to rank {peer} within {timeout_seconds} s; see why rank"
        f" {peer} did not open its transport"
    )


def host_of_sockets() -> str:
    """This host as far as its Unix sockets are seen: two network namespaces are two hosts."""
    return f"{host_name()} {os.readlink('/proc/self/ns/net')}"


def check_one_host(host_of: Mapping[int, str]) -> None:
    """Raises TransportError if the ranks, each with its `host_of_sockets`, are not on one host."""
    hosts = sorted(set(host_of.values()))
    if len(hosts) > 1:
        where = ", ".join(f"rank {rank} is on {host}" for rank, host in sorted(host_of.items()))
        raise TransportError(
            f'shared_memory stays inside a host, {where}; set pp.transport = "gloo"'
        )
