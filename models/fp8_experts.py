"""The routed experts in FP8: fused passes around grouped GEMMs, forward and backward.

    x8       = rows of x in FP8                      once per token, before it goes anywhere
    z        = x8 W13^T                              bf16 [P, 2F] in the padded pool
    h8       = rows of p silu(min(g, l)) clamp(u)    the routing weight goes in before rounding
    y        = sum over k of h8 W2^T                 fp32 sum, rounded to x's dtype

    d        = rows of dy, W2         dp, dg, du, h from z and d in one pass
    dx       = sum over k of rows of [dg | du], W13
    dW2     += columns of dy, h       dW13 += columns of [dg | du], x8

Weight gradients go straight into fp32 `.grad`s, whatever the weights' dtype; autograd never sees
them. Kept for the backward: x8, z (unless `keep_expert_activations` is off), the routing, the
layout. Recipe: DeepSeek-V3 report, section 3.3. Shape letters: N tokens, K experts per token,
D model width, F inner width, E experts, P pool rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppruntime.models.dims import ModelDims
from ppruntime.models.experts import expert_linears
from ppruntime.models.fp8_expert_rules import most_rows
from ppruntime.models.fp8_wire import WireRows
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.kernels.expert_backends import ExpertBackend, ExpertKernels, expert_kernels
from ppruntime.models.kernels.grouped_gemm import MOST_MICRO_BATCHES, WeightGradOperands
from ppruntime.models.kernels.moe_layout import Layout, padded_rows
from ppruntime.models.kernels.quantize import GROUP, Quantized
from ppruntime.models.row_slices import MOST_ELEMENTS, token_slices
from ppruntime.models.weight_copies import WeightCopies, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Options:
    """How the experts are computed. Unless said otherwise an option changes no bit."""

    backend: ExpertBackend = ExpertBackend.TRITON
    """Whose GEMMs. Changes numerics within rounding."""
    keep_expert_activations: bool = True
    """Keep z for the backward; else run the first GEMM again: saves 4 F bytes a row."""
    fp8_transposed_on_demand: bool = False
    """Turn the weights in each backward rather than keep a turned copy: saves a byte a weight."""
    free_weights: bool = False
    """Free the memory of the weights themselves once their FP8 copies are made. Only where another
    owns the master weights and gives these their memory and values again, as FSDP's gather does,
    before a new version is read."""
    wgrad_tile_scales: bool = False
    """One scale per 128x128 of dy in weight gradients, as x has with `power_of_two_scales` (and of
    x without). Changes numerics; less work."""
    fused_wgrad_micro_batches: int = 1
    """Micro-batches whose weight gradients are added in one launch; their operands wait. Bitwise
    with the Triton kernel; another order of sums with deep_gemm."""
    gemm_sms: GemmSms = field(default_factory=GemmSms, compare=False)
    """Multiprocessors for the GEMMs, as at their launch."""
    power_of_two_scales: bool = True
    """Scales of x, as FP8 dispatch sends it, are powers of two. Changes numerics."""
    power_of_two_grad_scales: bool = False
    """So are those of dy, as FP8 dispatch of gradients sends it: rounding what it sent once more
    then changes nothing. Changes numerics."""

    def __post_init__(self) -> None:
        if not 1 <= self.fused_wgrad_micro_batches <= MOST_MICRO_BATCHES:
            raise ValueError(
                f"fused_wgrad_micro_batches = {self.fused_wgrad_micro_batches}; one launch adds 1 "
                f"to {MOST_MICRO_BATCHES}"
            )


class ExpertWeights(NamedTuple):
    """FP8 copies of one layer's weights, in 128x128 blocks."""

    gate_up: Quantized
    """[E, 2F, D]"""
    down: Quantized
    """[E, D, F]"""
    gate_up_t: Quantized | None
    """[E, D, 2F] for the data gradient; None: turned on demand."""
    down_t: Quantized | None
    """[E, F, D], likewise."""


