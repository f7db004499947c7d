"""Which op makes the product with each matrix of a half layer, by the kernels it has. No torch."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ppruntime.models.dims import ModelDims
from ppruntime.models.expert_bytes import ExpertForm, products_op
from ppruntime.models.fp8_linear_rules import ATTENTION_LINEARS, SHARED_EXPERT
from ppruntime.models.kernel_limits import AttentionOp

_DOWN = f"{SHARED_EXPERT}.down"
_IN_FP8 = frozenset({*ATTENTION_LINEARS, f"{SHARED_EXPERT}.gate_up"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """What decides who computes them. The names are those of `activation_bytes.kept_results`."""

    dims: ModelDims
    layer: int
    is_low: bool
    """Whether the compute dtype is below fp32."""
    kernels: Set[AttentionOp]
    mhc: str
    router: str
    fp8_linears: bool
    experts: ExpertForm

    def op(self, linear: str) -> str:
        """The op's name as `save_points.op_name` gives it, for a linear by its name in the unit,
        such as "attention.q_b"."""
        first, *_, last = linear.split(".")
        if linear.startswith("moe.experts."):
            return products_op(self.experts)
        if first in ("mhc", "gated") and self.mhc == "triton":
            return "mhc_read" if first == "mhc" else "one_stream_read"
        if first == "engram":
            return "engram_linear"
        if linear == "moe.router.gate":
            return "wide_linear" if self.router != "reference" and self.is_low else "mm"
        if linear == "attention.o_a":
            return "grouped_linear"
        if linear == _DOWN and self.fp8_linears:
            return "fp8_swiglu_linear"
        turns = AttentionOp.ROPE in self.kernels
        # V4 normalises a query's heads before they are turned.
        if turns and (last == "query" or (last == "q_b" and self.dims.family != "v4")):
            return "rotated_linear"
        if linear in _IN_FP8 and self.fp8_linears:
            return "fp8_linear"
        # At ratio 1 V4.1's compressor is a plain projection.
        pools = self.dims.family == "v4" or self.dims.compress_ratios[self.layer] > 1
        in_parts = self.is_low and AttentionOp.COMPRESSOR in self.kernels
        return "wide_linear" if last in ("value", "gate") and pools and in_parts else "mm"
