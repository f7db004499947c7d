"""The Gluon kernel of the experts' weight gradients, simulated, against the Triton kernel."""

from collections import Counter
from dataclasses import replace

import pytest
import simulated_gluon
import torch
from fp8_cases import ON_GPU, distance, routings
from simulated_gluon import simulated

from ppruntime.models.kernels import grouped_gemm, grouped_gemm_hopper, moe_layout
from ppruntime.models.kernels.grouped_gemm import HOPPER_WEIGHT_GRAD_TILE, WeightGradOperands
from ppruntime.models.kernels.quantize import Quantized, quantize_columns_reference

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
EXPERTS = 4
ROUTINGS = routings(EXPERTS)
CASES = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
SCALES = pytest.mark.parametrize(
    "tiles", [(False, False), (False, True), (True, False), (True, True)], ids=str
)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    kernel = simulated(grouped_gemm_hopper.weight_grad_kernel)
    monkeypatch.setattr(grouped_gemm_hopper, "weight_grad_kernel", kernel)


def micro_batch(routing, widths, seed=0, tiles=(False, False), exact=False):
    """`exact`: small whole numbers under scales of powers of two; any order of sums is exact."""
    generator = torch.Generator().manual_seed(seed)
    layout = moe_layout.expert_layout_reference(routing, EXPERTS)
    found = []
    for width, tile_scales in zip(widths, tiles, strict=True):
        pool = torch.randn(layout.num_rows, width, generator=generator)
        pool[layout.pair_P < 0] = 0
        columns = quantize_columns_reference(pool, power_of_two=exact, tile_scales=tile_scales)
        if exact:
            whole = (pool * 2).round().clamp(-8, 8).view(-1, 128, width).transpose(1, 2)
            power = torch.randint(-2, 3, columns.scale.shape, generator=generator)
            columns = Quantized(whole.contiguous().to(torch.float8_e4m3fn), torch.exp2(power))
        found.append(columns)
    return WeightGradOperands(*found, layout)


def added(start, batches, hopper=True, **options):
    accumulator = start.clone()
    tile = HOPPER_WEIGHT_GRAD_TILE if hopper else grouped_gemm.WEIGHT_GRAD_TILE
    grouped_gemm.grouped_weight_grad(accumulator, batches, **({"tile": tile} | options))
    return accumulator


@SCALES
@CASES
def test_sums_of_whole_numbers_have_the_triton_kernels_bits(routing, tiles):
    widths = (256, 512)
    batch = micro_batch(routing, widths, tiles=tiles, exact=True)
    start = torch.randint(-9, 9, (EXPERTS, *widths)).float()
    got = added(start, [batch], gemm_sms=3)
    assert torch.equal(got, added(start, [batch], hopper=False))
    assert not torch.equal(got, start)
    idle = batch.layout.count_E == 0
    assert torch.equal(got[idle], start[idle])


@pytest.mark.parametrize("widths", [(128, 128), (128, 384), (384, 256)], ids=str)
def test_sums_are_as_close_as_the_triton_kernels(widths):
    batch = micro_batch(ROUTINGS["ragged"], widths)
    start = torch.randn(EXPERTS, *widths)
    got, of_triton = added(start, [batch]), added(start, [batch], hopper=False)
    expected = start.double()
    grouped_gemm.grouped_weight_grad_reference(expected, [batch])
    assert distance(got - start, of_triton - start) < 1e-6
    assert distance(got.double() - start, expected - start) < 5e-6


@pytest.mark.parametrize("num", [2, 3, 4])
def test_one_launch_for_several_micro_batches_has_the_bits_of_one_each(num):
    widths, names = (256, 256), list(ROUTINGS)
    batches = [micro_batch(ROUTINGS[names[i]], widths, i) for i in range(num)]
    start = apart = torch.randn(EXPERTS, *widths)
    for batch in batches:
        apart = added(apart, [batch])
    assert torch.equal(added(start, batches, gemm_sms=2), apart)


def test_neither_programs_nor_the_order_of_warps_change_a_bit():
    widths = (256, 512)
    batches = [micro_batch(ROUTINGS[name], widths, tiles=(False, True)) for name in ROUTINGS]
    start = torch.randn(EXPERTS, *widths)
    usual = added(start, batches)
    for sms in (1, 1, 1, 1, 2, 2, 5, 1000):  # every launch draws another order
        assert torch.equal(added(start, batches, gemm_sms=sms), usual)


@pytest.mark.parametrize("tiles", [(False, False), (True, False)], ids=str)
def test_no_variant_changes_a_bit(tiles):
    batches = [micro_batch(ROUTINGS[name], (256, 256), tiles=tiles) for name in ROUTINGS]
    start = torch.randn(EXPERTS, 256, 256)
    usual = added(start, batches)
    variants = [{"num_stages": stages} for stages in (1, 2, 3, 9)]
    for variant in [*variants, {"columns": 128}, {"group": 1}]:
        tile = replace(HOPPER_WEIGHT_GRAD_TILE, **variant)
        assert torch.equal(added(start, batches, tile=tile), usual), variant


