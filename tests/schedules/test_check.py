"""One wrong order per rule, with what the rule says about it."""

import pytest

from ppruntime.schedules import make
from ppruntime.schedules.check import check, check_progress
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.formats import from_csv
from ppruntime.schedules.grid import MAX_LINES, grid
from ppruntime.schedules.ops import Kind, Op, Pair, Schedule, ScheduleError, parse_step
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.schedules.progress import slots_needed

TWO_STAGES = (0, 1)


def by_hand(*rows: str, stage_to_rank=TWO_STAGES, num_micro_batches=2) -> Schedule:
    orders = tuple(tuple(parse_step(cell) for cell in row.split()) for row in rows)
    return Schedule("by hand", num_micro_batches, tuple(stage_to_rank), orders)


def complaint(schedule: Schedule, **options) -> str:
    with pytest.raises(ScheduleError) as error:
        check(schedule, **options)
    return str(error.value)


GOOD = "1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            by_hand(num_micro_batches=0, stage_to_rank=()),
            "by hand has 0 ranks and 0 micro-batches; the least is 1 of each",
        ),
        (by_hand("0F0", stage_to_rank=(0, 3)), "stage 1 is placed on rank 3; ranks go from 0 to 0"),
        (
            by_hand("0F0", "", stage_to_rank=(0,)),
            "rank 1 of 2 has no stage (stage_to_rank = [0]); give it one or leave the rank out",
        ),
        (
            by_hand("0F0 2F0", GOOD),
            "rank 0, step 1, 2F0: there is no stage 2, they go from 0 to 1",
        ),
        (by_hand("0F0 0F2", GOOD), "rank 0, step 1, 0F2: micro-batches go from 0 to 1"),
        (
            by_hand("0F0 1F1", GOOD),
            "rank 0, step 1, 1F1: stage 1 is on rank 1; move the op there",
        ),
        (
            by_hand("0F0 0F1 0B0 0F1 0B1", GOOD),
            "rank 0, step 3, 0F1: it is there already, at step 1; take one out",
        ),
        (
            by_hand("0F0 (0B0;0F1)OVERLAP_F_B 0B1", GOOD),
            "rank 0, step 1, 0B0: (0B0;0F1)OVERLAP_F_B is no pair: a pair is F and then B or I",
        ),
        (by_hand("0F0 0B0 0B1", GOOD), "rank 0 never runs 0F1, its forward; add it"),
        (by_hand("0F0 0F1 0B0", GOOD), "rank 0 never runs 0B1, its backward; add it"),
        (
            by_hand("0F0 0F1 0B0 0W1", GOOD),
            "rank 0 never runs 0I1, the first half of a backward; add it",
        ),
        (
            by_hand("0F0 0F1 0B0 0I1", GOOD),
            "rank 0 never runs 0W1, the other half of a backward; add it",
        ),
        (
            by_hand("0F0 0F1 0B0 0B1 0W1", GOOD),
            "rank 0, step 4, 0W1: 0B1 does it too; a backward is B, or else I and W",
        ),
        (
            by_hand("0B0 0F0 0F1 0B1", GOOD),
            "rank 0, step 0, 0B0: it runs before 0F0; move it behind",
        ),
        (
            by_hand("0F0 0W0 0I0 0F1 0B1", GOOD),
            "rank 0, step 1, 0W0: it runs before 0I0; move it behind",
        ),
        (
            by_hand("0F0 0F1 0B1 0B0", GOOD),
            "rank 0, step 2, 0B1: it adds to the gradients before micro-batch 0 does; swap the two",
        ),
        (
            by_hand("0F0 0F1 0I0 0I1 0W1 0W0", GOOD),
            "rank 0, step 4, 0W1: it adds to the gradients before micro-batch 0 does; swap the two",
        ),
        (
            by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "rank 0 waits at 0B0 for 1B0, which rank 1 runs later; rank 1 waits at 1F1 for 0F1,"
            " which rank 0 runs later: they wait for ever; move one of these ops",
        ),
        (
            by_hand("1F0 1B0 0F0 0B0", stage_to_rank=(0, 0), num_micro_batches=1),
            "rank 0 waits at 1F0 for 0F0, which rank 0 runs later: they wait for ever; move one of"
            " these ops",
        ),
        (
            by_hand("0F0 0OFFLOAD0 0F1 0B0 0B1", GOOD),
            "rank 0 never runs 0RELOAD0, though 0OFFLOAD0 moved it away; add it",
        ),
        (
            by_hand("0F0 0RELOAD0 0F1 0B0 0B1", GOOD),
            "rank 0 never runs 0OFFLOAD0, though 0RELOAD0 brings it back; add it",
        ),
        (
            by_hand("0F0 0OFFLOAD0 0OFFLOADED0 0F1 0B0 0RELOAD0 0B1", GOOD),
            "rank 0, step 4, 0B0: it runs before 0RELOAD0; move it behind",
        ),
        (
            by_hand("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1", GOOD),
            "rank 0 never runs 0OFFLOADED0, where 0OFFLOAD0's copy has to be done; add it",
        ),
        (
            by_hand("0F0 0OFFLOADED0 0F1 0B0 0B1", GOOD),
            "rank 0 never runs 0OFFLOAD0, which 0OFFLOADED0 waits for; add it",
        ),
        (
            by_hand("0F0 0OFFLOAD0 0F1 0RELOAD0 0OFFLOADED0 0B0 0B1", GOOD),
            "rank 0, step 3, 0RELOAD0: it runs before 0OFFLOADED0; move it behind",
        ),
    ],
)
def test_a_broken_rule_is_named_with_place_and_remedy(schedule, message):
    assert complaint(schedule).split("\n")[0] == message


