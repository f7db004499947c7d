"""Half layers of tiny models by all kernels that run on a CPU: in Triton's interpreter, and FP8 as
plain PyTorch has it."""

from __future__ import annotations

import torch
from whole_model import build_units

from ppruntime.models.attention_kernels import set_kernels
from ppruntime.models.dims import ModelDims, changed, preset
from ppruntime.models.engram_kernels import engram_kernels
from ppruntime.models.fp8_experts import Fp8Options
from ppruntime.models.fp8_linear import Fp8LinearOptions, convert_linears
from ppruntime.models.kernel_limits import Backend
from ppruntime.models.kernels.attention_backends import Choice, attention_kernels
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.kernels.fp8_linear_backends import LinearBackend
from ppruntime.models.moe import MoEOptions
from ppruntime.models.moe_kernels import moe_kernels
from ppruntime.models.residual import residual
from ppruntime.models.units import Unit

HALVES = ("layers.1.attn", "layers.1.moe", "layers.2.attn")
"""Of V4.1: a window with Engram, experts, and keys compressed and selected."""
V4_HALVES = ("layers.2.attn", "layers.2.moe", "layers.3.attn")
"""Of V4: keys compressed and selected, experts by token, keys compressed."""
CPU = torch.device("cpu")
TRITON = Choice(
    attention=Backend.TRITON,
    indexer=Backend.TRITON,
    rope=Backend.TRITON,
    grouped_output=Backend.LIBRARY,
    norm=Backend.TRITON,
)


def small(name: str = "tiny", **changes: object) -> ModelDims:
    return changed(preset(name), **{**SIZES, **changes})


SIZES = {
    **{"num_heads": 16, "head_dim": 32, "rope_dim": 8, "sinkhorn_iters": 1},
    **{"hidden_size": 32, "num_streams": 2, "q_lora_rank": 16, "expert_width": 16},
}


def some_units(dims: ModelDims, dtype: torch.dtype = torch.float32, **options) -> list[Unit]:
    """The embedding and three halves, which the interpreter runs in seconds."""
    names = {"embed", *(V4_HALVES if dims.family == "v4" else HALVES)}
    units = build_units(dims, 3, dtype, **options)
    return [unit for unit in units if unit.spec.name in names]


def in_triton(dims: ModelDims, dtype: torch.dtype = torch.float32) -> list[Unit]:
    """All that Triton's interpreter runs."""
    moe = MoEOptions(kernels=moe_kernels("triton", "triton", CPU, dtype))
    units = some_units(dims, dtype, moe=moe)
    for unit in units[1:]:
        set_kernels(unit, attention_kernels(TRITON))
        unit.residual = residual("triton", CPU, dims.residual_type)
        if getattr(unit, "engram", None) is not None:
            unit.engram.kernels = engram_kernels("triton", CPU)
    return units


def in_fp8(dims: ModelDims) -> list[Unit]:
    """FP8 experts and linears as plain PyTorch has them, bf16 products of compressors and routers
    by BLAS, and turned queries."""
    moe = MoEOptions(
        fp8=Fp8Options(backend=ExpertBackend.REFERENCE),
        kernels=moe_kernels("reference", "library", CPU, torch.bfloat16),
    )
    units = some_units(dims, torch.bfloat16, moe=moe)
    for unit in units[1:]:
        chosen = Choice(rope=Backend.TRITON, compressor=Backend.LIBRARY)
        set_kernels(unit, attention_kernels(chosen))
        convert_linears(unit, Fp8LinearOptions(backend=LinearBackend.REFERENCE))
    return units


WIDE = {"hidden_size": 256, "expert_width": 128, "q_lora_rank": 128, "o_lora_rank": 64}
