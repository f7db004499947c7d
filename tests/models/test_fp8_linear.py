"""FP8 linears and the FP8 shared expert: against the recipe in torch and fp64; every promise."""

import functools
from dataclasses import replace

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU, distance
from msgspec.structs import replace as replaced
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from ppruntime.models import fp8_linear
from ppruntime.models.dims import UnitKind, preset, unit_specs
from ppruntime.models.experts import SharedExpert, clamped_swiglu
from ppruntime.models.fp8_linear import (
    Fp8Linear,
    Fp8LinearOptions,
    Fp8SharedExpert,
    convert_linears,
)
from ppruntime.models.fp8_linear_rules import fp8_linears, misfit
from ppruntime.models.kernels import fp8_linear_backends
from ppruntime.models.kernels.fp8_linear_backends import (
    LinearBackend,
    dense_layout,
    scaled_mm_fits,
    unavailable_reason,
)
from ppruntime.models.kernels.quantize import (
    dequantize_blocks,
    dequantize_columns,
    dequantize_rows,
    quantize_blocks_reference,
    quantize_columns_reference,
    quantize_rows_reference,
)
from ppruntime.models.linear import Linear, WeightGradQueue, set_queue
from ppruntime.models.save_points import SavePoint, point_of
from ppruntime.models.units import build_unit
from ppruntime.models.weight_copies import WeightVersion, set_weight_version

pytestmark = pytest.mark.gpu if ON_GPU else []
INS, OUTS, ROWS = 256, 128, 100
"""100 rows leave the last block ragged."""
REFERENCE = Fp8LinearOptions(backend=LinearBackend.REFERENCE)
TRITON = Fp8LinearOptions(backend=LinearBackend.TRITON)
DIMS = replaced(
    preset("tiny"),
    hidden_size=INS,
    expert_width=OUTS,
    q_lora_rank=128,
    o_lora_rank=64,
    num_experts=4,
    experts_per_token=2,
)
LINEAR, SHARED = "linear", "shared"


def filled(module, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.06)
    return module


def layer(kind, options, *, dtype=torch.bfloat16, limit=10.0):
    if kind == LINEAR:
        return Fp8Linear(filled(Linear(INS, OUTS, device=DEVICE, dtype=dtype)), options)
    dims = replaced(DIMS, swiglu_limit=limit)
    return Fp8SharedExpert(filled(SharedExpert(dims, device=DEVICE, dtype=dtype)), options)


def case(kind, num_rows=ROWS, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_rows, INS, generator=generator).to(DEVICE, dtype)
    grad = torch.randn(num_rows, OUTS if kind == LINEAR else INS, generator=generator)
    return x, grad.to(DEVICE, dtype)


def gradients(module, x, grad):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    return y.detach(), x.grad, *(weight.grad for weight in module.parameters())


@functools.cache
def usual(kind, options):
    """The gradients of `case(kind)`, computed once."""
    return gradients(layer(kind, options), *case(kind))


def differing(results, others):
    """Which of them differ, and how far."""
    pairs = enumerate(zip(results, others, strict=True))
    return {i: distance(a, b) for i, (a, b) in pairs if not torch.equal(a, b)}


def equal(results, others):
    return not differing(results, others)


def exact(kind, module, x, grad):
    """fp64 by autograd."""
    x = x.double().requires_grad_()
    weights = [w.detach().double().requires_grad_() for w in module.parameters()]
    y = x @ weights[0].t()
    if kind == SHARED:
        y = clamped_swiglu(y, module.limit) @ weights[1].t()
    return y.detach(), *torch.autograd.grad(y, [x, *weights], grad.double())


def rows(x):
    return dequantize_rows(quantize_rows_reference(x, power_of_two=False))


def columns(x):
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 128))
    return dequantize_columns(quantize_columns_reference(padded, power_of_two=False))[: len(x)]


def by_the_recipe(kind, module, x, grad):
    """What the FP8 recipe says, product by product, in fp32."""
    first, *second = (
        dequantize_blocks(quantize_blocks_reference(w.detach().unsqueeze(0)))[0]
        for w in module.parameters()
    )
    z = (rows(x) @ first.t()).bfloat16()
    if kind == LINEAR:
        return z, (rows(grad) @ first).bfloat16(), columns(grad).t() @ columns(x)
    wide = z.float().requires_grad_()
    inner = clamped_swiglu(wide, module.limit)
    inner_grad = (rows(grad) @ second[0]).bfloat16().float()
    (z_grad,) = torch.autograd.grad(inner, wide, inner_grad)
    return (
        (rows(inner.detach()) @ second[0].t()).bfloat16(),
        (rows(z_grad) @ first).bfloat16(),
        columns(z_grad).t() @ columns(x),
        columns(grad).t() @ columns(inner.detach()),
    )


