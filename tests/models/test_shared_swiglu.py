"""The clamped SwiGLU's kernel against fp64 and the plain one, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ppruntime.models.dims import preset
from ppruntime.models.experts import Experts, clamped_swiglu
from ppruntime.models.kernels.shared_swiglu import swiglu
from ppruntime.models.moe import MoE, MoEOptions
from ppruntime.models.moe_kernels import REFERENCE, moe_kernels

on_gpu = torch.cuda.is_available()
DEVICE = torch.device("cuda" if on_gpu else "cpu")
LIMIT = 10.0


def case(shape, dtype=torch.float32, scale=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(shape, generator=generator) * scale
    grad = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator)
    return z.to(DEVICE, dtype), grad.to(DEVICE, dtype)


def results(function, z, grad):
    z = z.clone().requires_grad_()
    h = function(z, LIMIT)
    return [h.detach(), *torch.autograd.grad(h, z, grad.to(h.dtype))]


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


SHAPES = [(3, 8), (2, 5, 96), (1, 2), (7, 2050), (2, 4608)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-6, 4.0, 300.0])
def test_fp32_is_fp64_to_its_last_bits(shape, scale):
    z, grad = case(shape, scale=scale)
    expected = results(clamped_swiglu, z.double(), grad.double())
    for ours, exact in zip(results(swiglu, z, grad), expected, strict=True):
        assert error(ours, exact) < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_is_no_farther_from_fp64_than_the_plain_form(shape):
    z, grad = case(shape, torch.bfloat16)
    expected = results(clamped_swiglu, z.double(), grad.double())
    plain = results(clamped_swiglu, z, grad)
    for ours, theirs, exact in zip(results(swiglu, z, grad), plain, expected, strict=True):
        assert error(ours, exact) <= 1.02 * error(theirs, exact) + 1e-7


def test_clamped_values_let_no_gradient_through_and_the_limit_itself_does():
    z = torch.tensor([[9.0, 10.0, 11.0, -50.0, 1.0, -10.0, 10.0, -10.5]], device=DEVICE)
    found = results(swiglu, z, torch.ones(1, 4, device=DEVICE))
    expected = results(clamped_swiglu, z.double(), torch.ones(1, 4, device=DEVICE).double())
    assert torch.equal(found[1] == 0, expected[1] == 0)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-7)


def test_what_is_no_number_shows():
    z, grad = case((2, 8))
    z[0, 1], z[1, 5] = float("nan"), float("nan")
    found, plain = results(swiglu, z, grad), results(clamped_swiglu, z, grad)
    for ours, theirs in zip(found, plain, strict=True):
        assert torch.equal(ours.isnan().any(-1), theirs.isnan().any(-1))


def test_a_row_has_the_same_bits_whatever_lies_beside_it_and_repeats():
    z, grad = case((6, 40), torch.bfloat16)
    whole = results(swiglu, z, grad)
    parts = [results(swiglu, z[i : i + 1], grad[i : i + 1]) for i in range(6)]
    assert torch.equal(whole[0], torch.cat([h for h, _ in parts]))
    assert torch.equal(whole[1], torch.cat([dz for _, dz in parts]))


def test_strided_rows_none_and_a_recomputation():
    z, grad = case((4, 3, 24))
    turned = z.transpose(0, 1)
    assert torch.equal(swiglu(turned, LIMIT), swiglu(turned.contiguous(), LIMIT))
    assert swiglu(z[:0], LIMIT).shape == (0, 3, 12)

    def again(z, limit):
        return checkpoint(swiglu, z, limit, use_reentrant=False)

    assert all(map(torch.equal, results(again, z, grad), results(swiglu, z, grad)))


def test_wrong_dtypes_and_odd_widths_are_refused():
    with pytest.raises(ValueError, match=r"z is torch.float64; the kernel takes bfloat16 and"):
        swiglu(torch.zeros(2, 4, dtype=torch.float64, device=DEVICE), LIMIT)
    with pytest.raises(ValueError, match=r"z has 5 channels; gate and up are halves"):
        swiglu(torch.zeros(2, 5, device=DEVICE), LIMIT)


def test_torch_accepts_the_ops():
    z, grad = case((3, 16))
    torch.library.opcheck(torch.ops.ppruntime.shared_swiglu.default, (z, LIMIT))
    torch.library.opcheck(torch.ops.ppruntime.shared_swiglu_backward.default, (grad, z, LIMIT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moe_layer_with_them_gives_what_the_plain_one_gives(dtype):
    low = dtype is torch.bfloat16
    fused = moe_kernels("triton", "library" if low else "reference", DEVICE, dtype)
    dims = preset("tiny")
    found = []
    for kernels in (REFERENCE, fused):
        torch.manual_seed(0)
        moe = MoE(dims, options=MoEOptions(kernels=kernels), device=DEVICE, dtype=dtype)
        assert isinstance(moe.experts, Experts)
        for parameter in moe.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        x = torch.randn(2, 16, dims.hidden_size, device=DEVICE, dtype=dtype, requires_grad=True)
        y = moe(x, torch.zeros(2, 16, dtype=torch.int64, device=DEVICE))
        (y.y_BTD.float().square().sum() + y.balance_loss).backward()
        found.append([y.y_BTD.detach(), x.grad, moe.router.gate.weight.grad, y.loads_E])
    *ours, loads = found[1]
    *theirs, expected_loads = found[0]
    assert torch.equal(loads, expected_loads)
    for one, other in zip(ours, theirs, strict=True):
        assert error(one, other.double()) < (2e-2 if low else 1e-5)


def test_the_kernel_by_name_says_why_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r'kernels.swiglu = "triton": .*"reference" runs anyw'):
        moe_kernels("triton", "reference", torch.device("cpu"), torch.float32)
    with pytest.raises(RuntimeError, match=r'"library" is for bfloat16 .* torch.float32'):
        moe_kernels("reference", "library", torch.device("cpu"), torch.float32)
    assert moe_kernels("auto", "auto", torch.device("cpu"), torch.bfloat16) == REFERENCE


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [8192, 1001])
def test_at_full_width_on_a_gpu(tokens):
    z, grad = case((1, tokens, 4608), torch.bfloat16)
    expected = results(clamped_swiglu, z.double(), grad.double())
    plain = results(clamped_swiglu, z, grad)
    found = results(swiglu, z, grad)
    for ours, theirs, exact in zip(found, plain, expected, strict=True):
        assert error(ours, exact) <= 1.02 * error(theirs, exact)
    assert all(map(torch.equal, found, results(swiglu, z, grad)))
