"""The phases of whole routed layers by themselves, for `bench_moe_ranks`: of the yardstick, of a
dispatcher of tokens with FP8 experts, and of the fused layer, by the names of `moe_floor`.

A phase is all that a layer does between what it has at its beginning and what the next one starts
with: to quantise, to sort, to bring rows into order and to send them is `dispatch`. The fused layer
multiplies rows while they come and sends what it has multiplied: there such phases are one, as
`dispatch + L1`. Each runs by itself on operands that a forward and a backward leave behind; all
ranks run the same. Phases of one path add up to more than the layer where it hides one behind the
other, and to less where its host cannot keep ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppruntime.launch.moe_yardstick import WAYS, Yardstick, by_token, weighted_grads
from ppruntime.models.all_to_all import AllToAll, orders_by_expert
from ppruntime.models.expert_products import product, weight_grad
from ppruntime.models.expert_rows import expert_layout, to_rows, weighted_sum
from ppruntime.models.experts import Experts
from ppruntime.models.linear import accumulate_grad
from ppruntime.models.router import Routing
from ppruntime.models.token_dispatch import TokenDispatcher


class Part(NamedTuple):
    """Something to time."""

    name: str
    """A phase, or phases that are done together: "dispatch + L1"."""
    run: Callable[[], object]


class Step(NamedTuple):
    """A piece of a phase."""

    phase: str
    name: str
    run: Callable[[], object]


def yardstick_steps(
    way: Yardstick, experts: Experts, x_ND: Tensor, routing: Routing, grad_ND: Tensor
) -> Iterator[Step]:
    """Everything that the yardstick does, in its order."""
    gate_up, down = (layer.weight.detach() for layer in (experts.gate_up, experts.down))
    layout, weights_NK = expert_layout(routing.experts_NK), routing.weights_NK.detach()
    rows, grad_ND = way.rows_per_expert, grad_ND.to(x_ND.dtype)

    yield Step("dispatch", "order", lambda: expert_layout(routing.experts_NK))
    gather = partial(x_ND.index_select, 0, layout.token_R)
    yield Step("dispatch", "gather", gather)
    x_RD = gather()
    yield Step("dispatch", "all-to-all", partial(way.there, x_RD))
    came_SD = way.there(x_RD)
    yield Step("dispatch", "by expert", partial(way.by_expert, came_SD))
    x_SD = way.by_expert(came_SD)
    yield Step("L1", "grouped_mm", partial(product, x_SD, gate_up, rows))
    z_SC = product(x_SD, gate_up, rows)
    act = partial(experts.swiglu, z_SC, experts.limit)
    yield Step("act", "SwiGLU", act)
    inner_SF = act()
    yield Step("L2", "grouped_mm", partial(product, inner_SF, down, rows))
    o_SD = product(inner_SF, down, rows)
    yield Step("combine", "by source", partial(way.by_source, o_SD))
    o_SD = way.by_source(o_SD)
    yield Step("combine", "all-to-all", partial(way.back, o_SD))
    o_RD = way.back(o_SD)
    yield Step("combine", "by token", partial(by_token, o_RD, layout))
    o_NKD = by_token(o_RD, layout)
    sum_up = partial(WAYS[way.sums].weighted, o_NKD, weights_NK)
    yield Step("combine", f"weighted sum, {way.sums}", sum_up)

    unweigh = partial(weighted_grads, way, grad_ND, o_NKD, weights_NK, layout)
    yield Step("dispatch back", "gradients of the sum", unweigh)
    grad_RD, _ = unweigh()
    yield Step("dispatch back", "all-to-all", partial(way.there, grad_RD))
    grad_SD = way.there(grad_RD)
    yield Step("dispatch back", "by expert", partial(way.by_expert, grad_SD))
    grad_SD = way.by_expert(grad_SD)
    yield Step("dgrad L2", "grouped_mm", partial(product, grad_SD, down.mT, rows))
    grad_SF = product(grad_SD, down.mT, rows)
    with torch.enable_grad():
        leaf_SC = z_SC.detach().requires_grad_()
        made_SF = experts.swiglu(leaf_SC, experts.limit)
    act_back = partial(torch.autograd.grad, made_SF, leaf_SC, grad_SF, retain_graph=True)
    yield Step("act back", "SwiGLU", act_back)
    (grad_SC,) = act_back()
    yield Step("dgrad L1", "grouped_mm", partial(product, grad_SC, gate_up.mT, rows))
    grad_x_SD = product(grad_SC, gate_up.mT, rows)
    yield Step("combine back", "by source", partial(way.by_source, grad_x_SD))
    grad_x_SD = way.by_source(grad_x_SD)
    yield Step("combine back", "all-to-all", partial(way.back, grad_x_SD))
    grad_x_RD = way.back(grad_x_SD)
    yield Step("combine back", "by token", lambda: by_token(grad_x_RD, layout).sum(1))
    for name, layer, grad, inputs in (
        ("W13", experts.gate_up, grad_SC, x_SD),
        ("W2", experts.down, grad_SD, inner_SF),
    ):
        add = partial(_add_weight_grad, layer.weight, grad, inputs.detach(), rows)
        yield Step("wgrad", f"{name}, added in fp32", add)


def _add_weight_grad(weight: Tensor, grad: Tensor, inputs: Tensor, rows: Sequence[int]) -> None:
    with torch.no_grad():
        accumulate_grad(weight, weight_grad(grad, inputs, rows, len(rows)))


def readable_steps(
    way: AllToAll, experts: Experts, x_ND: Tensor, routing: Routing, counts_E: Tensor
) -> Iterator[Step]:
    """A forward of a run's readable way: where it spends what the yardstick does not."""
    gate_up, down = (layer.weight.detach() for layer in (experts.gate_up, experts.down))
    layout, routes = expert_layout(routing.experts_NK), way.routes(counts_E)
    weights_NK, name, ops = routing.weights_NK.detach(), way.exchange.name, torch.ops.ppruntime
    counts_PL = torch.tensor(routes.rows_per_expert).view(-1, len(gate_up))
    rows: list[int] = counts_PL.sum(0).tolist()

    yield Step("dispatch", "order", lambda: expert_layout(routing.experts_NK))
    yield Step("dispatch", "gather", partial(to_rows, x_ND, layout))
    x_RD = to_rows(x_ND, layout)
    yield Step("dispatch", "counts, the host waits", partial(way.routes, counts_E))
    there = partial(ops.expert_dispatch, x_RD, routes.send, routes.receive, name)
    yield Step("dispatch", "all-to-all", there)
    x_SD = there()
    yield Step("dispatch", "orders", partial(orders_by_expert, counts_PL, x_ND.device))
    order_S, place_S = orders_by_expert(counts_PL, x_ND.device)
    yield Step("dispatch", "by expert", lambda: x_SD[order_S])
    z_SC = product(x_SD[order_S], gate_up, rows)
    yield Step("act", "SwiGLU, in fp32", partial(experts.swiglu, z_SC, experts.limit))
    o_SD = product(experts.swiglu(z_SC, experts.limit), down, rows)
    yield Step("combine", "by source", lambda: o_SD[place_S])
    back = partial(ops.expert_combine, o_SD[place_S], routes.receive, routes.send, name)
    yield Step("combine", "all-to-all", back)
    sum_up = partial(weighted_sum, back(), weights_NK, layout)
    yield Step("combine", "weighted sum, in fp32", sum_up)


