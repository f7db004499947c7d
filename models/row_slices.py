"""Parts of a micro-batch whose pools stay below what kernels count in 32 bits. Imports no torch."""

from __future__ import annotations

from itertools import pairwise

from ppruntime.models.fp8_expert_rules import most_rows

MOST_ELEMENTS = 2**31 - 1
"""Elements of one tensor that a kernel with 32-bit offsets reaches."""


def token_slices(
    num_tokens: int, per_token: int, num_experts: int, width: int, most: int = MOST_ELEMENTS
) -> tuple[slice, ...]:
    """The fewest even parts of the tokens such that a pool with all rows of a part, `width` wide,
    has at most `most` elements under any routing. One empty part for no tokens.

    Raises ValueError where one token alone has more.
    """
    if most_rows(min(num_tokens, 1) * per_token, num_experts) * width > most:
        raise ValueError(
            f"one token's {per_token} rows of {width} values, padded, are more than {most} elements"
        )
    num_parts = 1
    while True:
        longest = -(-num_tokens // num_parts)
        if most_rows(longest * per_token, num_experts) * width <= most:
            break
        num_parts += 1
    starts = [num_tokens * part // num_parts for part in range(num_parts + 1)]
    return tuple(slice(first, last) for first, last in pairwise(starts))