LOWERED = (
    "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0FREE_B0 0RECV_B1 0B1 0FREE_B1",
    "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1FREE_F0 1F1 1B1 1SEND_B1 1FREE_F1",
)


def edited(*changes: tuple[str, str]) -> Schedule:
    """The lowered order with texts replaced; every change has to hit."""
    rows = "|".join(f" {row} " for row in LOWERED)
    for old, new in changes:
        assert f" {old} " in rows
        rows = rows.replace(f" {old} ", f" {new} ")
    return by_hand(*rows.split("|"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0SEND_F1", ""), "rank 0 never runs 0SEND_F1, a transfer that its neighbour counts on"),
        (("1RECV_F1", ""), "rank 1 never runs 1RECV_F1, a transfer that its neighbour counts on"),
        (
            ("0B1", "0B1 0SEND_B1"),
            "rank 0, step 9, 0SEND_B1: stage 0 has no neighbour on that side; leave it out",
        ),
        (("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0"), "the next message there is 0SEND_F0; swap"),
        (("0FREE_B1", ""), "rank 0 never runs 0FREE_B1, so its slot is lost; add it"),
        (
            ("0F1", "0F1 0FREE_F1"),
            "0FREE_F1: stage 0 receives nothing on that side; leave it out",
        ),
        (("0F0 0SEND_F0", "0SEND_F0 0F0"), "0SEND_F0: it runs before 0F0; move it behind"),
        (("0RECV_B1 0B1", "0B1 0RECV_B1"), "0B1: it runs before 0RECV_B1; move it behind"),
        (("1B1 1SEND_B1 1FREE_F1", "1FREE_F1 1B1 1SEND_B1"), "1FREE_F1: it runs before 1B1"),
        (
            ("0SEND_F1 0B0 0FREE_B0 0RECV_B1", "0B0 0FREE_B0 0RECV_B1 0SEND_F1"),
            None,  # late, not wrong
        ),
    ],
)
def test_a_wrong_transfer_is_named(change, message):
    check(by_hand(*LOWERED), slots=2)
    if message is None:
        check(edited(change), slots=2)
    else:
        assert message in complaint(edited(change)).split("\n")[0]


def test_a_receive_without_a_slot_is_named():
    schedule = edited(("0RECV_B0", "0RECV_B0 0RECV_B1"), ("0FREE_B0 0RECV_B1", "0FREE_B0"))
    check(schedule, slots=2)
    assert complaint(schedule, slots={(0, 1, "F"): 2, (1, 0, "B"): 1}).startswith(
        "rank 0, step 1, 0RECV_B1: all 1 slots for gradients of stage 1 for stage 0 are held, the"
        " oldest by micro-batch 0; post it later or give the channel more\n"
    )


