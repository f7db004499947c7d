"""The fused MoE layer's kernels, rank by rank in one process, against their references."""

from functools import partial

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU, distance, random_routing, values
from mega_cases import SHORT_LIMIT, make_arenas, meet

from ppruntime.models.kernels import mega_moe, mega_moe_gemm, mega_moe_swiglu, quantize
from ppruntime.models.kernels.moe_layout import BLOCK, Layout, expert_layout_reference
from ppruntime.models.mega_moe_arena import Arena, error_text
from ppruntime.models.mega_moe_plan import make_plan, unpacked
from ppruntime.models.mega_moe_rules import ArenaShape

pytestmark = pytest.mark.gpu if ON_GPU else []
HIDDEN, PER_TOKEN, HERE = 128, 2, 2
CASES = {
    "a few rows": (2, (5, 2), None),
    "two blocks": (2, (140, 3), None),
    "all to the first experts, a rank without tokens": (2, (80, 0), (0, 1)),
    "four ranks": (4, (9, 0, 30, 1), None),
    "one rank": (1, (20,), None),
    "no tokens": (2, (0, 0), None),
}


class Group:
    """Ranks with tokens and lists of pairs in their arenas, and each rank's plan."""

    def __init__(self, num_ranks, sizes, experts):
        num_experts = num_ranks * HERE
        self.shape = ArenaShape(
            most_tokens=max(max(sizes), 1),
            per_token=PER_TOKEN,
            num_experts=num_experts,
            hidden=HIDDEN,
        )
        self.arenas = make_arenas(num_ranks, self.shape)
        generator = torch.Generator().manual_seed(3)
        self.x, self.weights, self.lists, counts = [], [], [], []
        for rank, (arena, num_tokens) in enumerate(zip(self.arenas, sizes, strict=True)):
            routing = random_routing(
                num_tokens, PER_TOKEN, num_experts, seed=rank, unrouted=0.1, experts=experts
            )
            layout = expert_layout_reference(routing, num_experts)
            x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16().to(DEVICE)
            weights = torch.rand(num_tokens, PER_TOKEN, generator=generator).to(DEVICE)
            arena.order(layout.num_rows).copy_(layout.pair_P)
            arena.weights(num_tokens).copy_(weights)
            self.x.append(x)
            self.weights.append(weights)
            self.lists.append(layout.pair_P)
            counts.append(layout.count_E)
        meet(self.arenas)
        self.counts_PE = torch.stack(counts).cpu().long()
        self.plans = [
            unpacked(make_plan(self.counts_PE, rank).packed().to(DEVICE), num_ranks, HERE)
            for rank in range(num_ranks)
        ]

    def found(self, rank):
        return mega_moe.find_rows(
            self.arenas[rank].peers,
            self.plans[rank],
            order_offset=self.shape.offset("order"),
            weights_offset=self.shape.offset("weights"),
            most_pairs=self.shape.most_pairs,
        )

    def pulled(self, rank, *, fp8, quantized=None):
        home_R = self.found(rank).home_R
        pool = mega_moe.empty_pool(home_R, HIDDEN, fp8=fp8)
        mega_moe.pull_rows(
            self.arenas[rank].peers,
            home_R,
            self.plans[rank][0],
            pool,
            rows_offset=self.shape.offset("rows"),
            scales_offset=self.shape.offset("scales"),
            per_token=PER_TOKEN,
            most_pairs=self.shape.most_pairs,
            num_sms=2,
            quantized=quantized,
        )
        return pool

    def layout(self, rank):
        start_L1, count_L, _, _, expert_B = self.plans[rank]
        pair_R = self.found(rank).pair_R
        return Layout(pair_R, pair_R.unsqueeze(1), expert_B, start_L1, count_L)


FEW = list(CASES) if ON_GPU else ["a few rows", "no tokens"]
"""In the interpreter the others take too long for every run."""


@pytest.fixture(
    params=[
        pytest.param(sizes, marks=[] if case in FEW else pytest.mark.long, id=case)
        for case, sizes in CASES.items()
    ]
)
def group(request):
    return Group(*request.param)


