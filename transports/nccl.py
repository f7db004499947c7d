"""NCCL send and receive through torch, the kind called `nccl`: any machines that NCCL connects.

Every channel has a communicator of two ranks, so no channel waits for another and two ranks that
share several channels cannot mix them up. Kernels move the bytes: they take SMs while they run and
also while they wait for the peer, hence two limits: `transport_ctas` caps the thread blocks of a
transfer, `recv_lead` how many receives are on the GPU before their reader asks for them.

A message is one send and one receive whatever its number of tensors: several are packed into a
staging buffer, one tensor leaves from where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from ppruntime.transports import meeting, selftest
from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.device import DeviceTransport
from ppruntime.transports.driver import Driver, OwnStream, new_event
from ppruntime.transports.slots import aligned_bytes, typed_views

OPTIONS = frozenset({"transport_ctas", "recv_lead", "selftest"})
_KIND = "nccl"
_SRC, _DST, _TAG = 0, 1, 0  # ranks within a channel's communicator
_MIN_MESSAGE_BYTES = 256  # NCCL sends no empty messages
# torch's own watchdog ends the whole process; ours names the channel and must come first.
_TORCH_PATIENCE = 10.0


def message_bytes(channel: Channel) -> int:
    """Bytes that cross per message, the same on both ends."""
    if is_plain(channel):
        return channel.boundary.num_bytes
    return max(channel.boundary.slot_bytes, _MIN_MESSAGE_BYTES)


def is_plain(channel: Channel) -> bool:
    """The message is the one tensor of the boundary itself, nothing has to be packed."""
    return len(channel.boundary.tensors) == 1 and channel.boundary.num_bytes > 0


class _Source:
    """The source's end. Messages of a channel leave in order, so one staging buffer suffices."""

    def __init__(
        self,
        group: Any,
        driver: Driver,
        stream: OwnStream,
        channel: Channel,
        device: torch.device,
    ) -> None:
        self.stream, self._group, self._driver = stream, group, driver
        self._is_plain, self._offsets = is_plain(channel), channel.boundary.offsets
        num_bytes = 0 if self._is_plain else message_bytes(channel)
        self._staging = aligned_bytes(num_bytes, device)

    def push(self, message: int, tensors: tuple[Tensor, ...]) -> None:
        if self._is_plain:
            payload = tensors[0].reshape(-1).view(torch.uint8)
        else:
            payload, start = self._staging, self._staging.data_ptr()
            # Behind the last send: the stream has waited for it.
            for offset, tensor in zip(self._offsets, tensors, strict=True):
                source = tensor.data_ptr()
                self._driver.copy(self.stream.handle, start + offset, source, tensor.nbytes)
        with torch.cuda.stream(self.stream.torch):
            self._group.send([payload], _DST, _TAG).wait()  # the stream waits, not the host


class _Destination:
    """The destination's end: slots, and the receives that are posted but not yet given to NCCL.

    A receive is given to NCCL when its slot is free and, on the GPU, starts no earlier than the
    reader of the message `recv_lead` before it does.
    """

    def __init__(
        self,
        group: Any,
        stream: OwnStream,
        channel: Channel,
        device: torch.device,
        recv_lead: int,
    ) -> None:
        self.stream, self._group, self._recv_lead = stream, group, recv_lead
        size = max(channel.boundary.slot_bytes, _MIN_MESSAGE_BYTES)
        buffers = [aligned_bytes(size, device) for _ in range(channel.slots)]
        self._views = [typed_views(channel.boundary, buffer) for buffer in buffers]
        self._payloads = [buffer[: message_bytes(channel)] for buffer in buffers]
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
        stream = self.stream.torch
        for event in (earliest, self._released[slot]):
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            self._group.recv([self._payloads[slot]], _SRC, _TAG).wait()
        landed = self._landed[message] = new_event()
        landed.record(stream)
        self._num_issued += 1


