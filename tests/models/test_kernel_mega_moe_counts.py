"""Counts through the arenas and the plan on the device, against the plan on the host."""

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU
from mega_cases import make_arenas, meet

from ppruntime.models.kernels.moe_layout import BLOCK
from ppruntime.models.mega_moe_plan import make_plan, pool_rows
from ppruntime.models.mega_moe_rules import ArenaShape, told_words

pytestmark = pytest.mark.gpu if ON_GPU else []
COUNTS = {
    "even": [[130, 7, 128, 0, 1, 300], [0, 5, 129, 64, 1, 2]],
    "one expert gets all": [[0, 0, 0, 500, 0, 0], [0, 0, 0, 77, 0, 0], [0] * 6],
    "no rows": [[0] * 4, [0] * 4],
    "one rank": [[3, 0, 256, 129, 5]],
    "an expert a rank": [[1, 2, 3, 4]] * 4,
    "many blocks": [[40_000, 0, 3, 9], [1, 0, 2_000, 0]],
}


def heard_by_all(counts, rooms, errors=None):
    """What each rank plans when the ranks told these counts, in pools of these rooms. Ranks with an
    error met for the counts, gave up a wait and told again."""
    num_experts = len(counts[0])
    shape = ArenaShape(most_tokens=4, per_token=1, num_experts=num_experts, hidden=128)
    arenas = make_arenas(len(counts), shape)
    rows = [torch.tensor(row, dtype=torch.int32, device=DEVICE) for row in counts]
    for arena, row, room in zip(arenas, rows, rooms, strict=True):
        arena.tell(row, room)
    for arena, row, room, error in zip(arenas, rows, rooms, errors or (), strict=False):
        arena.error.fill_(error)
        if error:
            arena.tell(row + 9000, room + BLOCK)
    meet(arenas)
    return [arena.plan(room) for arena, room in zip(arenas, rooms, strict=True)]


def assert_planned(packed, plan, room):
    """The plan's numbers, and -1 for the blocks behind it."""
    expected = plan.packed()
    assert torch.equal(packed[: len(expected)].cpu(), expected)
    assert len(packed) - len(expected) == (room - plan.num_rows) // BLOCK
    assert (packed[len(expected) :] == -1).all()


@pytest.mark.parametrize("case", list(COUNTS))
@pytest.mark.parametrize("spare", [0, 5])
def test_every_rank_plans_on_its_device_what_the_host_plans(case, spare):
    counts = COUNTS[case]
    counts_PE = torch.tensor(counts)
    rooms = [max(rows, BLOCK) + spare * BLOCK for rows in pool_rows(counts_PE)]
    for rank, heard in enumerate(heard_by_all(counts, rooms)):
        assert_planned(heard.packed, make_plan(counts_PE, rank), rooms[rank])
        told = heard.words[:-1].view(len(counts), told_words(len(counts[0]))).cpu()
        assert told[:, :-2].tolist() == counts
        assert told[:, -2].tolist() == [0] * len(counts)
        assert told[:, -1].tolist() == rooms
        assert heard.words[-1] == 0


@pytest.mark.parametrize("case", ["even", "one expert gets all"])
def test_one_pool_too_small_by_a_block_leaves_the_plans_of_all_ranks_empty(case):
    counts = COUNTS[case]
    rows = pool_rows(torch.tensor(counts))
    rooms = [max(BLOCK, one) + BLOCK for one in rows]
    busiest = rows.index(max(rows))
    rooms[busiest] -= 2 * BLOCK
    empty = torch.zeros_like(torch.tensor(counts))
    for rank, heard in enumerate(heard_by_all(counts, rooms)):
        assert_planned(heard.packed, make_plan(empty, rank), rooms[rank])
        assert heard.words[:-1].view(len(counts), -1)[:, :-2].tolist() == counts


def test_a_rank_that_gave_up_a_wait_plans_nothing_and_says_so_to_all():
    counts = COUNTS["even"]
    rooms = [4096, 4096]
    one, other = heard_by_all(counts, rooms, errors=[0, 1])
    counts_PE = torch.tensor(counts)
    assert_planned(one.packed, make_plan(counts_PE, 0), 4096)
    assert_planned(other.packed, make_plan(torch.zeros_like(counts_PE), 1), 4096)
    for heard, error in ((one, 0), (other, 1)):
        assert heard.words[:-1].view(2, -1)[:, -2].tolist() == [0, 1]
        assert heard.words[-1] == error


def test_a_rank_that_gave_up_a_wait_writes_over_nothing_that_a_late_peer_may_be_reading():
    """It goes on to its next layer without the peer, whose plan has to be of one piece."""
    shape = ArenaShape(most_tokens=4, per_token=1, num_experts=6, hidden=128)
    early, late = make_arenas(2, shape)
    for arena, row in zip((early, late), COUNTS["even"], strict=True):
        arena.tell(torch.tensor(row, dtype=torch.int32, device=DEVICE), 4096)
    told = late.told().clone()
    early.error.fill_(2)  # it waited for the other in vain
    early.tell(torch.full((6,), 9000, dtype=torch.int32, device=DEVICE), 8192)
    told[0, -2] = 2
    for arena in (early, late):
        assert torch.equal(arena.told(), told)
