"""mHC around a sublayer in Triton: the same functions as models/mhc.py and the norm, in few passes.

`read` makes of the streams, in one pass over them, a sublayer's normed input and its coefficients:
the projection and the rms, sigmoids and Sinkhorn, the collapse. `write` makes the streams after it.
`write`'s backward mixes the gradient of its result; `read`'s adds what comes through collapse,
projection and rms, and stores the sum.

Bytes per unit of V4.1 at N = 8,192 tokens in bf16 (streams 335.5 MB, one of width D 83.9 MB):

    projection, collapse   streams, z out                                 0.419 GB
    coefficients, norm     z, x out                                       0.168 GB
    write                  streams, y, streams out                        0.755 GB
    forward                                                               1.342 GB
    write, backward        gradient, streams, y, dy out, gradient out     1.174 GB
    norm, backward         dx, z, dz out                                  0.252 GB
    read, backward         gradient, streams, dz, gradient out            1.091 GB
    backward                                                              2.517 GB
    weight gradient        streams (may be put off)                       0.336 GB

Parts of sums are 0.03 GB of it more forward, the weight's three parts 5 MB in either direction.
Were `write` and the next unit's `read` one pass, it would be 0.84 and 1.26 GB: that needs the next
unit's weights in this one, which units that are cut, sharded and recomputed one by one do not have.
Mixed in `read`'s backward, the gradient would be written once, 0.34 GB less: but there gradients of
four streams and a product want registers at once, and it was slower by more than that (0.92 ms
without the weight gradient, against 0.82; H200).

For the backward stay z, y, the projection, two rms and the coefficients: 168 MB + 1.6 MB; V4, whose
mix is its own coefficients, reads the streams once more in either direction.

Numeric class: summation order. fp32 products are exact, three bf16 parts of a weight. Sums on
tensor cores may leave the coefficients 1.5e-4 off fp64's (the GPU test's bound), more than the
reference is.
Shape letters: N tokens, S streams, D model width, C = 2 S + S^2 coefficients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppruntime.models.kernels import mhc_kernels as kernels
from ppruntime.models.kernels.rounding import INTERPRETED
from ppruntime.models.kernels.split import split_parts
from ppruntime.models.kernels.token_shares import SHARES, tokens_per_program
from ppruntime.models.linear import WeightGradQueue, now_or_later
from ppruntime.models.mhc import Coefficients, HyperConnection
from ppruntime.models.norm import RMSNorm

_PROJECT = (64, 64, 4, 4)
"""Tokens and channels of a step where streams are projected, warps, steps in flight."""
_PROJECT_REGISTERS = 168
"""At the most, up to four streams: three programs of four warps then share a multiprocessor."""
_BACK = (64, 64, 8, 3)
"""The same where the projection's gradient meets the weights."""
_WEIGHT_GRAD = (64, 128, 4, 3)
"""The same where it meets the streams."""
_ROW_BLOCK = 1024
"""Channels that one program works on at a time where streams are only weighed."""
_SHARE = 1024
"""Channels of each stream that one program takes at the most: a program per block of tokens would
leave most of a GPU's memory lanes idle."""
_BACK_SHARE = 1280
"""Channels of one stream that a program of `read`'s backward takes."""
_TOKEN_SHARE = 2048
"""Tokens whose part of the projection's weight gradient one program sums."""
_COEFFICIENT_TOKENS = 32
"""Tokens whose coefficients one program makes, and their gradients."""
_STAGES = 3
"""Tokens that a program which goes through many has under way."""


def read(
    connection: HyperConnection, norm: RMSNorm, streams_BTSD: Tensor, mix_BTS: Tensor | None
) -> tuple[Tensor, Tensor, Coefficients]:
    """(the sublayer's input [B, T, D], a handle for `write` in the streams' place, coefficients).

    `mix_BTS` collapses the streams; None takes this connection's own weights, as in V4. Raises
    ValueError for dtypes or a number of streams that the kernels do not take, RuntimeError where
    they cannot run.
    """
    _check(connection, norm, streams_BTSD, mix_BTS)
    dims, lead = connection.dims, streams_BTSD.shape[:2]
    x, handle, pre, post, comb = _Read.apply(  # type: ignore[no-untyped-call]
        streams_BTSD.flatten(0, 1),
        None if mix_BTS is None else mix_BTS.flatten(0, 1),
        connection.projection.weight,
        connection.base,
        connection.scale,
        norm.weight,
        connection.projection.queue,
        (dims.norm_eps, dims.mhc_eps, dims.sinkhorn_iters),
    )
    x, handle, pre, post, comb = (t.unflatten(0, lead) for t in (x, handle, pre, post, comb))
    return x, handle, Coefficients(pre, post, comb)