def test_pool_rows_are_found_in_the_peers_lists(group):
    for rank, arena in enumerate(group.arenas):
        expected = mega_moe.find_rows_reference(
            [one.cpu() for one in group.lists],
            [one.cpu() for one in group.weights],
            tuple(part.cpu() for part in group.plans[rank]),
            most_pairs=group.shape.most_pairs,
        )
        for name, got, want in zip(expected._fields, group.found(rank), expected, strict=True):
            assert torch.equal(got.cpu(), want), name
        assert not arena.error.item()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "FP8"])
def test_rows_are_pulled_in_order_and_every_block_says_when_it_is_there(group, fp8):
    sources, scales = group.x, None
    if fp8:
        quantized = [quantize.quantize_rows_reference(x, power_of_two=True) for x in group.x]
        sources, scales = [q.data for q in quantized], [q.scale.cpu() for q in quantized]
    for rank, arena in enumerate(group.arenas):
        num_tokens = len(group.x[rank])
        if fp8:
            for there, here in zip(arena.fp8_rows(num_tokens), quantized[rank], strict=True):
                there.copy_(here)
        else:
            arena.rows(num_tokens).copy_(group.x[rank])
    meet(group.arenas)
    where = {"per_token": PER_TOKEN, "most_pairs": group.shape.most_pairs}
    for rank in range(len(group.arenas)):
        pool, home_R = group.pulled(rank, fp8=fp8), group.found(rank).home_R
        expected = mega_moe.pull_rows_reference([one.cpu() for one in sources], home_R, **where)
        assert torch.equal(values(pool.data_RC), values(expected.to(DEVICE)))
        assert (pool.flag_B == mega_moe.PARTS).all()
        if scales is not None:
            expected = mega_moe.pull_rows_reference(scales, home_R, **where).to(DEVICE)
            assert torch.equal(pool.scale_RG, expected)
            assert torch.equal(pool.scale_GR, expected.t())


def test_rows_that_are_quantised_on_the_way_have_the_bits_of_the_quantiser(group):
    for rank, arena in enumerate(group.arenas):
        arena.rows(len(group.x[rank])).copy_(group.x[rank])
    meet(group.arenas)
    for rank in range(len(group.arenas)):
        plain = group.pulled(rank, fp8=False)
        both = quantize.pool_rows_like(plain.data_RC, *plain.data_RC.shape)
        pool = group.pulled(rank, fp8=False, quantized=both)
        assert torch.equal(pool.data_RC, plain.data_RC)
        assert torch.equal(pool.flag_B, plain.flag_B)
        expected = quantize.quantize_rows_reference(plain.data_RC, power_of_two=False)
        assert torch.equal(values(both.data), values(expected.data))
        assert torch.equal(both.scale, expected.scale.t())


@pytest.mark.parametrize("turned", [False, True], ids=["forward", "turned"])
def test_bf16_rows_are_multiplied_once_they_are_there_and_sent_home(group, turned):
    outs = 256
    generator = torch.Generator().manual_seed(1)
    for rank, arena in enumerate(group.arenas):
        arena.rows(len(group.x[rank])).copy_(group.x[rank])
    meet(group.arenas)
    shape = (HERE, HIDDEN, outs) if turned else (HERE, outs, HIDDEN)
    back = (HERE, outs, HIDDEN) if turned else (HERE, HIDDEN, outs)
    first = (torch.randn(shape, generator=generator) * 0.1).bfloat16().to(DEVICE)
    second = (torch.randn(back, generator=generator) * 0.1).bfloat16().to(DEVICE)
    targets = [torch.zeros(group.shape.most_pairs, HIDDEN).bfloat16() for _ in group.arenas]
    for rank, arena in enumerate(group.arenas):
        pool, layout = group.pulled(rank, fp8=False), group.layout(rank)
        ready = mega_moe_gemm.Ready(pool.flag_B, arena.peers)
        y_RO = mega_moe_gemm.mega_gemm(pool.data_RC, first, layout, turned=turned, ready=ready)
        assert not arena.error.item()
        live = layout.pair_P >= 0
        expected = mega_moe_gemm.mega_gemm_reference(pool.data_RC, first, layout, turned=turned)
        if live.any():
            assert distance(y_RO[live], expected[live]) < 3e-3
        homes = mega_moe_gemm.Homes(
            group.found(rank).home_R, arena.peers, group.shape.offset("places"),
            group.shape.most_pairs,
        )  # fmt: skip
        sent = mega_moe_gemm.mega_gemm(expected, second, layout, turned=turned, homes=homes)
        assert sent is None
        expected = mega_moe_gemm.mega_gemm_reference(expected, second, layout, turned=turned)
        mega_moe.push_reference(
            targets, homes.home_R, expected.cpu(), most_pairs=group.shape.most_pairs
        )
    for arena, target, x in zip(group.arenas, targets, group.x, strict=True):
        target = target[: len(x) * PER_TOKEN].to(DEVICE)
        if target.any():
            assert distance(arena.places(len(x)), target) < 3e-3


