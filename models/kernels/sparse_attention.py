"""Sparse attention in Triton: the same function as models/sparse_attention.py, for Hopper.

The op, its launches and what it checks. The kernels are in sparse_attention_kernels.py (Triton, any
shape) and sparse_attention_hopper.py (Gluon, the models' full width on a Hopper).

One program per query: its H heads are the rows of every product, its listed keys are gathered
`block` slots at a time. The forward is an online softmax. The backward computes the weights again
from the saved log-sum-exp and gives dq to the query, and to each listed key, which is a value too,
    dkey[n] += sum over heads of  weight * dout + dscore * q,
added up over queries by atomic adds in one of two ways:

- fp32: fast, but the order of the queries is not fixed, so the last bits differ from run to run;
- deterministic: as 64-bit fixed point, whose sums do not depend on any order. Twice the bytes of
  the atomic adds and a [B, N, K] int64 buffer; no sort and no second pass over queries. The unit is
  2^-61 of a bound on any sum that the inputs' largest values allow, far below fp32's last bit.

Numeric class: summation order (sums over slots in blocks, exp2 for exp, weights in the keys' dtype
before the value product). The fused rotation saves one rounding against the reference.

Shape letters: B sequences, T queries, H heads, K head width, N keys, W slots, P rotated pairs.
Sources: online softmax and its backward as in Dao 2023 (FlashAttention-2), algorithms 1 and 2.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ppruntime.models.kernels.sparse_attention_kernels import (
    INTERPRETED,
    backward_kernel,
    forward_kernel,
)
from ppruntime.models.rope import Rotation


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut: slots per step, warps per program, software pipeline depth."""

    block: int
    num_warps: int
    num_stages: int
    hopper: bool = False
    """The Gluon kernels, which set their own pipeline: `fits_hopper` says for which inputs."""

    def __str__(self) -> str:
        if self.hopper:
            return "hopper"
        return f"{self.block} slots, {self.num_warps} warps, {self.num_stages} stages"


HOPPER_TILES = Tiles(64, 8, 1, hopper=True)
FORWARD_TILES = Tiles(64, 8, 2)
BACKWARD_TILES = Tiles(64, 8, 1)
"""One stage: the query's q and dout and one block of keys fill the shared memory."""

FORWARD_TILES_TO_TRY = (FORWARD_TILES, Tiles(32, 8, 5), HOPPER_TILES)
BACKWARD_TILES_TO_TRY = (BACKWARD_TILES, HOPPER_TILES)
"""What the bench measures."""


@functools.cache
def _has_gluon() -> bool:
    return importlib.util.find_spec("triton.experimental.gluon") is not None


def fits_hopper(q_BTHK: Tensor, num_pairs: int) -> bool:
    """Whether the Gluon kernels take these queries: bf16, 64 heads of 512 channels, on a Hopper."""
    return (
        q_BTHK.is_cuda
        and torch.cuda.get_device_capability(q_BTHK.device)[0] == 9
        and q_BTHK.dtype is torch.bfloat16
        and q_BTHK.shape[2:] == (64, 512)
        and num_pairs in (0, 32)
        and _has_gluon()
    )


def sparse_attention(
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    rotation: tuple[Tensor, Tensor] | None = None,
    *,
    deterministic: bool = False,
    check_slots: bool = False,
    library: bool = False,
) -> Tensor:
    """[B, T, H, K] in q's dtype: softmax-weighted sum of the listed keys, which are values too.

    slots_BTW (int) lists rows of keys_BNK in any order; -1 is empty. The sink is a logit in every
    head's softmax that brings no value; -inf is none. `rotation` (cos, sin, each fp32 [B, T, P],
    without gradient) turns the output's last 2P channels back, as `rotate(..., inverse=True)` does.
    `deterministic` makes the keys' gradient bitwise repeatable; everything else always is.
    `library`: by the packages of sparse_attention_library.py, which cannot be deterministic.

    A slot of N or more makes the query's output NaN; `check_slots` raises IndexError instead and
    waits for the device. bf16; fp32 in the interpreter. Raises ValueError for shapes and dtypes
    that the kernels do not take, RuntimeError where they cannot run.
    """
    if deterministic and library:
        raise ValueError("sparse_attention: the library's key gradients are never deterministic")
    if check_slots:
        _check_slots(slots_BTW, keys_BNK.shape[1])
    cos, sin = (None, None) if rotation is None else rotation
    out_BTHK: Tensor
    out_BTHK, _ = _attend(
        q_BTHK, keys_BNK, slots_BTW.int(), sink_H, cos, sin, deterministic, library
    )
    return out_BTHK