@pytest.mark.parametrize("kind", [LINEAR, SHARED])
@pytest.mark.parametrize("options", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_a_layer_is_the_recipe_to_the_last_rounding_and_fp8_away_from_the_truth(kind, options):
    module, (x, grad) = layer(kind, options), case(kind)
    got = usual(kind, options)
    for i, (a, b) in enumerate(zip(got, by_the_recipe(kind, module, x, grad), strict=True)):
        # Another order of fp32 sums; a bf16 z that rounds the other way moves h by an FP8 step.
        # Tensor cores cut what they add, so on a GPU more of them do: 0.0056 (H200, Triton).
        steps = 1e-2 if a.is_cuda else 5e-3
        assert distance(a, b) < (1e-3 if kind == LINEAR else steps), i
        assert a.dtype is (torch.bfloat16 if i < 2 else torch.float32)
    low, high = (0.02, 0.045) if kind == LINEAR else (0.02, 0.08)
    for a, b in zip(got, exact(kind, module, x, grad), strict=True):
        assert low < distance(a, b) < high


def test_clamped_gates_cost_no_more_than_for_routed_experts():
    module, (x, grad) = layer(SHARED, REFERENCE, limit=1.2), case(SHARED)
    bounds = (0.08, 0.16, 0.16, 0.08)
    got, true = gradients(module, x, grad), exact(SHARED, module, x, grad)
    for a, b, bound in zip(got, true, bounds, strict=True):
        assert 0.02 < distance(a, b) < bound


@pytest.mark.parametrize("kind", [LINEAR, SHARED])
def test_weight_gradients_that_wait_have_the_bits_of_those_that_do_not(kind):
    expected = [usual(kind, REFERENCE)]
    module, queue, (x, grad) = layer(kind, REFERENCE), WeightGradQueue(), case(kind)
    set_queue(module, queue)
    queue.deferring = True
    got = gradients(module, x, grad)
    assert not differing(got[:2], expected[0][:2])
    assert all(g is None for g in got[2:])
    again = gradients(module, x, grad)
    tasks = queue.pop()
    assert len(tasks) == 2 * (1 if kind == LINEAR else 2)
    for task in tasks:
        task()
    whole = layer(kind, REFERENCE)
    gradients(whole, x, grad)
    assert not differing(again[:2], gradients(whole, x, grad)[:2])
    waited, at_once = ([w.grad for w in m.parameters()] for m in (module, whole))
    assert not differing(waited, at_once)


def test_frozen_weights_and_inputs_get_no_gradient():
    module, (x, grad) = layer(SHARED, REFERENCE), case(SHARED)
    module(x).backward(grad)  # only the weights ask for one
    assert torch.equal(module.down.weight.grad, usual(SHARED, REFERENCE)[3])
    module = layer(SHARED, REFERENCE).requires_grad_(False)
    got = gradients(module, x, grad)
    assert equal(got[:2], usual(SHARED, REFERENCE)[:2])
    assert got[2] is got[3] is None


@pytest.mark.parametrize("kind", [LINEAR, SHARED])
def test_weights_are_quantised_once_per_version(kind):
    module, (x, grad) = layer(kind, REFERENCE), case(kind)
    count, weights, quantize = 0, len(list(module.parameters())), module.kernels.quantize_blocks

    def counted(*args, **options):
        nonlocal count
        count += 1
        return quantize(*args, **options)

    module.kernels = replace(module.kernels, quantize_blocks=counted)
    gradients(module, x, grad)
    gradients(module, x, grad)
    assert count == 2 * weights  # without a version: in every forward, never in a backward
    version = WeightVersion()
    set_weight_version(torch.nn.ModuleList([module]), version)
    first = gradients(module, x, grad)[0]
    assert torch.equal(first, gradients(module, x, grad)[0])
    assert count == 3 * weights
    with torch.no_grad():
        list(module.parameters())[-1].mul_(1.5)
    with pytest.raises(RuntimeError, match="changed after it was quantised for version 0"):
        module(x)
    version.advance()
    assert not torch.equal(first, module(x))
    assert count == 4 * weights


@pytest.mark.parametrize("kind", [LINEAR, SHARED])
def test_checkpointing_recomputes_or_keeps_products_with_the_same_bits(kind, monkeypatch):
    calls = 0
    kernels_of = fp8_linear.linear_kernels

    def counted(*chosen):
        nonlocal calls
        calls += 1
        return kernels_of(*chosen)

    def keep_projections(ctx, op, *args, **kwargs):
        kept = point_of(op.name()) is SavePoint.PROJECTIONS
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    ops = 1 if kind == LINEAR else 2
    for contexts, runs in (
        (noop_context_fn, 2),
        (lambda: create_selective_checkpoint_contexts(keep_projections), 1),
    ):
        module, (x, grad) = layer(kind, REFERENCE), case(kind)
        monkeypatch.setattr(fp8_linear, "linear_kernels", counted)
        calls, x = 0, x.clone().requires_grad_()
        y = checkpoint(module, x, use_reentrant=False, context_fn=contexts)
        y.backward(grad)
        monkeypatch.undo()
        assert calls == runs * ops
        got = (y.detach(), x.grad, *(weight.grad for weight in module.parameters()))
        assert equal(got, usual(kind, REFERENCE))


def test_what_is_kept_of_x_has_half_its_bytes():
    sizes = []
    x, _ = case(LINEAR, num_rows=128)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes), lambda _: None):
        layer(LINEAR, REFERENCE)(x.requires_grad_())
    assert sizes == [x.nbytes // 2, INS * 4]  # columns, and a scale each


@pytest.mark.parametrize("kind", [LINEAR, SHARED])
@pytest.mark.parametrize("options", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_scales_of_tiles_change_the_weight_gradients_of_what_a_linear_got_alone(kind, options):
    module, (x, grad) = layer(kind, replace(options, wgrad_tile_scales=True)), case(kind)
    got, usually = gradients(module, x, grad), usual(kind, options)
    assert list(differing(got, usually)) == [2]  # of the linear, or of gate and up
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 128))
    tiles = quantize_columns_reference(padded, power_of_two=False, tile_scales=True)
    assert tiles.scale.shape == (1, INS // 128)
    if kind == LINEAR:
        expected = columns(grad).t() @ dequantize_columns(tiles)[: len(x)]
        assert distance(got[2], expected) < 1e-6
    true = exact(kind, module, x, grad)
    assert distance(got[2], true[2]) < 1.1 * distance(usually[2], true[2])


def test_scales_of_tiles_are_fewer():
    sizes = []
    x, _ = case(LINEAR, num_rows=128)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes), lambda _: None):
        layer(LINEAR, replace(REFERENCE, wgrad_tile_scales=True))(x.requires_grad_())
    assert sizes == [x.nbytes // 2, INS // 128 * 4]


def test_the_ops_are_proper_ops():
    module, (x, _) = layer(SHARED, REFERENCE), case(SHARED)
    blocks = [module.blocks(f"{name}.weight").weight for name in ("gate_up", "down")]
    torch.library.opcheck(
        torch.ops.ppruntime.fp8_linear.default,
        (x, *blocks[0], "reference", 0),
        test_utils="test_faketensor",
    )
    torch.library.opcheck(
        torch.ops.ppruntime.fp8_linear.default,
        (x, *blocks[0], "reference", 0, True),
        test_utils="test_faketensor",
    )
    z = torch.randn(ROWS, 2 * OUTS, device=DEVICE).bfloat16()
    torch.library.opcheck(
        torch.ops.ppruntime.fp8_swiglu_linear.default,
        (z, *blocks[1], 10.0, "reference", 0),
        test_utils="test_faketensor",
    )


@pytest.mark.parametrize("options", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_no_rows_and_leading_dimensions(options):
    for kind in (LINEAR, SHARED):
        x, grad = case(kind, num_rows=0)
        y, grad_x, *grads = gradients(layer(kind, options), x, grad)
        assert (y.shape, grad_x.shape) == (grad.shape, x.shape)
        assert not any(g.any() for g in grads)
    if options is REFERENCE:
        module, (x, grad) = layer(LINEAR, options), case(LINEAR)
        got = gradients(module, x.view(2, ROWS // 2, INS), grad.view(2, ROWS // 2, OUTS))
        assert got[0].shape == (2, ROWS // 2, OUTS)
        assert equal([t.flatten(0, -2) for t in got], usual(LINEAR, REFERENCE))


def test_a_gradient_in_another_dtype_is_reported():
    module, (x, grad) = layer(LINEAR, REFERENCE), case(LINEAR)
    module.weight.grad = torch.zeros_like(module.weight)
    with pytest.raises(RuntimeError, match=r"\.grad is torch.bfloat16"):
        gradients(module, x, grad)


class OwnLinear(Linear):
    """A linear with a forward of its own."""


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_the_named_plain_linears_are_converted_and_nothing_else(family):
    dims = (
        DIMS
        if family == "v41"
        else replaced(
            preset("tiny-v4"), hidden_size=INS, expert_width=OUTS, q_lora_rank=128, o_lora_rank=64
        )
    )
    assert misfit(dims) is None
    seen = set()
    for spec in unit_specs(dims):
        unit = build_unit(dims, spec, device="meta")
        before = dict(unit.named_modules())
        parameters = {name: p for name, p in unit.named_parameters()}
        names = convert_linears(unit, REFERENCE)
        assert names == fp8_linears(spec)
        seen |= set(names)
        assert {name: p for name, p in unit.named_parameters()} == parameters
        for name, module in unit.named_modules():
            is_fp8 = isinstance(module, (Fp8Linear, Fp8SharedExpert))
            inside = name in names or name == "moe.shared"
            assert is_fp8 == (inside and "shared." not in name), name
            assert is_fp8 or module is before[name], name
        for bf16 in ("attention.kv", "attention.o_a", "attention.indexer.query", "moe.router.gate"):
            assert bf16 not in names
    assert seen == {
        *("attention.q_a", "attention.q_b", "attention.o_b"),
        *("moe.shared.gate_up", "moe.shared.down"),
    }
    spec = next(s for s in unit_specs(dims) if s.kind is UnitKind.ATTENTION)
    unit = build_unit(dims, spec, device="meta")
    unit.attention.q_a = OwnLinear(INS, 128, device="meta")
    unit.attention.o_b = Linear(128, INS, device="meta", fp32_output=True)
    assert convert_linears(unit, REFERENCE) == ("attention.q_b",)


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"multiples of 128, the weight is \[96, 256\]"):
        Fp8Linear(Linear(INS, 96), REFERENCE)
    assert misfit(replaced(DIMS, q_lora_rank=100)) == (
        "widths have to be multiples of 128, q_lora_rank is 100"
    )


@pytest.mark.skipif(ON_GPU, reason="the reasons of a machine without a GPU")
def test_a_missing_backend_says_what_is_missing_and_what_works():
    for backend in (LinearBackend.DEEP_GEMM, LinearBackend.SCALED_MM):
        with pytest.raises(RuntimeError, match=r'needs a Hopper GPU .* "triton" to run without'):
            layer(LINEAR, Fp8LinearOptions(backend=backend))
    reason = fp8_linear_backends.deep_gemm_reason("kernels.linear", ("fp8_gemm_nt",))
    assert "needs the package deep_gemm, which is not installed" in reason
    assert 'use kernels.linear = "triton"' in reason
    assert "built for CUDA 12.9 or later" in fp8_linear_backends._scaled_mm_reason()
    assert unavailable_reason(LinearBackend.TRITON) is None


def test_scaled_mm_is_left_out_where_its_scales_would_be_read_wrongly():
    fits = {k: scaled_mm_fits(k) for k in (1280, 2304, 4608, 5120, 8192, 32768)}
    assert fits == {1280: False, 2304: False, 4608: True, 5120: True, 8192: True, 32768: True}


def test_a_dense_layout_is_one_group_of_all_rows_in_order():
    layout = dense_layout(130, torch.device(DEVICE))
    assert layout.num_rows == 256
    assert layout.pair_P.tolist() == [*range(130), *[-1] * 126]
    assert layout.row_NK.squeeze(1).tolist() == list(range(130))
    assert layout.expert_B.tolist() == [0, 0]
    assert layout.start_E1.tolist() == [0, 256]
    assert layout.count_E.tolist() == [130]