class _Fabric:
    """The communicators, in the order in which an abort ends them: those that send come first, so
    that nothing goes out which was made from data that never came."""

    def __init__(self) -> None:
        self.sending: list[Any] = []
        self.receiving: list[Any] = []
        self._aborted = False

    def unblock(self) -> bool:
        if not self._aborted:
            self._aborted = True
            for group in (*self.sending, *self.receiving):
                group.abort()
        return True

    def close(self, *, orderly: bool) -> None:
        if not orderly:
            self.unblock()  # shutting down would wait for peers
        elif not self._aborted:
            for group in (*self.sending, *self.receiving):
                group.shutdown()


def unavailable_reason() -> str | None:
    """Why this process cannot use nccl, with the remedy; None if it can."""
    if not torch.distributed.is_nccl_available():
        return (
            'this torch is built without NCCL; install one with CUDA or set pp.transport = "gloo"'
        )
    return meeting.no_cuda_reason(_KIND)


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
    reason = unavailable_reason()
    if reason is not None:
        raise TransportError(reason)
    device = meeting.checked_device(_KIND, device)
    if store is None:
        raise TransportError(f"{_KIND} needs a store by which the ranks meet; pass store=")
    transport_ctas, recv_lead = _checked_options(options)
    mine = sorted((c for c in channels if rank in (c.src_rank, c.dst_rank)), key=lambda c: c.id)
    fabric, sources, destinations = _Fabric(), dict[int, _Source](), dict[int, _Destination]()
    with meeting.OpeningLimit(_KIND, rank, timeout_seconds):
        peers = meeting.peers_of(mine, rank)
        places = meeting.swap_places(store, device, rank, peers, timeout_seconds)
        driver = Driver(device)
        for channel in mine:  # by id on every rank: making a communicator waits for the other end
            stream = OwnStream(driver, device)
            is_source = channel.src_rank == rank
            group = _communicator(store, channel, is_source, timeout_seconds, transport_ctas)
            _warm_up(group, is_source, stream, device)
            if is_source:
                fabric.sending.append(group)
                sources[channel.id] = _Source(group, driver, stream, channel, device)
            else:
                fabric.receiving.append(group)
                destinations[channel.id] = _Destination(group, stream, channel, device, recv_lead)
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


def _communicator(
    store: Store, channel: Channel, is_source: bool, timeout_seconds: float, ctas: int | None
) -> Any:
    # Any: the class exists only in a torch with CUDA, and its stub lacks send and recv.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    # High priority: a transfer's few blocks need not wait behind a matmul's many.
    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout_seconds * _TORCH_PATIENCE)
    if ctas is not None:
        options.config.min_ctas = 1
        options.config.max_ctas = ctas
    rank_in_channel = _SRC if is_source else _DST
    prefixed = PrefixStore(f"channel {channel.id}", store)
    return ProcessGroupNCCL(prefixed, rank_in_channel, 2, options)


def _warm_up(group: Any, is_source: bool, stream: OwnStream, device: torch.device) -> None:
    token = torch.zeros(_MIN_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    stream.torch.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream.torch):
        if is_source:
            group.send([token], _DST, _TAG).wait()
        else:
            group.recv([token], _SRC, _TAG).wait()
    stream.torch.synchronize()  # `token` is of this stream's time only


def _checked_options(options: Mapping[str, object]) -> tuple[int | None, int]:
    meeting.check_known(_KIND, options, OPTIONS)
    ctas, lead = options.get("transport_ctas"), options.get("recv_lead", 1)
    if ctas is not None and not (isinstance(ctas, int) and 1 <= ctas <= 64):
        raise TransportError(f"{_KIND}: transport_ctas must be 1 to 64, got {ctas!r}")
    if not (isinstance(lead, int) and lead >= 0):
        raise TransportError(f"{_KIND}: recv_lead must be 0 or more, got {lead!r}")
    return ctas, lead
