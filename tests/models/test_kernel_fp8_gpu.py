"""The FP8 experts at V4.1's widths on a GPU: bits, bounds, both backends, sizes beyond 32 bits."""

import pytest
import torch
from fp8_cases import ON_GPU, distance, needed, random_routing
from msgspec.structs import replace as replaced

from ppruntime.models.dims import preset
from ppruntime.models.experts import clamped_swiglu
from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.kernels import (
    deep_gemm,
    grouped_gemm,
    moe_layout,
    quantize,
    swiglu,
)
from ppruntime.models.kernels.expert_backends import ExpertBackend, unavailable_reason
from ppruntime.models.kernels.grouped_gemm import WeightGradOperands
from ppruntime.models.kernels.quantize import Quantized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]
HIDDEN, WIDTH, EXPERTS = 5120, 2304, 8
MISSING = unavailable_reason(ExpertBackend.DEEP_GEMM) if ON_GPU else "no GPU"
needs_deep_gemm = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
GEMMS = pytest.mark.parametrize(
    "backend", [grouped_gemm, pytest.param(deep_gemm, marks=needs_deep_gemm)], ids=["own", "deep"]
)


def same_bytes(a, b):
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(
        a.scale, b.scale
    )


@pytest.fixture(scope="module")
def layer_inputs():
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1024, HIDDEN, generator=generator, device="cuda").bfloat16()
    grad = torch.randn(1024, HIDDEN, generator=generator, device="cuda").bfloat16()
    weights = torch.rand(1024, 6, generator=generator, device="cuda")
    return x, random_routing(1024, 6, EXPERTS, unrouted=0.05), weights, grad


def layer(**options):
    dims = replaced(preset("v41-flash"), num_experts=EXPERTS)
    experts = Fp8Experts(dims, Fp8Options(**options), device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(1)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, 0, 0.02, generator=generator)
    return experts


def gradients(experts, x, routing, weights, grad):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, routing, weights)
    y.backward(grad)
    return y.detach(), x.grad, weights.grad, experts.gate_up.weight.grad, experts.down.weight.grad


@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantisers_have_the_references_bytes_at_full_width(layer_inputs, power_of_two):
    x, routing, _, _ = layer_inputs
    layout = moe_layout.expert_layout(routing, EXPERTS)
    expected = quantize.quantize_rows_reference(x, power_of_two=power_of_two)
    assert same_bytes(quantize.quantize_rows(x, power_of_two=power_of_two), expected)
    pool = moe_layout.gather_rows_reference(x, layout)
    _, columns = quantize.quantize_routed(
        x, layout, with_rows=False, power_of_two=power_of_two, tile_scales=False
    )
    reference = quantize.quantize_columns_reference(pool, power_of_two=power_of_two)
    assert same_bytes(needed(columns, layout), needed(reference, layout))
    weight = torch.randn(2, 2 * WIDTH, HIDDEN, device="cuda").bfloat16()
    weights, turned = quantize.quantize_blocks(weight, transposed=True)
    assert same_bytes(weights, quantize.quantize_blocks_reference(weight))
    assert same_bytes(turned, quantize.transpose_blocks(weights))


def test_a_thousand_routings_have_the_layout_of_a_stable_sort():
    for seed in range(1000):
        tokens, per_token = (seed * 37) % 700, 1 + seed % 8
        experts = max(per_token, (seed * 11) % 400)
        routing = random_routing(tokens, per_token, experts, seed=seed, unrouted=(seed % 3) / 5)
        got = moe_layout.expert_layout(routing, experts)
        expected = moe_layout.expert_layout_reference(routing, experts)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), seed


