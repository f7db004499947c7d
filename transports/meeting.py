"""How the ends of GPU channels meet: where each rank is, what stops it, and a limit on opening."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch._C._distributed_c10d import Store

from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.device import end_process
from ppruntime.transports.lives import Life, host_name, life_of, parse_life
from ppruntime.transports.nccl_api import Nccl, version_text
from ppruntime.transports.watchdog import ABORT_KEY

_GRACE_SECONDS = 15.0
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 2e-3, 0.05
_LISTEN_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: host and GPU by names unique over the machines, and its process."""

    host: str
    gpu: str
    process: str

    def __str__(self) -> str:
        return f"{self.host} {self.gpu} {self.process}"


def parse_place(text: str) -> Place:
    """What `str(place)` gave on another rank."""
    return Place(*text.split(" "))


def own_place(device: torch.device) -> Place:
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    life = life_of(os.getpid())
    return Place(host_name(), gpu, str(life or "unseen"))


def swap_places(
    store: Store, device: torch.device, rank: int, peers: Sequence[int], timeout_seconds: float
) -> dict[int, Place]:
    """Where this rank and its peers are, by rank."""
    place = own_place(device)
    texts = swap_texts(store, "place", str(place), rank, peers, timeout_seconds)
    return {rank: place, **{r: parse_place(text) for r, text in texts.items()}}


def lives_of(places: Mapping[int, Place], rank: int) -> dict[int, Life]:
    """The processes of those peers that are on this rank's host and can be seen from here."""
    lives = {}
    for peer, place in places.items():
        life = parse_life(place.process) if place.host == places[rank].host else None
        if peer != rank and life is not None:
            lives[peer] = life
    return lives


def check_own_gpus(kind: str, channels: Sequence[Channel], places: Mapping[int, Place]) -> None:
    """Raises TransportError, alike on both ends, where both of a channel are on one GPU: NCCL
    refuses that, and a copy engine has no peer there. `places` are by rank."""
    for channel in channels:
        here, there = places[channel.src_rank], places[channel.dst_rank]
        if here.gpu == there.gpu and here.host == there.host:
            raise TransportError(
                f"{kind} cannot carry the {channel}: ranks {channel.src_rank} and"
                f" {channel.dst_rank} are on one GPU, {here.gpu}; give each rank its own, or set"
                " pp.size = 1"
            )


def no_cuda_reason(kind: str) -> str | None:
    """Why no GPU transport can work in this process, or None."""
    if not torch.cuda.is_available():
        return f'{kind} needs a CUDA GPU and finds none; set pp.transport = "gloo"'
    return None


def queue_reason(kind: str, environment: Mapping[str, str]) -> str | None:
    """Why the hardware queues do not suffice for waits on streams, or None. One queue for all
    streams means that a stream that waits for a peer holds every other one (measured)."""
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return (
            f"{kind} cannot work with CUDA_DEVICE_MAX_CONNECTIONS=1: a stream that waits for a"
            " peer would hold all others; set it to 32 before the program starts, or set"
            ' pp.transport = "nccl"'
        )
    return None


def peers_of(channels: Sequence[Channel], rank: int) -> tuple[int, ...]:
    """The ranks at the other ends of this rank's channels, ascending."""
    mine = (c for c in channels if rank in (c.src_rank, c.dst_rank))
    return tuple(sorted({c.src_rank + c.dst_rank - rank for c in mine}))


def swap_texts(
    store: Store, key: str, text: str, rank: int, peers: Sequence[int], timeout_seconds: float
) -> dict[int, str]:
    """Gives all `peers` a text and gets theirs; both ends use one key."""
    store.set(f"{key} {rank}", text)
    keys = {peer: f"{key} {peer}" for peer in peers}
    if not await_keys(store, list(keys.values()), time.monotonic() + timeout_seconds):
        late = [p for p in peers if not store.check([keys[p]])]
        raise TransportError(
            f"rank {rank}: ranks {late} did not come to open their channels within"
            f" {timeout_seconds:g} s (waited for their {key})"
        )
    return {peer: store.get(keys[peer]).decode() for peer in peers}


