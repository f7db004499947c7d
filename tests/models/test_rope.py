import math

import pytest
import torch

from ppruntime.models.dims import preset
from ppruntime.models.rope import Rope, frequencies, rotate, yarn_ramp

FLASH = preset("v41-flash")


def test_yarn_ramp_of_v41_flash_runs_from_pair_15_to_25():
    assert yarn_ramp(FLASH, FLASH.compress_rope_theta) == (15, 25)


def test_window_layers_have_plain_frequencies():
    expected = [10000 ** (-2 * j / 64) for j in range(32)]
    torch.testing.assert_close(frequencies(FLASH, compressed=False), torch.tensor(expected))


def test_compressed_layers_interpolate_slow_pairs_by_the_factor():
    theta = frequencies(FLASH, compressed=True).double()
    plain = torch.tensor([160000.0 ** (-2 * j / 64) for j in range(32)], dtype=torch.float64)
    shares = theta / plain
    torch.testing.assert_close(shares[:16], torch.ones(16).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(shares[25:], torch.full((7,), 1 / 16).double(), rtol=1e-6, atol=0)
    assert shares[20].item() == pytest.approx(0.5 + 0.5 / 16, rel=1e-6)


def test_rotation_turns_adjacent_pairs_of_the_last_channels():
    dims = preset("tiny")
    rotation = Rope(dims, compressed=False)(torch.tensor([[0, 5]]))
    x = torch.randn(1, 2, 3, 64)
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., :48], x[..., :48])
    for pair in range(8):
        angle = 5 * 10000 ** (-2 * pair / 16)
        first, second = x[0, 1, :, 48 + 2 * pair], x[0, 1, :, 49 + 2 * pair]
        expected = first * math.cos(angle) - second * math.sin(angle)
        torch.testing.assert_close(turned[0, 1, :, 48 + 2 * pair], expected)


def test_inverse_rotation_undoes_it():
    rotation = Rope(preset("tiny"), compressed=True)(torch.arange(40).unsqueeze(0))
    x = torch.randn(1, 40, 64)
    torch.testing.assert_close(rotate(rotate(x, rotation), rotation, inverse=True), x)


def test_products_depend_on_the_distance_alone():
    rope = Rope(preset("tiny"), compressed=True)
    q, k = torch.randn(64).double(), torch.randn(64).double()
    at = [
        (rotate(q.expand(1, 1, 64), rope(torch.tensor([[p + 7]]))))
        @ rotate(k.expand(1, 1, 64), rope(torch.tensor([[p]]))).transpose(-1, -2)
        for p in (0, 3, 50)
    ]
    torch.testing.assert_close(at[1], at[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(at[2], at[0], rtol=1e-4, atol=1e-4)