def test_a_send_that_comes_too_late_hangs_and_is_named():
    schedule = edited(
        ("0SEND_F0", ""), ("0SEND_F1", ""), ("0FREE_B0", "0FREE_B0 0SEND_F0 0SEND_F1")
    )
    assert complaint(schedule).startswith(
        "rank 0 waits at 0B0 for 1SEND_B0, which rank 1 runs later; rank 1 waits at 1F0 for"
        " 0SEND_F0, which rank 0 runs later: they wait for ever; move one of these ops\n"
    )


def test_the_whole_order_is_shown_with_the_place_marked():
    assert complaint(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")).split("\n")[1:] == [
        "by hand:",
        "        rank 0   rank 1",
        "step 0  0F0      1F0",
        "step 1  0B0 <--  1F1",
        "step 2  0F1      1B0",
        "step 3  0B1      1B1",
    ]


def test_a_long_order_is_shown_around_the_mark():
    lines = grid(make("1f1b", 2, 200), (1, 300)).split("\n")
    assert len(lines) == MAX_LINES + 2
    assert lines[-1] == "(steps 240 to 359 of 400)"
    assert [line for line in lines if "<--" in line] == ["step 300  0B149   1F150 <--"]


def test_an_op_that_is_nowhere_is_named_as_such():
    with pytest.raises(ScheduleError) as error:
        check_progress(by_hand("0F0 0B0", "1F0", num_micro_batches=1))
    assert str(error.value).startswith(
        "rank 0 waits at 0B0 for 1B0, which rank 1 never runs; add it\n"
    )


def test_too_few_slots_are_named_with_the_number_that_is_enough():
    schedule = make("interleaved_zb1p", 4, 8)
    check(schedule, slots=2)
    text = complaint(schedule, slots=1)
    assert "waits at 4I2 for a slot, for 3I1, which rank 3 runs later" in text
    assert "give the channels more slots: 2 each are enough\n" in text


def test_a_breadth_first_order_needs_slots_for_half_its_micro_batches():
    """Rank 1 sends stage 1's outputs while rank 0 is still busy with all of stage 0."""

    def row(first, last):
        forwards = [f"{s}F{m}" for s in (first, last) for m in range(8)]
        return " ".join(forwards + [f"{s}B{m}" for s in (last, first) for m in range(8)])

    schedule = by_hand(row(0, 2), row(1, 3), stage_to_rank=(0, 1, 0, 1), num_micro_batches=8)
    check(schedule)
    assert slots_needed(schedule) == 4


def test_an_order_that_hangs_anyway_has_no_number_of_slots():
    with pytest.raises(ScheduleError, match="hangs with any number of slots"):
        slots_needed(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))


def test_a_cap_on_activations_is_kept_or_named():
    schedule = make("1f1b", 3, 6)
    check(schedule, max_in_flight=[3, 2, 1])
    check(schedule, max_in_flight=3)
    assert complaint(schedule, max_in_flight=[3, 1, 1]).startswith(
        "rank 1, step 1, 1F1: it makes 2 activations in flight of 1; run a backward first\n"
    )


def test_gradients_in_another_order_are_legal_if_asked_for():
    check(by_hand("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"), ascending=False)


def test_a_fused_pair_that_feeds_itself_hangs_and_apart_does_not():
    """0F0 and 0B0 in one pair: the backward needs what the forward starts."""
    pair = Pair(Op(0, Kind.F, 0), Op(0, Kind.B, 0))
    last = (Op(1, Kind.F, 0), Op(1, Kind.B, 0))
    schedule = Schedule("by hand", 1, TWO_STAGES, ((pair,), last))
    check(schedule)
    assert "rank 0 waits at 0B0 for 1B0" in complaint(schedule, fuse_pairs=True)


def test_a_table_from_elsewhere_is_checked_like_our_own():
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", name="elsewhere")
    check(schedule, slots=1)
    check(add_frees(add_transfers(schedule)), slots=slots_held(schedule))
