"""Orders against those of torch.distributed.pipelining, as text, with its idle steps left out."""

import csv

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from ppruntime.schedules import make
from ppruntime.schedules.check import check
from ppruntime.schedules.formats import from_csv, read
from ppruntime.schedules.ops import ScheduleError
from ppruntime.schedules.passes import drop_micro_batches


def torch_order(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None
) -> list[list[str]]:
    orders = get_schedule_ops(name, num_ranks, num_micro_batches, stages_per_rank)
    cells = [[str(action) for action in order if action is not None] for order in orders]
    return [[cell for cell in row if "REDUCE_GRAD" not in cell] for row in cells]


def texts(schedule) -> list[list[str]]:
    return [[str(step) for step in order] for order in schedule.orders]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("interleaved_1f1b", "Interleaved1F1B"), ("interleaved_zb1p", "InterleavedZeroBubble")],
)
def test_interleaved_orders_are_torchs(ours, theirs, num_ranks, rounds, stages_per_rank):
    num_micro_batches = rounds * num_ranks
    schedule = make(ours, num_ranks, num_micro_batches, stages_per_rank=stages_per_rank)
    assert texts(schedule) == torch_order(theirs, num_ranks, num_micro_batches, stages_per_rank)


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("extra", [-3, 0, 5])
def test_zb_v_is_torchs_for_few_micro_batches_too(num_ranks, extra):
    num_micro_batches = max(1, 2 * num_ranks + extra)
    schedule = make("zb_v", num_ranks, num_micro_batches)
    assert texts(schedule) == torch_order("ZBVZeroBubble", num_ranks, num_micro_batches)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("extra", [0, 5])
def test_dualpipe_v_is_torchs(num_ranks, extra):
    num_micro_batches = 2 * num_ranks + extra
    schedule = make("dualpipe_v", num_ranks, num_micro_batches)
    assert texts(schedule) == torch_order("DualPipeV", num_ranks, num_micro_batches)


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("extra", [0, 7])
def test_1f1b_is_torchs_on_all_ranks_but_the_last_whose_table_is_shifted_there(num_ranks, extra):
    num_micro_batches = num_ranks + extra
    ours = texts(make("1f1b", num_ranks, num_micro_batches))
    theirs = torch_order("1F1B", num_ranks, num_micro_batches)
    assert ours[:-1] == theirs[:-1]


def test_torchs_table_for_the_last_rank_of_1f1b_is_refused_with_the_reason():
    rows = get_schedule_ops("1F1B", 3, 4)
    schedule = from_csv("\n".join(",".join(map(str, row)) for row in rows), name="torch")
    if texts(schedule) == texts(make("1f1b", 3, 4)):
        pytest.skip("this torch has the last rank right")
    with pytest.raises(ScheduleError, match=r"rank 2 never runs 2F0, its forward"):
        check(drop_micro_batches(schedule, 4))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("interleaved_1f1b", "Interleaved1F1B"),
        ("interleaved_zb1p", "InterleavedZeroBubble"),
        ("zb_v", "ZBVZeroBubble"),
        ("dualpipe_v", "DualPipeV"),
    ],
)
def test_a_compute_only_file_with_idle_cells_loads(ours, theirs, tmp_path):
    path = tmp_path / "order.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(get_schedule_ops(theirs, 4, 8))
    loaded = read(path)
    check(loaded)
    made = make(ours, 4, 8)
    assert (loaded.orders, loaded.stage_to_rank) == (made.orders, made.stage_to_rank)
    assert loaded.name == "order"
