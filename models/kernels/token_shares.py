"""How many tokens one program takes where it adds up a sum over tokens in its registers.

Each program writes a part of such a sum, and a pass over the parts follows: few programs, each with
many tokens, and loads that run ahead of the work instead of many programs. The number depends on
the tokens alone, so that bits do not depend on the device.
"""

from __future__ import annotations

SHARES = 128
"""Programs at the most: an H100 or H200 has 132 multiprocessors, which then take one each."""
_LEAST = 4


def tokens_per_program(num_tokens: int, num_programs: int = SHARES) -> int:
    """At least 4, and so many that `num_programs` programs are enough."""
    return max(_LEAST, -(-num_tokens // num_programs))
