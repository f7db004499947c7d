"""The FP8 quantisers against their meaning in torch: the same bytes and scales."""

import fp8_cases
import pytest
import torch
from fp8_cases import DEVICE, ON_GPU, needed, random_routing, values

from ppruntime.models.kernels import moe_layout, quantize
from ppruntime.models.kernels.fp8_linear_backends import dense_layout
from ppruntime.models.kernels.quantize import Quantized

pytestmark = pytest.mark.gpu if ON_GPU else []
KINDS = pytest.mark.parametrize("power_of_two", [False, True], ids=["amax / 448", "power of two"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def same(a, b):
    if ON_GPU:
        return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(
            a.scale, b.scale
        )
    return torch.equal(values(a.data), values(b.data)) and torch.equal(a.scale, b.scale)


def wide_range(*shape, dtype=torch.float32, seed=0):
    """Values over many binades, with exact zeros, tiny and huge groups."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    x[0] = 0.0
    x[1, :128] *= 1e-20
    x[2, 128:] *= 1e20
    return x.to(dtype).to(DEVICE)


@KINDS
@DTYPES
@pytest.mark.parametrize("num_rows", [3, 33])
def test_rows_have_the_references_bytes(num_rows, dtype, power_of_two):
    x = wide_range(num_rows, 256, dtype=dtype)
    expected = quantize.quantize_rows_reference(x, power_of_two=power_of_two)
    assert same(quantize.quantize_rows(x, power_of_two=power_of_two), expected)


def test_every_midpoint_of_e4m3_rounds_to_even():
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[1:] + codes[:-1]) / 2
    tests = torch.cat([codes, midpoints, midpoints.nextafter(codes[1:]), -midpoints])
    # With 448 in each group a scale is 1, and the values arrive as they are.
    groups = torch.full((-(-len(tests) // 127), 128), 448.0)
    groups[:, :127].flatten()[: len(tests)] = tests
    flat = torch.zeros(groups.shape[0] * 127)
    flat[: len(tests)] = tests
    groups[:, :127] = flat.view(-1, 127)
    rows = quantize.quantize_rows(groups.to(DEVICE), power_of_two=True)
    assert torch.equal(rows.scale, torch.ones_like(rows.scale))
    got = values(rows.data).cpu()[:, :127].flatten()[: len(tests)]
    assert torch.equal(got, tests.to(torch.float8_e4m3fn).float())


def test_scales_are_exact_at_powers_of_two_and_at_zero():
    largest = torch.tensor([0.0, 1e-30, 448.0, 449.0, 447.0, 1e30])
    plain = quantize.scale_of(largest, power_of_two=False)
    assert (plain[:2] == plain[0]).all()
    assert plain[0] > 0
    power = quantize.scale_of(largest, power_of_two=True)
    assert power[2:5].tolist() == [1.0, 2.0, 1.0]
    assert torch.equal(torch.frexp(power)[0], torch.full_like(power, 0.5))


def test_power_of_two_rows_quantise_to_the_same_values_again():
    x = wide_range(16, 256, dtype=torch.bfloat16)
    once = quantize.dequantize_rows(quantize.quantize_rows(x, power_of_two=True))
    assert torch.equal(once.bfloat16().float(), once)  # what FP8 dispatch hands on is exact
    twice = quantize.dequantize_rows(quantize.quantize_rows(once, power_of_two=True))
    assert torch.equal(once, twice)


def test_error_is_within_half_a_step():
    x = torch.randn(64, 512, device=DEVICE)
    for power_of_two, bound in [(False, 2**-4), (True, 2**-4)]:
        rows = quantize.quantize_rows(x, power_of_two=power_of_two)
        error = (quantize.dequantize_rows(rows) - x).abs()
        # Half a step of a normal value, or of the smallest ones of its group.
        step = rows.scale.repeat_interleave(128, dim=1) * 2**-10
        assert (error <= (bound * x.abs()).maximum(step) * (1 + 1e-6)).all()


@KINDS
@pytest.mark.parametrize("tile_scales", [False, True], ids=["columns", "tiles"])
@pytest.mark.parametrize("source", ["bf16", "fp8"])
def test_routed_rows_and_columns_have_the_references_bytes(source, tile_scales, power_of_two):
    experts_NK = random_routing(50, 3, 5, unrouted=0.1, experts=[0, 1, 4])
    layout = moe_layout.expert_layout(experts_NK, 5)
    x = wide_range(50, 256, dtype=torch.bfloat16)
    fp8 = quantize.quantize_rows(x, power_of_two=power_of_two)
    wide = quantize.dequantize_rows(fp8) if source == "fp8" else x
    pool = moe_layout.gather_rows_reference(wide, layout)
    rows, columns = quantize.quantize_routed(
        fp8 if source == "fp8" else x,
        layout,
        with_rows=True,
        power_of_two=power_of_two,
        tile_scales=tile_scales,
    )
    expected = quantize.quantize_columns_reference(
        pool, power_of_two=power_of_two, tile_scales=tile_scales
    )
    assert same(needed(columns, layout), needed(expected, layout))
    expected_rows = quantize.quantize_rows_reference(pool, power_of_two=power_of_two)
    used = int(layout.start_E1[-1])
    assert same(
        Quantized(rows.data[:used], rows.scale[:, :used]),
        Quantized(expected_rows.data[:used], expected_rows.scale[:used].t()),
    )
    no_rows, again = quantize.quantize_routed(
        fp8 if source == "fp8" else x,
        layout,
        with_rows=False,
        power_of_two=power_of_two,
        tile_scales=tile_scales,
    )
    assert no_rows is None
    assert same(needed(again, layout), needed(columns, layout))


@pytest.mark.parametrize("num_rows", [5, 128, 300])
def test_columns_of_one_group_may_lie_as_one_matrix(num_rows):
    layout = dense_layout(num_rows, torch.device(DEVICE))
    x = wide_range(num_rows, 256, dtype=torch.bfloat16)
    rows, columns = quantize.quantize_routed(x, layout, with_rows=True, power_of_two=False)
    same_rows, dense = quantize.quantize_routed(
        x, layout, with_rows=True, power_of_two=False, dense=True
    )
    assert same(same_rows, rows)
    assert same(dense, columns)
    matrix = quantize.as_matrix(dense).view(256, layout.num_rows).float()
    assert torch.equal(matrix, columns.data.float().transpose(0, 1).flatten(1))
    assert quantize.is_dense(dense)
    assert quantize.is_dense(columns) == (layout.num_rows == 128)


def test_columns_come_back_as_rows():
    pool = torch.randn(256, 384, device=DEVICE)
    for tile_scales in (False, True):
        columns = quantize.quantize_columns_reference(
            pool, power_of_two=False, tile_scales=tile_scales
        )
        back = quantize.dequantize_columns(columns)
        assert 0.02 < fp8_cases.distance(back, pool) < 0.03
    assert columns.scale.shape == (2, 3)


@DTYPES
def test_weight_blocks_have_the_references_bytes_both_ways(dtype):
    weight = torch.stack([wide_range(128, 256, dtype=dtype, seed=i) for i in range(2)])
    expected = quantize.quantize_blocks_reference(weight)
    weights, turned = quantize.quantize_blocks(weight, transposed=True)
    assert same(weights, expected)
    # Of fp32 weights, 16 of a thread's 64 turned bytes were bits of addresses once, on a GPU:
    # `to_e4m3_by_fours` says how.
    assert same(turned, Quantized(*(t.transpose(1, 2) for t in expected)))
    assert same(quantize.transpose_blocks(weights), turned)
    alone, none = quantize.quantize_blocks(weight, transposed=False)
    assert none is None
    assert same(alone, expected)
    assert 0.02 < fp8_cases.distance(quantize.dequantize_blocks(weights), weight) < 0.03


def test_a_reciprocal_gives_what_the_division_does_for_all_of_bf16_but_far_below_the_largest():
    """Every value of bf16 beside every largest one, up to a factor of two that changes no bit: 33
    of 319,552 pairs are half way between two multiples of E4M3's least step, and fall to the other
    side."""
    mantissas = 1 + torch.arange(128) / 128
    pairs = differing = 0
    for exponent in range(20):
        values = mantissas * 2.0**-exponent
        # Groups of 128: the largest one in front, and in two rows all values.
        rows = torch.stack([torch.cat([mantissas[:1], values[1:]]), values[:1].expand(128)])
        groups = rows.expand(128, 2, 128).clone()
        groups[:, :, 0] = mantissas[:, None]
        groups = groups.where(groups <= mantissas[:, None, None], 0).flatten(0, 1)
        found = quantize.quantize_rows_reference(groups.bfloat16(), power_of_two=False)
        divided = (groups / found.scale).to(torch.float8_e4m3fn)
        live = groups > 0
        live[:, 0] = False
        live[1::2, 2:] = False
        other = (found.data.view(torch.uint8) != divided.view(torch.uint8)) & live
        pairs, differing = pairs + int(live.sum()), differing + int(other.sum())
        assert exponent >= 16 or not other.any()
        step = (found.data.float() - divided.float()).abs()
        assert step[other].numel() == 0 or step[other].max() == 2.0**-9
    assert (pairs, differing) == (319_552, 33)