class MicroBatch(NamedTuple):
    """What the weight gradients of one micro-batch are computed from."""

    x8: Quantized
    grad_columns: Quantized
    inner_columns: Quantized
    gate_up_columns: Quantized
    layout: Layout


@dataclass(slots=True)
class _Held:
    """Micro-batches whose weight gradients wait for a launch, and where they will go."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    accumulators: tuple[Tensor, ...] = ()


class Fp8Experts(WeightCopies):
    """The routed experts of one layer, or those `held` here; parameters as in `experts.Experts`."""

    most_elements = MOST_ELEMENTS
    """Of one tensor of the pool."""

    def __init__(
        self,
        dims: ModelDims,
        options: Fp8Options,
        *,
        held: range | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden, width = dims.hidden_size, dims.expert_width
        if hidden % GROUP or width % GROUP:
            raise ValueError(
                f"FP8 experts need widths that are multiples of {GROUP}; hidden_size is {hidden}, "
                f"expert_width {width}; use bf16 experts"
            )
        self.options = options
        self.limit = float(dims.swiglu_limit)
        self.kernels: ExpertKernels = expert_kernels(options.backend)
        self.gate_up, self.down = expert_linears(dims, held, device=device, dtype=dtype)
        self._quantized: tuple[tuple[int, int, int], ExpertWeights] | None = None
        self._held = _Held()

    def forward(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """sum_k weights_nk expert_nk(x_n), [N, D] in x's dtype (bf16, or fp32 for tests).

        experts_NK: counted from the first one held, distinct within a token, -1 for nowhere;
        weights_NK fp32. A micro-batch that 32-bit offsets do not reach is computed in parts; each
        counts for `fused_wgrad_micro_batches`.
        """
        num_tokens, per_token = experts_NK.shape
        num_experts, *widths = self.gate_up.weight.shape
        parts = token_slices(num_tokens, per_token, num_experts, max(widths), self.most_elements)
        if len(parts) == 1:  # a slice of all would cost its backward a copy
            return self._over(x_ND, experts_NK, weights_NK)
        return torch.cat([self._over(x_ND[p], experts_NK[p], weights_NK[p]) for p in parts])

    def _over(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        y_ND: Tensor = _Fp8Experts.apply(  # type: ignore[no-untyped-call]
            x_ND, weights_NK, self.gate_up.weight, self.down.weight, experts_NK, self
        )
        return y_ND

    def quantized(self) -> ExpertWeights:
        """The FP8 weights, made once per version."""
        if self.version is None:
            assert not self.options.free_weights, "copies that are not kept outlive no weights"
            return self._quantize()
        copies = self._copies_of(self.version)
        if self.options.free_weights:
            for weight in (self.gate_up.weight, self.down.weight):
                weight.untyped_storage().resize_(0)  # shape, version and gradient stay
        return copies

    def _copies_of(self, version: WeightVersion) -> ExpertWeights:
        key = (version.number, self.gate_up.weight._version, self.down.weight._version)
        if self._quantized is not None and self._quantized[0] == key:
            return self._quantized[1]
        if self._quantized is not None and self._quantized[0][0] == key[0]:
            raise RuntimeError(
                f"expert weights changed after they were quantised for version {key[0]}; call "
                "WeightVersion.advance() after every change of the weights"
            )
        assert not self._held.micro_batches, "weights change while weight gradients are held"
        self._quantized = None  # before the new copy is made: never two at once
        self._quantized = (key, self._quantize())
        return self._quantized[1]

    def renew_copies(self) -> None:
        if self.version is not None:
            self.quantized()

    def flush_weight_grads(self) -> None:
        """Adds the weight gradients that still wait for others to be fused with."""
        held, self._held = self._held, _Held()
        if not held.micro_batches:
            return
        for kept, now in zip(held.accumulators, self._accumulators(), strict=True):
            if kept is not now:
                raise RuntimeError(
                    f"{len(held.micro_batches)} micro-batches' expert weight gradients were held "
                    "while .grad was replaced; call flush_weight_grads before gradients are "
                    "reduced or zeroed"
                )
        with torch.no_grad():
            self._launch(held.micro_batches, *held.accumulators)

    @torch.no_grad()
    def _quantize(self) -> ExpertWeights:
        for weight in (self.gate_up.weight, self.down.weight):
            if weight.numel() and not weight.untyped_storage().size():
                raise RuntimeError(
                    "expert weights were freed and a new version of them is asked for; gather them "
                    "again before the forward, or leave free_weights off"
                )
        turned = not self.options.fp8_transposed_on_demand
        gate_up, gate_up_t = self.kernels.quantize_blocks(self.gate_up.weight, transposed=turned)
        down, down_t = self.kernels.quantize_blocks(self.down.weight, transposed=turned)
        return ExpertWeights(gate_up, down, gate_up_t, down_t)

    def prepared(self) -> ExpertWeights:
        return self.quantized()

    def over_tokens(
        self,
        x: WireRows,
        experts_NK: Tensor,
        weights_NK: Tensor,
        weights: ExpertWeights,
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Also of rows that come in FP8, which are not rounded again."""
        num_rows, widest = padded_rows(counts), max(self.gate_up.weight.shape[1:])
        if num_rows * widest > self.most_elements:
            raise ValueError(
                f"{num_rows} rows of {widest} values came at once, kernels count to"
                f" {self.most_elements} elements; raise moe.dispatch.token_chunks"
            )
        y_ND, z_PC, *rest = _forward_passes(
            self.kernels,
            x if isinstance(x, Tensor) else Quantized(*x),
            experts_NK,
            weights_NK,
            weights.gate_up,
            weights.down,
            limit=self.limit,
            power_of_two=self.options.power_of_two_scales,
            gemm_sms=self.options.gemm_sms.now,
            num_rows=num_rows,
            keeps_z=self.options.keep_expert_activations,
            dtype=dtype,
        )
        return [y_ND, z_PC, *rest]

    def over_tokens_backward(
        self,
        grad: WireRows,
        experts_NK: Tensor,
        weights_NK: Tensor,
        weights: ExpertWeights,
        kept: Sequence[Tensor],
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, MicroBatch]:
        del experts_NK, counts  # the layout has them
        z_PC, x8, x_scale, *layout = kept
        return self._data_grads(
            grad if isinstance(grad, Tensor) else Quantized(*grad),
            weights_NK,
            Quantized(x8, x_scale),
            z_PC if self.options.keep_expert_activations else None,
            Layout(*layout),
            weights,
            dtype,
        )

    def _backward(
        self,
        grad_ND: Tensor,
        weights_NK: Tensor,
        x8: Quantized,
        z_PC: Tensor | None,
        layout: Layout,
        weights: ExpertWeights,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the routing weights; those of the weights now or in the queue."""
        grad_x_ND, grad_weights_NK, micro_batch = self._data_grads(
            grad_ND, weights_NK, x8, z_PC, layout, weights, grad_ND.dtype
        )
        if self.gate_up.weight.requires_grad:
            self.put_weight_grads(micro_batch)
        return grad_x_ND, grad_weights_NK

    def _data_grads(
        self,
        grad: Tensor | Quantized,
        weights_NK: Tensor,
        x8: Quantized,
        z_PC: Tensor | None,
        layout: Layout,
        weights: ExpertWeights,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, MicroBatch]:
        """Gradients of x, in `dtype`, and of the routing weights; operands of the weights'."""
        kernels, options = self.kernels, self.options
        sms = options.gemm_sms.now
        if z_PC is None:
            rows = Quantized(*kernels.gather_rows(x8.data, layout, x8.scale))
            z_PC = kernels.grouped_gemm(rows, weights.gate_up, layout, gemm_sms=sms)
        grad_rows, grad_columns = kernels.quantize_routed(
            grad,
            layout,
            with_rows=True,
            power_of_two=options.power_of_two_grad_scales,
            tile_scales=options.wgrad_tile_scales,
        )
        down_t = weights.down_t or kernels.transpose_blocks(weights.down)
        inner_grad_PF = kernels.grouped_gemm(grad_rows, down_t, layout, gemm_sms=sms)
        del grad_rows, down_t
        grads = kernels.swiglu_backward(
            z_PC, inner_grad_PF, weights_NK, layout, self.limit, power_of_two=False
        )
        del z_PC, inner_grad_PF
        gate_up_t = weights.gate_up_t or kernels.transpose_blocks(weights.gate_up)
        grad_PD = kernels.grouped_gemm(grads.rows, gate_up_t, layout, gemm_sms=sms)
        grad_x_ND = kernels.gather_sum(grad_PD, layout, dtype=dtype)
        micro_batch = MicroBatch(x8, grad_columns, grads.inner_columns, grads.columns, layout)
        return grad_x_ND, grads.weight_NK, micro_batch

    def put_weight_grads(self, micro_batch: MicroBatch) -> None:
        """Adds a micro-batch's weight gradients: now, or in the queue while that is deferring."""
        if self.queue is not None and self.queue.deferring:
            self.queue.add(lambda: self._add_weight_grads(micro_batch))
        else:
            self._add_weight_grads(micro_batch)

    def _add_weight_grads(self, micro_batch: MicroBatch) -> None:
        """Holds a micro-batch; launches when enough are held."""
        if not self._held.micro_batches:
            self._held.accumulators = self._accumulators()
        self._held.micro_batches.append(micro_batch)
        if len(self._held.micro_batches) == self.options.fused_wgrad_micro_batches:
            self.flush_weight_grads()

    def _accumulators(self) -> tuple[Tensor, Tensor]:
        return fp32_grad(self.gate_up.weight), fp32_grad(self.down.weight)

    def _launch(self, micro_batches: Sequence[MicroBatch], gate_up: Tensor, down: Tensor) -> None:
        kernels, options = self.kernels, self.options
        kernels.grouped_weight_grad(
            down,
            [WeightGradOperands(m.grad_columns, m.inner_columns, m.layout) for m in micro_batches],
            gemm_sms=options.gemm_sms.now,
        )
        # x is turned only now: until here its rows, once per token, were all that was kept. Values
        # of four bits times powers of two keep all their bits under one power of two per tile,
        # unless they are 2^-15 of its largest: tiles cost x nothing.
        operands = []
        for m in micro_batches:
            _, x_columns = kernels.quantize_routed(
                m.x8,
                m.layout,
                with_rows=False,
                power_of_two=options.power_of_two_scales,
                tile_scales=options.wgrad_tile_scales or options.power_of_two_scales,
            )
            operands.append(WeightGradOperands(m.gate_up_columns, x_columns, m.layout))
        kernels.grouped_weight_grad(gate_up, operands, gemm_sms=options.gemm_sms.now)


def fp32_grad(weight: nn.Parameter) -> Tensor:
    """The parameter's fp32 gradient, made of zeros if there is none; the weight may be bf16."""
    if weight.grad is None:
        weight.grad_dtype = torch.float32
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    if weight.grad.dtype is not torch.float32:
        raise RuntimeError(
            f"FP8 experts add fp32 weight gradients, but .grad is {weight.grad.dtype}; something "
            "else gave this weight a gradient"
        )
    return weight.grad


@torch.library.custom_op("ppruntime::fp8_experts", mutates_args=())
def _forward_op(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    backend: str,
    power_of_two: bool,
    gemm_sms: int,
    keeps_z: bool,
) -> list[Tensor]:
    """y, z, x8, its scale, and the layout's five. One op, so that selective checkpointing can save
    its outputs: a recompute then neither sends nor multiplies again; z is empty unless `keeps_z`.
    `gemm_sms` 0: all."""
    return _forward_passes(
        expert_kernels(ExpertBackend(backend)),
        x_ND,
        experts_NK,
        weights_NK,
        Quantized(gate_up, gate_up_scale),
        Quantized(down, down_scale),
        limit=limit,
        power_of_two=power_of_two,
        gemm_sms=gemm_sms or None,
        num_rows=None,
        keeps_z=keeps_z,
        dtype=x_ND.dtype,
    )


def _forward_passes(
    kernels: ExpertKernels,
    x: Tensor | Quantized,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up: Quantized,
    down: Quantized,
    *,
    limit: float,
    power_of_two: bool,
    gemm_sms: int | None,
    num_rows: int | None,
    keeps_z: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """y in `dtype`, z, x8, its scale, and the layout's five. `num_rows`: pool rows where the host
    knows them; None: for the worst case."""
    layout = kernels.expert_layout(experts_NK, gate_up.data.shape[0], num_rows)
    x8 = kernels.quantize_rows(x, power_of_two=power_of_two) if isinstance(x, Tensor) else x
    rows = Quantized(*kernels.gather_rows(x8.data, layout, x8.scale))
    z_PC = kernels.grouped_gemm(rows, gate_up, layout, gemm_sms=gemm_sms)
    del rows
    inner = kernels.swiglu(z_PC, weights_NK, layout, limit, power_of_two=False)
    z_PC = z_PC if keeps_z else z_PC.new_empty(0)
    y_PD = kernels.grouped_gemm(inner, down, layout, gemm_sms=gemm_sms)
    y_ND = kernels.gather_sum(y_PD, layout, dtype=dtype)
    return [y_ND, z_PC, *x8, *layout]


@_forward_op.register_fake
def _(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    backend: str,
    power_of_two: bool,
    gemm_sms: int,
    keeps_z: bool,
) -> list[Tensor]:
    num_experts, width, hidden = gate_up.shape
    num_tokens = x_ND.shape[0]
    num_rows = most_rows(experts_NK.numel(), num_experts)

    def ints(*shape: int) -> Tensor:
        return x_ND.new_empty(shape, dtype=torch.int32)

    return [
        torch.empty_like(x_ND),
        x_ND.new_empty((num_rows, width) if keeps_z else 0, dtype=torch.bfloat16),
        torch.empty_like(x_ND, dtype=torch.float8_e4m3fn),
        x_ND.new_empty(num_tokens, hidden // GROUP, dtype=torch.float32),
        ints(num_rows),
        ints(*experts_NK.shape),
        ints(num_rows // GROUP),
        ints(num_experts + 1),
        ints(num_experts),
    ]


class _Fp8Experts(torch.autograd.Function):
    """The op with its gradient. The weights come along so that autograd asks for a backward where
    only they need one; their gradients are added to `.grad` on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weights_NK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        experts_NK: Tensor,
        layer: Fp8Experts,
    ) -> Tensor:
        options, weights = layer.options, layer.quantized()
        y_ND, z_PC, x8, x_scale, *layout = torch.ops.ppruntime.fp8_experts(
            x_ND,
            experts_NK,
            weights_NK,
            *weights.gate_up,
            *weights.down,
            layer.limit,
            options.backend.value,
            options.power_of_two_scales,
            options.gemm_sms.now or 0,
            options.keep_expert_activations,
        )
        ctx.save_for_backward(weights_NK, z_PC, x8, x_scale, *layout)
        ctx.layer, ctx.weights = layer, weights
        result: Tensor = y_ND
        return result

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        weights_NK, z_PC, x8, x_scale, *layout = ctx.saved_tensors
        grad_x, grad_weights = ctx.layer._backward(
            grad_ND.contiguous(),
            weights_NK,
            Quantized(x8, x_scale),
            z_PC if ctx.layer.options.keep_expert_activations else None,
            Layout(*layout),
            ctx.weights,
        )
        return grad_x, grad_weights, None, None, None, None
