"""What is turned where it lies, for good or for a while, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from ppruntime.models.kernels.rope import put_back_, turn_, turn_for_a_while_
from ppruntime.models.rope import Rotation, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 5, 40), (2, 3, 3, 24), (1, 2, 32, 16), (1, 3, 64, 24), (2, 1, 96, 16), (1, 0, 64, 24)]
"""Without heads; heads of several tokens in one program, of one token alone, and no token."""


def case(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(*shape[:2], 4, generator=generator) * 6
    x = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return x, Rotation(angles.cos().to(DEVICE), angles.sin().to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_in_place_it_is_the_plain_rotation_bit_by_bit(shape, dtype, inverse):
    x, rotation = case(shape, dtype)
    expected = rotate(x, rotation, inverse=inverse)
    turn_(x, rotation, inverse=inverse)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_for_a_while_it_comes_back_to_the_bit(shape, dtype):
    x, rotation = case(shape, dtype)
    before = x.clone()
    kept = turn_for_a_while_(x, rotation)
    assert torch.equal(kept, before[..., -8:].reshape(-1, 8))
    assert torch.equal(x, rotate(before, rotation))
    put_back_(x, kept)
    assert torch.equal(x, before)


def test_autograd_takes_what_was_turned_for_a_while_as_unchanged():
    x, rotation = case((1, 3, 64, 24), torch.float32)
    weight = torch.ones((), device=DEVICE, requires_grad=True)
    y = x * weight  # saves x
    put_back_(x, turn_for_a_while_(x, rotation))
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum())
