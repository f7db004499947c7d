"""When a stage's masters leave and come back."""

from __future__ import annotations

import pytest

from ppruntime.master_moments import master_moments
from ppruntime.schedules import make
from ppruntime.schedules.ops import COMPUTE
from ppruntime.schedules.passes import add_frees, add_offload, add_transfers


def moments(schedule, rank, stage):
    found = master_moments(list(schedule.ops(rank)), stage)
    assert found is not None
    parts = (found.leave, found.left, found.through, found.back)
    return [part and str(part) for part in parts]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, ["0F0", "0B0", "0B3", "0B4"]),
        (1, ["1F0", "1B0", "1B4", "1B5"]),
        (2, ["2F0", "2F1", "2B5", None]),
    ],
)
def test_masters_are_away_while_micro_batches_are_in_flight(rank, expected):
    lowered = add_frees(add_transfers(make("1f1b", 3, 6)))
    assert moments(lowered, rank, rank) == expected


def test_what_leaves_the_device_makes_room_for_masters_that_come_back():
    order = make("async_1f1b", 1, 5, warmup_step=[3])
    lowered = add_frees(add_transfers(add_offload(order, every=2, overlapped=2)))
    texts = [str(op) for op in lowered.ops(0)]
    *_, back = moments(lowered, 0, 0)
    assert texts.index("0OFFLOADED4") < texts.index(back)


def test_another_stages_work_is_what_masters_come_back_before():
    lowered = add_frees(add_transfers(make("dualpipe_v", 2, 6)))
    for rank in range(2):
        ops = [op for op in lowered.ops(rank) if op.kind in COMPUTE]
        for stage in lowered.stages_of(rank):
            *_, through, back = moments(lowered, rank, stage)
            own = [str(op) for op in ops if op.stage == stage]
            texts = [str(op) for op in ops]
            if back is None:
                assert own[-1] == through
            else:
                assert texts.index(back) == texts.index(through) + 1


def test_one_micro_batch_leaves_masters_no_time_away():
    assert master_moments(list(make("1f1b", 1, 1).ops(0)), 0) is None
