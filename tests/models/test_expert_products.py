"""Grouped products of rows and experts against the loop, on whatever device the suite runs on."""

from __future__ import annotations

import pytest
import torch
from fp8_cases import DEVICE

from ppruntime.models.expert_products import (
    can_group,
    grouped_product,
    grouped_weight_grad,
    looped_product,
    looped_weight_grad,
    product,
    rows_are_aligned,
    weight_grad,
)
from ppruntime.models.experts import clamped_swiglu

COUNTS = {
    "even": (8, 8, 8, 8),
    "uneven": (3, 17, 1, 11),
    "experts without rows": (0, 13, 0, 5),
    "all in the last": (0, 0, 0, 21),
    "no rows": (0, 0, 0, 0),
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_one_launch_gives_what_the_loop_gives(counts):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 64, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn(sum(counts), 32, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(4, 32, 64, device=DEVICE, dtype=torch.bfloat16)
    pairs = (
        (grouped_product(x, weight, counts), looped_product(x, weight, counts)),
        (grouped_product(grad, weight.mT, counts), looped_product(grad, weight.mT, counts)),
        (grouped_weight_grad(grad, x, counts), looped_weight_grad(grad, x, counts, 4)),
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    # Close to the same sums in fp64 as well: neither is a bad yardstick.
    exact = looped_product(x.double(), weight.double(), counts)
    if len(x):
        assert (pairs[0][0].double() - exact).norm() / exact.norm() < 3e-3


def test_the_loop_takes_parts_of_several_sources_and_alone_does():
    x, weight = torch.randn(10, 8), torch.randn(2, 4, 8)
    counts = (3, 1, 2, 4)  # of two sources
    y = product(x, weight, counts)
    for rows, expert in ((slice(0, 3), 0), (slice(3, 4), 1), (slice(4, 6), 0), (slice(6, 10), 1)):
        torch.testing.assert_close(y[rows], x[rows] @ weight[expert].t())
    grad = weight_grad(y, x, counts, 2)
    torch.testing.assert_close(grad[0], y[:3].t() @ x[:3] + y[4:6].t() @ x[4:6])


def test_grouped_products_are_for_bf16_on_gpus_and_rows_of_whole_16_bytes():
    weight = torch.empty(2, 32, 64, dtype=torch.bfloat16)
    assert rows_are_aligned(weight)
    assert not rows_are_aligned(torch.empty(2, 32, 60, dtype=torch.bfloat16))
    assert not can_group(torch.empty(4, 64, dtype=torch.bfloat16), weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_groups_bf16_rows_and_leaves_fp32_to_the_loop():
    weight = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    assert can_group(x, weight)
    assert not can_group(x.float(), weight.float())
    counts = COUNTS["uneven"]
    assert torch.equal(product(x, weight, counts), grouped_product(x, weight, counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_swiglu_has_the_same_bits_whatever_rows_lie_beside_it(dtype):
    """torch's silu has not: with AVX-512 the last rows of 31 by 48 came out otherwise."""
    generator = torch.Generator().manual_seed(0)
    z = (4 * torch.randn(64, 96, generator=generator)).to(dtype)
    grad = torch.randn(64, 48, generator=generator).to(dtype)

    def results(rows):
        part = z[rows].clone().requires_grad_()
        h = clamped_swiglu(part, 10.0)
        h.backward(grad[rows])
        return h.detach(), part.grad

    whole = results(slice(0, 64))
    for num_rows in range(1, 64):
        for start in (0, 64 - num_rows):
            rows = slice(start, start + num_rows)
            for part, all_rows in zip(results(rows), whole, strict=True):
                assert torch.equal(part, all_rows[rows]), (num_rows, start)


def test_swiglu_is_that_of_torch_also_far_out():
    gate = torch.tensor([-1e30, -300.0, -90.0, -20.0, -1.0, 0.0, 1.0, 9.9, 10.0, 11.0, 1e30])
    z = torch.cat((gate, torch.linspace(-12, 12, len(gate)))).requires_grad_()
    h = clamped_swiglu(z, 10.0)
    (found,) = torch.autograd.grad(h.sum(), z)
    wide = z.detach().double().requires_grad_()
    gate, up = wide.chunk(2)
    expected = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
    torch.testing.assert_close(h.double(), expected, rtol=1e-6, atol=1e-30)
    (grads,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(found.double(), grads, rtol=1e-5, atol=1e-30)
