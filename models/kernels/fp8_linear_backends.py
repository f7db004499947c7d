"""Who multiplies for FP8 linears: own kernels, the package deep_gemm, or torch's cuBLASLt call.

A dense linear is the routed experts' layer with one expert and all rows in order, so the casts, the
clamped SwiGLU and the weight gradient are those kernels, given `dense_layout`. What differs is the
product with the weights, for which there are libraries. All follow one recipe: activations by 1 x
128, weights by 128 x 128 (DeepSeek-V3 report, section 3.3.2).

Shape letters: N rows, P rows with padding to a multiple of 128, O and I output and input width.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ppruntime.models import kernels
from ppruntime.models.kernels.expert_backends import (
    ExpertBackend,
    ExpertKernels,
    deep_gemm_package,
    deep_gemm_reason,
    expert_kernels,
)
from ppruntime.models.kernels.moe_layout import BLOCK, Layout
from ppruntime.models.kernels.quantize import GROUP, Quantized

_KEY = "kernels.linear"
_NEEDED = ("fp8_gemm_nt", "k_grouped_fp8_gemm_nt_contiguous", "set_num_sms")
_FIRST_CUDA = (12, 9)
"""Whose cuBLASLt takes 1 x 128 and 128 x 128 scales on Hopper."""
_FASTER_BY_SCALED_MM = frozenset({(1280, 5120), (1280, 32768)})
"""(O, I) where scaled_mm beat deep_gemm, 8,192 rows on an H200: 1,216 to 1,100 TFLOP/s, and 1,376
to 1,227 (a run without a record; whole linears are in docs/bench/layers-linears.json)."""


class LinearBackend(Enum):
    """Whose products. The weight gradient is deep_gemm's where its products are, but for scales of
    whole tiles; else our own."""

    REFERENCE = "reference"
    """The recipe in torch, anywhere: slow, the yardstick of the others."""
    TRITON = "triton"
    """Own kernels."""
    SCALED_MM = "scaled_mm"
    """torch's block-scaled product where `scaled_mm_fits`; elsewhere our own. `gemm_sms` does not
    reach it: cuBLASLt is limited for the whole process."""
    DEEP_GEMM = "deep_gemm"
    """The package's."""
    FASTEST = "fastest"
    """deep_gemm, and scaled_mm for shapes where it was measured to be faster."""


def scaled_mm_fits(num_in: int) -> bool:
    """Whether torch's block-scaled product is right for that K.

    cuBLASLt wants the weights' scales padded to a multiple of 4 along K. `torch._scaled_mm` refuses
    padded ones, and given the plain ones of another K it returns wrong numbers (error 0.1, torch
    2.11 on an H200).
    """
    return num_in // GROUP % 4 == 0


DENSE_BACKENDS = (LinearBackend.DEEP_GEMM, LinearBackend.FASTEST)
"""Those whose weight gradients take columns as one matrix."""


def linear_kernels(backend: LinearBackend, wgrad_tile_scales: bool = False) -> ExpertKernels:
    """The backend's functions: `grouped_gemm` takes and gives one group only. Weight gradients
    whose input has scales of whole tiles are our own kernels'. Raises RuntimeError with
    `unavailable_reason` if it cannot run."""
    reason = unavailable_reason(backend)
    if reason is not None:
        raise RuntimeError(reason)
    if backend is LinearBackend.REFERENCE:
        return expert_kernels(ExpertBackend.REFERENCE)
    if backend is LinearBackend.TRITON:
        return expert_kernels(ExpertBackend.TRITON)
    if backend is LinearBackend.SCALED_MM:
        return replace(expert_kernels(ExpertBackend.TRITON), grouped_gemm=_by_scaled_mm)
    product = _by_deep_gemm if backend is LinearBackend.DEEP_GEMM else _by_the_fastest
    from ppruntime.models.kernels import deep_gemm

    if wgrad_tile_scales:
        return replace(expert_kernels(ExpertBackend.TRITON), grouped_gemm=product)
    return replace(
        expert_kernels(ExpertBackend.DEEP_GEMM),
        grouped_gemm=product,
        grouped_weight_grad=deep_gemm.dense_weight_grad,
        dense_columns=backend in DENSE_BACKENDS,
    )


