"""SignSGD: the update by hand, the kernel's bits, and what is refused."""

from __future__ import annotations

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU  # before any kernel: it turns on Triton's interpreter

from ppruntime.optim.sign_sgd import make_sign_sgd, sign_update_reference
from ppruntime.optim.sign_sgd_kernel import sign_update

kernel = pytest.mark.gpu if ON_GPU else pytest.mark.filterwarnings("default")


@kernel
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_has_torch_s_bits(decay, dtype):
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(2, 3, 1025, generator=generator)
    grad = torch.randn(2, 3, 1025, generator=generator)
    grad[0, 0, :4] = torch.tensor([0.0, -0.0, float("nan"), float("-inf")])
    grad = grad.to(dtype)
    param[0, 0, :2] = torch.tensor([0.0, -0.0])
    param, grad = param.to(DEVICE), grad.to(DEVICE)
    other = param.clone()
    sign_update_reference(param, grad, lr=3e-4, decay=decay)
    sign_update(other, grad, lr=3e-4, decay=decay)
    assert torch.equal(param.view(torch.int32), other.view(torch.int32))


def test_weights_move_by_the_rate_and_matrices_decay():
    weight = torch.nn.Parameter(torch.full((2, 2), 2.0))
    bias = torch.nn.Parameter(torch.full((3,), 2.0))
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = make_sign_sgd(
        {"a.weight": weight, "a.bias": bias, "frozen": frozen}, lr=0.5, weight_decay=0.25
    )
    weight.grad = torch.tensor([[1e-30, -7.0], [0.0, float("nan")]])
    bias.grad = torch.tensor([3.0, -3.0, 0.0])
    optimizer.step()
    assert weight.tolist() == [[1.25, 2.25], [1.75, 1.75]]
    assert bias.tolist() == [1.5, 2.5, 2.0]
    assert not optimizer.state
    bias.grad = None
    optimizer.apply({weight, bias})
    assert weight.grad is None
    assert weight.tolist() == [[0.59375, 2.46875], [1.53125, 1.53125]]
    with pytest.raises(ValueError, match=r"SignSGD got x in torch\.bfloat16"):
        make_sign_sgd({"x": torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))}, lr=1.0)
