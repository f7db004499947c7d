# mypy: disable-error-code="no-untyped-call"
"""Sparse attention by two optional packages: FlashMLA forward, cuDNN's frontend backward.

The same function as in sparse_attention.py beside this file, behind the same op, for bf16, 64 heads
of 512 channels and a Hopper. Neither package knows of rotations or of batches:

- a batch is one long sequence, each row's slots moved by the keys of the rows before;
- the output is turned back in place after the forward; the backward turns it and its gradient
  forth again for as long as they are read.

Unlike the own kernels, a slot of N or more is an empty one, and the keys' gradient is summed by
fp32 atomic adds in bf16's precision at the end: it is not bitwise from run to run.

FlashMLA reads lists in multiples of 128 slots, -1 being empty. Its log-sum-exp is natural and
without the sink, as the backward wants it (both measured on an H200). A query without any slot has
an infinite one, of which the backward would make NaN.

Sources: `flash_mla_sparse_fwd` of FlashMLA, `DSA.sparse_attention_backward_wrapper` of
cudnn-frontend.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ppruntime.models.rope import Rotation

_SLOT_BLOCK = 128
_INSTALL = "pip install 'ppruntime[attention]'"
_REMEDY = 'or use kernels.attention = "triton"'


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the packages cannot run there, and what to do; None if they can. Imports them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"FlashMLA and cuDNN's backward need a Hopper GPU (sm_90); {_REMEDY[3:]}"
    if dtype is not torch.bfloat16:
        return f"the packages take bfloat16, the model is in {dtype}"
    for module, distribution, names in (
        ("flash_mla", "tokenspeed-flashmla", ("flash_mla_sparse_fwd",)),
        ("cudnn", "nvidia-cudnn-frontend", ("DSA",)),
    ):
        if find_spec(module) is None:
            return f"the package {distribution} is not installed; {_INSTALL} {_REMEDY}"
        try:
            package = importlib.import_module(module)
            missing = [name for name in names if not hasattr(package, name)]
        except Exception as error:  # whatever a binary of another build raises
            return f"importing {module} failed with: {error}; {_INSTALL} {_REMEDY}"
        if missing:
            return f"the installed {module} has no {', '.join(missing)}; {_INSTALL} {_REMEDY}"
    return None


def _flash_mla() -> ModuleType:
    return importlib.import_module("flash_mla")


def _dsa() -> Any:  # the package has no types
    return importlib.import_module("cudnn").DSA


def run_forward(
    q_BTHK: Tensor, keys_BNK: Tensor, slots_BTW: Tensor, sink_H: Tensor, rotation: Rotation | None
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, K], lse [B, T, H] fp32: natural, without the sink)."""
    from ppruntime.models.kernels.rope import turn_

    batch, num_queries, _, width = q_BTHK.shape
    out_NHK, _, lse_NH = _flash_mla().flash_mla_sparse_fwd(
        q_BTHK.contiguous().flatten(0, 1),
        keys_BNK.contiguous().view(-1, 1, width),
        _flat_slots(slots_BTW, keys_BNK.shape[1], _SLOT_BLOCK).unsqueeze(1),
        width**-0.5,
        d_v=width,
        attn_sink=sink_H.float().contiguous(),
    )
    lse_NH = lse_NH.masked_fill(lse_NH.isinf(), 0.0)
    out_BTHK = out_NHK.contiguous().unflatten(0, (batch, num_queries))
    if rotation is not None:
        turn_(out_BTHK, rotation, inverse=True)
    return out_BTHK, lse_NH.contiguous().unflatten(0, (batch, num_queries))


def run_backward(
    dout_BTHK: Tensor,
    q_BTHK: Tensor,
    keys_BNK: Tensor,
    slots_BTW: Tensor,
    sink_H: Tensor,
    rotation: Rotation | None,
    out_BTHK: Tensor,
    lse_BTH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, keys and sink, each in its tensor's dtype."""
    dout_BTHK = dout_BTHK.contiguous()
    if dout_BTHK.data_ptr() == out_BTHK.data_ptr():  # which would be turned twice
        dout_BTHK = dout_BTHK.clone()
    with _as_it_was(out_BTHK, rotation), _as_it_was(dout_BTHK, rotation):
        found = _dsa().sparse_attention_backward_wrapper(
            q_BTHK.contiguous().flatten(0, 1),
            keys_BNK.contiguous().flatten(0, 1),
            out_BTHK.flatten(0, 1),
            dout_BTHK.flatten(0, 1),
            lse_BTH.flatten(0, 1),
            sink_H.float().contiguous(),
            _flat_slots(slots_BTW, keys_BNK.shape[1], 1),
            softmax_scale=q_BTHK.shape[-1] ** -0.5,
        )
    dq, dkeys, dsink = found["dq"], found["dkv"], found["d_sink"]
    return dq.view_as(q_BTHK), dkeys.view_as(keys_BNK), dsink.to(sink_H.dtype)


@contextmanager
def _as_it_was(out_BTHK: Tensor, rotation: Rotation | None) -> Iterator[None]:
    """Inside, an output or its gradient is as before the output was turned: its last channels are
    turned forth where they lie, and afterwards they are what they were, to the bit, for whoever
    else holds the tensor. A turned copy would move 1.07 GB, this 0.40 (8,192 tokens)."""
    from ppruntime.models.kernels.rope import put_back_, turn_for_a_while_

    if rotation is None:
        yield
        return
    # By kernels, which autograd does not see: what others saved of it is unchanged afterwards.
    kept = turn_for_a_while_(out_BTHK, rotation)
    try:
        yield
    finally:
        put_back_(out_BTHK, kept)


def _flat_slots(slots_BTW: Tensor, num_keys: int, multiple: int) -> Tensor:
    """[B T, W'] int32 rows of all sequences' keys; W' is W filled up with -1 to the multiple."""
    if slots_BTW.shape[0] > 1:
        first_B11 = torch.arange(slots_BTW.shape[0], device=slots_BTW.device).view(-1, 1, 1)
        is_key = (slots_BTW >= 0) & (slots_BTW < num_keys)
        slots_BTW = torch.where(is_key, slots_BTW + first_B11 * num_keys, -1).int()
    slots_NW = slots_BTW.flatten(0, 1)
    missing = -slots_NW.shape[1] % multiple
    return functional.pad(slots_NW, (0, missing), value=-1) if missing else slots_NW.contiguous()