def whole_phases(steps: Sequence[Step]) -> Iterator[Part]:
    """Each phase's steps one after another."""
    for phase in dict.fromkeys(step.phase for step in steps):
        runs = [step.run for step in steps if step.phase == phase]
        yield Part(phase, partial(_in_turn, runs))


def _in_turn(runs: Sequence[Callable[[], object]]) -> None:
    for run in runs:
        run()


def token_phases(
    dispatcher: TokenDispatcher,
    experts: Any,  # Fp8Experts, which need Triton
    x_ND: Tensor,
    routing: Routing,
    grad_ND: Tensor,
) -> Iterator[Part]:
    """Of FP8 experts to which tokens come once per rank, in one chunk."""
    from ppruntime.models.fp8_experts import MicroBatch
    from ppruntime.models.fp8_wire import to_wire
    from ppruntime.models.kernels.moe_layout import padded_rows
    from ppruntime.models.kernels.quantize import Quantized

    buffer, kernels, weights = dispatcher.buffer, experts.kernels, experts.prepared()
    options, wire, dtype = experts.options, dispatcher.wire, x_ND.dtype
    sms = options.gemm_sms.now
    held, num = len(experts.gate_up.weight), len(experts.gate_up.weight) * buffer.num_ranks
    weights_NK, grad_ND = routing.weights_NK.detach(), grad_ND.to(dtype)

    def dispatch() -> Any:
        rows = to_wire(x_ND) if wire.fp8 else x_ND
        arrived = buffer.dispatch(rows, routing.experts_NK, weights_NK, num, after=buffer.now())()
        layout = kernels.expert_layout(arrived.expert_SK, held, padded_rows(arrived.counts))
        x8 = arrived.x
        if isinstance(x8, Tensor):
            x8 = kernels.quantize_rows(x8, power_of_two=options.power_of_two_scales)
        x8 = Quantized(*x8)
        pool = Quantized(*kernels.gather_rows(x8.data, layout, x8.scale))
        return arrived, layout, x8, pool

    arrived, layout, x8, pool = dispatch()
    z = kernels.grouped_gemm(pool, weights.gate_up, layout, gemm_sms=sms)
    act = partial(kernels.swiglu, z, arrived.weight_SK, layout, experts.limit, power_of_two=False)
    inner = act()
    o = kernels.grouped_gemm(inner, weights.down, layout, gemm_sms=sms)

    def combine(rows: Tensor, weight_SK: Tensor | None = None) -> Any:
        y_SD = kernels.gather_sum(rows, layout, dtype=dtype)
        return buffer.combine(y_SD, arrived.handle, weight_SK, after=buffer.now())()

    yield Part("dispatch", dispatch)
    yield Part("L1", partial(kernels.grouped_gemm, pool, weights.gate_up, layout, gemm_sms=sms))
    yield Part("act", act)
    yield Part("L2", partial(kernels.grouped_gemm, inner, weights.down, layout, gemm_sms=sms))
    yield Part("combine", partial(combine, o))

    def dispatch_back() -> Any:
        rows = to_wire(grad_ND) if wire.fp8_grad else grad_ND
        came = buffer.again(rows, arrived.handle, after=buffer.now())()
        return kernels.quantize_routed(
            came if isinstance(came, Tensor) else Quantized(*came),
            layout,
            with_rows=True,
            power_of_two=options.power_of_two_grad_scales,
            tile_scales=options.wgrad_tile_scales,
        )

    grad_rows, grad_columns = dispatch_back()
    down_t = weights.down_t or kernels.transpose_blocks(weights.down)
    gate_up_t = weights.gate_up_t or kernels.transpose_blocks(weights.gate_up)
    inner_grad = kernels.grouped_gemm(grad_rows, down_t, layout, gemm_sms=sms)
    act_back = partial(
        kernels.swiglu_backward, z, inner_grad, arrived.weight_SK, layout, experts.limit,
        power_of_two=False,
    )  # fmt: skip
    grads = act_back()
    grad_x = kernels.grouped_gemm(grads.rows, gate_up_t, layout, gemm_sms=sms)
    operands = MicroBatch(x8, grad_columns, grads.inner_columns, grads.columns, layout)
    yield Part("dispatch back", dispatch_back)
    yield Part("dgrad L2", partial(kernels.grouped_gemm, grad_rows, down_t, layout, gemm_sms=sms))
    yield Part("act back", act_back)
    yield Part(
        "dgrad L1", partial(kernels.grouped_gemm, grads.rows, gate_up_t, layout, gemm_sms=sms)
    )
    yield Part("combine back", partial(combine, grad_x, grads.weight_NK))
    yield Part("wgrad", partial(put_weight_grads, experts, operands))


def put_weight_grads(experts: Any, operands: Any) -> None:
    """The weight gradients of as many micro-batches as are added in one launch."""
    for _ in range(experts.options.fused_wgrad_micro_batches):
        experts.put_weight_grads(operands)
