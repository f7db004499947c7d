"""Moving boundaries between stages: tensors, peers and slots; no op, no stage, no schedule.

Start with `base`, what every transport promises.

all kinds     ledger (checks of every call), slots (receive buffers), ring (slots in turn), agree
              (what ranks compare before the first transfer), lives (hosts, dead peers), per_channel
              (each channel by its own kind), selftest
anywhere      local (inside a process), shared_memory (inside a host, over shared_slots and line),
              p2p (gloo, over connection); both over host_transport and host_opening
GPUs          nccl (over communicators), copy_engine (over peer_memory), put
on GPUs       device (order, events, deadlines, abort, for all three), watchdog, opening (over
              meeting), background (calls that may hang)
libraries     driver (libcuda), nccl_api and nccl_library (libnccl), by ctypes

Imports torch and the standard library, nothing else of ppruntime.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ppruntime.transports import agree, per_channel
from ppruntime.transports.base import Channel, Transport, TransportError
from ppruntime.transports.lives import host_name

KINDS = ("auto", "local", "gloo", "shared_memory", "nccl", "copy_engine", "put")
"""What `open_transport` takes. `auto` picks for each channel, see `per_channel.choose_kind`."""

_MODULE_OF = {kind: kind for kind in KINDS} | {"gloo": "p2p"}


def unavailable_reason(kind: str, options: Mapping[str, object] | None = None) -> str | None:
    """Why this process cannot use `kind` with these options, with the remedy; None if it can."""
    if kind not in KINDS:
        return f"there is no transport {kind!r}; choose one of {', '.join(KINDS)}"
    if kind in ("auto", "local"):
        return None
    if kind == "gloo":
        has_gloo = dist.is_available() and dist.is_gloo_available()
        return None if has_gloo else "this torch is built without gloo; install one that has it"
    module = _module(kind)
    # What put needs depends on an option, the library that it is to load.
    reason: str | None = (
        module.unavailable_reason(options or {}) if kind == "put" else module.unavailable_reason()
    )
    return reason


def options_of(kind: str) -> frozenset[str]:
    """The options that a kind takes; of `auto`, all that any kind takes that it may choose."""
    if kind == "auto":
        return frozenset().union(*(options_of(k) for k in KINDS if k != "auto"))
    taken: frozenset[str] = getattr(_module(kind), "OPTIONS", frozenset())
    return taken - {"uncredited"}


def open_transport(
    kind: str | Mapping[int, str],
    channels: Sequence[Channel],
    rank: int,
    *,
    device: torch.device,
    timeout_seconds: float,
    store: Store | None = None,
    uncredited: frozenset[int] = frozenset(),
    tell_kinds: Callable[[Mapping[int, str]], object] = lambda _: None,
    **options: object,
) -> Transport:
    """Opens the ends that `rank` has of a pipeline's channels; collective over all its ranks.

    `channels` are those of the whole pipeline; ranks are the pipeline's, from 0. `kind` is that of
    all channels, or of each by its id. Channels inside a rank are carried by local whatever the
    kind; `tell_kinds` hears what carries each, by id, once all ranks have agreed. `store` is this
    pipeline's own (pipelines side by side take a PrefixStore each). If no channel leaves its rank,
    it may be None, and neither the kind nor its `options` matter. No transfer takes longer than
    `timeout_seconds`, nor does opening wait longer for a peer.

    `uncredited` are the ids of channels on which the order proves that a slot is released before
    the message that overwrites it is sent; kinds that have no credits anyway take no notice. Each
    kind gets those of `options` that it takes, see `options_of`. Raises TransportError, with one
    text on all ranks, if they disagree on a channel, if one of them cannot use the kind, or for an
    option that none of the kinds takes that carry a channel.
    """
    wanted = {c.id: kind if isinstance(kind, str) else kind[c.id] for c in channels}
    for name in (kind,) if isinstance(kind, str) else wanted.values():
        if name not in KINDS:
            raise TransportError(
                f"there is no transport {name!r}; choose one of {', '.join(KINDS)}"
            )
    ranks = sorted({rank}.union(*((c.src_rank, c.dst_rank) for c in channels)))
    kind_of = {channel.id: "local" for channel in channels}
    if len(ranks) > 1:
        if store is None:
            raise TransportError(f"ranks {ranks} need a store to find each other; pass store=")
        # The n-th opening of this rank meets the n-th of the others, under names of its own.
        store = PrefixStore(f"opening {store.add(f'openings of rank {rank}', 1)}", store)
        kind_of = _agreed_kinds(
            wanted, channels, rank, ranks, device, timeout_seconds, store, options, uncredited
        )
        tell_kinds(kind_of)
    used_kinds = sorted(set(kind_of.values()))
    if kind == "local" or len(ranks) > 1:
        _refuse_what_none_takes(wanted, used_kinds, options)
    carriers: list[tuple[Transport, Sequence[Channel]]] = []
    try:
        for used in used_kinds:
            carried = [c for c in channels if kind_of[c.id] == used]
            transport: Transport = _module(used).open(
                carried,
                rank,
                device=device,
                timeout_seconds=timeout_seconds,
                store=None if store is None else PrefixStore(used, store),
                options=_options_for(used, {**options, "uncredited": uncredited}),
            )
            carriers.append((transport, carried))
    except BaseException as error:
        # Peers that share no channel of the kind that failed would go on with those that did not.
        for transport, _ in carriers:
            transport.abort(f"rank {rank} could not open its other channels: {error}")
            transport.close()
        raise
    if len(carriers) == 1:
        return carriers[0][0]
    return per_channel.PerChannelTransport(carriers)


def _agreed_kinds(
    wanted: Mapping[int, str],
    channels: Sequence[Channel],
    rank: int,
    ranks: Sequence[int],
    device: torch.device,
    timeout_seconds: float,
    store: Store,
    options: Mapping[str, object],
    uncredited: frozenset[int],
) -> dict[int, str]:
    """Each channel's kind by its id, once all ranks agree on the channels and can use the kinds."""
    leaving = [c for c in channels if c.src_rank != c.dst_rank]
    names = sorted({wanted[c.id] for c in leaving})
    reasons = {name: unavailable_reason(name, options) for name in names}
    facts = [
        agree.Fact("the transport", _named(names, wanted, reasons)),
        *agree.channel_facts(channels, rank),
        # An end that waits for credits which the other never gives would wait for ever.
        agree.Fact("the channels without credits", str(sorted(uncredited))),
    ]
    agree.agree(
        PrefixStore("agreement", store),
        rank,
        ranks,
        facts,
        timeout_seconds=timeout_seconds,
        what="opening the transport",
    )
    for name, reason in reasons.items():
        if reason is not None:
            raise TransportError(f"{name} cannot be used: {reason}")
    kind_of = {c.id: "local" if c.src_rank == c.dst_rank else wanted[c.id] for c in channels}
    if "auto" not in names:
        return kind_of
    usable = [k for k in KINDS if k != "auto" and unavailable_reason(k, options) is None]
    stated = agree.gather(
        PrefixStore("abilities", store),
        rank,
        ranks,
        json.dumps([host_name(), usable]),
        timeout_seconds=timeout_seconds,
        what="choosing transports",
    )
    abilities = {r: json.loads(text) for r, text in stated.items()}
    chosen = {
        channel.id: per_channel.choose_kind(
            channel,
            device_type=device.type,
            host_of={r: host for r, (host, _) in abilities.items()},
            available=frozenset.intersection(*(frozenset(k) for _, k in abilities.values())),
        )
        for channel in leaving
        if wanted[channel.id] == "auto"
    }
    return kind_of | chosen


