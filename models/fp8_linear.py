"""Dense linears and the shared expert in FP8, forward and backward.

    y   = rows of x, W                       x by 1 x 128, W by 128 x 128 blocks
    dx  = rows of dy, W^T                    the same bytes, turned
    dW += columns of dy, columns of x        1 x 128 along the rows, into the fp32 `.grad`; x by
                                             128 x 128 with `wgrad_tile_scales`

One pass over x makes its rows and its columns, one over dy too. Kept for the backward: x's columns,
half the bytes of x. Weights are quantised once per version, both ways. Weight gradients go
straight into fp32, whatever the weights' dtype; autograd never sees them. Recipe: DeepSeek-V3
report, section 3.3. Shape letters: N rows, P rows padded to 128, I and O input and output width, F
inner width of the shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.experts import SharedExpert
from ppruntime.models.fp8_experts import fp32_grad
from ppruntime.models.fp8_linear_rules import ATTENTION_LINEARS, BLOCK, SHARED_EXPERT
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.kernels.expert_backends import ExpertKernels
from ppruntime.models.kernels.fp8_linear_backends import (
    DENSE_BACKENDS,
    LinearBackend,
    dense_layout,
    linear_kernels,
)
from ppruntime.models.kernels.fp8_linear_cast import can_turn, quantize_turned
from ppruntime.models.kernels.grouped_gemm import WeightGradOperands
from ppruntime.models.kernels.moe_layout import Layout
from ppruntime.models.kernels.quantize import GROUP, Quantized, columns_like
from ppruntime.models.linear import Linear, break_graph
from ppruntime.models.rope import Rotation, rotate
from ppruntime.models.weight_copies import WeightCopies


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8LinearOptions:
    """Who multiplies. All follow one recipe."""

    backend: LinearBackend = LinearBackend.TRITON
    wgrad_tile_scales: bool = False
    """In weight gradients one scale per 128 x 128 values of the layer's input: products as fast as
    a forward's, by own kernels. Changes numerics."""
    gemm_sms: GemmSms = field(default_factory=GemmSms, compare=False)
    """Multiprocessors for the products, as at their launch. Changes no bit."""


class Blocks(NamedTuple):
    """One weight's FP8 copies as a group of one: [1, O, I], and [1, I, O] for the data gradient."""

    weight: Quantized
    turned: Quantized


class _Fp8Layer(WeightCopies):
    """What both layers have: kernels, and copies of weights made once per version."""

    def __init__(self, options: Fp8LinearOptions) -> None:
        super().__init__()
        self.options = options
        self.kernels: ExpertKernels = linear_kernels(options.backend, options.wgrad_tile_scales)
        self._copies: dict[str, tuple[tuple[int, int], Blocks]] = {}

    def blocks(self, name: str) -> Blocks:
        """The copies of the parameter `name`. Raises RuntimeError if it was changed within a
        version."""
        weight = self.get_parameter(name)
        if self.version is None:
            return self._quantized(weight)
        key = (self.version.number, weight._version)
        made = self._copies.pop(name, None)
        if made is not None and made[0] != key:
            if made[0][0] == key[0]:
                raise RuntimeError(
                    f"{name} changed after it was quantised for version {key[0]}; call "
                    "WeightVersion.advance() after every change of the weights"
                )
            made = None  # before the new copies are made: never two at once
        if made is None:
            made = key, self._quantized(weight)
        self._copies[name] = made
        return made[1]

    def renew_copies(self) -> None:
        if self.version is not None:
            for name, _ in self.named_parameters():
                self.blocks(name)

    @torch.no_grad()
    def _quantized(self, weight: Tensor) -> Blocks:
        blocks, turned = self.kernels.quantize_blocks(weight.unsqueeze(0), transposed=True)
        return Blocks(blocks, turned)

    def cast(self, x_NI: Tensor) -> tuple[Quantized, Quantized, Layout]:
        """Rows and columns in one pass, and the layout they lie in; columns as one matrix where
        weight gradients take them so."""
        return _cast(self.kernels, x_NI)

    def product(self, rows: Quantized, weight: Quantized, layout: Layout) -> Tensor:
        """[P, O] bf16; what padding holds is garbage."""
        return self.kernels.grouped_gemm(rows, weight, layout, gemm_sms=self.options.gemm_sms.now)

    def add_weight_grad(
        self, name: str, grad: Quantized, inputs: Quantized, layout: Layout
    ) -> None:
        """Adds grad^T inputs, both in columns, to the parameter's fp32 gradient: now, or when the
        queue's task runs."""
        weight = self.get_parameter(name)
        if not weight.requires_grad:
            return

        def add() -> None:
            with torch.no_grad():
                self.kernels.grouped_weight_grad(
                    fp32_grad(weight).unsqueeze(0),
                    [WeightGradOperands(grad, inputs, layout)],
                    gemm_sms=self.options.gemm_sms.now,
                )

        break_graph()  # a graph could not write to the gradient either
        if self.queue is not None and self.queue.deferring:
            self.queue.add(add)
        else:
            add()


