"""Each channel by its own kind of transport: local inside a rank, another for what leaves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ppruntime.transports.base import Channel, HoldsDeviceMemory, Transport, TransportError
from ppruntime.transports.device import DeviceTransport


def choose_kind(
    channel: Channel,
    *,
    device_type: str,
    host_of: Mapping[int, str],
    available: frozenset[str],
) -> str:
    """The kind that `auto` gives a channel; the same on every rank, as it depends on nothing else.

    local within a rank. On the CPU shared_memory inside a host, else gloo. On GPUs copy_engine
    inside a host, as it takes no SMs, else put, which takes none either and reaches further, else
    nccl. `host_of` names each rank's host; `available` are the kinds that every rank can use.
    """
    if channel.src_rank == channel.dst_rank:
        return "local"
    is_one_host = host_of[channel.src_rank] == host_of[channel.dst_rank]
    if device_type == "cpu":
        return "shared_memory" if is_one_host and "shared_memory" in available else "gloo"
    if is_one_host and "copy_engine" in available:
        return "copy_engine"
    return "put" if "put" in available else "nccl"


class PerChannelTransport:
    """Passes every call on to the transport that carries its channel; see `Transport`.

    `carriers` are (transport, the channels that it carries). One that fails raises from its own
    calls and from `step_end`. On GPUs it ends all others at once, as the host may be elsewhere:
    once its waits are let go streams run without their data, and what they make would cross the
    others' channels to ranks that know of nothing.
    """

    def __init__(self, carriers: Sequence[tuple[Transport, Sequence[Channel]]]) -> None:
        self._transports = tuple(transport for transport, _ in carriers)
        self._carrier_of = {
            channel.id: transport for transport, channels in carriers for channel in channels
        }
        for transport in self._transports:
            if isinstance(transport, DeviceTransport):
                transport.on_abort = self.abort

    @property
    def outside_bytes(self) -> int:
        """See `base.HoldsDeviceMemory`."""
        holders = (t for t in self._transports if isinstance(t, HoldsDeviceMemory))
        return sum(holder.outside_bytes for holder in holders)

    def post(self, channel: Channel, micro_batch: int) -> None:
        self._carrier(channel).post(channel, micro_batch)

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        self._carrier(channel).send(channel, micro_batch, tensors)

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        return self._carrier(channel).take(channel, micro_batch)

    def release(self, channel: Channel, micro_batch: int) -> None:
        self._carrier(channel).release(channel, micro_batch)

    def step_end(self) -> None:
        for transport in self._transports:
            transport.step_end()

    def abort(self, reason: str) -> None:
        for transport in self._transports:
            transport.abort(reason)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def _carrier(self, channel: Channel) -> Transport:
        carrier = self._carrier_of.get(channel.id)
        if carrier is None:
            raise TransportError(
                f"{channel} is none of the channels {sorted(self._carrier_of)} that the transport"
                " was opened with"
            )
        return carrier