def _check_slots(slots_BTW: Tensor, num_keys: int) -> None:
    low, high = (int(x) for x in slots_BTW.aminmax()) if slots_BTW.numel() else (-1, -1)
    if low < -1 or high >= num_keys:
        raise IndexError(
            f"slots run from {low} to {high}, but there are {num_keys} keys; "
            "a slot is a key's row or -1 for none"
        )


# The ops


@torch.library.custom_op("ppruntime::sparse_attention", mutates_args=())
def _attend(
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    cos_BTP: Tensor | None,
    sin_BTP: Tensor | None,
    deterministic: bool,
    library: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, K], lse [B, T, H] fp32: natural log, the sink included by the own kernels)."""
    if library and q_BTHK.numel():
        _check_inputs(q_BTHK, keys_BNK, slots_BTW, sink_H, cos_BTP, sin_BTP)
        rotation = _rotation(cos_BTP, sin_BTP)
        found: tuple[Tensor, Tensor] = _library().run_forward(
            q_BTHK, keys_BNK, slots_BTW, sink_H, rotation
        )
        return found
    return run_forward(q_BTHK, keys_BNK, slots_BTW, sink_H, cos_BTP, sin_BTP)


@_attend.register_fake
def _(
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    cos_BTP: Tensor | None,
    sin_BTP: Tensor | None,
    deterministic: bool,
    library: bool = False,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_BTHK, memory_format=torch.contiguous_format)
    return out, q_BTHK.new_empty(q_BTHK.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("ppruntime::sparse_attention_backward", mutates_args=())
def _attend_backward(
    dout_BTHK: Tensor,
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    cos_BTP: Tensor | None,
    sin_BTP: Tensor | None,
    out_BTHK: Tensor,
    lse_BTH: Tensor,
    deterministic: bool,
    library: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, keys and sink, each in its tensor's dtype."""
    if library and q_BTHK.numel():
        rotation = _rotation(cos_BTP, sin_BTP)
        grads: tuple[Tensor, Tensor, Tensor] = _library().run_backward(
            dout_BTHK, q_BTHK, keys_BNK, slots_BTW, sink_H, rotation, out_BTHK, lse_BTH
        )
        return grads
    return run_backward(
        dout_BTHK,
        q_BTHK,
        keys_BNK,
        slots_BTW,
        sink_H,
        cos_BTP,
        sin_BTP,
        out_BTHK,
        lse_BTH,
        deterministic=deterministic,
    )


@_attend_backward.register_fake
def _(
    dout_BTHK: Tensor,
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    cos_BTP: Tensor | None,
    sin_BTP: Tensor | None,
    out_BTHK: Tensor,
    lse_BTH: Tensor,
    deterministic: bool,
    library: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(q_BTHK, memory_format=contiguous),
        torch.empty_like(keys_BNK, memory_format=contiguous),
        torch.empty_like(sink_H, memory_format=contiguous),
    )


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q_BTHK, keys_BNK, slots_BTW, sink_H, cos_BTP, sin_BTP, *ctx.options = inputs
    out_BTHK, lse_BTH = output
    ctx.mark_non_differentiable(lse_BTH)
    ctx.save_for_backward(q_BTHK, keys_BNK, slots_BTW, sink_H, cos_BTP, sin_BTP, out_BTHK, lse_BTH)


def _backward(ctx, dout_BTHK: Tensor, _: Tensor | None):  # type: ignore[no-untyped-def]
    dq, dkeys, dsink = _attend_backward(dout_BTHK, *ctx.saved_tensors, *ctx.options)
    return dq, dkeys, None, dsink, None, None, None, None


_attend.register_autograd(_backward, setup_context=_setup_context)


# Launches