def _cast(
    kernels: ExpertKernels, x_NI: Tensor, *, tile_scales: bool = False
) -> tuple[Quantized, Quantized, Layout]:
    layout = dense_layout(x_NI.shape[0], x_NI.device)
    options = {"dense": True} if kernels.dense_columns else {}
    if tile_scales:
        options["tile_scales"] = True
    rows, columns = kernels.quantize_routed(
        x_NI, layout, with_rows=True, power_of_two=False, **options
    )
    return rows, columns, layout


class Fp8Linear(_Fp8Layer):
    """`linear.Linear` in FP8, around the same parameter. Raises ValueError for widths that are no
    multiples of 128, RuntimeError for a backend that cannot run here."""

    def __init__(self, linear: Linear, options: Fp8LinearOptions) -> None:
        super().__init__(options)
        _check_widths(linear.weight)
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O], in x's dtype."""
        y_NO: Tensor = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), self.weight, self
        )
        return y_NO.view(*x.shape[:-1], y_NO.shape[1])

    def project_rotated(self, x_BTI: Tensor, rotation: Rotation, num_heads: int) -> Tensor:
        """[B, T, H, K]: the product as heads, turned where it lies. Its gradient is turned back
        inside the cast that both gradients read. Bitwise the same as the product, then `rotate`."""
        cos_NR, sin_NR = (angles.flatten(0, 1) for angles in rotation)
        q_NO: Tensor = _Fp8RotatedLinear.apply(  # type: ignore[no-untyped-call]
            x_BTI.flatten(0, 1), cos_NR, sin_NR, self.weight, self, num_heads
        )
        return q_NO.view(*x_BTI.shape[:2], *_heads(q_NO, num_heads).shape[2:])


class _Fp8Linear(torch.autograd.Function):
    """The op with its gradient. The weight comes along so that autograd asks for a backward where
    only it needs one."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight: Tensor, layer: Fp8Linear) -> Tensor:
        blocks, options = layer.blocks("weight"), layer.options
        y_NO, columns, scale = torch.ops.ppruntime.fp8_linear(
            x_NI,
            *blocks.weight,
            options.backend.value,
            options.gemm_sms.now or 0,
            options.wgrad_tile_scales,
        )
        ctx.save_for_backward(columns, scale)
        ctx.layer, ctx.blocks = layer, blocks
        result: Tensor = y_NO
        return result

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, None, None]:
        layer: Fp8Linear = ctx.layer
        cast = layer.cast(grad_NO)
        grad_x = _linear_grads(ctx, *cast, Quantized(*ctx.saved_tensors), grad_NO)
        return grad_x, None, None


def _linear_grads(
    ctx: Any, rows: Quantized, columns: Quantized, layout: Layout, inputs: Quantized, grad: Tensor
) -> Tensor | None:
    """The gradient of x, in `grad`'s dtype, from the rows and columns of `grad`; that of the weight
    goes its own way. `inputs`: x's columns."""
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = ctx.layer.product(rows, ctx.blocks.turned, layout)[: len(grad)].to(grad.dtype)
    ctx.layer.add_weight_grad("weight", columns, inputs, layout)
    return grad_x