def _named(
    names: Sequence[str], wanted: Mapping[int, str], reasons: Mapping[str, str | None]
) -> str:
    """What a rank was told to use, and why it cannot, for the ranks to compare."""
    parts = [n if reasons[n] is None else f"{n} (unusable: {reasons[n]})" for n in names]
    if len(names) < 2:
        return "".join(parts)
    return f"{' and '.join(parts)} (by channel: {', '.join(wanted[i] for i in sorted(wanted))})"


def _options_for(used: str, options: Mapping[str, object]) -> dict[str, object]:
    taken: frozenset[str] = getattr(_module(used), "OPTIONS", frozenset())
    return {name: value for name, value in options.items() if name in taken}


def _refuse_what_none_takes(
    wanted: Mapping[int, str], used_kinds: Sequence[str], options: Mapping[str, object]
) -> None:
    taken = frozenset[str]().union(*map(options_of, used_kinds))
    unknown = sorted(options.keys() - taken)
    if not unknown:
        return
    carrying = [used for used in used_kinds if used != "local"] or ["local"]
    is_auto = "auto" in wanted.values()
    who = f"auto took {' and '.join(carrying)}, which" if is_auto else " and ".join(carrying)
    what = f"the options {', '.join(sorted(taken))}" if taken else "no options"
    takes = "takes" if len(carrying) == 1 else "take"
    raise TransportError(f"{who} {takes} {what}, got {unknown}; remove them")


def _module(kind: str) -> ModuleType:
    # Imported when asked for: the GPU kinds need what a CPU machine lacks.
    return importlib.import_module(f"ppruntime.transports.{_MODULE_OF[kind]}")