def write(handle_BTSD: Tensor, y_BTD: Tensor, coefficients: Coefficients) -> Tensor:
    """The streams after the sublayer, as `models.mhc.write_back`. The handle comes from `read`.
    Raises ValueError for shapes and dtypes that do not belong together."""
    _, post, comb = coefficients
    *lead, num_streams, width = handle_BTSD.shape
    wanted = ((*lead, width), (*lead, num_streams), (*lead, num_streams, num_streams))
    if (y_BTD.shape, post.shape, comb.shape) != wanted:
        raise ValueError(
            f"mhc: streams {list(handle_BTSD.shape)} take y {list(wanted[0])}, post "
            f"{list(wanted[1])} and comb {list(wanted[2])}, got {list(y_BTD.shape)}, "
            f"{list(post.shape)} and {list(comb.shape)}"
        )
    if y_BTD.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"mhc: y is {y_BTD.dtype}; the kernel takes bfloat16 and float32")
    if {post.dtype, comb.dtype} != {torch.float32}:
        raise ValueError(f"mhc: post is {post.dtype} and comb {comb.dtype}; they are float32")
    flat = (t.flatten(0, 1) for t in (handle_BTSD, y_BTD, post, comb))
    out: Tensor = _Write.apply(*flat)  # type: ignore[no-untyped-call]
    return out.view_as(handle_BTSD)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        mix: Tensor | None,
        weight: Tensor,
        base: Tensor,
        scale: Tensor,
        gain: Tensor,
        queue: WeightGradQueue | None,
        constants: tuple[float, float, int],
    ) -> tuple[Tensor, ...]:
        x, z, projected, inverse, pre, post, comb = _read(
            streams, mix, weight, base, scale, gain, *constants
        )
        ctx.set_materialize_grads(False)
        own = pre if mix is None else mix
        ctx.save_for_backward(streams, own, weight, base, scale, gain, z, projected, inverse, comb)
        ctx.queue, ctx.parameter, ctx.constants = queue, weight, constants
        ctx.is_own = mix is None
        return x, streams.view_as(streams), pre, post, comb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dhandle, dpre, dpost, dcomb = grads
        streams, mix, weight, base, scale, gain, z, projected, inverse, comb = ctx.saved_tensors
        like = [z, streams, None, mix, comb]
        dx, dhandle, _, dpost, dcomb = (
            torch.zeros_like(t) if g is None and t is not None else g
            for g, t in zip((dx, dhandle, None, dpost, dcomb), like, strict=True)
        )
        dstreams, dmix, operand, dbase, dscale, dgain = _read_backward(
            dx, dhandle, dpre, dpost, dcomb, streams, mix, weight, base, scale, gain, z,
            projected, inverse, comb, *ctx.constants, ctx.is_own, ctx.needs_input_grad[1],
        )  # fmt: skip
        held = streams.detach()
        dweight = now_or_later(ctx.queue, ctx.parameter, lambda: _weight_grad(operand, held))
        return (
            dstreams,
            dmix if ctx.needs_input_grad[1] else None,
            dweight,
            dbase,
            dscale,
            dgain,
            None,
            None,
        )


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        ctx.save_for_backward(handle, y, post, comb)
        out: Tensor = _write(handle, y, post, comb)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor, Tensor] = _write_backward(dout, *ctx.saved_tensors)
        return grads


# The ops