def test_fp8_rows_have_the_bits_of_the_plain_grouped_product():
    from ppruntime.models.kernels import grouped_gemm

    group = Group(*CASES["a few rows"])
    for rank, arena in enumerate(group.arenas):
        rows = quantize.quantize_rows_reference(group.x[rank], power_of_two=True)
        for there, here in zip(arena.fp8_rows(len(group.x[rank])), rows, strict=True):
            there.copy_(here)
    meet(group.arenas)
    weight = torch.randn(HERE, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.1
    weights = quantize.quantize_blocks_reference(weight.to(DEVICE))
    for rank, arena in enumerate(group.arenas):
        pool, layout = group.pulled(rank, fp8=True), group.layout(rank)
        live = layout.pair_P >= 0
        expected = grouped_gemm.grouped_gemm(pool.rows(), weights, layout)[live]
        ready = mega_moe_gemm.Ready(pool.flag_B, arena.peers)
        got = mega_moe_gemm.mega_gemm(pool.rows(), weights, layout, ready=ready)[live]
        assert torch.equal(got, expected)
        reference = mega_moe_gemm.mega_gemm_reference(pool.rows(), weights, layout)[live]
        assert distance(got, reference) < 3e-3
        home_R = group.found(rank).home_R
        homes = mega_moe_gemm.Homes(
            home_R, arena.peers, group.shape.offset("places"), group.shape.most_pairs
        )
        mega_moe_gemm.mega_gemm(pool.rows(), weights, layout, homes=homes)
        for row, home in zip(got, home_R[live].tolist(), strict=True):
            source, pair = divmod(home, group.shape.most_pairs)
            assert torch.equal(group.arenas[source].places(len(group.x[source]))[pair], row)


def test_programs_that_draw_the_last_tiles_change_no_bit():
    outs = 512
    group = Group(*CASES["a few rows"])
    for rank, arena in enumerate(group.arenas):
        arena.rows(len(group.x[rank])).copy_(group.x[rank])
    meet(group.arenas)
    weights = torch.randn(HERE, outs, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights = weights.bfloat16().to(DEVICE)
    tile = mega_moe_gemm.Tile(rows=64, columns=128, num_warps=4)
    for rank, arena in enumerate(group.arenas):
        pool, layout = group.pulled(rank, fp8=False), group.layout(rank)
        live = layout.pair_P >= 0
        ready = mega_moe_gemm.Ready(pool.flag_B, arena.peers)
        multiply = partial(
            mega_moe_gemm.mega_gemm, pool.data_RC, weights, layout, ready=ready, tile=tile
        )
        expected = multiply()
        stream = torch.cuda.current_stream() if ON_GPU else None
        got = multiply(helpers=mega_moe_gemm.Helpers(pool.ticket_1, 3, stream), gemm_sms=2)
        assert torch.equal(got[live], expected[live])
        num_last = len(layout.pair_P) // 64 * (outs // 128) // 4
        assert pool.ticket_1.item() > num_last > 0
        assert (pool.flag_B == mega_moe.PARTS).all()


def test_values_go_back_to_their_pairs(group):
    targets = [torch.zeros(group.shape.most_pairs) for _ in group.arenas]
    for rank, arena in enumerate(group.arenas):
        home_R = group.found(rank).home_R
        value_R = torch.rand(len(home_R), device=DEVICE)
        where = {"most_pairs": group.shape.most_pairs}
        mega_moe.push_values(
            arena.peers, home_R, value_R, offset=group.shape.offset("values"), **where
        )
        mega_moe.push_reference(targets, home_R, value_R.cpu(), **where)
    for arena, target, x in zip(group.arenas, targets, group.x, strict=True):
        assert torch.equal(arena.values(len(x)).flatten().cpu(), target[: len(x) * PER_TOKEN])


def test_bf16_swiglu_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(BLOCK, 256, generator=generator).bfloat16().to(DEVICE)
    grad = torch.randn(BLOCK, 128, generator=generator).bfloat16().to(DEVICE)
    weight = torch.rand(BLOCK, generator=generator).to(DEVICE)
    pair = torch.arange(BLOCK, dtype=torch.int32, device=DEVICE)
    pair[100:] = -1
    weight[100:] = 0
    z[100:], grad[100:] = torch.nan, torch.nan
    limit = 1.2  # a tenth of the gates is clamped
    got = mega_moe_swiglu.swiglu_bf16(z, weight, pair, limit)
    assert distance(got, mega_moe_swiglu.swiglu_bf16_reference(z, weight, pair, limit)) < 1e-3
    got = mega_moe_swiglu.swiglu_bf16_backward(z, grad, weight, pair, limit)
    expected = mega_moe_swiglu.swiglu_bf16_backward_reference(z, grad, weight, pair, limit)
    for name, a, b in zip(got._fields, got, expected, strict=True):
        assert distance(a, b) < 1e-3, name
        assert not a[100:].any(), name


def two_arenas() -> list[Arena]:
    shape = ArenaShape(most_tokens=2, per_token=1, num_experts=2, hidden=HIDDEN)
    return make_arenas(2, shape, limit=SHORT_LIMIT)


def test_a_meeting_ends_when_all_have_come_and_not_with_an_old_word():
    arenas = two_arenas()
    for _ in range(3):
        meet(arenas)
    assert [arena.error.item() for arena in arenas] == [0, 0]
    arenas[0].meet()  # rank 1 came three times, not four
    assert [arena.error.item() for arena in arenas] == [2, 0]
    text = error_text([2, 0], (4, 5))
    assert "ranks [4, 5]" in text
    assert "rank 4 waited too long for rank 5" in text
    assert error_text([0, 0], (4, 5)) is None


@pytest.mark.parametrize("met", [0, 1, 2, 3])
def test_ranks_still_wait_for_each_other_when_their_words_begin_again(met):
    """After 2^31 meetings; one rank comes once more than the other."""
    arenas = two_arenas()
    for arena in arenas:
        arena._epoch = 2**31 - 3
    for _ in range(met):
        meet(arenas)
    assert [arena.error.item() for arena in arenas] == [0, 0]
    arenas[1].meet()
    assert arenas[1].num_meetings == 2**31 - 2 + met
    assert [arena.error.item() for arena in arenas] == [0, 1]


@pytest.mark.skipif(ON_GPU, reason="its limit is polls")
def test_a_product_whose_rows_never_come_ends_and_later_waits_end_at_once():
    group = Group(*CASES["a few rows"])
    arena, layout = group.arenas[0], group.layout(0)
    arena.rows(len(group.x[0])).copy_(group.x[0])
    pool = mega_moe.empty_pool(layout.pair_P, HIDDEN, fp8=False)
    pool.data_RC.zero_()
    ready = mega_moe_gemm.Ready(pool.flag_B, arena.peers)
    weights = torch.zeros(HERE, HIDDEN, HIDDEN).bfloat16()
    mega_moe_gemm.mega_gemm(pool.data_RC, weights, layout, ready=ready)
    assert arena.error.item() == mega_moe.LATE_PART
    arena.meet()  # alone: waits for nobody any more, and the first reason stays
    assert arena.error.item() == mega_moe.LATE_PART
    assert "rows of its own copy kernel" in error_text([mega_moe.LATE_PART, 0], (0, 1))
