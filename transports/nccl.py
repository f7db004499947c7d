"""NCCL send and receive, the kind called `nccl`: any machines that NCCL connects.

Every channel has a communicator of two ranks, so no channel waits for another and two ranks that
share several channels cannot mix them up. Kernels move the bytes: they take SMs while they run and
also while they wait for the peer, hence two limits: `transport_ctas` caps the thread blocks of a
transfer, `recv_lead` how many receives are on the GPU before their reader asks for them.

A message is one group of sends and receives, into the slot's own places. Large tensors leave from
where they are; small neighbours are packed into one piece first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ppruntime.transports import meeting, nccl_library, opening
from ppruntime.transports.base import ALIGNMENT_BYTES, Channel, TransportError
from ppruntime.transports.communicators import DST, SRC, Communicators
from ppruntime.transports.device import DeviceTransport
from ppruntime.transports.driver import Driver, OwnStream, new_event
from ppruntime.transports.nccl_api import Config, Nccl
from ppruntime.transports.slots import aligned_bytes, typed_views

OPTIONS = frozenset({"transport_ctas", "recv_lead", "selftest"})
_KIND = "nccl"
_MIN_MESSAGE_BYTES = 256  # a message without bytes sends this many, so that it is one
_LARGE_BYTES = 1 << 20
"""From here on a tensor is sent from where it is: to copy 1 MB costs as much as one more piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one send moves: the bytes of the slot from `offset` on, those of `tensors` (by index).
    Packed unless it is one tensor."""

    offset: int
    num_bytes: int
    tensors: tuple[int, ...]


def pieces_of(channel: Channel) -> tuple[Piece, ...]:
    """How a message is cut, the same on both ends: each large tensor alone, neighbouring small ones
    together with the gaps between them; at least one piece."""
    pieces: list[Piece] = []
    packed: list[int] = []
    boundary = channel.boundary

    def end_packed() -> None:
        if packed:
            first, last = packed[0], packed[-1]
            end = boundary.offsets[last] + boundary.tensors[last].num_bytes
            start = boundary.offsets[first]
            pieces.append(Piece(start, end - start, tuple(packed)))
            packed.clear()

    for index, spec in enumerate(boundary.tensors):
        if spec.num_bytes >= _LARGE_BYTES:
            end_packed()
            pieces.append(Piece(boundary.offsets[index], spec.num_bytes, (index,)))
        elif spec.num_bytes:
            packed.append(index)
    end_packed()
    return tuple(pieces) or (Piece(0, _MIN_MESSAGE_BYTES, ()),)


class _Source:
    """The source's end. Messages of a channel leave in order, so one staging buffer suffices."""

    def __init__(
        self,
        comms: Communicators,
        comm: int,
        driver: Driver,
        stream: OwnStream,
        channel: Channel,
        device: torch.device,
    ) -> None:
        self.stream, self.streams = stream, (stream,)
        self._comms, self._comm, self._driver = comms, comm, driver
        self._pieces, self._offsets = pieces_of(channel), channel.boundary.offsets
        packed = [p for p in self._pieces if len(p.tensors) != 1]
        self._staging_of: dict[int, int] = {}
        num_bytes = 0
        for piece in packed:
            self._staging_of[piece.offset] = num_bytes
            num_bytes += -(-piece.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._staging = aligned_bytes(num_bytes, device)

    def push(self, message: int, tensors: tuple[Tensor, ...], ready: torch.cuda.Event) -> None:
        stream = self.stream.handle
        sends = [(self._gathered(piece, tensors), piece.num_bytes) for piece in self._pieces]

        def enqueue() -> None:
            nccl = self._comms.nccl
            with nccl.group():
                for address, num_bytes in sends:
                    nccl.send(address, num_bytes, DST, self._comm, stream)

        self._comms.enqueue(enqueue)

    def _gathered(self, piece: Piece, tensors: tuple[Tensor, ...]) -> int:
        """The address of the piece's bytes."""
        if len(piece.tensors) == 1:
            return tensors[piece.tensors[0]].data_ptr()
        start = self._staging.data_ptr() + self._staging_of[piece.offset]
        # Behind the last send: the stream has waited for it.
        for index in piece.tensors:
            tensor, offset = tensors[index], self._offsets[index] - piece.offset
            self._driver.copy(self.stream.handle, start + offset, tensor.data_ptr(), tensor.nbytes)
        return start


class _Destination:
    """The destination's end: slots, and the receives that are posted but not yet given to NCCL.

    A receive is given to NCCL when its slot is free and, on the GPU, starts no earlier than the
    reader of the message `recv_lead` before it does.
    """

    def __init__(
        self,
        comms: Communicators,
        comm: int,
        stream: OwnStream,
        channel: Channel,
        device: torch.device,
        recv_lead: int,
    ) -> None:
        self.stream, self.streams = stream, (stream,)
        self._comms, self._comm, self._recv_lead = comms, comm, recv_lead
        size = max(channel.boundary.slot_bytes, _MIN_MESSAGE_BYTES)
        self._buffers = [aligned_bytes(size, device) for _ in range(channel.slots)]
        self._views = [typed_views(channel.boundary, buffer) for buffer in self._buffers]
        self._pieces = pieces_of(channel)
        self._free = deque(range(channel.slots))
        self._slot_of: dict[int, int] = {}
        self._released: list[torch.cuda.Event | None] = [None] * channel.slots
        self._landed: dict[int, torch.cuda.Event] = {}
        self._num_posted = self._num_issued = self._num_read = 0
        self._reader: torch.cuda.Event | None = None  # where the last message's reader began

    def post(self, message: int) -> None:
        # Ours to choose, unlike where a peer writes: the slot that has been free for longest.
        self._slot_of[message] = self._free.popleft()
        self._num_posted = message + 1
        self._issue_within_lead()

    def wait(self, message: int, current: torch.cuda.Stream) -> None:
        # Messages are read in order: the receives up to this one may start where the reader is now.
        reader = new_event()
        reader.record(current)
        if self._num_issued <= message:
            self._issue(message, reader)
        current.wait_event(self._landed.pop(message))
        self._num_read = message + 1
        self._reader = reader
        self._issue_within_lead()

    def views(self, message: int) -> tuple[Tensor, ...]:
        return tuple(v.detach() for v in self._views[self._slot_of[message]])

    def give_back(self, message: int, released: torch.cuda.Event) -> None:
        slot = self._slot_of.pop(message)
        self._released[slot] = released
        self._free.append(slot)

    def _issue_within_lead(self) -> None:
        while self._num_issued < min(self._num_posted, self._num_read + self._recv_lead):
            self._issue(self._num_issued, self._reader)

    def _issue(self, message: int, earliest: torch.cuda.Event | None) -> None:
        assert message == self._num_issued, f"receive {self._num_issued} is due, not {message}"
        slot = self._slot_of[message]
        stream, start = self.stream.torch, self._buffers[slot].data_ptr()
        for event in (earliest, self._released[slot]):
            if event is not None:
                stream.wait_event(event)

        def enqueue() -> None:
            nccl = self._comms.nccl
            with nccl.group():
                for p in self._pieces:
                    nccl.recv(start + p.offset, p.num_bytes, SRC, self._comm, self.stream.handle)

        self._comms.enqueue(enqueue)
        landed = self._landed[message] = new_event()
        landed.record(stream)
        self._num_issued += 1


class _Fabric:
    """What an abort ends."""

    outside_bytes = 0

    def __init__(self, comms: Communicators) -> None:
        self._comms = comms

    def unblock(self) -> bool:
        return self._comms.abort()

    def close(self, *, orderly: bool) -> None:
        if orderly:
            self._comms.destroy()
        else:
            self._comms.wait_aborted()


def unavailable_reason() -> str | None:
    """Why this process cannot use nccl, with the remedy; None if it can."""
    reason = meeting.no_cuda_reason(_KIND)
    if reason is None:
        try:
            nccl_library.load(nccl_library.FOR_SEND_RECV)
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

    Options: `transport_ctas`, the most thread blocks of one transfer (default: NCCL chooses);
    `recv_lead`, see above (default 1); `selftest`, False to leave the start-up test out. Every
    channel moves one message before this returns, so no communicator is made during a step.
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
        lambda: nccl_library.load(nccl_library.FOR_SEND_RECV),
        start.store,
        start.rank,
        start.peers,
        start.timeout_seconds,
    )
    device, ctas = start.device, start.options.transport_ctas

    def configure(config: Config) -> None:
        if ctas is not None:
            config.min_ctas, config.max_ctas = 1, ctas

    driver, comms = Driver(device), Communicators(nccl, start.store, start.timeout_seconds)
    sources, destinations = dict[int, _Source](), dict[int, _Destination]()
    for channel in start.channels:  # making a communicator waits for the other end
        stream = OwnStream(driver, device)
        is_source = start.begin(channel)
        comm = comms.open(channel, is_source=is_source, configure=configure)
        _warm_up(nccl, comm, is_source, stream, device)
        if is_source:
            sources[channel.id] = _Source(comms, comm, driver, stream, channel, device)
        else:
            destinations[channel.id] = _Destination(
                comms, comm, stream, channel, device, start.options.recv_lead
            )
    torch.cuda.synchronize(device)
    return opening.Ends(driver, sources, destinations, _Fabric(comms))


def _warm_up(
    nccl: Nccl, comm: int, is_source: bool, stream: OwnStream, device: torch.device
) -> None:
    """One message. NCCL's first connects the two ends, which blocks the host for the peer."""
    token = torch.zeros(_MIN_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    stream.torch.wait_stream(torch.cuda.current_stream(device))
    move, peer = (nccl.send, DST) if is_source else (nccl.recv, SRC)
    move(token.data_ptr(), _MIN_MESSAGE_BYTES, peer, comm, stream.handle)
    stream.torch.synchronize()  # `token` is of this stream's time only
