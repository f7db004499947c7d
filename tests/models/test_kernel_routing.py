"""Routing's kernels against fp64 and the plain functions, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import measured_activations
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ppruntime.models import router
from ppruntime.models.activation_bytes import saved_bytes
from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import Role, UnitKind, preset, unit_specs
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels import routing
from ppruntime.models.moe_kernels import moe_kernels
from ppruntime.models.topk import top_k
from ppruntime.models.units import build_unit

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
interpreted = pytest.mark.skipif(on_gpu, reason="small shapes, for the interpreter")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not on_gpu, reason="needs a GPU")]
FACTOR = 1.5

SHAPES = [
    *(pytest.param(shape, marks=interpreted) for shape in ((6, 5, 2), (1, 1, 1), (9, 16, 6))),
    pytest.param((37, 24, 24), marks=interpreted),
    *(pytest.param(shape, marks=gpu) for shape in ((8192, 384, 6), (1000, 384, 8), (77, 130, 1))),
]
"""Tokens, experts, experts per token."""


def case(num_tokens, num_experts, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator) * scale
    bias = torch.randn(num_experts, generator=generator) * 0.1
    return logits.to(DEVICE), bias.to(DEVICE)


def grads_of(function, logits, bias, given, per_token, through):
    """Weights, scores and the logits' gradient through both, or one of them."""
    logits = logits.clone().requires_grad_()
    found = function(logits, bias, given, per_token, FACTOR)
    total = 0.0
    for i, name in enumerate(("weights_NK", "scores_NE")):
        if name in through:
            values = getattr(found, name)
            steps = torch.linspace(-1, 1, values.numel(), device=DEVICE, dtype=values.dtype)
            total = total + (values * steps.view_as(values)).sum() * (i + 1)
    total.backward()
    return found, logits.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "through", [("weights_NK",), ("scores_NE",), ("weights_NK", "scores_NE")], ids=len
)
def test_scores_weights_and_gradients_are_fp64s(shape, through):
    num_tokens, num_experts, per_token = shape
    logits, bias = case(num_tokens, num_experts)
    found, grad = grads_of(routing.route, logits, bias, None, per_token, through)
    expected, true = grads_of(
        router.route, logits.double(), None, found.experts_NK, per_token, through
    )
    torch.testing.assert_close(found.scores_NE.double(), expected.scores_NE, rtol=2e-6, atol=1e-12)
    torch.testing.assert_close(
        found.weights_NK.double(), expected.weights_NK, rtol=3e-6, atol=1e-12
    )
    torch.testing.assert_close(grad.double(), true, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_picks_are_the_rules_of_the_sums(shape):
    num_tokens, num_experts, per_token = shape
    for seed, scale in ((0, 3.0), (1, 0.0)):  # the second: all scores are equal
        logits, bias = case(num_tokens, num_experts, scale, seed)
        bias = bias.round(decimals=1) * (seed == 0 or num_experts % 2)
        found = routing.route(logits, bias, None, per_token, FACTOR)
        assert found.experts_NK.dtype is torch.int64
        assert torch.equal(found.experts_NK, top_k(found.scores_NE + bias, per_token))


def test_zeros_of_either_sign_are_equal_and_what_is_no_number_comes_first():
    logits = torch.tensor([[-200.0, -300.0, 1.0, float("nan")]], device=DEVICE)
    bias = torch.tensor([-0.0, 0.0, -0.0, 0.0], device=DEVICE)
    found = routing.route(logits, bias, None, 4, FACTOR)
    assert found.experts_NK.tolist() == [[3, 2, 0, 1]]
    zeros = torch.full((1, 4), -300.0, device=DEVICE)
    bias = torch.tensor([0.0, -0.0, 0.0, -0.0], device=DEVICE)
    assert routing.route(zeros, bias, None, 3, FACTOR).experts_NK.tolist() == [[0, 1, 2]]
    all_nan = routing.route(zeros * float("nan"), bias, None, 3, FACTOR).experts_NK
    assert all_nan.tolist() == [[0, 1, 2]]


def test_logits_far_out_have_the_references_scores_and_finite_gradients():
    logits = torch.tensor([[-120.0, -90.0, -20.0, 19.99, 20.01, 500.0]], device=DEVICE)
    found, grad = grads_of(routing.route, logits, None, None, 2, ("weights_NK", "scores_NE"))
    plain = router.route(logits, None, None, 2, FACTOR)
    torch.testing.assert_close(found.scores_NE, plain.scores_NE, rtol=2e-6, atol=1e-19)
    assert found.experts_NK.tolist() == [[5, 4]]
    assert grad.isfinite().all()
    assert grad[0, 0] == 0


def test_given_experts_are_kept_and_weighed():
    logits, bias = case(12, 7)
    given = torch.stack([torch.arange(12) % 7, (torch.arange(12) + 3) % 7], 1).to(DEVICE)
    found, grad = grads_of(routing.route, logits, bias, given, 2, ("weights_NK",))
    plain, expected = grads_of(router.route, logits, bias, given, 2, ("weights_NK",))
    assert torch.equal(found.experts_NK, given)
    torch.testing.assert_close(found.weights_NK, plain.weights_NK)
    torch.testing.assert_close(grad, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("batch", "length", "num_experts"),
    [
        *(pytest.param(*s, marks=interpreted) for s in ((1, 5, 3), (3, 7, 16), (2, 130, 5))),
        *(pytest.param(*s, marks=gpu) for s in ((1, 8192, 384), (3, 1001, 384))),
    ],
)
def test_shares_and_their_gradients_are_fp64s(batch, length, num_experts):
    scores = case(batch * length, num_experts)[0].abs() + 1e-3
    results = []
    for function, dtype in (
        (routing.mean_shares, torch.float32),
        (router.mean_shares, torch.double),
    ):
        leaf = scores.to(dtype, copy=True).detach().requires_grad_()
        shares = function(leaf, batch)
        (shares * torch.linspace(0, 1, shares.numel(), device=DEVICE, dtype=dtype).view_as(shares)
         ).sum().backward()  # fmt: skip
        results.append((shares.detach().double(), leaf.grad.double()))
    (found, grad), (expected, true) = results
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-9)
    torch.testing.assert_close(grad, true, rtol=3e-5, atol=1e-7 / length)


