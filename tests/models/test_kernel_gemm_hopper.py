"""The Gluon kernel of the grouped FP8 products, simulated, against the Triton kernels."""

from dataclasses import replace

import pytest
import torch
from fp8_cases import ON_GPU, routings
from simulated_gluon import Pointer, simulated

from ppruntime.models.kernels import (
    grouped_gemm,
    mega_moe,
    mega_moe_gemm,
    mega_moe_gemm_hopper,
    moe_layout,
)
from ppruntime.models.kernels.grouped_gemm import HOPPER_TILE
from ppruntime.models.kernels.quantize import Quantized

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
EXPERTS, PAIRS = 4, 200
ROUTINGS = routings(EXPERTS)
CASES = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
ARENAS = torch.zeros(2, PAIRS * 512, dtype=torch.bfloat16)
"""Of two ranks: where rows are sent."""


def _drawn(ticket_ptr):
    ticket = int(ticket_ptr.load(None, 0))
    ticket_ptr.flat[0] += 1
    return torch.tensor(ticket)


def _keep_first(word_ptr, code):
    if not word_ptr.load(None, 0):
        word_ptr.flat[0] = code


class _Rows(Pointer):
    """bf16 in the arenas, by address."""

    def __init__(self, address):
        super().__init__(ARENAS, (address - ARENAS.data_ptr()) // 2)

    def __getitem__(self, key):
        return Pointer(self.flat, self.offsets[key])


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    kernel = simulated(
        mega_moe_gemm_hopper.gemm_kernel,
        _acquired=lambda pointer: pointer.load(None, 0),
        _keep_first=_keep_first,
        _nanoseconds=lambda polls: torch.tensor(polls),
        _proxy_fence=lambda: None,
        _drawn=_drawn,
        _rows_at=_Rows,
    )
    monkeypatch.setattr(mega_moe_gemm_hopper, "gemm_kernel", kernel)


def operands(routing, outs, ins, seed=0):
    """Small whole numbers under scales of powers of two: any order of sums is exact."""
    generator = torch.Generator().manual_seed(seed)
    layout = moe_layout.expert_layout_reference(routing, EXPERTS)

    def whole(*shape):
        return torch.randint(-8, 9, shape, generator=generator).float().to(torch.float8_e4m3fn)

    def powers(*shape):
        return torch.exp2(torch.randint(-2, 3, shape, generator=generator))

    x = Quantized(whole(layout.num_rows, ins), powers(ins // 128, layout.num_rows))
    scale = powers(EXPERTS, outs // 128, ins // 128)
    return x, Quantized(whole(EXPERTS, outs, ins), scale), layout


@pytest.mark.parametrize(("outs", "ins"), [(256, 128), (512, 384), (384, 256)])
@CASES
def test_products_of_whole_numbers_have_the_triton_kernels_bits(routing, outs, ins):
    x, weights, layout = operands(routing, outs, ins)
    live = layout.pair_P >= 0
    expected = grouped_gemm.grouped_gemm(x, weights, layout)[live]
    assert expected.any()
    for sms in (1, 3, 1000):  # every launch draws another order of warps
        got = grouped_gemm.grouped_gemm(x, weights, layout, tile=HOPPER_TILE, gemm_sms=sms)
        assert torch.equal(got[live], expected)


@pytest.mark.parametrize(
    "variant",
    [{"num_stages": n} for n in (1, 2, 9)] + [{"columns": 128}, {"group": 1}],
    ids=str,
)
def test_no_variant_changes_a_bit(variant):
    x, weights, layout = operands(ROUTINGS["ragged"], 512, 256)
    live = layout.pair_P >= 0
    expected = grouped_gemm.grouped_gemm(x, weights, layout)[live]
    tile = replace(HOPPER_TILE, **variant)
    for _ in range(4):
        got = grouped_gemm.grouped_gemm(x, weights, layout, tile=tile, gemm_sms=2)
        assert torch.equal(got[live], expected)


def peers(limit=5):
    bases = torch.tensor([arena.data_ptr() for arena in ARENAS])
    return mega_moe.Peers(bases, torch.zeros(1, dtype=torch.int32), 0, limit)


def test_rows_go_to_their_homes():
    routing = ROUTINGS["ragged"][: PAIRS // 2]
    x, weights, layout = operands(routing, 512, 256)
    live = layout.pair_P >= 0
    expected = grouped_gemm.grouped_gemm(x, weights, layout)[live]
    home_R = torch.where(live, layout.pair_P + (layout.pair_P % 3 == 0) * PAIRS, -1)
    ARENAS.fill_(-1)
    homes = mega_moe_gemm.Homes(home_R.to(torch.int32), peers(), 0, PAIRS)
    assert (
        mega_moe_gemm.mega_gemm(x, weights, layout, homes=homes, tile=HOPPER_TILE, gemm_sms=2)
        is None
    )
    places = ARENAS.view(2 * PAIRS, 512)
    home = home_R[live].long()
    assert torch.equal(places[home], expected)
    others = torch.ones(2 * PAIRS, dtype=torch.bool)
    others[home] = False
    assert (places[others] == -1).all()


def test_rows_that_are_there_are_waited_for_and_the_last_tiles_drawn():
    x, weights, layout = operands(ROUTINGS["ragged"], 512, 384)
    live = layout.pair_P >= 0
    expected = grouped_gemm.grouped_gemm(x, weights, layout)[live]
    flags = torch.full((layout.num_rows // 128,), mega_moe.PARTS, dtype=torch.int32)
    ready = mega_moe_gemm.Ready(flags, peers())
    num_last = int(layout.start_E1[-1]) // 128 * 2 // 4
    for num_helpers in (1, 3):
        ticket = torch.zeros(1, dtype=torch.int32)
        got = mega_moe_gemm.mega_gemm(
            x, weights, layout, ready=ready, tile=HOPPER_TILE, gemm_sms=2,
            helpers=mega_moe_gemm.Helpers(ticket, num_helpers, None),
        )  # fmt: skip
        assert torch.equal(got[live], expected)
        assert ticket.item() > num_last > 0
    assert ready.peers.error.item() == 0


def test_rows_that_never_come_end_the_wait_and_say_so():
    x, weights, layout = operands(ROUTINGS["one token"], 256, 128)
    flags = torch.full((layout.num_rows // 128,), mega_moe.PARTS - 1, dtype=torch.int32)
    ready = mega_moe_gemm.Ready(flags, peers())
    mega_moe_gemm.mega_gemm(x, weights, layout, ready=ready, tile=HOPPER_TILE)
    assert ready.peers.error.item() == mega_moe.LATE_PART
