"""One residual stream around a sublayer in Triton: models/single_stream.py and the norm, fused.

`read` norms the stream and makes the gate in one pass, `write` adds the sublayer's output. The
gradient of the stream is formed once: `write` hands back the gradient of its result as it came, and
`read`'s backward adds it to what comes through norm and gate. So the handle that `read` gives to
`write` is for `write` alone.

Bytes per unit of V4.1 at N = 8,192 tokens in bf16 (a stream is 83.9 MB):

    read             stream, x                                  0.168 GB
    write            stream, y, stream out                      0.252 GB
    write, backward  gradient, y, dy                            0.252 GB
    read, backward   dx, gradient, stream, gradient out         0.336 GB

For the backward stay y and, a token, 1 / rms, with a gate also its projection and the gate.

Numeric class: summation order.
Shape letters: N tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppruntime.models.kernels import single_stream_kernels as kernels
from ppruntime.models.kernels.rounding import INTERPRETED
from ppruntime.models.kernels.token_shares import SHARES, tokens_per_program
from ppruntime.models.norm import RMSNorm
from ppruntime.models.single_stream import LayerScale, PostGate

_BLOCK = 1024
"""Channels that one program works on where nothing is summed."""
_STAGES = 3
"""Tokens that a program which goes through many has under way."""


def read(
    connection: PostGate | LayerScale, norm: RMSNorm, stream_BT1D: Tensor, mix: None
) -> tuple[Tensor, Tensor, Tensor]:
    """(the sublayer's input [B, T, D], a handle for `write` in the stream's place, the factor
    [B, T, 1] or [D]).

    Raises ValueError for dtypes that the kernels do not take, RuntimeError where they cannot run.
    """
    assert mix is None, "one stream is not mixed"
    _check(connection, norm, stream_BT1D)
    lead, stream_ND = stream_BT1D.shape[:2], stream_BT1D.flatten(0, 2)
    gate: tuple[Tensor | None, ...] = (None, None, None)
    if isinstance(connection, PostGate):
        gate = (connection.projection.weight, connection.base, connection.scale)
    x, handle, factor = _Read.apply(  # type: ignore[no-untyped-call]
        stream_ND, norm.weight, *gate, norm.eps
    )
    factor = connection.scale if gate[0] is None else factor.view(*lead, 1)
    return x.unflatten(0, lead), handle.view_as(stream_BT1D), factor


def write(handle_BT1D: Tensor, y_BTD: Tensor, factor: Tensor) -> Tensor:
    """The stream after the sublayer, as `models.single_stream.write`. The handle is `read`'s.
    Raises ValueError for shapes and dtypes that do not belong together."""
    per_token = factor.dim() == 3
    batch, num_tokens, _, width = handle_BT1D.shape
    of_factor = (batch, num_tokens, 1) if per_token else (width,)
    if y_BTD.shape != (batch, num_tokens, width) or factor.shape != of_factor:
        raise ValueError(
            f"one stream: {list(handle_BT1D.shape)} takes y {[batch, num_tokens, width]} and a "
            f"factor {list(of_factor)}, got {list(y_BTD.shape)} and {list(factor.shape)}"
        )
    if y_BTD.dtype not in (torch.bfloat16, torch.float32) or factor.dtype != torch.float32:
        raise ValueError(
            f"one stream: y is {y_BTD.dtype} and the factor {factor.dtype}; they have to be "
            "bfloat16 or float32, and float32"
        )
    out: Tensor = _Write.apply(  # type: ignore[no-untyped-call]
        handle_BT1D.flatten(0, 2), y_BTD.flatten(0, 1), factor.flatten(), per_token
    )
    return out.view_as(handle_BT1D)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        gain: Tensor,
        weight: Tensor | None,
        base: Tensor | None,
        scale: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, inverse, projected, gate = _read(stream, gain, weight, base, scale, eps)
        ctx.set_materialize_grads(False)
        of_gate = () if weight is None else (weight, base, scale, projected)
        ctx.save_for_backward(stream, gain, inverse, *of_gate)
        return x, stream.view_as(stream), gate

    @staticmethod
    def backward(
        ctx: Any, dx: Tensor | None, dhandle: Tensor | None, dgate: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        stream, gain, inverse, *of_gate = ctx.saved_tensors
        weight, base, scale, projected = of_gate or (None, None, None, None)
        dx = torch.zeros_like(stream) if dx is None else dx
        if projected is not None and dgate is None:
            dgate = torch.zeros_like(projected)
        dstream, dgain, dweight, draw = _read_backward(
            dx, dhandle, stream, gain, inverse, weight, base, scale, projected, dgate
        )
        if weight is None:
            return dstream, dgain, None, None, None, None
        dscale = (draw * projected * inverse).sum().view(1)
        return dstream, dgain, dweight, draw.sum().view(1), dscale, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, y: Tensor, factor: Tensor, per_token: bool) -> Tensor:
        ctx.save_for_backward(y, factor)
        ctx.per_token = per_token
        out: Tensor = _write(handle, y, factor, per_token)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        y, factor = ctx.saved_tensors
        dout = dout.contiguous()
        return dout, *_write_backward(dout, y, factor, ctx.per_token), None


# The ops


@torch.library.custom_op("ppruntime::one_stream_read", mutates_args=())
def _read(
    stream: Tensor,
    gain: Tensor,
    weight: Tensor | None,
    base: Tensor | None,
    scale: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x [N, D], 1 / rms [N], projection [N], gate [N]); the last two empty without a weight."""
    outputs = _read_outputs(stream, weight)
    num_tokens, width = stream.shape
    if num_tokens:
        kernels.read_kernel[(num_tokens,)](
            stream.contiguous(), gain, weight, base, scale, *outputs, eps,
            width, _power_of_two(width), num_warps=8,
        )  # fmt: skip
    return outputs


