"""One-sided puts into the peer's window, the kind called `put`: NCCL >= 2.30, no kernel.

Inside a host a put is a copy-engine copy plus a copy of an 8-byte signal count, a wait is a stream
memory operation; between hosts a proxy thread of NCCL writes by RDMA. Per message n (from 0), S
being the number of slots:

    source, staging stream      source, channel's stream      destination, reader   credit stream
    wait  put of n - S past
    stage tensors -> slot  -->  wait  staged
                                wait  a credit, if n >= S
                                put   -> slot n mod S    -->  wait  its signals
                                                              ... readers ...  -->  wait  readers
                                a signal of the peer     <--                        signal, a credit

Staging costs a sixth of the put and runs beside it: a message goes in two puts, the first of which
leaves while the rest is staged, and the next message is staged while this one is put. It is the one
part that no copy engine does: a copy inside a GPU at 4.2 TB/s can only run on the SMs, 0.16 ms for
335 MB, which a persistent kernel beside it feels (docs/measurements.md: FP8 grouped GEMM).

Why one communicator per channel: NCCL runs everything on a communicator in the order in which the
host issued it, whatever the streams. Data and credits of one channel may share one: the reader's
wait for message n + 1 is issued only once message n + 1 - S was released, whose credit is issued by
then, and that is all that the put of n + 1 waits for. Two channels may not share one.

Lifetime: puts read from the window only, so tensors may go once they are staged; a source slot is
staged again only once the put that read it is past.

Nothing can undo a wait that never gets its signal, not even ncclCommAbort (measured): where an
abort leaves one behind, the process ends with a report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ppruntime.transports import meeting, nccl_library, opening
from ppruntime.transports.base import ALIGNMENT_BYTES, Boundary, Channel, TransportError
from ppruntime.transports.communicators import DST, SRC, Communicators
from ppruntime.transports.device import DeviceTransport
from ppruntime.transports.driver import Driver, OwnStream, new_event
from ppruntime.transports.nccl_api import CTA_POLICY_ZERO, Config, Nccl, version_text
from ppruntime.transports.peer_memory import tensor_at
from ppruntime.transports.ring import ReceiveRing, credits_needed, slot_of
from ppruntime.transports.slots import typed_views

OPTIONS = frozenset({"nccl_library", "uncredited", "selftest"})
_KIND = "put"
_WINDOW_ALIGNMENT = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT
_CUT_BYTES = 64 << 20
"""Messages from here on go in two puts: one more costs some 10 us, staging 0.5 us/MB."""
_FIRST_SHARE = 6  # the rest is staged (4.2 TB/s) while the first sixth is put (390 GB/s), H200


def window_bytes(channel: Channel) -> int:
    """Size of each end's window. Equal on both: NCCL before 2.30.7 wants that, and with the few
    slots that an order needs the source's surplus is small."""
    needed = max(channel.slots * channel.boundary.slot_bytes, 1)
    return -(-needed // _WINDOW_ALIGNMENT) * _WINDOW_ALIGNMENT


def parts_of(boundary: Boundary) -> tuple[tuple[int, int], ...]:
    """The byte ranges of a slot (start, end) that one put each moves, the same on both ends. None
    for a message without bytes, which is a bare signal."""
    size = boundary.slot_bytes
    if not size:
        return ()
    if size < _CUT_BYTES:
        return ((0, size),)
    cut = size // _FIRST_SHARE // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return ((0, cut), (cut, size))


def num_signals(boundary: Boundary) -> int:
    """The signals of one message: one per put, or the bare one."""
    return max(1, len(parts_of(boundary)))


def copies_into(boundary: Boundary, start: int, end: int) -> tuple[tuple[int, int, int, int], ...]:
    """What of the tensors lies between `start` and `end` of a slot: (tensor's index, first byte in
    the tensor, first byte in the slot, number of bytes)."""
    copies = []
    for index, (offset, spec) in enumerate(zip(boundary.offsets, boundary.tensors, strict=True)):
        first, last = max(start, offset), min(end, offset + spec.num_bytes)
        if first < last:
            copies.append((index, first - offset, first, last - first))
    return tuple(copies)


@dataclass(slots=True)
class _Edge:
    """One channel's communicator and window at this rank's end."""

    nccl: Nccl
    comm: int
    address: int
    num_bytes: int
    window: int


class _Source:
    """The source's end."""

    def __init__(
        self,
        edge: _Edge,
        driver: Driver,
        stream: OwnStream,
        staging: OwnStream,
        channel: Channel,
        *,
        has_credits: bool,
    ) -> None:
        self.stream, self.streams = stream, (stream, staging)
        self._staging, self._edge, self._driver = staging, edge, driver
        self._channel, self._has_credits = channel, has_credits
        self._parts = [
            (s, e, copies_into(channel.boundary, s, e)) for s, e in parts_of(channel.boundary)
        ]
        self._past: list[torch.cuda.Event | None] = [None] * channel.slots

    def push(self, message: int, tensors: tuple[Tensor, ...], ready: torch.cuda.Event) -> None:
        slot = slot_of(message, self._channel.slots)
        first_byte = slot * self._channel.boundary.slot_bytes
        staged = self._stage(self._edge.address + first_byte, slot, tensors, ready)
        nccl, comm, stream = self._edge.nccl, self._edge.comm, self.stream
        if self._has_credits and credits_needed(message, self._channel.slots):
            # One more than the message before: together as many as are needed.
            nccl.wait_signal(DST, 1, comm, stream.handle)
        for (start, end, _), event in zip(self._parts, staged, strict=True):
            stream.torch.wait_event(event)
            nccl.put_signal(
                self._edge.address + first_byte + start,
                end - start,
                DST,
                self._edge.window,
                first_byte + start,
                comm,
                stream.handle,
            )
        if not self._parts:
            nccl.signal(DST, comm, stream.handle)
        past = self._past[slot] = new_event()
        past.record(stream.torch)

    def _stage(
        self, address: int, slot: int, tensors: tuple[Tensor, ...], ready: torch.cuda.Event
    ) -> list[torch.cuda.Event]:
        """Copies the tensors to the slot at `address`; an event behind each part."""
        staging, events = self._staging, []
        staging.torch.wait_event(ready)
        past = self._past[slot]
        if past is not None:
            staging.torch.wait_event(past)
        for _, _, copies in self._parts:
            for index, in_tensor, in_slot, num_bytes in copies:
                source = tensors[index].data_ptr() + in_tensor
                self._driver.copy(staging.handle, address + in_slot, source, num_bytes)
            event = new_event()
            event.record(staging.torch)
            events.append(event)
        return events


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
        self.stream, self.streams = stream, (stream,)
        self._edge, self._num_slots = edge, channel.slots
        self._num_signals = num_signals(channel.boundary)
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
        nccl, comm = self._edge.nccl, self._edge.comm
        nccl.wait_signal(SRC, self._num_signals, comm, current.cuda_stream)

    def views(self, message: int) -> tuple[Tensor, ...]:
        # New tensors on the slot: what the caller sets on them ends with this message.
        return tuple(v.detach() for v in self._views[slot_of(message, self._num_slots)])

    def give_back(self, message: int, released: torch.cuda.Event) -> None:
        self.stream.torch.wait_event(released)
        num_credits = self._ring.release(message)
        if self._has_credits:
            for _ in range(num_credits):
                self._edge.nccl.signal(SRC, self._edge.comm, self.stream.handle)


class _Fabric:
    """The communicators and windows of one rank."""

    def __init__(self, comms: Communicators) -> None:
        self._comms = comms
        self.edges: list[_Edge] = []

    @property
    def outside_bytes(self) -> int:
        return sum(edge.num_bytes for edge in self.edges)

    def unblock(self) -> bool:
        """Nothing can: the signal counts are NCCL's own."""
        return not self.edges

    def close(self, *, orderly: bool) -> None:
        """After an abort the windows stay until the process ends: a peer may still put into them,
        and NCCL would wait for one that is gone."""
        if not orderly:
            return
        torch.cuda.synchronize()
        nccl = self._comms.nccl
        for edge in self.edges:
            nccl.deregister(edge.comm, edge.window)
        self._comms.destroy()
        for edge in self.edges:
            nccl.free(edge.address)


def unavailable_reason(options: Mapping[str, object] | None = None) -> str | None:
    """Why this process cannot use put, with the remedy; None if it can. NCCL's version is part of
    it only if `options` are given, as they may name the library."""
    reason = meeting.no_cuda_reason(_KIND) or meeting.queue_reason(_KIND, meeting.environment())
    if reason is None and options is not None:
        try:
            library = opening.checked_options(_KIND, options, OPTIONS).nccl_library
            nccl_library.load(nccl_library.FOR_PUT, library)
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
    nccl = meeting.agreed_library(
        _KIND,
        lambda: nccl_library.load(nccl_library.FOR_PUT, start.options.nccl_library),
        start.store,
        start.rank,
        start.peers,
        start.timeout_seconds,
    )
    device = start.device
    driver, comms = Driver(device), Communicators(nccl, start.store, start.timeout_seconds)
    fabric, sources, destinations = _Fabric(comms), dict[int, _Source](), dict[int, _Destination]()
    for channel in start.channels:  # each edge waits for its other end
        stream = OwnStream(driver, device)
        is_source = start.begin(channel)
        edge = _open_edge(comms, channel, is_source)
        fabric.edges.append(edge)
        _warm_up(edge, is_source, stream)
        has_credits = channel.id not in start.options.uncredited
        if is_source:
            # Its own, so that a channel that waits for a credit holds no other's staging.
            staging = OwnStream(driver, device)
            sources[channel.id] = _Source(
                edge, driver, stream, staging, channel, has_credits=has_credits
            )
        else:
            destinations[channel.id] = _Destination(
                edge, stream, channel, device, has_credits=has_credits
            )
    torch.cuda.synchronize(device)
    return opening.Ends(driver, sources, destinations, fabric)


def _open_edge(comms: Communicators, channel: Channel, is_source: bool) -> _Edge:
    nccl = comms.nccl
    comm = comms.open(channel, is_source=is_source, configure=_no_thread_blocks)
    num_bytes = window_bytes(channel)
    # One allocation per window: 2.30's network path confuses several windows in one.
    address = nccl.alloc(num_bytes)
    window = nccl.register(comm, address, num_bytes)
    if window is None:
        raise TransportError(
            f"put cannot carry the {channel}: NCCL {version_text(nccl.version)} makes no"
            " symmetric window here (no peer access between the GPUs, cuMem switched off, or no"
            ' network plugin with RMA between hosts); set pp.transport = "nccl"'
        )
    return _Edge(nccl, comm, address, num_bytes, window)


def _warm_up(edge: _Edge, is_source: bool, stream: OwnStream) -> None:
    """A signal each way. NCCL's first call of this kind sets things up with the peer and blocks the
    host until the peer makes one too; after this none does. Sends go before waits."""
    peer = DST if is_source else SRC
    edge.nccl.signal(peer, edge.comm, stream.handle)
    edge.nccl.wait_signal(peer, 1, edge.comm, stream.handle)
    stream.torch.synchronize()


def _no_thread_blocks(config: Config) -> None:
    config.cta_policy = CTA_POLICY_ZERO
    config.min_ctas = config.max_ctas = 1