def test_no_tokens_have_no_picks():
    logits, bias = case(0, 5)
    found, grad = grads_of(routing.route, logits, bias, None, 2, ("weights_NK", "scores_NE"))
    assert found.experts_NK.shape == found.weights_NK.shape == (0, 2)
    assert grad.shape == (0, 5)


def test_a_recompute_gives_the_same_bits():
    logits, bias = case(10, 8)
    results = []
    for recompute in (False, True):
        leaf = logits.clone().requires_grad_()

        def run(leaf):
            found = routing.route(leaf, bias, None, 3, FACTOR)
            return found.weights_NK.sum(0).prod() + routing.mean_shares(found.scores_NE, 2)[0, 0]

        loss = checkpoint(run, leaf, use_reentrant=False) if recompute else run(leaf)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", ["by scores", "by token"])
def test_a_unit_that_routes_so_gives_what_the_plain_one_gives_and_keeps_the_planned_bytes(
    role, dtype
):
    dims = preset("tiny-v4" if role == "by token" else "tiny")
    specs = [s for s in unit_specs(dims) if s.kind is UnitKind.MOE]
    spec = next(s for s in specs if (s.role is Role.HASH) == (role == "by token"))
    unit = build_unit(dims, spec, dtype=getattr(torch, dtype))
    init_parameters(unit, spec.name, seed=0)
    low = dtype == "bfloat16"
    kernels = moe_kernels("reference", "triton", torch.device("cpu"), getattr(torch, dtype))
    before = unit_specs(dims)[unit_specs(dims).index(spec) - 1]
    carry = measured_activations.blank_carry(dims, before, 2, 3, dtype)
    carry = carry._replace(streams=torch.randn(carry.streams.shape, dtype=carry.streams.dtype))
    if carry.mix is not None:
        carry = carry._replace(mix=torch.rand(carry.mix.shape))
    carry.streams.requires_grad_()
    ids = torch.arange(6).view(2, 3)
    batch = MicroBatch(ids, ids, ids)
    results = []
    for fused in (False, True):
        if fused:
            unit.moe.router.wide_products = kernels.wide_products
            unit.moe.router.route = kernels.route
            unit.moe.options = replace(unit.moe.options, kernels=kernels)
        measured = measured_activations.measure([unit], carry, batch)
        name = "triton" if fused else "reference"
        assert measured.own_bytes == saved_bytes(dims, spec, 2, 3, dtype, router=name)
        unit.zero_grad()
        found = unit(carry, batch)
        loss = found.streams.float().square().sum()
        loss = loss if found.balance_loss is None else loss + found.balance_loss
        loss.backward()
        results.append([found.streams.detach(), unit.moe.router.gate.weight.grad])
        assert fused or found.loads[-1].sum() == 6 * dims.experts_per_token
    for one, other in zip(*results, strict=True):
        assert ((one - other).norm() / other.norm()) < (2e-2 if low else 1e-5)


def test_who_routes_is_told_by_its_key(monkeypatch):
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match=r'"library" is for bfloat16 .* torch.float32'):
        moe_kernels("reference", "library", cpu, torch.float32)
    assert moe_kernels("reference", "library", cpu, torch.bfloat16).route is router.route
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r'kernels.router = "triton": .*"reference" runs anyw'):
        moe_kernels("reference", "triton", cpu, torch.bfloat16)


def test_ops_say_what_they_give_and_other_dtypes_are_refused():
    logits, bias = case(6, 8)
    ops = torch.ops.ppruntime
    given = torch.zeros(6, 2, dtype=torch.int64, device=DEVICE) + torch.arange(2, device=DEVICE)
    torch.library.opcheck(ops.route, (logits, bias, None, 2, FACTOR))
    torch.library.opcheck(ops.route, (logits, None, given, 2, FACTOR))
    scores = logits.abs() + 0.1
    weights = torch.ones(6, 2, device=DEVICE)
    torch.library.opcheck(ops.route_backward, (weights, None, logits, scores, given, FACTOR))
    torch.library.opcheck(ops.mean_shares, (scores, 3))
    torch.library.opcheck(ops.mean_shares_backward, (torch.ones(3, 8, device=DEVICE), scores))
    with pytest.raises(ValueError, match=r"the bias is \[7\]; .* \[6, 8\] .* has to be \[8\]"):
        routing.route(logits, bias[1:], None, 2, FACTOR)
    with pytest.raises(ValueError, match=r"given experts is \[6, 2\]; .* has to be \[6, 3\]"):
        routing.route(logits, None, given, 3, FACTOR)
    with pytest.raises(ValueError, match="6 tokens are not 4 sequences of equal length"):
        routing.mean_shares(scores, 4)
    with pytest.raises(ValueError, match=r"logits are torch\.bfloat16"):
        routing.route(logits.bfloat16(), None, None, 2, FACTOR)