def run_forward(
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    cos_BTP: Tensor | None = None,
    sin_BTP: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as the op gives them; no gradient. The bench picks `tiles`, others leave it."""
    _check_inputs(q_BTHK, keys_BNK, slots_BTW, sink_H, cos_BTP, sin_BTP)
    batch, num_queries, num_heads, width = q_BTHK.shape
    out_BTHK = torch.empty_like(q_BTHK, memory_format=torch.contiguous_format)
    lse_BTH = q_BTHK.new_empty(q_BTHK.shape[:-1], dtype=torch.float32)
    if q_BTHK.numel() == 0:
        return out_BTHK, lse_BTH
    num_pairs = 0 if cos_BTP is None else cos_BTP.shape[-1]
    tiles = tiles or _tiles(q_BTHK, num_pairs, FORWARD_TILES)
    kernel = _hopper().forward_kernel if tiles.hopper else forward_kernel
    kernel[(batch * num_queries,)](
        q_BTHK.contiguous(),
        keys_BNK.contiguous(),
        slots_BTW.contiguous(),
        sink_H.float().contiguous(),
        None if cos_BTP is None else cos_BTP.contiguous(),
        None if sin_BTP is None else sin_BTP.contiguous(),
        out_BTHK,
        lse_BTH,
        num_queries,
        keys_BNK.shape[1],
        slots_BTW.shape[2],
        width**-0.5 * math.log2(math.e),
        H=num_heads,
        K=width,
        P=num_pairs,
        BLOCK=tiles.block,
        ALL_SLOTS=_padded(slots_BTW.shape[2]),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out_BTHK, lse_BTH


def run_backward(
    dout_BTHK: Tensor,
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    cos_BTP: Tensor | None,
    sin_BTP: Tensor | None,
    out_BTHK: Tensor,
    lse_BTH: Tensor,
    *,
    deterministic: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dkeys, dsink) as the op gives them. The bench picks `tiles`, others leave it."""
    batch, num_queries, num_heads, width = q_BTHK.shape
    dq_BTHK = torch.empty_like(q_BTHK, memory_format=torch.contiguous_format)
    dsink_BTH = torch.empty_like(lse_BTH)
    if q_BTHK.numel() == 0:
        return dq_BTHK, torch.zeros_like(keys_BNK), torch.zeros_like(sink_H)
    sums_dtype = torch.int64 if deterministic else torch.float32
    sums_BNK = torch.zeros(keys_BNK.shape, dtype=sums_dtype, device=keys_BNK.device)
    unit = _fixed_point_unit(dout_BTHK, q_BTHK, keys_BNK) if deterministic else None
    num_pairs = 0 if cos_BTP is None else cos_BTP.shape[-1]
    tiles = tiles or _tiles(q_BTHK, num_pairs, BACKWARD_TILES)
    kernel = _hopper().backward_kernel if tiles.hopper else backward_kernel
    kernel[(batch * num_queries,)](
        dout_BTHK.contiguous(),
        q_BTHK.contiguous(),
        keys_BNK.contiguous(),
        slots_BTW.contiguous(),
        sink_H.float().contiguous(),
        None if cos_BTP is None else cos_BTP.contiguous(),
        None if sin_BTP is None else sin_BTP.contiguous(),
        out_BTHK,
        lse_BTH,
        unit,
        dq_BTHK,
        sums_BNK,
        dsink_BTH,
        num_queries,
        keys_BNK.shape[1],
        slots_BTW.shape[2],
        width**-0.5,
        H=num_heads,
        K=width,
        P=num_pairs,
        BLOCK=tiles.block,
        ALL_SLOTS=_padded(slots_BTW.shape[2]),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if unit is not None:
        sums_BNK = sums_BNK.to(torch.float32) * unit
    return dq_BTHK, sums_BNK.to(keys_BNK.dtype), dsink_BTH.sum((0, 1)).to(sink_H.dtype)


def _tiles(q_BTHK: Tensor, num_pairs: int, otherwise: Tiles) -> Tiles:
    return HOPPER_TILES if fits_hopper(q_BTHK, num_pairs) else otherwise


def _hopper() -> ModuleType:
    # Where Triton has no Gluon, nothing asks for this.
    return importlib.import_module("ppruntime.models.kernels.sparse_attention_hopper")


def _library() -> Any:
    # Imported, and the packages with it, only where it is chosen.
    return importlib.import_module("ppruntime.models.kernels.sparse_attention_library")


def _rotation(cos_BTP: Tensor | None, sin_BTP: Tensor | None) -> Rotation | None:
    return None if cos_BTP is None or sin_BTP is None else Rotation(cos_BTP, sin_BTP)


def _padded(num_slots: int) -> int:
    """A power of two that holds the list; the usual lengths share one, and so one kernel."""
    return max(1024, 1 << (num_slots - 1).bit_length())


def _fixed_point_unit(dout_BTHK: Tensor, q_BTHK: Tensor, keys_BNK: Tensor) -> Tensor:
    """What 1 in the int64 sums stands for: a power of two, or NaN where an input is not finite.

    A head's weights sum to at most 1 over the slots of a query. So whatever the order, no partial
    sum of weight * dout + dscore * q exceeds
        T H (max|dout| + 2 K^-1/2 max|dout . key| max|q|),  |dout . key| <= K max|dout| max|key|.
    A factor of 4 covers the rotation of dout and bf16 weights; the sums get 61 bits.
    """
    num_queries, num_heads, width = q_BTHK.shape[1:]
    largest_dout, largest_q, largest_key = (
        torch.linalg.vector_norm(x, math.inf).double() for x in (dout_BTHK, q_BTHK, keys_BNK)
    )
    of_scores = 2 * width**0.5 * largest_key * largest_q
    bound = 4 * num_queries * num_heads * largest_dout * (1 + of_scores)
    exponent = torch.log2(bound).ceil().clamp_min(-60) - 61
    unit = torch.exp2(exponent).float()
    return torch.where(torch.isfinite(bound), unit, torch.nan)


def _check_inputs(
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    cos_BTP: Tensor | None,
    sin_BTP: Tensor | None,
) -> None:
    """Raises ValueError unless the kernels take these tensors, RuntimeError without a device."""
    place = "sparse_attention"
    if q_BTHK.dim() != 4 or keys_BNK.dim() != 3 or slots_BTW.dim() != 3:
        raise ValueError(
            f"{place}: q, keys and slots have {q_BTHK.dim()}, {keys_BNK.dim()} and "
            f"{slots_BTW.dim()} dimensions; they are [B, T, H, K], [B, N, K] and [B, T, W]"
        )
    batch, num_queries, num_heads, width = q_BTHK.shape
    shapes = (
        ("keys", keys_BNK, (batch, keys_BNK.shape[1], width)),
        ("slots", slots_BTW, (batch, num_queries, slots_BTW.shape[2])),
        ("sink", sink_H, (num_heads,)),
    )
    for name, tensor, expected in shapes:
        if tensor.shape != expected:
            raise ValueError(
                f"{place}: {name} is {list(tensor.shape)}, but with q {list(q_BTHK.shape)} it "
                f"has to be {list(expected)}"
            )
        if tensor.device != q_BTHK.device:
            raise ValueError(f"{place}: {name} is on {tensor.device}, q on {q_BTHK.device}")
    if num_heads < 16 or num_heads & (num_heads - 1) or width < 32 or width & (width - 1):
        raise ValueError(
            f"{place}: {num_heads} heads of {width} channels; the kernels take powers of two "
            "from 16 heads and 32 channels, the reference takes any"
        )
    if keys_BNK.shape[1] == 0 or keys_BNK.shape[1] * width >= 1 << 31:
        raise ValueError(
            f"{place}: {keys_BNK.shape[1]} keys of {width} channels a sequence; the kernels take "
            "at least one and fewer than 2^31 numbers"
        )
    if q_BTHK.dtype != keys_BNK.dtype or q_BTHK.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"{place}: q is {q_BTHK.dtype} and keys {keys_BNK.dtype}; both have to be bfloat16 "
            "(or float32 in the interpreter)"
        )
    if slots_BTW.dtype != torch.int32:
        raise ValueError(f"{place}: slots are {slots_BTW.dtype}; they have to be int32")
    if (cos_BTP is None) != (sin_BTP is None):
        raise ValueError(f"{place}: a rotation is cosines and sines, one of them is missing")
    if cos_BTP is not None and sin_BTP is not None:
        expected = (batch, num_queries, cos_BTP.shape[-1])
        if cos_BTP.shape != expected or sin_BTP.shape != expected or 4 * expected[2] > width:
            raise ValueError(
                f"{place}: cosines {list(cos_BTP.shape)} and sines {list(sin_BTP.shape)} have to "
                f"be [{batch}, {num_queries}, P] with P at most {width // 4}"
            )
        if cos_BTP.dtype != torch.float32 or sin_BTP.dtype != torch.float32:
            raise ValueError(f"{place}: cosines are {cos_BTP.dtype}; they have to be float32")
    _check_device(q_BTHK)


def _check_device(q_BTHK: Tensor) -> None:
    if not q_BTHK.is_cuda and not INTERPRETED.value:
        raise RuntimeError(
            f"sparse_attention: the kernels need a CUDA device, q is on {q_BTHK.device}; use the "
            "reference, or set TRITON_INTERPRET=1 before the first import"
        )
    if q_BTHK.is_cuda and q_BTHK.dtype != torch.bfloat16:
        raise ValueError(
            f"sparse_attention: q is {q_BTHK.dtype}; on a GPU the kernels take bfloat16"
        )
