"""How the GPU kinds open: one way to check options and to meet the peers.

A kind gives what is its own: why it cannot work here, the options it takes, and `connect`, which
makes the ends of this rank's channels once everything that can be checked is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from ppruntime.transports import meeting, selftest
from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.device import DeviceTransport, Fabric, ReceiveEnd, SendEnd
from ppruntime.transports.driver import Driver


@dataclass(frozen=True, slots=True)
class Options:
    """What a kind was told, checked; each kind reads those that it takes."""

    uncredited: frozenset[int] = frozenset()
    """Ids of channels whose order proves that a slot is released before its next message leaves."""
    nccl_library: str | None = None
    """Path of a libnccl.so.2; None: the installed one, else torch's own."""
    transport_ctas: int | None = None
    """The most thread blocks of one transfer; None: NCCL chooses."""
    recv_lead: int = 1
    """How many receives are on the GPU before their reader asks for them."""
    selftest: bool = True
    """Run the start-up test."""


def checked_options(kind: str, given: Mapping[str, object], taken: frozenset[str]) -> Options:
    """`given` as `Options`. Raises TransportError for one that the kind does not take, as it would
    have no effect, and for a value that cannot be meant."""
    unknown = sorted(given.keys() - taken)
    if unknown:
        raise TransportError(
            f"{kind} takes the options {', '.join(sorted(taken))}, got {', '.join(unknown)}; remove"
            " what it does not take"
        )
    for name, value in given.items():
        is_right, what = _RULES[name]
        if not is_right(value):
            raise TransportError(f"{kind}: {name} must be {what}, got {value!r}")
    values: dict[str, Any] = dict(given)
    return Options(**values)


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


_RULES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "uncredited": (lambda v: isinstance(v, frozenset), "a frozenset of channel ids"),
    "nccl_library": (lambda v: v is None or isinstance(v, str), "a path"),
    "transport_ctas": (lambda v: v is None or _is_count(v, 1, 64), "1 to 64"),
    "recv_lead": (lambda v: _is_count(v, 0, 1 << 20), "0 or more"),
    "selftest": (lambda v: isinstance(v, bool), "True or False"),
}


@dataclass(frozen=True, slots=True)
class Start:
    """What `connect` starts from. `channels` are this rank's, by id; so every rank comes to them in
    one order, and of two ends that wait for each other none waits in a cycle."""

    rank: int
    channels: tuple[Channel, ...]
    peers: tuple[int, ...]
    places: Mapping[int, meeting.Place]
    device: torch.device
    store: Store
    timeout_seconds: float
    options: Options
    limit: meeting.OpeningLimit

    def begin(self, channel: Channel) -> bool:
        """This channel is opened next; whether this rank is its source."""
        is_source = channel.src_rank == self.rank
        peer = channel.dst_rank if is_source else channel.src_rank
        self.limit.doing = f"opens the {channel}, with rank {peer}"
        return is_source


@dataclass(frozen=True, slots=True)
class Ends:
    """What `connect` made: this rank's ends by channel id, and what they share."""

    driver: Driver
    senders: Mapping[int, SendEnd]
    receivers: Mapping[int, ReceiveEnd]
    fabric: Fabric


def open_ends(
    kind: str,
    channels: Sequence[Channel],
    rank: int,
    *,
    device: torch.device,
    timeout_seconds: float,
    store: Store | None,
    options: Mapping[str, object],
    taken: frozenset[str],
    reason: str | None,
    connect: Callable[[Start], Ends],
) -> DeviceTransport:
    """Opens the ends that `rank` has of `channels`; collective over their ranks, on a fresh store.

    `reason` says why the kind cannot be used here, or is None. The start-up test has run when this
    returns. Raises TransportError; where a call into CUDA or NCCL waits for a peer that does not
    come, the process ends, see `meeting.OpeningLimit`.
    """
    device = meeting.checked_device(kind, device)
    if reason is not None:
        raise TransportError(reason)
    if store is None:
        raise TransportError(f"{kind} needs a store by which the ranks meet; pass store=")
    checked = checked_options(kind, options, taken)
    mine = sorted((c for c in channels if rank in (c.src_rank, c.dst_rank)), key=lambda c: c.id)
    peers = meeting.peers_of(mine, rank)
    with meeting.OpeningLimit(kind, rank, store, timeout_seconds) as limit:
        places = meeting.swap_places(store, device, rank, peers, timeout_seconds)
        meeting.check_own_gpus(kind, mine, places)
        ends = connect(
            Start(rank, tuple(mine), peers, places, device, store, timeout_seconds, checked, limit)
        )
    transport = DeviceTransport(
        kind,
        rank,
        mine,
        driver=ends.driver,
        device=device,
        timeout_seconds=timeout_seconds,
        store=store,
        senders=ends.senders,
        receivers=ends.receivers,
        fabric=ends.fabric,
        lives=meeting.lives_of(places, rank),
    )
    if checked.selftest:
        selftest.test_once(
            transport, mine, rank, device=device, store=store, timeout_seconds=timeout_seconds
        )
    return transport