@torch.library.custom_op("ppruntime::mhc_read", mutates_args=())
def _read(
    streams: Tensor,
    mix: Tensor | None,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    gain: Tensor,
    norm_eps: float,
    mhc_eps: float,
    num_iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(x [N, D], z [N, D] before the norm, projection [N, C], 1 / rms of streams and z [N, 2], pre
    [N, S], post [N, S], comb [N, S, S]); x and z in the streams' dtype, the rest fp32."""
    outputs = _read_outputs(streams, weight)
    x, z, projected, inverse, pre, post, comb = outputs
    num_tokens, num_streams, width = streams.shape
    if num_tokens:
        shares, num_coefficients = -(-width // _SHARE), weight.shape[0]
        tokens, channels, num_warps, num_stages = _steps(_PROJECT)
        streams = streams.contiguous()
        partial = projected.new_empty(shares, num_tokens, 3 * num_coefficients)
        squares = projected.new_empty(shares, num_tokens)
        kernels.project_kernel[(shares, -(-num_tokens // tokens))](
            streams, None if mix is None else mix.contiguous(), _parts(weight, streams), z,
            partial, squares, num_tokens, 1.0, num_streams, width, 3 * num_coefficients,
            *_low_and_high(3 * num_coefficients), tokens, channels, shares,
            num_warps=num_warps, num_stages=num_stages,
            maxnreg=_PROJECT_REGISTERS if num_streams <= 4 else None,
        )  # fmt: skip
        num_blocks = -(-num_tokens // _COEFFICIENT_TOKENS)
        to_norm = (None,) * 4 if mix is None else (streams, z, gain, x)
        kernels.coefficients_kernel[(num_blocks + (0 if mix is None else num_tokens),)](
            partial, squares, base, scale, projected, inverse, pre, post, comb, *to_norm,
            num_tokens, norm_eps, mhc_eps, num_streams, width, num_coefficients,
            _power_of_two(num_coefficients), _power_of_two(width), num_iters, _COEFFICIENT_TOKENS,
            shares, num_warps=4 if mix is None else 8,
        )  # fmt: skip
        if mix is None:
            kernels.norm_kernel[(num_tokens,)](
                streams, pre, z, gain, x, inverse, norm_eps,
                num_streams, width, _power_of_two(width), num_warps=8,
            )  # fmt: skip
    return outputs


def _read_outputs(
    streams: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_streams, width = streams.shape

    def wide(*shape: int) -> Tensor:
        return streams.new_empty(num_tokens, *shape, dtype=torch.float32)

    return (
        streams.new_empty(num_tokens, width),
        streams.new_empty(num_tokens, width),
        wide(weight.shape[0]),
        wide(2),
        wide(num_streams),
        wide(num_streams),
        wide(num_streams, num_streams),
    )


@_read.register_fake
def _(
    streams: Tensor,
    mix: Tensor | None,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    gain: Tensor,
    norm_eps: float,
    mhc_eps: float,
    num_iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _read_outputs(streams, weight)


@torch.library.custom_op("ppruntime::mhc_read_backward", mutates_args=())
def _read_backward(
    dx: Tensor,
    dhandle: Tensor,
    dpre: Tensor | None,
    dpost: Tensor,
    dcomb: Tensor,
    streams: Tensor,
    mix: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    gain: Tensor,
    z: Tensor,
    projected: Tensor,
    inverse: Tensor,
    comb: Tensor,
    norm_eps: float,
    mhc_eps: float,
    num_iters: int,
    is_own: bool,
    wants_mix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, mix (if `wants_mix`; [N, S] of nothing otherwise), projection (as the
    sum of two parts in the streams' dtype, [N, 2 C]), base, scale and gain. `is_own`: the mix was
    this connection's pre."""
    num_tokens, num_streams, width = streams.shape
    num_coefficients = weight.shape[0]
    dstreams = torch.empty_like(streams, memory_format=torch.contiguous_format)
    dmix, draw = torch.empty_like(mix), torch.empty_like(projected)
    operand = streams.new_empty(num_tokens, 2 * num_coefficients)
    if num_tokens == 0:
        dbase, dscale, dgain = (torch.zeros_like(t) for t in (base, scale, gain))
        return dstreams, dmix, operand, dbase, dscale, dgain
    streams, mix, dhandle = streams.contiguous(), mix.contiguous(), dhandle.contiguous()
    tokens = tokens_per_program(num_tokens, 2 * SHARES)
    num_programs = -(-num_tokens // tokens)
    dz = torch.empty_like(z)
    dgains = z.new_empty(num_programs, width, dtype=torch.float32)
    kernels.norm_backward_kernel[(num_programs,)](
        dx.contiguous(), z, inverse, gain, dz, dgains, num_tokens, tokens,
        width, _power_of_two(width), _STAGES, num_warps=8,
    )  # fmt: skip
    if is_own:
        kernels.mix_backward_kernel[(num_tokens,)](
            dz, streams, dmix, num_streams, width, _row_block(width), num_warps=4
        )
        dpre = dmix if dpre is None else dpre + dmix
    through_rms = torch.empty_like(mix)  # of a token's places the first
    totals = projected.new_empty(2 * num_iters - 1, num_tokens, num_streams)
    # As many as give each of a program's threads a number of its own: copies' last bits differ.
    tokens = _COEFFICIENT_TOKENS * max(1, 4 // num_streams)
    kernels.coefficients_backward_kernel[(-(-num_tokens // tokens),)](
        projected, inverse, base, scale, None if dpre is None else dpre.contiguous(),
        dpost.contiguous(), dcomb.contiguous(), totals, draw, operand, through_rms,
        num_tokens, mhc_eps, num_streams, width, num_coefficients, num_iters, tokens,
        num_warps=4,
    )  # fmt: skip
    tokens, channels, num_warps, num_stages = _steps(_BACK)
    shares = -(-width // _BACK_SHARE)
    dmixes = mix.new_empty(shares, *mix.shape) if wants_mix and not is_own else None
    kernels.read_backward_kernel[(-(-num_tokens // tokens), num_streams, shares)](
        dhandle, dz, streams, mix, operand, through_rms, _parts(weight, streams), dstreams, dmixes,
        num_tokens, num_streams, width, num_coefficients,
        *_low_and_high(3 * num_coefficients), tokens, channels, _BACK_SHARE,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if dmixes is not None:
        dmix = dmixes.sum(0)
    sizes = [num_streams, num_streams, num_streams**2]
    of_scale = torch.split((draw * projected * inverse[:, :1]).sum(0), sizes)
    dscale = torch.stack([part.sum() for part in of_scale])
    return dstreams, dmix, operand, draw.sum(0), dscale, dgains.sum(0).to(gain.dtype)


@_read_backward.register_fake
def _(
    dx: Tensor,
    dhandle: Tensor,
    dpre: Tensor | None,
    dpost: Tensor,
    dcomb: Tensor,
    streams: Tensor,
    mix: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    gain: Tensor,
    z: Tensor,
    projected: Tensor,
    inverse: Tensor,
    comb: Tensor,
    norm_eps: float,
    mhc_eps: float,
    num_iters: int,
    is_own: bool,
    wants_mix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = (streams, mix, base, scale, gain)
    dstreams, dmix, dbase, dscale, dgain = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in like
    )
    operand = streams.new_empty(streams.shape[0], 2 * weight.shape[0])
    return dstreams, dmix, operand, dbase, dscale, dgain


@torch.library.custom_op("ppruntime::mhc_weight_grad", mutates_args=())
def _weight_grad(operand: Tensor, streams: Tensor) -> Tensor:
    """[C, S D] fp32: the gradient of the projection's weight, tokens summed in order. `operand`
    [N, 2 C]: the projection's gradient in two parts."""
    num_tokens, num_streams, width = streams.shape
    num_rows, num_channels = operand.shape[1], num_streams * width
    if not num_tokens:
        return operand.new_zeros(num_rows // 2, num_channels, dtype=torch.float32)
    tokens, channels, num_warps, num_stages = _steps(_WEIGHT_GRAD)
    shares = -(-num_tokens // _TOKEN_SHARE)
    parts = operand.new_empty(shares, 2, num_rows // 2, num_channels, dtype=torch.float32)
    kernels.weight_grad_kernel[(-(-num_channels // channels), shares)](
        operand, streams.contiguous(), parts, num_tokens, num_channels, num_rows,
        max(16, _power_of_two(num_rows)), tokens, channels, _TOKEN_SHARE,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return parts.sum((0, 1))


@_weight_grad.register_fake
def _(operand: Tensor, streams: Tensor) -> Tensor:
    shape = operand.shape[1] // 2, streams.shape[1] * streams.shape[2]
    return operand.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("ppruntime::mhc_write", mutates_args=())
def _write(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """[N, S, D]: post_j y + sum_i comb_ij X_i."""
    num_tokens, num_streams, width = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if num_tokens:
        block = _row_block(width)
        kernels.write_kernel[(num_tokens, -(-width // block))](
            streams.contiguous(), y.contiguous(), post.contiguous(), comb.contiguous(), out,
            num_streams, width, block, num_warps=4,
        )  # fmt: skip
    return out


@_write.register_fake
def _(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.empty_like(streams, memory_format=torch.contiguous_format)


@torch.library.custom_op("ppruntime::mhc_write_backward", mutates_args=())
def _write_backward(
    dout: Tensor, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the streams, y, post and comb."""
    num_tokens, num_streams, width = streams.shape
    grads = _write_gradients(streams, y, post)
    if num_tokens:
        kernels.write_backward_kernel[(num_tokens,)](
            dout.contiguous(), streams.contiguous(), y.contiguous(), post.contiguous(),
            comb.contiguous(), *grads, num_streams, width, _row_block(width), _STAGES, num_warps=4,
        )  # fmt: skip
    return grads


@_write_backward.register_fake
def _(
    dout: Tensor, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _write_gradients(streams, y, post)


def _write_gradients(
    streams: Tensor, y: Tensor, post: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_streams, _ = streams.shape
    return (
        torch.empty_like(streams, memory_format=torch.contiguous_format),
        torch.empty_like(y, memory_format=torch.contiguous_format),
        post.new_empty(num_tokens, num_streams),
        post.new_empty(num_tokens, num_streams, num_streams),
    )


def _parts(weight: Tensor, streams: Tensor) -> Tensor:
    """[3 C, S D]: the weight's large, middle and small parts, in the streams' dtype."""
    return split_parts(weight, 3, streams.dtype).flatten(0, 1)


def _steps(of: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Small in the interpreter, where nothing is gained by large ones."""
    return (16, min(64, of[1]), 1, 1) if INTERPRETED.value else of


def _low_and_high(num_rows: int) -> tuple[int, int]:
    """Two powers of two, 16 at least, that hold the rows: a product in two instructions."""
    low = max(16, _power_of_two(num_rows + 1) // 2)
    return low, max(16, _power_of_two(max(1, num_rows - low)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _row_block(width: int) -> int:
    return min(_ROW_BLOCK, max(16, _power_of_two(width)))


def _check(
    connection: HyperConnection, norm: RMSNorm, streams_BTSD: Tensor, mix_BTS: Tensor | None
) -> None:
    wanted = (connection.dims.num_streams, connection.dims.hidden_size)
    if streams_BTSD.dim() != 4 or streams_BTSD.shape[2:] != wanted:
        raise ValueError(
            f"mhc: streams are {list(streams_BTSD.shape)}, the connection takes [B, T, "
            f"{wanted[0]}, {wanted[1]}]"
        )
    if mix_BTS is not None and mix_BTS.shape != streams_BTSD.shape[:-1]:
        raise ValueError(
            f"mhc: the mix is {list(mix_BTS.shape)}, streams {list(streams_BTSD.shape)} take "
            f"{list(streams_BTSD.shape[:-1])}"
        )
    if norm.weight.shape != wanted[1:]:
        raise ValueError(f"mhc: the norm's gain is {list(norm.weight.shape)} of {wanted[1]} wide")
    num_streams = wanted[0]
    if num_streams not in (2, 4, 8):
        raise ValueError(
            f"mhc: {num_streams} streams; the kernels take 2, 4 or 8, the reference any number"
        )
    wide: list[Tensor] = [connection.projection.weight, connection.base, connection.scale]
    wide += [] if mix_BTS is None else [mix_BTS]
    if any(t.dtype != torch.float32 for t in wide):
        found = ", ".join(str(t.dtype) for t in wide)
        raise ValueError(f"mhc: weights, base, scale and mix have to be float32, got {found}")
    allowed = (torch.bfloat16,) if streams_BTSD.is_cuda else (torch.bfloat16, torch.float32)
    if streams_BTSD.dtype not in allowed or norm.weight.dtype not in allowed:
        raise ValueError(
            f"mhc: streams are {streams_BTSD.dtype} and the norm's gain {norm.weight.dtype}; they "
            "have to be bfloat16 (or float32 in the interpreter)"
        )
    if not streams_BTSD.is_cuda and not INTERPRETED.value:
        raise RuntimeError(
            f"mhc: the kernels need a CUDA device, streams are on {streams_BTSD.device}; use the "
            "reference, or set TRITON_INTERPRET=1 before the first import"
        )
