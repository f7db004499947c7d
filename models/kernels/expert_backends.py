"""Which kernels compute the FP8 experts: torch's (the reference), Triton's, or deep_gemm's GEMMs.

Optional packages are found by capability and imported only when asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from ppruntime.models import kernels

_NEEDED = ("m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous", "set_num_sms")
_REMEDY = 'use moe.compute.backend = "triton" to run without it'


class ExpertBackend(Enum):
    """How the experts' passes are computed. All follow one recipe."""

    REFERENCE = "reference"
    """torch, anywhere: slow, for tests and as the yardstick."""
    TRITON = "triton"
    """Own kernels; weight gradients are bitwise independent of fused micro-batches."""
    DEEP_GEMM = "deep_gemm"
    """The GEMMs of the package deep_gemm between own passes. Sums in another order."""


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """One function per pass, with the signature of the Triton function of the same name."""

    expert_layout: Callable[..., Any]
    quantize_rows: Callable[..., Any]
    gather_rows: Callable[..., Any]
    grouped_gemm: Callable[..., Tensor]
    swiglu: Callable[..., Any]
    gather_sum: Callable[..., Tensor]
    quantize_routed: Callable[..., Any]
    swiglu_backward: Callable[..., Any]
    grouped_weight_grad: Callable[..., None]
    quantize_blocks: Callable[..., Any]
    transpose_blocks: Callable[..., Any]
    dense_columns: bool = False
    """Whether weight gradients of one group take columns as one matrix, see `quantize_routed`."""


def expert_kernels(backend: ExpertBackend) -> ExpertKernels:
    """The backend's functions. Raises RuntimeError with `unavailable_reason` if it cannot run."""
    reason = unavailable_reason(backend)
    if reason is not None:
        raise RuntimeError(reason)
    if backend is ExpertBackend.REFERENCE:
        from ppruntime.models.kernels import moe_reference

        names = ExpertKernels.__dataclass_fields__.keys() - {"dense_columns"}
        return ExpertKernels(**{name: getattr(moe_reference, name) for name in names})
    from ppruntime.models.kernels import deep_gemm, grouped_gemm, moe_layout, quantize, swiglu

    own = ExpertKernels(
        expert_layout=moe_layout.expert_layout,
        quantize_rows=quantize.quantize_rows,
        gather_rows=moe_layout.gather_rows,
        grouped_gemm=grouped_gemm.grouped_gemm,
        swiglu=swiglu.swiglu,
        gather_sum=moe_layout.gather_sum,
        quantize_routed=quantize.quantize_routed,
        swiglu_backward=swiglu.swiglu_backward,
        grouped_weight_grad=grouped_gemm.grouped_weight_grad,
        quantize_blocks=quantize.quantize_blocks,
        transpose_blocks=quantize.transpose_blocks,
    )
    if backend is ExpertBackend.TRITON:
        return own
    return replace(
        own,
        grouped_gemm=deep_gemm.grouped_gemm,
        grouped_weight_grad=deep_gemm.expert_weight_grad,
    )


def unavailable_reason(backend: ExpertBackend) -> str | None:
    """Why the backend cannot run here, in a sentence that says what to do; None if it can."""
    # The reference shares the kernels' files and types, not their device.
    if backend is ExpertBackend.REFERENCE and find_spec("triton") is not None:
        return None
    asked = f'moe.compute.backend = "{backend.value}"'
    if backend is ExpertBackend.DEEP_GEMM:
        reason = kernels.hopper_reason(asked, _REMEDY)
        if reason is not None:
            return reason
    reason = kernels.unavailable_reason("triton")  # the passes around the products are ours
    if reason is not None:
        return f"{asked}: {reason}"
    return None if backend is ExpertBackend.TRITON else _deep_gemm_reason()


def _deep_gemm_reason() -> str | None:
    return deep_gemm_reason("moe.compute.backend", _NEEDED)


def deep_gemm_reason(key: str, needed: Sequence[str]) -> str | None:
    """Why the package, which the config's `key` asks for, does not work with the functions
    `needed`; None if it does."""
    asked = f'{key} = "deep_gemm"'
    remedy = f'use {key} = "triton" to run without it'
    if find_spec("deep_gemm") is None:
        return (
            f"{asked} needs the package deep_gemm, which is not installed; "
            f"install ppruntime[deep-gemm] (built for torch 2.11, CUDA 13) or {remedy}"
        )
    try:
        package = deep_gemm_package()
    except AssertionError:  # its way to say that it found no CUDA toolkit
        return f"{asked} compiles its kernels and finds no nvcc; set CUDA_HOME or {remedy}"
    except (ImportError, OSError) as error:
        return f"{asked}: importing deep_gemm failed with: {error}; {remedy}"
    missing = [name for name in needed if not hasattr(package, name)]
    if missing:
        return f"{asked}: this deep_gemm has no {', '.join(missing)}; {remedy}"
    return None


def deep_gemm_package() -> ModuleType:
    """The package itself; importing it reads CUDA_HOME."""
    return importlib.import_module("deep_gemm")
