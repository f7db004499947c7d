"""Ranks of a fused MoE layer that one process plays. Import it before any kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from fp8_cases import DEVICE, ON_GPU

from ppruntime.models.mega_moe import MegaMoe
from ppruntime.models.mega_moe_arena import Arena
from ppruntime.models.mega_moe_passes import MegaMoeOptions
from ppruntime.models.mega_moe_rules import ArenaShape

_NUMBERS = count()
LIMIT = 10**10 if ON_GPU else 5
"""The longest wait, in nanoseconds; in the interpreter 5 polls: nobody waits for what is to come.
"""
SHORT_LIMIT = 10**7 if ON_GPU else 5
"""Where somebody does wait in vain."""


def make_arenas(num_ranks: int, shape: ArenaShape, *, limit: int = LIMIT) -> list[Arena]:
    memory = [
        torch.zeros(shape.num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(num_ranks)
    ]
    addresses = [one.data_ptr() for one in memory]
    return [Arena(shape, one, addresses, rank, limit=limit) for rank, one in enumerate(memory)]


def meet(arenas: Sequence[Arena]) -> None:
    for arena in arenas:
        arena.meet(wait=False)
    for arena in arenas:
        arena.meet(arrive=False)


class Played:
    """The exchange of a rank that this process plays; `run_together` carries the counts."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.name, self.rank, self.num_ranks = f"played {next(_NUMBERS)}", rank, num_ranks

    def begin(self, outgoing, incoming, what):
        del what
        assert self.num_ranks == 1, "more ranks exchange in run_together"
        incoming[0].copy_(outgoing[0])
        return lambda: None


def make_ranks(
    num_ranks: int, shape: ArenaShape, options: MegaMoeOptions | None = None, *, limit: int = LIMIT
) -> list[MegaMoe]:
    return [
        MegaMoe(Played(rank, num_ranks), arena, options or MegaMoeOptions(num_sms=3))
        for rank, arena in enumerate(make_arenas(num_ranks, shape, limit=limit))
    ]


def run_together(ranks: Sequence[MegaMoe], passes: Sequence) -> list:
    """Runs one pass of each rank, from meeting to meeting."""
    answers = [None] * len(ranks)
    while True:
        asked, results = [], []
        for one, answer in zip(passes, answers, strict=True):
            try:
                asked.append(one.send(answer))
            except StopIteration as done:
                results.append(done.value)
        if results:
            assert not asked, "some ranks meet once more than others"
            return results
        if asked[0] is None:
            assert all(counts is None for counts in asked)
            meet([rank.arena for rank in ranks])
            answers = [None] * len(ranks)
        else:
            everyones = torch.stack([counts.cpu() for counts in asked])
            answers = [everyones.clone() for _ in ranks]
