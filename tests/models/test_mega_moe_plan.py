"""The plan of an expert group's pools, against sorting all ranks' pairs in one process."""

import pytest
import torch
from fp8_cases import random_routing
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.models.kernels.moe_layout import expert_layout_reference
from ppruntime.models.mega_moe_plan import (
    BLOCK,
    make_plan,
    pool_rows,
    unpacked,
)
from ppruntime.models.mega_moe_rules import ArenaShape, PoolOverflow, most_pool_rows, room_after


def counts_of(routings, num_experts):
    return torch.stack(
        [torch.bincount(r[r >= 0].flatten(), minlength=num_experts) for r in routings]
    )


@settings(max_examples=25)
@given(
    num_ranks=st.sampled_from([1, 2, 4]),
    here=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 70), min_size=4, max_size=4),
    few=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_pair_has_one_place_by_expert_source_and_pair(num_ranks, here, sizes, few, seed):
    num_experts = num_ranks * here
    per_token = min(2, num_experts)
    experts = range(per_token) if few else None  # all rows to the first rank's experts
    routings = [
        random_routing(sizes[p], per_token, num_experts, seed=seed + p, experts=experts).cpu()
        for p in range(num_ranks)
    ]
    counts_PE = counts_of(routings, num_experts)
    lists = [expert_layout_reference(r, num_experts).pair_P for r in routings]
    for rank in range(num_ranks):
        plan = make_plan(counts_PE, rank)
        assert plan.num_rows == len(plan.expert_B) * BLOCK
        assert plan.num_rows == max(BLOCK, pool_rows(counts_PE)[rank])
        assert plan.num_live_rows == int(counts_PE[:, rank * here : (rank + 1) * here].sum())
        start_L1, count_L, before, order, expert_B = unpacked(plan.packed(), num_ranks, here)
        assert torch.equal(expert_B.long(), plan.expert_B)
        for local in range(here):
            expert = rank * here + local
            first = int(start_L1[local])
            assert first % BLOCK == 0
            blocks = plan.expert_B[first // BLOCK : int(start_L1[local + 1]) // BLOCK]
            assert (blocks == local).all()
            is_all_there_is = plan.num_live_rows == 0 and local == 0
            assert len(blocks) == -(-int(count_L[local]) // BLOCK) + is_all_there_is
            found = []
            for source in range(num_ranks):
                assert int(before.view(num_ranks, here)[source, local]) == len(found)
                begin = int(order.view(num_ranks, here)[source, local])
                pairs = lists[source][begin : begin + int(counts_PE[source, expert])]
                found += [(source, int(pair)) for pair in pairs]
            expected = [
                (source, int(pair))
                for source, routing in enumerate(routings)
                for pair in (routing.flatten() == expert).nonzero()
            ]
            assert found == expected
            assert len(found) == int(count_L[local])


def test_a_rank_that_gets_too_many_rows_stops_all_ranks_with_one_text():
    counts_PE = torch.tensor([[300, 0, 0, 0], [0, 300, 4, 0]])
    texts = set()
    for rank in range(2):
        with pytest.raises(PoolOverflow) as raised:
            make_plan(counts_PE, rank, capacity_factor=1.25, num_pairs=304)
        texts.add(str(raised.value))
    (text,) = texts
    assert "rank 0 of the expert group would get 768 rows" in text
    assert "allows 640" in text
    assert "expert, 0, has 300 rows, 2.0 times the mean" in text
    assert most_pool_rows(1.25, 304, 2) == 640
    assert make_plan(counts_PE, 0, capacity_factor=2.0, num_pairs=304).num_rows == 768
    assert make_plan(counts_PE, 1).num_rows == 128


def test_balanced_rows_fit_every_factor_from_one():
    counts_PE = torch.full((4, 8), 130)
    plan = make_plan(counts_PE, 3, capacity_factor=1.0, num_pairs=8 * 130)
    assert plan.num_rows == 2 * 640


def test_an_arena_has_room_for_each_region_and_no_more():
    shape = ArenaShape(most_tokens=8192, per_token=6, num_experts=384, hidden=5120)
    names = ("words", "error", "told", "order", "weights", "scales", "values", "rows", "places")
    offsets = [shape.offset(name) for name in names]
    assert all(offset % 256 == 0 for offset in offsets)
    assert offsets == sorted(set(offsets))
    assert shape.offset("places") - shape.offset("rows") == 2 * 8192 * 5120
    assert shape.num_bytes - shape.offset("places") == 2 * 6 * 8192 * 5120
    assert 0.58e9 < shape.num_bytes < 0.6e9


@pytest.mark.parametrize(
    ("room", "num_rows", "next_room"),
    [
        (1024, 1024, 1024),  # fits
        (1024, 640, 1024),  # not twice too large
        (1024, 1025, 1152),  # too small: a sixteenth more than came, in whole blocks
        (8192, 1024, 1152),  # far too large
        (8192, 0, 512),  # never less than a fair share
        (512, 0, 512),
    ],
)
def test_a_pool_keeps_its_room_while_what_comes_fits_and_fills_half_of_it(
    room, num_rows, next_room
):
    assert room_after(room, num_rows, fair_share=512) == next_room
