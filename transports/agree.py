"""Start-up agreement: all ranks compare what they are about to do before the first transfer.

Facts go as text through the store, so nothing is unpickled and no transfer is needed to find out
that transfers cannot work.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.ledger import describe

_PARTING_SECONDS = 5.0
_ALIKE = "start all ranks with the same configuration and code"


class DisagreementError(TransportError):
    """Ranks hold different views of what they are about to do; the text lists all of them."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that ranks must hold alike: what it is, for people, and its value or a digest of
    it.

    `ranks` are those that must state it; None stands for all that come to the agreement. `remedy`
    is what whoever started the ranks can do where they do not.
    """

    name: str
    value: str
    ranks: tuple[int, ...] | None = None
    remedy: str = _ALIKE


def channel_facts(channels: Sequence[Channel], rank: int) -> tuple[Fact, ...]:
    """What `rank` believes of the channels that it is an end of; the other end must believe it
    too."""
    return tuple(
        Fact(
            f"channel {channel.id}",
            f"{channel.kind} from stage {channel.src_stage} on rank {channel.src_rank} to stage"
            f" {channel.dst_stage} on rank {channel.dst_rank}, {channel.slots} slots of"
            f" ({describe(channel.boundary)})",
            (channel.src_rank, channel.dst_rank),
        )
        for channel in channels
        if rank in (channel.src_rank, channel.dst_rank)
    )


def agree(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    facts: Sequence[Fact],
    *,
    timeout_seconds: float,
    what: str = "the start-up",
) -> None:
    """Returns on all of `ranks` once each has published its facts and no two contradict each other.

    Raises DisagreementError, with one text on every rank, that lists each differing fact with its
    values and their ranks; TransportError when a rank does not come within the time limit. Give
    every agreement a store of its own (a PrefixStore).
    """
    statement = json.dumps([[fact.name, fact.value, fact.ranks, fact.remedy] for fact in facts])
    statements = gather(store, rank, ranks, statement, timeout_seconds=timeout_seconds, what=what)
    stated = {
        r: [Fact(name, value, of and tuple(of), cure) for name, value, of, cure in json.loads(text)]
        for r, text in statements.items()
    }
    differences = find_differences(stated)
    if not differences:
        return
    _part_together(store, ranks, timeout_seconds)
    told = [fact for rank in sorted(stated) for fact in stated[rank] if fact.name in differences]
    remedies = dict.fromkeys(fact.remedy for fact in told)
    raise DisagreementError(
        f"the ranks disagree before {what}: {'; '.join([*differences.values(), *remedies])}"
    )


def find_differences(stated: Mapping[int, Sequence[Fact]]) -> dict[str, str]:
    """By name, one text per fact that its ranks do not hold alike: `NAME is X on ranks 0, 2 but Y
    on rank 1`.

    A rank that must state a fact, in the view of any rank that does, and lacks it differs as well.
    """
    values: dict[str, dict[int, str]] = {}
    must_state: dict[str, set[int]] = {}
    for rank, facts in sorted(stated.items()):
        for fact in facts:
            values.setdefault(fact.name, {})[rank] = fact.value
            must_state.setdefault(fact.name, {rank}).update(fact.ranks or stated)
    differences = {}
    for name, value_of in values.items():
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(must_state[name]):
            ranks_of.setdefault(value_of.get(rank, "absent"), []).append(rank)
        if len(ranks_of) > 1:
            views = " but ".join(f"{value} on {_text(ranks)}" for value, ranks in ranks_of.items())
            differences[name] = f"{name} is {views}"
    return differences


def gather(
    store: Store, rank: int, ranks: Sequence[int], text: str, *, timeout_seconds: float, what: str
) -> dict[int, str]:
    """The texts of all of `ranks`, by rank. Raises TransportError if one is missing at the time
    limit."""
    store.set(f"text {rank}", text)
    try:
        store.wait([f"text {r}" for r in ranks], timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        missing = [r for r in ranks if not store.check([f"text {r}"])]
        raise TransportError(
            f"{_text(missing)} did not come to {what} within {timeout_seconds} s; see why, or raise"
            " the time limit"
        ) from error
    return {r: store.get(f"text {r}").decode() for r in ranks}


def _part_together(store: Store, ranks: Sequence[int], timeout_seconds: float) -> None:
    # The process that raises first may be the one that hosts the store: it stays until all have
    # read. To the others the store's end is as good as the last rank's arrival here.
    deadline = time.monotonic() + min(timeout_seconds, _PARTING_SECONDS)
    with contextlib.suppress(RuntimeError):
        store.add("parting", 1)
        while store.add("parting", 0) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.01)


def _text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