@pytest.mark.parametrize("columns", [128, 256])
@SCALES
def test_sums_that_tma_adds_are_those_that_warps_add(tiles, columns, monkeypatch):
    batches = [micro_batch(ROUTINGS[name], (256, 256), tiles=tiles) for name in ROUTINGS]
    start = torch.randn(EXPERTS, 256, 256)
    tile = replace(HOPPER_WEIGHT_GRAD_TILE, columns=columns)
    for num in (1, 2, 4):
        monkeypatch.setattr(grouped_gemm, "adds_by_tma", lambda *_: False)
        usual = added(start, batches[:num], tile=tile, gemm_sms=2)
        monkeypatch.setattr(grouped_gemm, "adds_by_tma", lambda *_: True)
        assert torch.equal(added(start, batches[:num], tile=tile, gemm_sms=2), usual), num


def test_tma_adds_several_micro_batches_where_that_is_faster(monkeypatch):
    """By column, or turned, which left tiles alone are."""
    made, sums_descriptor = [], grouped_gemm_hopper.sums_descriptor

    def noted(*arguments):
        made.append(arguments)
        return sums_descriptor(*arguments)

    monkeypatch.setattr(grouped_gemm_hopper, "sums_descriptor", noted)
    found = set()
    for tiles in [(False, False), (False, True), (True, False), (True, True)]:
        batch = micro_batch(ROUTINGS["one token"], (128, 128), tiles=tiles)
        for num in (1, 2, 4):
            made.clear()
            added(torch.zeros(EXPERTS, 128, 128), [batch] * num)
            found |= {(tiles, num)} if made else set()
    assert found == {(tiles, num) for tiles in [(False, False), (True, False)] for num in (2, 4)}


@pytest.mark.parametrize("hopper", [False, True])
def test_an_accumulator_that_tma_cannot_add_to_is_refused(hopper):
    batch = micro_batch(ROUTINGS["one token"], (128, 128))
    numbers = torch.zeros(EXPERTS * 128 * 128 + 1)
    start = numbers[1:].view(EXPERTS, 128, 128)
    with pytest.raises(ValueError, match=r"\(4, 128, 128\) begins 4 bytes after a multiple of 16"):
        grouped_gemm.grouped_weight_grad(
            start, [batch], tile=HOPPER_WEIGHT_GRAD_TILE if hopper else None
        )
    assert not numbers.any()


def test_wrong_barriers_are_found(monkeypatch):
    """By the simulation: warps that nobody wakes, and a stage that is filled again too early."""
    batch = micro_batch(ROUTINGS["all to one expert"], (128, 128))
    start, warps = torch.zeros(EXPERTS, 128, 128), simulated_gluon._Warps
    tile = replace(HOPPER_WEIGHT_GRAD_TILE, num_stages=2)
    usual, wait = added(start, [batch], tile=tile), warps.wait
    with monkeypatch.context() as changed:
        changed.setattr(warps, "expect", lambda *_: None)
        with pytest.raises(AssertionError, match="deadlock"):
            added(start, [batch], tile=tile)

    def hasty(self, shared, phase):
        if self.barrier(shared).count == 1:  # not where the copies wait for both warpgroups
            wait(self, shared, phase)

    monkeypatch.setattr(warps, "wait", hasty)

    def all_orders_agree():
        assert all(torch.equal(added(start, [batch], tile=tile), usual) for _ in range(20))

    with pytest.raises(AssertionError):
        all_orders_agree()


@pytest.mark.parametrize(
    "instead", [lambda warps: None, lambda warps: warps.wait_reads(0)], ids=["nothing", "reads"]
)
def test_micro_batches_that_do_not_wait_until_those_before_are_added_are_found(
    instead, monkeypatch
):
    """By the simulation: sums that are replaced before they are read, or added in another order."""
    one_block = torch.ones(3, 1, dtype=torch.int64)
    batches = [micro_batch(one_block, (128, 128), seed) for seed in range(2)]
    start, warps, waits = torch.randn(EXPERTS, 128, 128), simulated_gluon._Warps, Counter()
    usual, wait = added(start, batches, gemm_sms=1), warps.wait_additions

    def changed(self):
        """Each warpgroup's second of three: between the two micro-batches of the one tile."""
        waits[self.partition] += 1
        (instead if waits[self.partition] == 2 else wait)(self)

    def agree(num):
        return all(torch.equal(added(start, batches, gemm_sms=1), usual) for _ in range(num))

    assert agree(50)
    monkeypatch.setattr(warps, "wait_additions", changed)
    assert not agree(300)
    assert set(waits.values()) == {3}


def test_halves_of_a_tile_that_do_not_wait_until_the_one_before_is_read_are_found(monkeypatch):
    """By the simulation: both go through the same shared memory."""
    batches = [micro_batch(ROUTINGS["all to one expert"], (128, 128), seed) for seed in range(2)]
    start = torch.randn(EXPERTS, 128, 128)
    usual = added(start, batches)
    monkeypatch.setattr(simulated_gluon._Warps, "wait_reads", lambda *_: None)
    assert not all(torch.equal(added(start, batches), usual) for _ in range(40))
