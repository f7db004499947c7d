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
