"""Orders survive a file unchanged, and a wrong file is answered with the place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.formats import digest, from_csv, from_json, read, to_csv, to_json
from ppruntime.schedules.ops import Kind, Op, Pair, ScheduleError, parse_op, parse_step
from ppruntime.schedules.passes import add_frees, add_offload, add_transfers


@st.composite
def schedules(draw):
    """Computations alone or lowered, pairs left or taken apart."""
    num_ranks = draw(st.integers(1, 4))
    schedule = make(draw(st.sampled_from(NAMES)), num_ranks, draw(st.integers(1, 9)))
    if draw(st.booleans()):
        schedule = add_offload(schedule)
    if draw(st.booleans()):
        schedule = add_frees(add_transfers(schedule, fuse_pairs=draw(st.booleans())))
    return schedule


@given(schedules())
def test_text_gives_the_schedule_back(schedule):
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule
    assert from_json(to_json(schedule)) == schedule


@given(st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 999))
def test_an_op_is_its_text(stage, kind, micro_batch):
    op = Op(stage, kind, micro_batch)
    assert parse_op(str(op)) == op
    assert str(op) == f"{stage}{kind.value}{micro_batch}"


def test_a_pair_is_its_text():
    pair = Pair(Op(0, Kind.F, 8), Op(7, Kind.B, 0))
    assert str(pair) == "(0F8;7B0)OVERLAP_F_B"
    assert parse_step(str(pair)) == pair


def test_files_are_read_by_their_ending(tmp_path):
    schedule = make("dualpipe_v", 2, 5)
    for name, text in (("a.csv", to_csv(schedule)), ("b.json", to_json(schedule))):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert read(tmp_path / "a.csv").orders == schedule.orders
    assert read(tmp_path / "a.csv").name == "a"
    assert read(tmp_path / "b.json") == schedule
    (tmp_path / "c.txt").write_text("0F0")
    with pytest.raises(ScheduleError, match=r"c\.txt is neither \.csv nor \.json"):
        read(tmp_path / "c.txt")


def test_idle_cells_blank_rows_at_the_end_and_sharding_ops_are_skipped():
    text = "0UNSHARD,0F0,,0B0,0REDUCE_GRAD\n ,1F0,1B0,0RESHARD\n\n,,\n"
    schedule = from_csv(text, name="torch")
    assert to_csv(schedule) == "0F0,0B0\n1F0,1B0\n"


def test_json_may_hold_more_than_the_order_and_less_than_its_numbers():
    schedule = from_json(json.dumps({"makespan": 12.5, "order": [["0F0", "0B0"]]}), name="found")
    assert schedule.name == "found"
    assert (schedule.num_micro_batches, schedule.stage_to_rank) == (1, (0,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "table, rank 0, column 1: '0X0' is not an op; write STAGE KIND MICRO_BATCH"),
        ("0F0,(0F0;0B0)\n", "table, rank 0, column 1: '(0F0;0B0)' is not an op"),
        ("0F0,-1F0\n", "'-1F0' is not an op"),
        ("0F0,1F0\n1B0\n", "rank 1, column 0: 1B0 belongs to rank 0, which has other ops"),
        ("0F0,2F0\n", "table has no op of stage 1; stages go from 0 up, no gaps"),
        ("\n", "table has no op at all; a row is a rank, a cell an op such as 0F0"),
    ],
)
def test_a_wrong_csv_is_answered_with_the_place(text, message):
    with pytest.raises(ScheduleError) as error:
        from_csv(text, name="table")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "json is not JSON: "),
        ("[]", 'json needs an "order": a list over ranks of lists of op texts'),
        ('{"order": [["0F0", 1]]}', 'json needs an "order"'),
        (
            '{"order": [["0F0"]], "num_micro_batches": 2}',
            "json says num_micro_batches = 2, its ops go up to micro-batch 0",
        ),
        (
            '{"order": [["0F0"]], "stage_to_rank": [1]}',
            "json says stage_to_rank = [1], its ops lie as in [0]",
        ),
    ],
)
def test_a_wrong_json_is_answered_with_the_reason(text, message):
    with pytest.raises(ScheduleError) as error:
        from_json(text)
    assert message in str(error.value)


def test_digests_agree_exactly_if_the_tables_do():
    schedule = make("1f1b", 4, 8)
    assert digest(schedule) == digest(make("async_1f1b", 4, 8, warmup_step=1))
    assert len(digest(schedule)) == 16
    others = [
        make("1f1b", 4, 9),
        make("1f1b", 3, 8),
        make("async_1f1b", 4, 8),
        make("dualpipe_v", 4, 8),
        add_transfers(schedule),
        add_frees(add_transfers(schedule)),
    ]
    assert len({digest(other) for other in [schedule, *others]}) == 7


def test_digest_is_of_the_text_alone():
    """The first 16 digits of sha256 of: 2;0,1 / 0F0,0F1,0B0,0B1 / 1F0,1B0,1F1,1B1, by line."""
    assert digest(make("1f1b", 2, 2)) == "7480fb486cc8b027"