class _Fp8RotatedLinear(torch.autograd.Function):
    """The product and its rotation as one node."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        cos_NR: Tensor,
        sin_NR: Tensor,
        weight: Tensor,
        layer: Fp8Linear,
        num_heads: int,
    ) -> Tensor:
        blocks, options = layer.blocks("weight"), layer.options
        q_NO, columns, scale = torch.ops.ppruntime.fp8_rotated_linear(
            x_NI,
            *blocks.weight,
            cos_NR,
            sin_NR,
            num_heads,
            options.backend.value,
            options.gemm_sms.now or 0,
            options.wgrad_tile_scales,
        )
        ctx.save_for_backward(columns, scale, cos_NR, sin_NR)
        ctx.layer, ctx.blocks, ctx.num_heads = layer, blocks, num_heads
        result: Tensor = q_NO
        return result

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, cos_NR, sin_NR = ctx.saved_tensors
        layer: Fp8Linear = ctx.layer
        head_width = grad_NO.shape[1] // ctx.num_heads
        in_torch = layer.options.backend is LinearBackend.REFERENCE
        if not in_torch and can_turn(head_width, cos_NR.shape[1]):
            layout = dense_layout(len(grad_NO), grad_NO.device)
            turned = quantize_turned(
                grad_NO, cos_NR, sin_NR, head_width=head_width, dense=layer.kernels.dense_columns
            )
            cast = (*turned, layout)
        else:
            turn = Rotation(cos_NR, sin_NR)
            back = _rotated(grad_NO, turn, ctx.num_heads, inverse=True)
            cast = layer.cast(back)
        grad_x = _linear_grads(ctx, *cast, Quantized(columns, scale), grad_NO)
        return grad_x, None, None, None, None, None


def _heads(x_NO: Tensor, num_heads: int) -> Tensor:
    """[1, N, H, K]."""
    return x_NO.view(1, len(x_NO), num_heads, x_NO.shape[1] // num_heads)


def _rotated(x_NO: Tensor, turn: Rotation, num_heads: int, *, inverse: bool = False) -> Tensor:
    """Heads side by side, a turned copy by torch. Rows are taken for tokens of one sequence."""
    heads = _heads(x_NO, num_heads)
    one = Rotation(*(angles.unsqueeze(0) for angles in turn))
    return rotate(heads, one, inverse=inverse).view(x_NO.shape)


class Fp8SharedExpert(_Fp8Layer):
    """`experts.SharedExpert` in FP8, around the same parameters.

    Gate and up are one product; the clamped SwiGLU's kernel gives the down projection's operand,
    its backward's the operands of both gradients. Kept: x's columns and z, gate and up in bf16.
    """

    def __init__(self, expert: SharedExpert, options: Fp8LinearOptions) -> None:
        super().__init__(options)
        for linear in (expert.gate_up, expert.down):
            _check_widths(linear.weight)
        self.limit = float(expert.limit)
        self.gate_up, self.down = expert.gate_up, expert.down

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], in x's dtype."""
        y_ND: Tensor = _Fp8SharedExpert.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), self.gate_up.weight, self.down.weight, self
        )
        return y_ND.view(x.shape)