def unavailable_reason(backend: LinearBackend) -> str | None:
    """Why the backend cannot run here, in a sentence that says what to do; None if it can."""
    if backend is LinearBackend.REFERENCE and find_spec("triton") is not None:
        return None  # it shares the kernels' files, not their device
    asked, remedy = f'{_KEY} = "{backend.value}"', f'use {_KEY} = "triton" to run without it'
    if backend not in (LinearBackend.TRITON, LinearBackend.REFERENCE):
        reason = kernels.hopper_reason(asked, remedy)
        if reason is not None:
            return reason
    reason = kernels.unavailable_reason("triton")  # the casts are ours
    if reason is not None:
        return f"{asked}: {reason}"
    if backend is LinearBackend.TRITON:
        return None
    if backend is not LinearBackend.DEEP_GEMM and (reason := _scaled_mm_reason()) is not None:
        return f"{reason}; {remedy}"
    if backend is not LinearBackend.SCALED_MM:
        return deep_gemm_reason(_KEY, _NEEDED)
    return None


def _scaled_mm_reason() -> str | None:
    found = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if found < _FIRST_CUDA:
        return (
            f'{_KEY} = "scaled_mm" needs a torch built for CUDA {_FIRST_CUDA[0]}.{_FIRST_CUDA[1]} '
            f"or later, this one is for {torch.version.cuda}"
        )
    return None


@lru_cache(maxsize=16)
def dense_layout(num_rows: int, device: torch.device) -> Layout:
    """All rows in order, in one group. Shared: nobody writes to it."""
    padded = -(-num_rows // BLOCK) * BLOCK
    with torch.inference_mode(False):
        row_N = torch.arange(num_rows, dtype=torch.int32, device=device)
        pair_P = row_N.new_full((padded,), -1)
        pair_P[:num_rows] = row_N
        return Layout(
            pair_P,
            row_N.unsqueeze(1),
            row_N.new_zeros(padded // BLOCK),
            torch.tensor([0, padded], dtype=torch.int32, device=device),
            torch.tensor([num_rows], dtype=torch.int32, device=device),
        )


# Products with the signature of `grouped_gemm`: x in row groups with scale [I/128, P], weights
# [1, O, I] in blocks -> [P, O] bf16; rows of padding hold anything.


def _by_scaled_mm(
    x: Quantized, weights: Quantized, layout: Layout, *, gemm_sms: int | None = None
) -> Tensor:
    if not scaled_mm_fits(x.data.shape[1]) or not layout.num_rows:
        own = expert_kernels(ExpertBackend.TRITON)
        return own.grouped_gemm(x, weights, layout, gemm_sms=gemm_sms)
    return torch._scaled_mm(
        x.data,
        weights.data[0].t(),
        scale_a=x.scale.t(),
        scale_b=weights.scale[0].t(),
        out_dtype=torch.bfloat16,
    )


def _by_deep_gemm(
    x: Quantized, weights: Quantized, layout: Layout, *, gemm_sms: int | None = None
) -> Tensor:
    from ppruntime.models.kernels.deep_gemm import limited_to

    y_PO = x.data.new_empty(layout.num_rows, weights.data.shape[1], dtype=torch.bfloat16)
    if layout.num_rows:
        with limited_to(gemm_sms):
            deep_gemm_package().fp8_gemm_nt(
                (x.data, x.scale.t()), (weights.data[0], weights.scale[0]), y_PO
            )
    return y_PO


def _by_the_fastest(
    x: Quantized, weights: Quantized, layout: Layout, *, gemm_sms: int | None = None
) -> Tensor:
    _, outs, ins = weights.data.shape
    if (outs, ins) in _FASTER_BY_SCALED_MM:
        return _by_scaled_mm(x, weights, layout, gemm_sms=gemm_sms)
    return _by_deep_gemm(x, weights, layout, gemm_sms=gemm_sms)
