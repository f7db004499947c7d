"""The FP8 GEMMs and the SwiGLU between them, against fp64 of the same FP8 values."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from fp8_cases import DEVICE, ON_GPU, distance, needed, random_routing, values

from ppruntime.models.kernels import (
    deep_gemm,
    grouped_gemm,
    moe_layout,
    moe_reference,
    quantize,
    swiglu,
)
from ppruntime.models.kernels.grouped_gemm import Tile, WeightGradOperands
from ppruntime.models.kernels.quantize import Quantized

pytestmark = pytest.mark.gpu if ON_GPU else []
WIDTH = 512 if ON_GPU else 256
ROUTINGS = {
    "an expert without rows": random_routing(60, 2, 4, experts=[0, 1, 3]),
    "all to one expert": torch.full((150, 1), 1, device=DEVICE),
    "one token": random_routing(1, 2, 4),
    "some routed nowhere": random_routing(40, 2, 4, unrouted=0.3),
}
CASES = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())


def operands(routing, outs=WIDTH, ins=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layout = moe_layout.expert_layout_reference(routing, 4)
    x = torch.randn(len(routing), ins, generator=generator).to(DEVICE)
    weight = torch.randn(4, outs, ins, generator=generator).to(DEVICE) * 0.05
    x8 = quantize.quantize_rows_reference(x, power_of_two=False)
    rows = Quantized(*moe_reference.gather_rows(x8.data, layout, x8.scale))
    return layout, rows, quantize.quantize_blocks_reference(weight), x, weight


def exact(rows, weights, layout):
    """fp64 of the same FP8 values."""
    x = quantize.dequantize_rows(Quantized(rows.data, rows.scale.t())).double()
    w = quantize.dequantize_blocks(weights).double()
    y = x.new_zeros(len(x), w.shape[1])
    for block, expert in enumerate(layout.expert_B.tolist()):
        if expert >= 0:
            y[block * 128 : block * 128 + 128] = x[block * 128 : block * 128 + 128] @ w[expert].t()
    return y


@CASES
def test_rows_times_their_experts_weights(routing):
    layout, rows, weights, _, _ = operands(routing)
    live = layout.pair_P >= 0
    expected = exact(rows, weights, layout)[live]
    got = grouped_gemm.grouped_gemm(rows, weights, layout)
    assert distance(got[live], expected) < 3e-3
    reference = grouped_gemm.grouped_gemm_reference(rows, weights, layout)
    assert distance(reference[live], expected) < 1e-6


@pytest.mark.parametrize(
    "tile", [Tile(rows=128, num_warps=8, group=2), Tile(columns=64, group=1), Tile(rows=128)]
)
@pytest.mark.parametrize("gemm_sms", [None, 3])
def test_no_tile_and_no_number_of_multiprocessors_changes_a_bit(tile, gemm_sms):
    layout, rows, weights, _, _ = operands(ROUTINGS["an expert without rows"])
    live = layout.pair_P >= 0
    usual = grouped_gemm.grouped_gemm(rows, weights, layout)
    other = grouped_gemm.grouped_gemm(rows, weights, layout, tile=tile, gemm_sms=gemm_sms)
    assert torch.equal(usual[live], other[live])


@triton.jit
def _places(place_ptr, num_rows, NUM_COLUMNS: tl.constexpr, GROUP_ROWS: tl.constexpr):
    tile = tl.program_id(0)
    row, column = grouped_gemm.tile_place(tile, num_rows, NUM_COLUMNS, GROUP_ROWS)
    tl.store(place_ptr + 2 * tile, row)
    tl.store(place_ptr + 2 * tile + 1, column)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 20])
def test_every_tile_has_one_place_and_a_group_of_rows_is_done_before_the_next(num_rows):
    """Rows lie by expert, so an expert's weights are read once while its rows are in the cache."""
    columns, group = 3, 8
    places = torch.empty(num_rows * columns, 2, dtype=torch.int32, device=DEVICE)
    _places[(len(places),)](places, num_rows, columns, group)
    told = [tuple(place) for place in places.tolist()]
    assert sorted(told) == [(r, c) for r in range(num_rows) for c in range(columns)]
    groups = [row // group for row, _ in told]
    assert groups == sorted(groups)


def test_one_gemm_loses_what_fp8_loses_and_no_more():
    layout, rows, weights, x, weight = operands(ROUTINGS["some routed nowhere"])
    live = layout.pair_P >= 0
    token_P = layout.pair_P[live].long() // 2
    expert_P = layout.expert_B.repeat_interleave(128)[live].long()
    true = torch.einsum("ri,roi->ro", x[token_P].double(), weight[expert_P].double())
    got = grouped_gemm.grouped_gemm(rows, weights, layout)[live]
    assert 0.02 < distance(got, true) < 0.045


def test_large_tiles_are_taken_where_they_leave_little_idle():
    fills = partial(grouped_gemm.fills, sms=132)
    assert fills(52_224, 4608)
    assert fills(52_224, 5120)
    assert fills(52_224, 2304)
    assert not fills(52_224, 640)  # no multiple of 256
    assert not fills(128, 4608)  # 18 tiles; as 72 smaller ones twice as many multiprocessors work
    assert fills(8192, 32_768)
    assert fills(8192, 1280)  # 2.4 rounds of 3; of the smaller ones 4.8 of 5
    assert not fills(8192, 768)  # 1.45 rounds of 2; 2.9 of 3
    assert not fills(0, 512)


@pytest.mark.parametrize("num", [1, 2])
def test_deep_gemm_leaves_weight_gradients_to_the_own_kernel_where_its_tiles_fit(num, monkeypatch):
    told = []
    monkeypatch.setattr(deep_gemm, "on_hopper", lambda _: True)
    for name, who in (("own_weight_grad", "own"), ("grouped_weight_grad", "deep_gemm")):
        monkeypatch.setattr(deep_gemm, name, lambda *_, who=who, **__: told.append(who))
    operand = micro_batch(ROUTINGS["one token"], 128, 256, 0)
    deep_gemm.expert_weight_grad(torch.zeros(4, 128, 256), [operand] * num)
    deep_gemm.expert_weight_grad(torch.zeros(4, 128, 384), [operand] * num)  # no large tiles
    assert told == ["own", "deep_gemm"]


def micro_batch(routing, left, right, seed, *, tile_scales=False):
    generator = torch.Generator().manual_seed(seed)
    layout = moe_layout.expert_layout_reference(routing, 4)

    def columns(channels, tiles):
        pool = torch.randn(layout.num_rows, channels, generator=generator).to(DEVICE)
        pool[layout.pair_P < 0] = 0
        return needed(
            quantize.quantize_columns_reference(pool, power_of_two=False, tile_scales=tiles), layout
        )

    return WeightGradOperands(columns(left, tile_scales), columns(right, False), layout)


@CASES
@pytest.mark.parametrize("tile_scales", [False, True], ids=["columns", "tiles"])
def test_weight_gradients_are_added_to_the_accumulator(routing, tile_scales):
    operand = micro_batch(routing, 256, 128, 0, tile_scales=tile_scales)
    start = torch.randn(4, 256, 128, device=DEVICE)
    got = start.clone()
    grouped_gemm.grouped_weight_grad(got, [operand])
    left = quantize.dequantize_columns(operand.left).double()
    right = quantize.dequantize_columns(operand.right).double()
    expected = torch.zeros(4, 256, 128, device=DEVICE, dtype=torch.float64)
    starts = operand.layout.start_E1.tolist()
    for expert in range(4):
        rows = slice(starts[expert], starts[expert + 1])
        expected[expert] = left[rows].t() @ right[rows]
    assert distance(got.double() - start, expected) < 5e-6
    untouched = operand.layout.count_E == 0
    assert torch.equal(got[untouched], start[untouched])


@pytest.mark.parametrize("num", [2, 3, 4])
def test_one_launch_for_several_micro_batches_has_the_bits_of_one_each(num):
    names = list(ROUTINGS)
    batches = [micro_batch(ROUTINGS[names[i]], 128, 256, i) for i in range(num)]
    together = torch.randn(4, 128, 256, device=DEVICE)
    apart = together.clone()
    grouped_gemm.grouped_weight_grad(together, batches, gemm_sms=2)
    for batch in batches:
        grouped_gemm.grouped_weight_grad(apart, [batch])
    assert torch.equal(together, apart)


@pytest.mark.parametrize("tile_scales", [False, True], ids=["columns", "tiles"])
def test_deep_gemm_gets_each_experts_rows_of_all_micro_batches_as_one_matrix(tile_scales):
    names = list(ROUTINGS)
    batches = [
        micro_batch(ROUTINGS[names[i]], 256, 128, i, tile_scales=tile_scales) for i in (0, 1, 3)
    ]
    layouts = [batch.layout for batch in batches]
    # Pools have room to spare in training: their unneeded blocks are not copied.
    pools = [
        Quantized(*(torch.cat([t, t[:1]]) for t in batch.left)) if i == 1 else batch.left
        for i, batch in enumerate(batches)
    ]
    dense = deep_gemm.dense_columns(pools, layouts)
    parts = [quantize.dequantize_columns(batch.left) for batch in batches]
    place = 0
    for expert in range(4):
        pieces = [
            part[int(layout.start_E1[expert]) : int(layout.start_E1[expert + 1])]
            for part, layout in zip(parts, layouts, strict=True)
        ]
        expected_RC = torch.cat(pieces)
        num_rows = len(expected_RC)
        matrix_CR = dense.data[place * 256 : (place + num_rows) * 256].view(256, num_rows).float()
        scale = dense.scale[place // 128 : (place + num_rows) // 128]
        got_RC = matrix_CR.t() * scale.repeat_interleave(128, dim=0)
        assert torch.equal(got_RC, expected_RC)
        place += num_rows
    assert place == sum(int(layout.start_E1[-1]) for layout in layouts)


@CASES
@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_swiglu_equals_the_reference_and_hides_padding(routing, limit):
    layout = moe_layout.expert_layout_reference(routing, 4)
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(layout.num_rows, 256, generator=generator).to(DEVICE).bfloat16()
    weight = torch.rand(routing.shape, generator=generator).to(DEVICE)
    expected = moe_reference.swiglu(z, weight, layout, limit, power_of_two=False)
    z[layout.pair_P < 0] = torch.nan  # a skipped half block holds anything
    got = swiglu.swiglu(z, weight, layout, limit, power_of_two=False)
    close(rows_of(got, layout), rows_of(expected, layout))


@CASES
@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_the_swiglus_closed_gradients_equal_autograds(routing, limit):
    layout = moe_layout.expert_layout_reference(routing, 4)
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(layout.num_rows, 256, generator=generator).to(DEVICE).bfloat16()
    grad = torch.randn(layout.num_rows, 128, generator=generator).to(DEVICE).bfloat16()
    weight = torch.rand(routing.shape, generator=generator).to(DEVICE)
    expected = moe_reference.swiglu_backward(z, grad, weight, layout, limit, power_of_two=False)
    z[layout.pair_P < 0] = torch.nan
    grad[layout.pair_P < 0] = torch.nan
    got = swiglu.swiglu_backward(z, grad, weight, layout, limit, power_of_two=False)
    close(rows_of(got.rows, layout), rows_of(expected.rows, layout))
    for name in ("columns", "inner_columns"):
        close(needed(getattr(got, name), layout), needed(getattr(expected, name), layout))
    torch.testing.assert_close(got.weight_NK, expected.weight_NK, rtol=1e-4, atol=1e-5)


def rows_of(rows, layout):
    used = int(layout.start_E1[-1])
    return Quantized(rows.data[:used], rows.scale[:, :used])


def close(got, expected):
    """The same but for the last bit of exp: scales nearly equal, few values one step apart."""
    torch.testing.assert_close(got.scale, expected.scale, rtol=1e-5, atol=0)
    a, b = values(got.data), values(expected.data)
    assert (a != b).double().mean() < 1e-3
    torch.testing.assert_close(a, b, rtol=0.13, atol=2**-9)