@GEMMS
def test_a_sum_over_5120_is_promoted_every_128(backend):
    """Without promotion Hopper's accumulator alone would cost 3.8e-3."""
    layout = moe_layout.expert_layout(random_routing(256, 2, EXPERTS), EXPERTS)
    x = quantize.quantize_rows(torch.rand(256, HIDDEN, device="cuda") + 0.5, power_of_two=False)
    rows = Quantized(*moe_layout.gather_rows(x.data, layout, x.scale))
    weight = torch.rand(EXPERTS, WIDTH, HIDDEN, device="cuda") + 0.5
    weights, _ = quantize.quantize_blocks(weight, transposed=False)
    y = backend.grouped_gemm(rows, weights, layout)
    wide = quantize.dequantize_blocks(weights).double()
    x_PC = quantize.dequantize_rows(Quantized(rows.data, rows.scale.t())).double()
    for expert in range(EXPERTS):
        start = int(layout.start_E1[expert])
        live = slice(start, start + int(layout.count_E[expert]))
        assert distance(y[live], x_PC[live] @ wide[expert].t()) < 3e-3


@GEMMS
def test_weight_gradients_over_5000_rows_keep_fp32(backend):
    routing = torch.zeros(5000, 1, dtype=torch.int64, device="cuda")
    routing[4900:] = 2
    layout = moe_layout.expert_layout(routing, 3)
    left = torch.rand(5000, 512, device="cuda") + 0.5
    right = torch.rand(5000, 384, device="cuda") + 0.5
    operands = WeightGradOperands(
        *(
            quantize.quantize_routed(t, layout, with_rows=False, power_of_two=False)[1]
            for t in (left, right)
        ),
        layout,
    )
    got = torch.zeros(3, 512, 384, device="cuda")
    backend.grouped_weight_grad(got, [operands])
    for expert, rows in ((0, slice(0, 4900)), (2, slice(4900, 5000))):
        start, stop = (int(layout.start_E1[i]) // 128 for i in (expert, expert + 1))
        a, b = (
            quantize.dequantize_columns(Quantized(q.data[start:stop], q.scale[start:stop])).double()
            for q in operands[:2]
        )
        assert distance(got[expert], a.t() @ b) < 5e-4
        assert distance(got[expert], left[rows].double().t() @ right[rows].double()) < 4.5e-2
    assert not got[1].any()


@GEMMS
def test_fused_micro_batches_equal_one_launch_each(backend):
    batches = []
    for seed in range(3):
        layout = moe_layout.expert_layout(random_routing(500, 2, 4, seed=seed), 4)
        columns = [
            quantize.quantize_routed(
                torch.randn(500, channels, device="cuda"),
                layout,
                with_rows=False,
                power_of_two=False,
                tile_scales=channels == 256,
            )[1]
            for channels in (256, 384)
        ]
        batches.append(WeightGradOperands(*columns, layout))
    together = torch.randn(4, 256, 384, device="cuda")
    apart = together.clone()
    backend.grouped_weight_grad(together, batches)
    for batch in batches:
        backend.grouped_weight_grad(apart, [batch])
    if backend is grouped_gemm:
        assert torch.equal(together, apart)
    assert distance(together, apart) < 1e-6


def test_options_that_change_no_bit_at_full_width(layer_inputs):
    usual = gradients(layer(), *layer_inputs)
    for options in (
        {},
        {"keep_expert_activations": False},
        {"fp8_transposed_on_demand": True},
        {"gemm_sms": 100},
    ):
        again = gradients(layer(**options), *layer_inputs)
        assert all(torch.equal(a, b) for a, b in zip(usual, again, strict=True)), options


@needs_deep_gemm
def test_deep_gemm_follows_the_same_recipe(layer_inputs):
    own = gradients(layer(), *layer_inputs)
    deep = layer(backend=ExpertBackend.DEEP_GEMM)
    for a, b in zip(gradients(deep, *layer_inputs), own, strict=True):
        assert distance(a, b) < 5e-3
    limited = layer(backend=ExpertBackend.DEEP_GEMM, gemm_sms=GemmSms(100))
    for a, b in zip(gradients(limited, *layer_inputs), own, strict=True):
        assert distance(a, b) < 5e-3


def test_the_layer_follows_the_recipe_in_torch(layer_inputs):
    own = gradients(layer(), *layer_inputs)
    reference = gradients(layer(backend=ExpertBackend.REFERENCE), *layer_inputs)
    for a, b in zip(own, reference, strict=True):
        assert distance(a, b) < 2e-2


def exact(experts, x, routing, weights, grad):
    """fp64, expert after expert."""
    x, weights = (t.double().requires_grad_() for t in (x, weights))
    w13, w2 = (w.detach().double().requires_grad_() for w in experts.parameters())
    y = torch.zeros_like(x)
    for expert in range(len(w13)):
        token, k = (routing == expert).nonzero(as_tuple=True)
        inner = clamped_swiglu(x[token] @ w13[expert].t(), experts.limit)
        y = y.index_add(0, token, weights[token, k].unsqueeze(1) * (inner @ w2[expert].t()))
    y.backward(grad.double())
    return y.detach(), x.grad, weights.grad, w13.grad, w2.grad


def test_errors_at_full_width_are_those_of_fp8_and_of_the_recipe(layer_inputs):
    true = exact(layer(), *layer_inputs)
    recipe = gradients(layer(backend=ExpertBackend.REFERENCE), *layer_inputs)
    bounds = {"y": 0.075, "dx": 0.08, "dp": 0.075, "dW13": 0.08, "dW2": 0.075}
    for own, expected, c, (name, bound) in zip(
        gradients(layer(), *layer_inputs), recipe, true, bounds.items(), strict=True
    ):
        error = distance(own, c)
        assert 0.02 < error < bound, name
        assert error < 1.02 * distance(expected, c) + 1e-3, name


def test_memory_is_stable_over_steps(layer_inputs):
    experts = layer(fused_wgrad_micro_batches=2)
    reserved = []
    for _ in range(12):
        gradients(experts, *layer_inputs)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[5]


def test_pools_beyond_32_bit_offsets():
    """All of 430,000 rows to one expert: more than 2^31 values of 5,120 channels."""
    num_rows = 430_080
    routing = torch.zeros(num_rows, 1, dtype=torch.int64, device="cuda")
    layout = moe_layout.expert_layout(routing, 2)
    x = torch.randn(num_rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    x8 = quantize.quantize_rows(x, power_of_two=True)
    rows = Quantized(*moe_layout.gather_rows(x8.data, layout, x8.scale))
    weight = torch.randn(2, 256, HIDDEN, device="cuda") * 0.02
    weights, _ = quantize.quantize_blocks(weight, transposed=False)
    z = grouped_gemm.grouped_gemm(rows, weights, layout)
    last = slice(num_rows - 500, num_rows)
    exact = (
        quantize.dequantize_rows(Quantized(*(t[last] for t in x8)))
        @ quantize.dequantize_blocks(weights)[0].t()
    )
    assert distance(z[last], exact) < 3e-3
    _, columns = quantize.quantize_routed(x8, layout, with_rows=False, power_of_two=True)
    block = num_rows // 128  # of the pool, whose blocks behind these are nobody's
    filled = (t[block - 4 : block] for t in columns)
    back = quantize.dequantize_columns(Quantized(*filled))
    assert distance(back, quantize.dequantize_rows(Quantized(*(t[-512:] for t in x8)))) < 1e-2
    del rows, columns, x8
    back = moe_layout.gather_sum(x, layout, dtype=torch.bfloat16)
    assert torch.equal(back[last], x[last])
    weight = torch.rand(num_rows, 1, device="cuda")
    inner = swiglu.swiglu(x, weight, layout, 10.0, power_of_two=False)
    got = quantize.dequantize_rows(Quantized(inner.data[last], inner.scale[:, last].t()))
    expected = swiglu.swiglu_reference(x[last], weight[last, 0], 10.0)
    assert distance(got, expected) < 0.04
