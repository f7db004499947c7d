"""RMSNorm's kernel against fp64 and the plain one, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ppruntime.models.attention_kernels import REFERENCE, set_kernels
from ppruntime.models.kernel_limits import Backend
from ppruntime.models.kernels import norm as kernel
from ppruntime.models.kernels.attention_backends import Choice, attention_kernels
from ppruntime.models.norm import RMSNorm, rms_norm

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
interpreted = pytest.mark.skipif(on_gpu, reason="small shapes, for the interpreter")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not on_gpu, reason="needs a GPU")]


def case(shape, dtype, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator) + 0.5
    return [t.to(DEVICE, dtype) for t in (x * scale, weight, grad)]


def results(function, x, weight, grad, eps):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight, eps)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad.to(y.dtype))]


def distances(found, expected):
    return [
        ((f.double() - e).norm() / e.norm().clamp_min(1e-300)).item()
        for f, e in zip(found, expected, strict=True)
    ]


SHAPES = [(7, 40), (2, 3, 128), (1, 1), (1, 600), (70, 16), (5, 4097)]


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-9, 3e4])
def test_in_fp32_all_results_are_fp64s_to_fp32s_last_bits(shape, scale):
    x, weight, grad = case(shape, torch.float32, scale)
    found = results(kernel.rms_norm, x, weight, grad, 1e-20)
    expected = results(rms_norm, x.double(), weight.double(), grad.double(), 1e-20)
    assert all(f.isfinite().all() for f in found)
    if shape[-1] > 1:  # the gradient of the only channel's sign is rounding alone
        assert max(distances(found, expected)) < 2e-6
    else:
        assert torch.allclose(found[0].double(), expected[0])


@interpreted
def test_zeros_and_no_rows_give_zeros_and_no_rows():
    x, weight, grad = case((3, 24), torch.float32)
    y, dx, dweight = results(kernel.rms_norm, torch.zeros_like(x), weight, grad, 1e-20)
    assert not y.any()
    assert not dweight.any()
    assert dx.isfinite().all()
    y, dx, dweight = results(kernel.rms_norm, x[:0], weight, grad[:0], 1e-20)
    assert y.shape == dx.shape == (0, 24)
    assert not dweight.any()


@pytest.mark.parametrize("shape", [(2, 37, 512), (300, 1280), (1, 128)], ids=str)
def test_in_bf16_errors_are_no_larger_than_the_plain_ones(shape):
    values = case(shape, torch.bfloat16)
    expected = results(rms_norm, *(v.double() for v in values), 1e-20)
    found, plain = (results(f, *values, 1e-20) for f in (kernel.rms_norm, rms_norm))
    assert [f.dtype for f in found] == [p.dtype for p in plain]
    assert [f.shape for f in found] == [p.shape for p in plain]
    for error, allowed in zip(distances(found, expected), distances(plain, expected), strict=True):
        assert error <= 1.05 * allowed + 1e-6


@interpreted
def test_rows_that_lie_apart_and_a_recomputation_have_the_same_bits():
    x, weight, grad = case((6, 48), torch.bfloat16)
    expected = results(kernel.rms_norm, x, weight, grad, 1e-20)
    apart = torch.stack((x, x), 1)[:, 1]
    assert not apart.is_contiguous()

    def again(x, weight, eps):
        return checkpoint(kernel.rms_norm, x, weight, eps, use_reentrant=False)

    for found in (results(kernel.rms_norm, apart, weight, grad, 1e-20),
                  results(again, x, weight, grad, 1e-20)):  # fmt: skip
        assert all(map(torch.equal, found, expected))


def test_other_dtypes_are_refused_with_a_reason():
    with pytest.raises(
        ValueError, match=r"the weight is torch\.float64; the kernel takes bfloat16"
    ):
        kernel.rms_norm(torch.ones(2, 4), torch.ones(4, dtype=torch.float64), 1e-6)
    with pytest.raises(ValueError, match=r"x is \[2, 4\] and the weight \[3\]; .* be \[4\]"):
        kernel.rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6)


@interpreted
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [rms_norm, kernel.rms_norm])
def test_a_compiled_norm_has_the_plain_ones_gradients(function, dtype):
    values = case((5, 24), dtype)
    expected = results(function, *values, 1e-6)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = results(compiled, *values, 1e-6)
    torch._dynamo.reset()
    assert expected[1].any()
    assert all(map(torch.equal, found, expected))


@interpreted
def test_a_record_gives_its_norm_to_every_norm_of_a_unit_and_takes_it_back():
    unit = torch.nn.Sequential(RMSNorm(16, 1e-20), torch.nn.Sequential(RMSNorm(16, 1e-20)))
    for parameter in unit.parameters():
        torch.nn.init.ones_(parameter)
    x = torch.randn(3, 16)
    expected = unit(x)
    set_kernels(unit, attention_kernels(Choice(norm=Backend.TRITON)))
    assert all(norm.function is kernel.rms_norm for norm in (unit[0], unit[1][0]))
    torch.testing.assert_close(unit(x), expected)
    set_kernels(unit, REFERENCE)
    assert torch.equal(unit(x), expected)


@interpreted
def test_torch_accepts_the_ops():
    x, weight, grad = case((5, 24), torch.float32)
    torch.library.opcheck(kernel._norm, (x, weight, 1e-6))
    _, inverse = kernel._norm(x, weight, 1e-6)
    torch.library.opcheck(kernel._norm_backward, (grad, x, weight, inverse))


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=gpu) for s in [(8192, 1280), (8191, 512), (3, 128), (1, 5120)]]
)
def test_at_full_width_on_a_gpu_errors_are_the_plain_ones_and_bits_repeat(shape):
    values = case(shape, torch.bfloat16)
    expected = results(rms_norm, *(v.double() for v in values), 1e-20)
    found, plain = (results(f, *values, 1e-20) for f in (kernel.rms_norm, rms_norm))
    for error, allowed in zip(distances(found, expected), distances(plain, expected), strict=True):
        assert error <= 1.05 * allowed + 1e-6
    assert all(map(torch.equal, found, results(kernel.rms_norm, *values, 1e-20)))
