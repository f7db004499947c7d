"""A query projection in FP8 with its rotation: the bits of the product, the rotation, the cast."""

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU, values

from ppruntime.models.attention_kernels import REFERENCE
from ppruntime.models.fp8_linear import Fp8Linear, Fp8LinearOptions
from ppruntime.models.kernels.fp8_linear_backends import (
    LinearBackend,
    dense_layout,
    linear_kernels,
)
from ppruntime.models.kernels.fp8_linear_cast import quantize_turned
from ppruntime.models.kernels.quantize import is_dense
from ppruntime.models.kernels.rope import project_rotated
from ppruntime.models.linear import Linear
from ppruntime.models.rope import Rotation, rotate

pytestmark = pytest.mark.gpu if ON_GPU else []
INS, OUTS = 256, 128


def normal(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=generator) * scale).bfloat16().to(DEVICE)


def linear(backend):
    plain = Linear(INS, OUTS, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(normal(OUTS, INS, scale=0.06))
    return Fp8Linear(plain, Fp8LinearOptions(backend=backend))


def gradients(module, x, grad):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    return y.detach(), x.grad, module.linear.weight.grad


def rotation(batch, tokens, pairs):
    angles = torch.arange(batch * tokens, device=DEVICE).view(batch, tokens, 1) * 0.37
    angles = angles * torch.logspace(0, -2, pairs, device=DEVICE)
    return Rotation(angles.cos(), angles.sin())


@pytest.mark.parametrize("backend", [LinearBackend.REFERENCE, LinearBackend.TRITON])
def test_a_rotated_projection_has_the_bits_of_the_product_and_the_rotation(backend):
    batch, tokens, heads = 2, 35, 1
    turn = rotation(batch, tokens, pairs=8)
    x, grad = normal(batch, tokens, INS), normal(batch, tokens, heads, OUTS)
    apart = gradients(projection(linear(backend), REFERENCE.project_rotated, turn), x, grad)
    together = gradients(projection(linear(backend), project_rotated, turn), x, grad)
    assert all(map(torch.equal, apart, together))
    assert together[0].shape == grad.shape


def projection(linear, project, turn):
    """A module of the linear's parameter that projects to one head and turns it."""

    class Projection(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return project(linear, x, turn, 1)

    return Projection()


def test_the_turning_cast_has_the_bytes_of_the_rotation_and_the_cast():
    """Heads of 256 of which 160 turn, so that one tile is turned in part and one as a whole."""
    turn = rotation(1, 70, pairs=80)
    x = normal(1, 70, 2, 256)
    got = quantize_turned(x.view(70, -1), *(angles[0] for angles in turn), head_width=256)
    back = rotate(x, turn, inverse=True).view(70, -1)
    kernels = linear_kernels(LinearBackend.REFERENCE)
    layout = dense_layout(70, x.device)
    expected = kernels.quantize_routed(back, layout, with_rows=True, power_of_two=False)
    dense = quantize_turned(
        x.view(70, -1), *(angles[0] for angles in turn), head_width=256, dense=True
    )
    for a, b, c in zip(got, expected, dense, strict=True):
        assert torch.equal(values(a.data), values(b.data))
        assert torch.equal(a.scale, b.scale)
        assert torch.equal(values(c.data), values(b.data))
    assert is_dense(dense[1])
