"""One-sided puts into the peer's window, the kind called `put`: NCCL >= 2.30, no kernel, no SM.

Inside a host a put is a copy-engine copy plus a copy of an 8-byte signal count, a wait is a stream
memory operation; between hosts a proxy thread of NCCL writes by RDMA. Per message n (from 0):

    source, channel's stream            destination, reader's stream       channel's stream
    stage  tensors -> source slot
    wait   one credit, if n >= slots
    put    -> slot n mod slots, signal -->  wait one signal
                                            ... readers ..., event    -->  wait event
    one more signal of the peer        <--                                 signal, per credit

Why one communicator per channel: NCCL runs everything on a communicator in the order in which the
host issued it, whatever the streams. Data and credits of one channel may share one: the reader's
wait for message n + 1 is issued only once message n + 1 - slots was released, whose credit is
issued by then, and that is all that the put of n + 1 waits for. Two channels may not share one.

Lifetime: puts read from the window only, so tensors are copied there first and may go once that is
past; a source slot is written again behind the put that read it, in one stream's order.

Nothing can undo a wait that never gets its signal, not even ncclCommAbort (measured): where an
abort leaves one behind, the process ends with a report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ppruntime.transports import meeting, nccl_api, selftest
from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.device import DeviceTransport
from ppruntime.transports.driver import Driver, OwnStream
from ppruntime.transports.nccl_api import Nccl
from ppruntime.transports.peer_memory import tensor_at
from ppruntime.transports.ring import ReceiveRing, credits_needed, slot_of
from ppruntime.transports.slots import typed_views

OPTIONS = frozenset({"nccl_library", "uncredited", "selftest"})
_KIND = "put"
_SRC, _DST = 0, 1  # ranks within a channel's communicator
_WINDOW_ALIGNMENT = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT
_UNIQUE_ID_NAME = "nccl id of channel"


def window_bytes(channel: Channel) -> int:
    """Size of each end's window. Equal on both: NCCL before 2.30.7 wants that, and with the few
    slots that an order needs the source's surplus is small."""
    needed = max(channel.slots * channel.boundary.slot_bytes, 1)
    return -(-needed // _WINDOW_ALIGNMENT) * _WINDOW_ALIGNMENT


@dataclass(slots=True)
class _Edge:
    """One channel's communicator and window at this rank's end."""

    nccl: Nccl
    comm: int
    address: int
    window: int
    name: bytes  # NCCL keeps the pointer

    def close(self) -> None:
        self.nccl.deregister(self.comm, self.window)
        self.nccl.destroy(self.comm)
        self.nccl.free(self.address)


class _Source:
    """The source's end."""

    def __init__(
        self, edge: _Edge, driver: Driver, stream: OwnStream, channel: Channel, *, has_credits: bool
    ) -> None:
        self.stream, self._edge, self._driver, self._channel = stream, edge, driver, channel
        self._has_credits = has_credits

    def push(self, message: int, tensors: tuple[Tensor, ...]) -> None:
        edge, stream, boundary = self._edge, self.stream.handle, self._channel.boundary
        offset = slot_of(message, self._channel.slots) * boundary.slot_bytes
        slot = edge.address + offset
        for start, tensor in zip(boundary.offsets, tensors, strict=True):
            self._driver.copy(stream, slot + start, tensor.data_ptr(), tensor.nbytes)
        if self._has_credits and credits_needed(message, self._channel.slots):
            # One more than the message before: together as many as are needed.
            edge.nccl.wait_signal(_DST, 1, edge.comm, stream)
        if boundary.slot_bytes:
            edge.nccl.put_signal(
                slot, boundary.slot_bytes, _DST, edge.window, offset, edge.comm, stream
            )
        else:
            edge.nccl.signal(_DST, edge.comm, stream)


class _Destination:
    """The destination's end."""

    def __init__(
        self,
        edge: _Edge,
        stream: OwnStream,
        channel: Channel,
        device: torch.device,
        *,
        has_credits: bool,
    ) -> None:
        self.stream, self._edge, self._num_slots = stream, edge, channel.slots
        self._has_credits, self._ring = has_credits, ReceiveRing(channel)
        size = channel.boundary.slot_bytes
        memory = tensor_at(edge.address, window_bytes(channel), device)
        self._views = [
            typed_views(channel.boundary, memory[i * size : (i + 1) * size])
            for i in range(channel.slots)
        ]

    def post(self, message: int) -> None:
        """Bookkeeping only: the source puts when it is ready."""
        self._ring.reserve()

    def wait(self, message: int, current: torch.cuda.Stream) -> None:
        self._edge.nccl.wait_signal(_SRC, 1, self._edge.comm, current.cuda_stream)

    def views(self, message: int) -> tuple[Tensor, ...]:
        # New tensors on the slot: what the caller sets on them ends with this message.
        return tuple(v.detach() for v in self._views[slot_of(message, self._num_slots)])

    def give_back(self, message: int, released: torch.cuda.Event) -> None:
        self.stream.torch.wait_event(released)
        num_credits = self._ring.release(message)
        if self._has_credits:
            for _ in range(num_credits):
                self._edge.nccl.signal(_SRC, self._edge.comm, self.stream.handle)


class _Fabric:
    """The communicators and windows of one rank."""

    def __init__(self) -> None:
        self.edges: list[_Edge] = []

    def unblock(self) -> bool:
        """Nothing can: the signal counts are NCCL's own."""
        return not self.edges

    def close(self, *, orderly: bool) -> None:
        if orderly:
            torch.cuda.synchronize()
            for edge in self.edges:
                edge.close()
        # Else NCCL might wait for a peer that is gone; the end of the process gives all back.


def unavailable_reason(options: Mapping[str, object] | None = None) -> str | None:
    """Why this process cannot use put, with the remedy; None if it can. NCCL's version is part of
    it only if `options` are given, as they may name the library."""
    reason = meeting.no_cuda_reason(_KIND) or meeting.queue_reason(_KIND, meeting.environment())
    if reason is None and options is not None:
        try:
            nccl_api.load(_checked_library(options))
        except TransportError as error:
            reason = str(error)
    return reason


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

    Options: `nccl_library`, the path of a libnccl.so.2 of 2.30 or newer (default: the installed
    nvidia-nccl package, else torch's own); `uncredited`, the ids of channels whose order proves
    that a slot is released before its next message is sent; `selftest`, False to leave the start-up
    test out. Raises TransportError, on both ends of every channel, if one of them has no such
    library or no support for windows.
    """
    device = meeting.checked_device(_KIND, device)
    reason = unavailable_reason()
    if reason is not None:
        raise TransportError(reason)
    if store is None:
        raise TransportError(f"{_KIND} needs a store by which the ranks meet; pass store=")
    mine = sorted((c for c in channels if rank in (c.src_rank, c.dst_rank)), key=lambda c: c.id)
    meeting.check_known(_KIND, options, OPTIONS)
    uncredited = meeting.uncredited_of(_KIND, options)
    peers = meeting.peers_of(mine, rank)
    with meeting.OpeningLimit(_KIND, rank, timeout_seconds):
        places = meeting.swap_places(store, device, rank, peers, timeout_seconds)
        nccl = _agreed_library(store, options, rank, peers, timeout_seconds)
        driver = Driver(device)
        fabric, sources, destinations = _Fabric(), dict[int, _Source](), dict[int, _Destination]()
        for channel in mine:  # by id on every rank: each edge waits for its other end
            stream = OwnStream(driver, device)
            is_source = channel.src_rank == rank
            edge = _open_edge(nccl, store, channel, is_source, timeout_seconds)
            fabric.edges.append(edge)
            _warm_up(edge, is_source, stream)
            has_credits = channel.id not in uncredited
            if is_source:
                sources[channel.id] = _Source(
                    edge, driver, stream, channel, has_credits=has_credits
                )
            else:
                destinations[channel.id] = _Destination(
                    edge, stream, channel, device, has_credits=has_credits
                )
        torch.cuda.synchronize(device)
    transport = DeviceTransport(
        _KIND,
        rank,
        mine,
        driver=driver,
        device=device,
        timeout_seconds=timeout_seconds,
        store=store,
        senders=sources,
        receivers=destinations,
        fabric=fabric,
        lives=meeting.lives_of(places, rank),
    )
    return selftest.tested(transport, mine, rank, device, store, timeout_seconds, options)


def _agreed_library(
    store: Store,
    options: Mapping[str, object],
    rank: int,
    peers: Sequence[int],
    timeout_seconds: float,
) -> Nccl:
    """This rank's library, once every peer has one of the same version."""
    nccl, found = None, ""
    try:
        nccl = nccl_api.load(_checked_library(options))
        found = nccl_api.version_text(nccl.version)
    except TransportError as error:
        found = f"no usable NCCL: {error}"
    by_rank = {
        rank: found,
        **meeting.swap_texts(store, "nccl library", found, rank, peers, timeout_seconds),
    }
    if nccl is None or len(set(by_rank.values())) > 1:
        said = "; ".join(f"rank {r}: {text}" for r, text in sorted(by_rank.items()))
        raise TransportError(
            f"put needs one NCCL version on both ends of every channel ({said}); set"
            " pp.nccl_library to the same file on all ranks"
        )
    return nccl


def _open_edge(
    nccl: Nccl, store: Store, channel: Channel, is_source: bool, timeout_seconds: float
) -> _Edge:
    key, me = f"{_UNIQUE_ID_NAME} {channel.id}", _SRC if is_source else _DST
    if is_source:
        store.set(key, nccl.unique_id().hex())
    name = f"ppruntime channel {channel.id}".encode()
    config = nccl_api.make_config(nccl.version, name)
    comm = nccl.init(bytes.fromhex(store.get(key).decode()), me, config)
    num_bytes = window_bytes(channel)
    # One allocation per window: 2.30's network path confuses several windows in one.
    address = nccl.alloc(num_bytes)
    window = nccl.register(comm, address, num_bytes)
    if window is None:
        raise TransportError(
            f"put cannot carry the {channel}: NCCL {nccl_api.version_text(nccl.version)} makes no"
            " symmetric window here (no peer access between the GPUs, cuMem switched off, or no"
            ' network plugin with RMA between hosts); set pp.transport = "nccl"'
        )
    return _Edge(nccl, comm, address, window, name)


def _warm_up(edge: _Edge, is_source: bool, stream: OwnStream) -> None:
    """A signal each way. NCCL's first call of this kind sets things up with the peer and blocks the
    host until the peer makes one too; after this none does. Sends go before waits."""
    peer = _DST if is_source else _SRC
    edge.nccl.signal(peer, edge.comm, stream.handle)
    edge.nccl.wait_signal(peer, 1, edge.comm, stream.handle)
    stream.torch.synchronize()


def _checked_library(options: Mapping[str, object]) -> str | None:
    path = options.get("nccl_library")
    if path is not None and not isinstance(path, str):
        raise TransportError(f"{_KIND}: nccl_library must be a path, got {path!r}")
    return path
