"""Which dense projections can run in FP8, by name. Pure: the plan and the config read it.

Only plain linears are converted: query down and up, the second half of the output, the shared
expert. The grouped first half of the output is no plain linear. The window's and the compressed
keys' projections, 512 wide, and the indexer's gain nothing in FP8; router, mHC, Engram and head
need more bits.
"""

from __future__ import annotations

from ppruntime.models.dims import ModelDims, UnitKind, UnitSpec

BLOCK = 128
"""Values along K that share a scale: widths have to be multiples of it."""
ATTENTION_LINEARS = ("attention.q_a", "attention.q_b", "attention.o_b")
SHARED_EXPERT = "moe.shared"
_SHARED_LINEARS = (f"{SHARED_EXPERT}.gate_up", f"{SHARED_EXPERT}.down")


def fp8_linears(spec: UnitSpec) -> tuple[str, ...]:
    """Names, within the unit, of the linears that run in FP8."""
    match spec.kind:
        case UnitKind.ATTENTION:
            return ATTENTION_LINEARS
        case UnitKind.MOE:
            return _SHARED_LINEARS
    return ()


def misfit(dims: ModelDims) -> str | None:
    """Which of the model's widths is no multiple of 128, as a clause; None if all are."""
    widths = {
        "hidden_size": dims.hidden_size,
        "q_lora_rank": dims.q_lora_rank,
        "num_heads x head_dim": dims.num_heads * dims.head_dim,
        "o_groups x o_lora_rank": dims.o_groups * dims.o_lora_rank,
        "num_shared_experts x expert_width": dims.num_shared_experts * dims.expert_width,
    }
    for name, width in widths.items():
        if width % BLOCK:
            return f"widths have to be multiples of {BLOCK}, {name} is {width}"
    return None