class _Fp8SharedExpert(torch.autograd.Function):
    """Two ops with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_up: Tensor, down: Tensor, layer: Fp8SharedExpert
    ) -> Tensor:
        blocks = layer.blocks("gate_up.weight"), layer.blocks("down.weight")
        chosen = layer.options.backend.value, layer.options.gemm_sms.now or 0
        z_NC, columns, scale = torch.ops.ppruntime.fp8_linear(
            x_ND, *blocks[0].weight, *chosen, layer.options.wgrad_tile_scales
        )
        y_ND = torch.ops.ppruntime.fp8_swiglu_linear(z_NC, *blocks[1].weight, layer.limit, *chosen)
        ctx.save_for_backward(z_NC, columns, scale)
        ctx.layer, ctx.blocks = layer, blocks
        result: Tensor = y_ND.to(x_ND.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer: Fp8SharedExpert = ctx.layer
        z_NC, *x_columns = ctx.saved_tensors
        gate_up, down = ctx.blocks
        grad_rows, grad_columns, layout = layer.cast(grad_ND)
        inner_grad_PF = layer.product(grad_rows, down.turned, layout)
        grads = layer.kernels.swiglu_backward(
            _padded(z_NC, layout),
            inner_grad_PF,
            _ones(z_NC),
            layout,
            layer.limit,
            power_of_two=False,
        )
        layer.add_weight_grad("down.weight", grad_columns, grads.inner_columns, layout)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = layer.product(grads.rows, gate_up.turned, layout)
            grad_x = grad_x[: len(grad_ND)].to(grad_ND.dtype)
        layer.add_weight_grad("gate_up.weight", grads.columns, Quantized(*x_columns), layout)
        return grad_x, None, None, None


def convert_linears(unit: nn.Module, options: Fp8LinearOptions) -> tuple[str, ...]:
    """Puts the FP8 form in the place of the unit's linears that `fp8_linear_rules` names; gives
    their names. Parameters stay the same objects under the same names.

    A module that is not exactly a `Linear` with a 16- or 32-bit result, or a `SharedExpert`, stays
    as it is: one with a forward of its own computes something else.
    """
    converted: list[str] = []
    for name in ATTENTION_LINEARS:
        found = _find(unit, name)
        if type(found) is Linear and not found.fp32_output and (found.product is functional.linear):
            unit.set_submodule(name, Fp8Linear(found, options))
            converted.append(name)
    shared = _find(unit, SHARED_EXPERT)
    if type(shared) is SharedExpert:
        unit.set_submodule(SHARED_EXPERT, Fp8SharedExpert(shared, options))
        converted += [f"{SHARED_EXPERT}.gate_up", f"{SHARED_EXPERT}.down"]
    return tuple(converted)


def _find(unit: nn.Module, name: str) -> nn.Module | None:
    return dict(unit.named_modules()).get(name)


def _check_widths(weight: Tensor) -> None:
    if any(width % BLOCK for width in weight.shape):
        raise ValueError(
            f"an FP8 linear needs widths that are multiples of {BLOCK}, the weight is "
            f'{list(weight.shape)}; use kernels.linear = "reference"'
        )


def _padded(z_NC: Tensor, layout: Layout) -> Tensor:
    """z with as many rows as the layout; the kernels never use what padding holds."""
    missing = layout.num_rows - z_NC.shape[0]
    return functional.pad(z_NC, (0, 0, 0, missing)) if missing else z_NC


def _ones(z_NC: Tensor) -> Tensor:
    """Every row's weight, as the routed experts' kernels want it."""
    return z_NC.new_ones((z_NC.shape[0], 1), dtype=torch.float32)


# The ops. `gemm_sms` 0: all.


@torch.library.custom_op("ppruntime::fp8_linear", mutates_args=())
def _linear_op(
    x_NI: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    backend: str,
    gemm_sms: int,
    wgrad_tile_scales: bool = False,
) -> list[Tensor]:
    """x W^T in x's dtype, and x's columns with their scales: what a backward needs of x."""
    kernels = linear_kernels(LinearBackend(backend), wgrad_tile_scales)
    rows, columns, layout = _cast(kernels, x_NI, tile_scales=wgrad_tile_scales)
    y_PO = kernels.grouped_gemm(
        rows, Quantized(weight, weight_scale), layout, gemm_sms=gemm_sms or None
    )
    return [y_PO[: x_NI.shape[0]].to(x_NI.dtype), *columns]


@_linear_op.register_fake
def _(
    x_NI: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    backend: str,
    gemm_sms: int,
    wgrad_tile_scales: bool = False,
) -> list[Tensor]:
    return _linear_shapes(x_NI, weight, backend, wgrad_tile_scales)


def _linear_shapes(
    x_NI: Tensor, weight: Tensor, backend: str, wgrad_tile_scales: bool
) -> list[Tensor]:
    num_rows, width = x_NI.shape
    padded = (num_rows + GROUP - 1) // GROUP * GROUP
    dense = LinearBackend(backend) in DENSE_BACKENDS and not wgrad_tile_scales
    columns = columns_like(x_NI, padded, width, tile_scales=wgrad_tile_scales, dense=dense)
    return [x_NI.new_empty(num_rows, weight.shape[1]), *columns]


@torch.library.custom_op("ppruntime::fp8_rotated_linear", mutates_args=())
def _rotated_op(
    x_NI: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    num_heads: int,
    backend: str,
    gemm_sms: int,
    wgrad_tile_scales: bool = False,
) -> list[Tensor]:
    """As `fp8_linear`, with the last channels of each head turned."""
    y_NO, *columns = _linear_op(x_NI, weight, weight_scale, backend, gemm_sms, wgrad_tile_scales)
    turn = Rotation(cos_NR, sin_NR)
    if LinearBackend(backend) is LinearBackend.REFERENCE:
        return [_rotated(y_NO, turn, num_heads), *columns]
    from ppruntime.models.kernels.rope import turn_

    one = Rotation(cos_NR.unsqueeze(0), sin_NR.unsqueeze(0))
    turn_(_heads(y_NO, num_heads), one)
    return [y_NO, *columns]


@_rotated_op.register_fake
def _(
    x_NI: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    num_heads: int,
    backend: str,
    gemm_sms: int,
    wgrad_tile_scales: bool = False,
) -> list[Tensor]:
    return _linear_shapes(x_NI, weight, backend, wgrad_tile_scales)


@torch.library.custom_op("ppruntime::fp8_swiglu_linear", mutates_args=())
def _swiglu_op(
    z_NC: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    limit: float,
    backend: str,
    gemm_sms: int,
) -> Tensor:
    """swiglu(z) W^T in bf16; between the two there are FP8 rows only."""
    kernels = linear_kernels(LinearBackend(backend))
    layout = dense_layout(z_NC.shape[0], z_NC.device)
    inner = kernels.swiglu(_padded(z_NC, layout), _ones(z_NC), layout, limit, power_of_two=False)
    y_PD = kernels.grouped_gemm(
        inner, Quantized(weight, weight_scale), layout, gemm_sms=gemm_sms or None
    )
    return y_PD[: z_NC.shape[0]]


@_swiglu_op.register_fake
def _(
    z_NC: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    limit: float,
    backend: str,
    gemm_sms: int,
) -> Tensor:
    return z_NC.new_empty(z_NC.shape[0], weight.shape[1], dtype=torch.bfloat16)
