"""What FP8 copies of the routed experts' weights take. Pure: plan, ledger and search read it."""

from __future__ import annotations

BLOCK = 128
"""A scale is for so many by so many weights."""
_SCALE_BYTES = 4


def copy_bytes(num_weights: int, *, turned: bool) -> int:
    """Bytes of the FP8 copies of `num_weights` expert weights, scales included: one copy, and with
    `turned` a second one that lies turned. Widths are multiples of 128, as the experts ask."""
    one = num_weights + _SCALE_BYTES * (num_weights // BLOCK**2)
    return (1 + turned) * one


def most_rows(num_pairs: int, num_experts: int) -> int:
    """Pool rows that any routing of `num_pairs` pairs to `num_experts` experts fits in."""
    if num_pairs <= num_experts:
        return num_pairs * BLOCK  # each alone in its block
    return ((num_pairs - num_experts) // BLOCK + num_experts) * BLOCK


def waiting_bytes(
    num_tokens: int, per_token: int, num_experts: int, hidden: int, width: int
) -> int:
    """Bytes that a micro-batch's weight gradients are made from, held while they wait for another
    micro-batch's: tokens, gradients of both products' results and the inner values in FP8, and
    where each row belongs."""
    rows = most_rows(num_tokens * per_token, num_experts)
    values = num_tokens * hidden + rows * (hidden + 3 * width)
    indices = rows + num_tokens * per_token + rows // BLOCK + 2 * num_experts + 1
    return values + _SCALE_BYTES * (values // BLOCK) + 4 * indices
