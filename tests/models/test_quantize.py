import pytest
import torch

from ppruntime.models.quantize import (
    CacheFormat,
    power_of_two_ceiling,
    round_to_e2m1,
    through_cache,
)

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_e2m1_rounds_to_the_nearest_level_and_ties_to_the_even_one():
    x = torch.linspace(0, 6, 4801)
    levels = torch.tensor(LEVELS)
    distances = (x.unsqueeze(-1) - levels).abs()
    # An even mantissa is an even place in the list of levels: at a tie that one is nearer.
    distances = distances + torch.tensor([0.0, 1e-7] * 4)
    expected = levels[distances.argmin(-1)]
    assert torch.equal(round_to_e2m1(x), expected)
    assert torch.equal(round_to_e2m1(-x), -expected)


def test_power_of_two_ceiling_is_exact():
    exponents = torch.arange(-120, 120)
    powers = torch.ldexp(torch.ones(240), exponents)
    assert torch.equal(power_of_two_ceiling(powers), powers)
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert torch.equal(power_of_two_ceiling(above), 2 * powers)
    below = torch.nextafter(powers, torch.tensor(0.0))
    assert torch.equal(power_of_two_ceiling(below), powers)


@pytest.mark.parametrize("cache_format", CacheFormat)
@pytest.mark.parametrize("channels", [64, 40])
def test_what_comes_out_of_the_cache_goes_in_unchanged(cache_format, channels):
    once = through_cache(torch.randn(3, 5, channels), cache_format)
    assert once.shape == (3, 5, channels)
    if cache_format is not CacheFormat.NVFP4:  # its scale is not a power of two: it may move
        assert torch.equal(through_cache(once, cache_format), once)


def test_formats_keep_the_largest_values_and_their_step():
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 40] = 448.0, 6.0
    assert torch.equal(through_cache(x, CacheFormat.FP8), x)
    x = torch.tensor([LEVELS * 8])
    for cache_format in (CacheFormat.MXFP4, CacheFormat.NVFP4):
        assert torch.equal(through_cache(x, cache_format), x)


@pytest.mark.parametrize(
    ("cache_format", "bound"),
    [(CacheFormat.FP8, 2**-4), (CacheFormat.MXFP4, 1 / 2), (CacheFormat.NVFP4, 1 / 5)],
)
def test_rounding_error_stays_below_half_a_step_of_the_largest(cache_format, bound):
    x = torch.randn(64, 64)
    error = (through_cache(x, cache_format) - x).abs().amax()
    assert 0 < error <= bound * x.abs().amax()


def test_gradient_passes_straight_through():
    x = torch.randn(2, 64, requires_grad=True)
    weights = torch.randn(2, 64)
    (through_cache(x, CacheFormat.NVFP4) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_zeros_stay_zeros():
    for cache_format in CacheFormat:
        assert torch.equal(through_cache(torch.zeros(2, 32), cache_format), torch.zeros(2, 32))
