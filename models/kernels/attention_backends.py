"""Which kernels compute attention's operations, and why one cannot run here.

Optional packages are found by capability and imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ppruntime.models import kernels
from ppruntime.models.attention_kernels import REFERENCE, AttentionKernels
from ppruntime.models.dims import ModelDims
from ppruntime.models.kernel_limits import BACKENDS, AttentionOp, Backend, misfit


@dataclass(frozen=True, slots=True)
class Target:
    """What a backend has to run: a model's sizes, in a type, on a device."""

    dims: ModelDims
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend for every operation."""

    attention: Backend = Backend.REFERENCE
    indexer: Backend = Backend.REFERENCE
    rope: Backend = Backend.REFERENCE
    grouped_output: Backend = Backend.REFERENCE
    norm: Backend = Backend.REFERENCE
    compressor: Backend = Backend.REFERENCE
    deterministic: bool = False
    """Triton's attention: gradients of keys are bitwise the same from run to run."""


def unavailable_reason(op: AttentionOp, backend: Backend, target: Target) -> str | None:
    """Why the backend cannot compute `op` there, in a clause that names what is missing and how to
    get it; None if it can. Raises ValueError for a backend that `op` does not have."""
    if backend not in BACKENDS[op]:
        names = ", ".join(b.value for b in BACKENDS[op])
        raise ValueError(f"{op.value} has no backend {backend.value}; there are: {names}")
    if backend is Backend.REFERENCE or op is AttentionOp.GROUPED_OUTPUT:
        return None
    if op is AttentionOp.COMPRESSOR:
        is_low = target.dtype is torch.bfloat16
        return None if is_low else f"it is for bfloat16 models, this one is in {target.dtype}"
    reason = misfit(op, backend, target.dims)
    if reason is not None:
        return reason
    if backend is Backend.LIBRARY:
        from ppruntime.models.kernels import indexer_library, sparse_attention_library

        if op is AttentionOp.INDEXER:
            return indexer_library.unavailable_reason(target.device, target.dtype)
        return sparse_attention_library.unavailable_reason(target.device, target.dtype)
    if target.device.type == "cpu" and not kernels.is_interpreted():
        return "the model is on the CPU; TRITON_INTERPRET=1 runs the kernels there, slowly"
    if target.dtype not in (torch.bfloat16, torch.float32):
        return f"the kernels take bfloat16 and float32, the model is in {target.dtype}"
    is_narrow = op is AttentionOp.ATTENTION and target.device.type != "cpu"
    if is_narrow and target.dtype is not torch.bfloat16:
        return f"on a GPU the kernels take bfloat16, the model is in {target.dtype}"
    return kernels.unavailable_reason("triton")


def fastest(op: AttentionOp, target: Target, *, deterministic: bool = False) -> Backend:
    """The first of the operation's backends that can run there.

    Interpreted kernels are for tests, and a CPU gains nothing from bf16 products, so it gets the
    reference. `deterministic`: no backend that
    cannot be.
    """
    for backend in BACKENDS[op]:
        is_for_gpus = backend is Backend.TRITON or op is AttentionOp.COMPRESSOR
        if is_for_gpus and target.device.type == "cpu" and backend is not Backend.REFERENCE:
            continue
        if op is AttentionOp.ATTENTION and deterministic and backend is Backend.LIBRARY:
            continue
        if unavailable_reason(op, backend, target) is None:
            return backend
    raise AssertionError(f"{op.value} has no reference")


def attention_kernels(choice: Choice) -> AttentionKernels:
    """The chosen functions. Ask `unavailable_reason` first: this imports what they need."""
    found: dict[str, Callable[..., Any]] = {}
    if choice.attention is not Backend.REFERENCE:
        from ppruntime.models.kernels.sparse_attention import sparse_attention

        found["attend"] = partial(
            sparse_attention,
            deterministic=choice.deterministic,
            library=choice.attention is Backend.LIBRARY,
        )
    if choice.indexer is Backend.TRITON:
        from ppruntime.models.kernels import indexer

        found["select"] = indexer.select_entries
    if choice.indexer is Backend.LIBRARY:
        from ppruntime.models.kernels import indexer_library

        found["select"] = indexer_library.select_entries
    if choice.rope is Backend.TRITON:
        from ppruntime.models.kernels import rope

        found |= {"rotate": rope.rotate, "project_rotated": rope.project_rotated}
    if choice.grouped_output is Backend.LIBRARY:
        from ppruntime.models.kernels.grouped_output import grouped_output

        found["grouped"] = grouped_output
    if choice.norm is Backend.TRITON:
        from ppruntime.models.kernels.norm import rms_norm

        found["norm"] = rms_norm
    if choice.compressor is Backend.LIBRARY:
        from ppruntime.models.kernels.wide_linear import wide_products

        found["wide_products"] = wide_products
    return replace(REFERENCE, **found)
