"""fp32 products by bf16 ones: the compressor's values and gates."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ppruntime.models.attention_kernels import REFERENCE
from ppruntime.models.kernels.split import split
from ppruntime.models.kernels.wide_linear import _products, wide_products
from ppruntime.models.linear import Linear, WeightGradQueue, set_queue

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"


def case(shape=(2, 37, 96), widths=(24, 16), scale=1.0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    linears = []
    for width in widths:
        linear = Linear(shape[-1], width, device=DEVICE, dtype=torch.float32)
        with torch.no_grad():
            linear.weight.copy_(scale * torch.randn(width, shape[-1], generator=generator))
        linears.append(linear)
    grads = [torch.randn(*shape[:-1], width, generator=generator).to(DEVICE) for width in widths]
    return linears, x, grads


def results(products, linears, x, grads):
    x = x.clone().requires_grad_()
    for linear in linears:
        linear.weight.grad = None
    outputs = products(linears, x)
    torch.autograd.backward(outputs, grads)
    return [*(y.detach() for y in outputs), x.grad, *(linear.weight.grad for linear in linears)]


def exact(linears, x, grads):
    wide = [linear.weight.detach().double() for linear in linears]
    rows = x.double().flatten(0, -2)
    flat = [g.double().flatten(0, -2) for g in grads]
    outputs = [(rows @ w.t()).view(*x.shape[:-1], -1) for w in wide]
    dx = sum(g @ w for g, w in zip(flat, wide, strict=True)).view(x.shape)
    return [*outputs, dx, *(g.t() @ rows for g in flat)]


def distances(found, expected):
    return [
        ((f.double() - e).norm() / e.norm()).item() for f, e in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e5])
def test_values_and_weight_gradients_are_fp32s_and_the_inputs_gradient_bf16s(scale):
    linears, x, grads = case(scale=scale)
    found, plain = (results(f, linears, x, grads) for f in (wide_products, REFERENCE.wide_products))
    expected = exact(linears, x, grads)
    assert [f.dtype for f in found] == [p.dtype for p in plain]
    errors, allowed = distances(found, expected), distances(plain, expected)
    assert max(errors[:2] + errors[3:]) < 1e-6
    assert errors[2] < 1.02 * allowed[2]


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 0, 8), (5, 16)], ids=str)
def test_one_row_and_none_and_rows_without_a_batch(shape):
    linears, x, grads = case(shape, (8, 8))
    found, plain = (results(f, linears, x, grads) for f in (wide_products, REFERENCE.wide_products))
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)


def test_rows_in_fp32_take_the_plain_form():
    linears, x, grads = case(dtype=torch.float32)
    found, plain = (results(f, linears, x, grads) for f in (wide_products, REFERENCE.wide_products))
    assert all(map(torch.equal, found, plain))


def test_put_off_weight_gradients_and_a_recomputation_have_the_same_bits():
    linears, x, grads = case()
    expected = results(wide_products, linears, x, grads)

    def again(linears, x):
        return checkpoint(wide_products, linears, x, use_reentrant=False)

    assert all(map(torch.equal, results(again, linears, x, grads), expected))
    queue = WeightGradQueue()
    queue.deferring = True
    for linear in linears:
        set_queue(linear, queue)
    found = results(wide_products, linears, x, grads)[:3]
    assert all(linear.weight.grad is None for linear in linears)
    for task in queue.pop():
        task()
    found += [linear.weight.grad for linear in linears]
    assert all(map(torch.equal, found, expected))


def test_a_frozen_weight_gets_no_gradient():
    linears, x, grads = case()
    linears[0].weight.requires_grad_(False)
    found = results(wide_products, linears, x, grads)
    assert found[3] is None
    assert found[4] is not None


def test_torch_accepts_the_op():
    linears, x, _ = case((5, 16), (8, 4))
    weights = [linear.weight.detach() for linear in linears]
    torch.library.opcheck(_products, (x, weights))


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [8192, 1001])
def test_at_full_width_on_a_gpu(tokens):
    linears, x, grads = case((1, tokens, 5120), (512, 512), scale=0.02)
    found, plain = (results(f, linears, x, grads) for f in (wide_products, REFERENCE.wide_products))
    expected = exact(linears, x, grads)
    errors, allowed = distances(found, expected), distances(plain, expected)
    # A Hopper's tensor cores cut what they add instead of rounding it: 6e-6 for 5,120 terms, 9e-6
    # for 8,192, where a rounded sum is 7e-7 off.
    assert max(errors[:2] + errors[3:]) < 2e-5, (errors, allowed)
    assert errors[2] < 1.02 * allowed[2]
    assert all(map(torch.equal, found, results(wide_products, linears, x, grads)))


EXTREMES = [0.0, -0.0, 1e-30, -3e-30, 1.5, 3.38e38, -1e30, float("nan")]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 700), (2, 1024)], ids=str)
def test_parts_are_those_of_roundings_one_after_another(shape, count):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    x.flatten()[: len(EXTREMES)] = torch.tensor(EXTREMES[: x.numel()])
    x = x.to(DEVICE)
    found = split(x, count, torch.bfloat16)
    assert found.shape == (count, *shape)
    left = x.clone()
    for part in found:
        assert torch.equal(part.isnan(), left.bfloat16().isnan())
        assert torch.equal(part.nan_to_num(7), left.bfloat16().nan_to_num(7))
        left = left - part
    torch.library.opcheck(split, (x.nan_to_num(), count, torch.bfloat16))
