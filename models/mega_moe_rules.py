"""Sizes of the fused MoE layer's memory, and its errors. Without torch: plan, ledger, rules and
who reports errors read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ppruntime.models.fp8_expert_rules import BLOCK, most_rows

MOST_RANKS = 64
"""Ranks that an arena has words for."""
_ALIGNMENT = 256


class PoolOverflow(RuntimeError):
    """A rank would get more rows than it may keep. Every rank of the group raises it alike."""


class MeetingError(RuntimeError):
    """A rank of an expert group did not come, or its rows did not. Says who waited for whom; every
    rank of the group raises it alike."""


def most_pool_rows(capacity_factor: float, num_pairs: int, num_here: int) -> int:
    """Rows that a rank may keep: so many times its fair share of `num_pairs` pairs a rank, and a
    block per expert for padding."""
    return -(-int(capacity_factor * num_pairs) // BLOCK) * BLOCK + num_here * BLOCK


def told_words(num_experts: int) -> int:
    """32-bit words that a rank tells every other in a forward: its rows for each expert, its error
    word, the pool rows that it has room for."""
    return num_experts + 2


def rows_with_slack(num_rows: int) -> int:
    """Room for a pool that lately took so many rows: a 16th more, in whole blocks."""
    return -(-(num_rows + num_rows // 16) // BLOCK) * BLOCK


def room_after(room: int, num_rows: int, fair_share: int) -> int:
    """The room of a layer's next pool, after one of `room` rows got `num_rows`. It stays while it
    fits and is not twice too large, so that the memory of one micro-batch serves the next; never
    less than a fair share."""
    wanted = rows_with_slack(num_rows)
    fits = num_rows <= room <= 2 * wanted
    return room if fits else max(wanted, fair_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaShape:
    """What an arena is made for, see `mega_moe_arena`. Alike on all ranks."""

    most_tokens: int
    """Of a micro-batch."""
    per_token: int
    num_experts: int
    """Of the whole layer."""
    hidden: int

    @property
    def most_pairs(self) -> int:
        """Pairs of a rank's full micro-batch."""
        return self.most_tokens * self.per_token

    def offset(self, region: str) -> int:
        """Where a region begins, in bytes."""
        return _offsets(self)[region]

    @property
    def num_bytes(self) -> int:
        """Of the whole arena: 0.6 GB at 8,192 tokens of 6 pairs, 5,120 wide."""
        return _offsets(self)[""]


@cache
def _offsets(shape: ArenaShape) -> dict[str, int]:
    tokens, pairs, hidden = shape.most_tokens, shape.most_pairs, shape.hidden
    sizes = {
        "words": 4 * MOST_RANKS,
        "error": 4,
        "told": 4 * MOST_RANKS * told_words(shape.num_experts),
        "order": 4 * most_rows(pairs, shape.num_experts),
        "weights": 4 * pairs,
        "scales": 4 * tokens * (hidden // BLOCK),
        "values": 4 * pairs,
        "rows": 2 * tokens * hidden,
        "places": 2 * pairs * hidden,
    }
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets | {"": total}