def await_keys(store: Store, keys: Sequence[str], deadline: float) -> bool:
    """Whether the store has all keys by the `deadline` (of the monotonic clock). Raises
    TransportError as soon as another rank has said why it will not come."""
    # Asks again and again: a store that waits keeps every other thread from asking. Ever more
    # seldom, as a store may serve thousands of ranks.
    pause = _POLL_SECONDS
    while not store.check(list(keys)):
        raise_if_given_up(store)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)
    return True


def raise_if_given_up(store: Store) -> None:
    """Raises TransportError with the reason of a rank that gave up while it opened its channels."""
    if reason := _given_up(store):
        raise TransportError(reason)


def give_up(store: Store, rank: int, kind: str, error: BaseException) -> None:
    """Tells all ranks why this one does not open its channels. The first reason stays."""
    with contextlib.suppress(RuntimeError):  # without the store nobody is left to be told
        reason = f"rank {rank} could not open its {kind} channels: {error}"
        store.compare_set(ABORT_KEY, "", reason)


def _given_up(store: Store) -> str:
    return store.get(ABORT_KEY).decode() if store.check([ABORT_KEY]) else ""


def agreed_library(
    kind: str,
    load: Callable[[], Nccl],
    store: Store,
    rank: int,
    peers: Sequence[int],
    timeout_seconds: float,
) -> Nccl:
    """This rank's NCCL, once every peer has one of the same version. Raises TransportError on both
    ends of every channel where one of them has none, or another."""
    nccl, found = None, ""
    try:
        nccl = load()
        found = version_text(nccl.version)
    except TransportError as error:
        found = f"no usable NCCL: {error}"
    by_rank = {
        rank: found,
        **swap_texts(store, "nccl library", found, rank, peers, timeout_seconds),
    }
    if nccl is None or len(set(by_rank.values())) > 1:
        said = "; ".join(f"rank {r}: {text}" for r, text in sorted(by_rank.items()))
        raise TransportError(
            f"{kind} needs one NCCL version on both ends of every channel ({said}); install the"
            " same one on all hosts, for put set pp.nccl_library to it"
        )
    return nccl


class OpeningLimit:
    """Ends the process if opening takes longer than the limit, or goes on although another rank
    has given up: calls into CUDA and NCCL that wait for a peer cannot be interrupted in any other
    way. Used as a context manager; an error inside is told to all ranks."""

    def __init__(self, kind: str, rank: int, store: Store, timeout_seconds: float) -> None:
        self._kind, self._rank, self._store = kind, rank, store
        # What has a limit of its own raises before.
        self._limit_seconds = timeout_seconds + _GRACE_SECONDS
        self._opened = threading.Event()
        self.doing = "meets its peers"
        """What the rank does now, for the report."""

    def __enter__(self) -> OpeningLimit:
        for name, watch in (("limit", self._watch), ("listener", self._listen)):
            threading.Thread(target=watch, name=f"opening {name}", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.set()
        if error is not None:
            give_up(self._store, self._rank, self._kind, error)

    def _watch(self) -> None:
        if not self._opened.wait(self._limit_seconds):
            self._end(f"could not open its channels within {self._limit_seconds:g} s")

    def _listen(self) -> None:
        # Not in the thread above: a store that is gone may keep whoever asks.
        reason = ""
        while not reason and not self._opened.wait(_LISTEN_SECONDS):
            with contextlib.suppress(RuntimeError):
                reason = _given_up(self._store)
        if reason and not self._opened.wait(_GRACE_SECONDS):
            self._end(f"cannot open its channels: {reason}")

    def _end(self, what: str) -> None:
        end_process(
            f"rank {self._rank}: {self._kind} {what}\n  It {self.doing}: a call into CUDA or NCCL"
            " waits for a peer and cannot be undone, so the process ends here."
        )


def checked_device(kind: str, device: torch.device) -> torch.device:
    """The device with its index, made the current one. Raises TransportError if it is no GPU."""
    reason = no_cuda_reason(kind)
    if device.type != "cuda":
        reason = f'{kind} moves GPU memory, the device is {device}; set pp.transport = "gloo"'
    if reason is not None:
        raise TransportError(reason)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def environment() -> Mapping[str, str]:
    """The process's environment as the CUDA driver sees it. Read here, against the house rule that
    only launchers read it: what counts is what the driver was started with, not what was meant."""
    return os.environ