def _read_outputs(stream: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens = stream.shape[0]
    num_gates = 0 if weight is None else num_tokens

    def wide(number: int) -> Tensor:
        return stream.new_empty(number, dtype=torch.float32)

    x = torch.empty_like(stream, memory_format=torch.contiguous_format)
    return x, wide(num_tokens), wide(num_gates), wide(num_gates)


@_read.register_fake
def _(
    stream: Tensor,
    gain: Tensor,
    weight: Tensor | None,
    base: Tensor | None,
    scale: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _read_outputs(stream, weight)


@torch.library.custom_op("ppruntime::one_stream_read_backward", mutates_args=())
def _read_backward(
    dx: Tensor,
    dhandle: Tensor | None,
    stream: Tensor,
    gain: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    base: Tensor | None,
    scale: Tensor | None,
    projected: Tensor | None,
    dgate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the stream, the norm's gain and the gate's weight, and of what each token's
    sigmoid got [N]; the last two empty without a weight."""
    num_tokens, width = stream.shape
    dstream = torch.empty_like(stream, memory_format=torch.contiguous_format)
    has_gate = weight is not None
    if num_tokens == 0:
        dweight = torch.zeros_like(weight) if weight is not None else inverse.new_empty(0)
        return dstream, torch.zeros_like(gain), dweight, inverse.new_empty(0)
    tokens = tokens_per_program(num_tokens)
    num_programs = -(-num_tokens // tokens)
    dgains = inverse.new_empty(num_programs, width)
    dweights = inverse.new_empty(num_programs if has_gate else 0, width)
    draw = inverse.new_empty(num_tokens if has_gate else 0)
    kernels.read_backward_kernel[(num_programs,)](
        dx.contiguous(), None if dhandle is None else dhandle.contiguous(), stream.contiguous(),
        gain, inverse, weight, base, scale, projected,
        None if dgate is None else dgate.contiguous(),
        dstream, dgains, dweights, draw, num_tokens, tokens, width, _power_of_two(width), _STAGES,
        num_warps=16,
    )  # fmt: skip
    dweight = dweights.sum(0, keepdim=True) if has_gate else inverse.new_empty(0)
    return dstream, dgains.sum(0).to(gain.dtype), dweight, draw


@_read_backward.register_fake
def _(
    dx: Tensor,
    dhandle: Tensor | None,
    stream: Tensor,
    gain: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    base: Tensor | None,
    scale: Tensor | None,
    projected: Tensor | None,
    dgate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(stream, memory_format=torch.contiguous_format),
        torch.empty_like(gain),
        inverse.new_empty(0) if weight is None else torch.empty_like(weight),
        inverse.new_empty(0 if weight is None else stream.shape[0]),
    )


@torch.library.custom_op("ppruntime::one_stream_write", mutates_args=())
def _write(stream: Tensor, y: Tensor, factor: Tensor, per_token: bool) -> Tensor:
    """[N, D]: stream + factor y; the factor is [N] if `per_token`, else [D]."""
    num_tokens, width = stream.shape
    out = torch.empty_like(stream, memory_format=torch.contiguous_format)
    if num_tokens:
        block = min(_BLOCK, max(16, _power_of_two(width)))
        kernels.write_kernel[(num_tokens, -(-width // block))](
            stream.contiguous(), y.contiguous(), factor.contiguous(), out, width, block, per_token,
            num_warps=4,
        )  # fmt: skip
    return out


@_write.register_fake
def _(stream: Tensor, y: Tensor, factor: Tensor, per_token: bool) -> Tensor:
    return torch.empty_like(stream, memory_format=torch.contiguous_format)


@torch.library.custom_op("ppruntime::one_stream_write_backward", mutates_args=())
def _write_backward(
    dout: Tensor, y: Tensor, factor: Tensor, per_token: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of y and of the factor."""
    num_tokens, width = y.shape
    dy = torch.empty_like(y, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return dy, torch.zeros_like(factor)
    tokens = tokens_per_program(num_tokens, 2 * SHARES)
    num_programs = -(-num_tokens // tokens)
    parts = factor.new_empty((num_tokens,) if per_token else (num_programs, width))
    kernels.write_backward_kernel[(num_programs,)](
        dout.contiguous(), y.contiguous(), factor.contiguous(), dy, parts, num_tokens, tokens,
        width, _power_of_two(width), per_token, _STAGES, num_warps=8,
    )  # fmt: skip
    return dy, parts if per_token else parts.sum(0)


@_write_backward.register_fake
def _(dout: Tensor, y: Tensor, factor: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
    dy = torch.empty_like(y, memory_format=torch.contiguous_format)
    return dy, torch.empty_like(factor)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _check(connection: PostGate | LayerScale, norm: RMSNorm, stream: Tensor) -> None:
    place = "gated residual" if isinstance(connection, PostGate) else "layerscale residual"
    width = norm.weight.numel()
    if stream.dim() != 4 or stream.shape[2:] != (1, width):
        raise ValueError(
            f"{place}: the stream is {list(stream.shape)}; with a norm's gain of {width} it has "
            f"to be [B, T, 1, {width}]"
        )
    if any(p.dtype != torch.float32 for p in connection.parameters()):
        found = ", ".join(str(p.dtype) for p in connection.parameters())
        raise ValueError(f"{place}: its parameters have to be float32, got {found}")
    allowed = (torch.bfloat16,) if stream.is_cuda else (torch.bfloat16, torch.float32)
    if stream.dtype not in allowed or norm.weight.dtype not in allowed:
        raise ValueError(
            f"{place}: the stream is {stream.dtype} and the norm's gain {norm.weight.dtype}; they "
            "have to be bfloat16 (or float32 in the interpreter)"
        )
    if not stream.is_cuda and not INTERPRETED.value:
        raise RuntimeError(
            f"{place}: the kernels need a CUDA device, the stream is on {stream.device}; use the "
            "reference, or set TRITON_INTERPRET=1 before the first import"
        )
