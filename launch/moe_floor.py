"""The least time that a routed layer's phases can take on an H200: of its products, the bytes of
its memory and those of its links whatever takes longest, each at the highest rate that was measured
there. Pure.

Ceilings, measured on H200s with torch 2.11 and Triton 3.6: a device copy moves 4,230 GB/s, read and
written; 8192^3 products run at 1,529 TFLOP/s in FP8 (`torch._scaled_mm`, one scale a tensor) and at
806 in bf16; between two GPUs copies both ways at once move 389 GB/s per direction.

Every operand of a phase is read once and every result is written once; a token goes once to each
other rank that has experts of it, and comes back once. What a kernel reads again, pads or sends
twice is its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY_BYTES_PER_S = 4.230e12
FP8_FLOPS_PER_S = 1.529e15
BF16_FLOPS_PER_S = 806e12
LINK_BYTES_PER_S = 389e9
"""One way, while as much comes the other way."""

FORWARD = ("dispatch", "L1", "act", "L2", "combine")
BACKWARD = ("dispatch back", "dgrad L2", "act back", "dgrad L1", "combine back", "wgrad")
_GROUP = 128
"""Values that share a scale of four bytes."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a phase does."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    """Read and written."""
    wire_bytes: float = 0.0
    """Sent one way to other ranks, by this rank."""

    def __add__(self, other: Work) -> Work:
        """Both, as one phase that does them side by side."""
        return Work(
            self.flops + other.flops,
            self.memory_bytes + other.memory_bytes,
            self.wire_bytes + other.wire_bytes,
        )

    def floor_ms(self, *, fp8: bool = True) -> float:
        """The least milliseconds, where nothing that can overlap is waited for."""
        flops = FP8_FLOPS_PER_S if fp8 else BF16_FLOPS_PER_S
        seconds = (
            self.flops / flops,
            self.memory_bytes / MEMORY_BYTES_PER_S,
            self.wire_bytes / LINK_BYTES_PER_S,
        )
        return 1e3 * max(seconds)


def together(works: Iterable[Work]) -> Work:
    """All of them side by side."""
    return sum(works, Work())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """A routed layer as one rank has it."""

    num_tokens: int
    num_rows: int
    """Pairs of a token and an expert that this rank's experts multiply."""
    num_away: int
    """Pairs of a token here and another rank that has experts of it."""
    num_experts: int
    """Held here."""
    hidden: int
    width: int


def phase_works(sizes: LayerSizes, *, fp8: bool = True, num_fused: int = 1) -> dict[str, Work]:
    """The phases of FORWARD and BACKWARD, of one micro-batch: with FP8 rows and weights, or all in
    bf16; results and gradients travel in bf16 in both. `num_fused`: micro-batches whose weight
    gradients go through the fp32 accumulators at once."""
    rows, tokens, hidden, width = sizes.num_rows, sizes.num_tokens, sizes.hidden, sizes.width
    value = 1 + 4 / _GROUP if fp8 else 2.0  # bytes of an operand, with its share of a scale
    weight = sizes.num_experts * hidden * width * (1.0 if fp8 else 2.0)
    columns = 1 if fp8 else 0  # FP8 weight gradients read columns of their own
    x, inner, gate_up = rows * hidden * value, rows * width * value, 2 * rows * width * value
    product = 2.0 * rows * hidden * width
    tokens_bf16, away_bf16 = 2.0 * tokens * hidden, 2.0 * sizes.num_away * hidden
    back = Work(0, 4.0 * rows * hidden + tokens_bf16, away_bf16)
    accumulators = 8.0 * 3 * sizes.num_experts * hidden * width
    operands = rows * (3 * width + 2 * hidden) * (1.0 if fp8 else 2.0)
    return {
        "dispatch": Work(0, tokens_bf16 + x, sizes.num_away * hidden * value),
        "L1": Work(2 * product, x + 2 * weight + 4.0 * rows * width),
        "act": Work(0, 4.0 * rows * width + inner),
        "L2": Work(product, inner + weight + 2.0 * rows * hidden),
        "combine": back,
        "dispatch back": Work(0, tokens_bf16 + (1 + columns) * x, away_bf16),
        "dgrad L2": Work(product, x + weight + 2.0 * rows * width),
        "act back": Work(0, 6.0 * rows * width + (1 + columns) * gate_up + columns * inner),
        "dgrad L1": Work(2 * product, gate_up + 2 * weight + 2.0 * rows * hidden),
        "combine back": back,
        "wgrad": Work(3 * product, accumulators / num_fused + operands),
    }


def fused_work(phase: str, works: dict[str, Work]) -> Work:
    """Of a phase, or of several that one does together: "dispatch + L1"."""
    return together(works[part] for part in phase.split(" + "))
