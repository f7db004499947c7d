"""Orders as tables written out by hand from the definitions, and their times on ideal ranks.

The event simulator below is this file's own: it shares nothing with `timeline` but the op texts.
"""

import re
from pathlib import Path

import pytest

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.check import check
from ppruntime.schedules.counts import num_transfers, peak_in_flight
from ppruntime.schedules.formats import read, to_csv
from ppruntime.schedules.ops import Schedule, ops_of

GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*_p*_m*.csv"))


def simulate(
    schedule: Schedule, costs: dict[str, float], *, fuse_pairs: bool
) -> tuple[float, float]:
    """Makespan, and the longest time between a rank's first start and its last end. No latency."""
    ranks, last = schedule.stage_to_rank, schedule.num_stages - 1
    queues = [
        [[str(op) for op in ops_of(step)] for step in order]
        if fuse_pairs
        else [[str(op)] for step in order for op in ops_of(step)]
        for order in schedule.orders
    ]
    done: dict[tuple[int, str, int], float] = {}
    clock, first = [0.0] * len(queues), [None] * len(queues)
    while any(queues):
        moved = False
        for rank, queue in enumerate(queues):
            while queue:
                parsed = [re.fullmatch(r"(\d+)([FBIW])(\d+)", text).groups() for text in queue[0]]
                needs = []
                for stage, kind, m in ((int(s), k, int(m)) for s, k, m in parsed):
                    assert ranks[stage] == rank
                    if kind == "F" and stage > 0:
                        needs.append((stage - 1, "F", m))
                    if kind in "BI":
                        needs += [(stage, "F", m)] + ([(stage + 1, "B", m)] if stage < last else [])
                    if kind == "W":
                        needs.append((stage, "B", m))
                if not all(need in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                first[rank] = start if first[rank] is None else first[rank]
                clock[rank] = start + sum(costs[kind] for _, kind, _ in parsed)
                for stage, kind, m in parsed:
                    if kind != "W":
                        done[int(stage), "F" if kind == "F" else "B", int(m)] = clock[rank]
                queue.pop(0)
                moved = True
        assert moved, f"no rank can move: {[queue[:1] for queue in queues]}"
    return max(clock), max(end - start for end, start in zip(clock, first, strict=True))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_order_is_the_one_written_out_by_hand(path):
    name, num_ranks, num_micro_batches = re.fullmatch(r"(.+)_p(\d+)_m(\d+)", path.stem).groups()
    schedule = make(name, int(num_ranks), int(num_micro_batches))
    assert to_csv(schedule) == path.read_text()
    by_hand = read(path)
    check(by_hand)
    assert by_hand.orders == schedule.orders
    assert by_hand.stage_to_rank == schedule.stage_to_rank


def test_every_order_has_a_table_written_out_by_hand():
    assert {re.fullmatch(r"(.+)_p\d+_m\d+", path.stem)[1] for path in GOLDEN} == set(NAMES)


# Bubbles (makespan, span) at F, I, W = 1, 1, 1 and 1, 1.5, 0.5 a rank; peaks in chunks; transfers.
SMALL = {  # 4 ranks, 8 micro-batches
    "gpipe": ((9, 9), (9, 9), (8, 8, 8, 8), 48),
    "1f1b": ((9, 9), (9, 9), (4, 3, 2, 1), 48),
    "async_1f1b": ((9, 9), (9, 9), (7, 5, 3, 1), 48),
    "1f1b_w": ((6, 6), (7.5, 7.5), (4, 3, 2, 1), 48),
    "zb_h1": ((3, 3), (6, 6), (4,) * 4, 48),
    "zb_h2": ((3, 0), (4.5, 4.5), (7,) * 4, 48),
    "interleaved_1f1b": ((4.5, 4.5), (4.5, 4.5), (11, 9, 7, 5), 112),
    "interleaved_zb1p": ((1.5, 1.5), (3, 3), (8,) * 4, 112),
    "zb_v": ((1.5, 0), (3, 3), (8,) * 4, 96),
    "dualpipe_v": ((1.5, 1.5), (3.25, 3.25), (9,) * 4, 96),
    "v_half": ((2.5, 2.5), (7.25, 7.25), (6,) * 4, 96),
    "v_min": ((5.5, 5.5), (16.5, 16.5), (4,) * 4, 96),
}
LARGE = {  # 8 ranks, 32 micro-batches
    "gpipe": ((21, 21), (21, 21), (32,) * 8, 448),
    "1f1b": ((21, 21), (21, 21), (8, 7, 6, 5, 4, 3, 2, 1), 448),
    "async_1f1b": ((21, 21), (21, 21), (15, 13, 11, 9, 7, 5, 3, 1), 448),
    "1f1b_w": ((14, 14), (17.5, 17.5), (8, 7, 6, 5, 4, 3, 2, 1), 448),
    "zb_h1": ((7, 7), (14, 14), (8,) * 8, 448),
    "zb_h2": ((7, 0), (10.5, 10.5), (15,) * 8, 448),
    "interleaved_1f1b": ((10.5, 10.5), (10.5, 10.5), (23, 21, 19, 17, 15, 13, 11, 9), 960),
    "interleaved_zb1p": ((3.5, 3.5), (7, 7), (16,) * 8, 960),
    "zb_v": ((3.5, 0), (7, 7), (16,) * 8, 896),
    "dualpipe_v": ((3.5, 3.5), (8.25, 8.25), (17,) * 8, 896),
    "v_half": ((8.5, 8.5), (29.25, 29.25), (10,) * 8, 896),
    "v_min": ((13, 13), (61.75, 61.75), (8,) * 8, 896),
}


def bubbles(schedule: Schedule, costs: tuple[float, float, float], *, fuse_pairs: bool = False):
    """(makespan, span) beyond the work of a rank; costs of a rank, split evenly over its chunks."""
    num_chunks = schedule.num_stages // schedule.num_ranks
    f, i, w = (cost / num_chunks for cost in costs)
    work = schedule.num_micro_batches * sum(costs)
    times = simulate(schedule, {"F": f, "I": i, "W": w, "B": i + w}, fuse_pairs=fuse_pairs)
    return tuple(pytest.approx(time - work, abs=1e-9) for time in times)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("size", "table"), [((4, 8), SMALL), ((8, 32), LARGE)], ids=["4x8", "8x32"]
)
def test_bubbles_peaks_and_transfers_are_the_known_ones(name, size, table):
    schedule = make(name, *size)
    equal, unequal, peaks, transfers = table[name]
    assert bubbles(schedule, (1, 1, 1)) == equal
    assert bubbles(schedule, (1, 1.5, 0.5)) == unequal
    assert peak_in_flight(schedule) == peaks
    assert num_transfers(schedule) == transfers


@pytest.mark.parametrize(
    ("size", "equal", "unequal"), [((4, 8), 3, 4.75), ((8, 32), 7, 11.75)], ids=["4x8", "8x32"]
)
def test_fused_pairs_double_the_bubble_of_dualpipe_v(size, equal, unequal):
    schedule = make("dualpipe_v", *size)
    assert bubbles(schedule, (1, 1, 1), fuse_pairs=True) == (equal, equal)
    assert bubbles(schedule, (1, 1.5, 0.5), fuse_pairs=True) == (unequal, unequal)


@pytest.mark.parametrize(
    ("name", "num_ranks", "bubble", "peak"),
    [
        ("v_half", 6, 5.5, 8),
        ("v_half", 16, 20.5, 18),
        ("v_min", 6, 8.5, 6),
        ("v_min", 16, 29.5, 12),
    ],
)
def test_memory_saving_v_orders_are_the_known_ones_at_other_sizes(name, num_ranks, bubble, peak):
    schedule = make(name, num_ranks, 4 * num_ranks)
    assert bubbles(schedule, (1, 1, 1))[0] == bubble
    assert peak_in_flight(schedule) == (peak,) * num_ranks


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "async_1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_bubble_of_whole_backwards_is_its_closed_form(name, num_ranks):
    schedule = make(name, num_ranks, 3 * num_ranks)
    num_chunks = schedule.num_stages // num_ranks
    bubble = (num_ranks - 1) * 3.5 / num_chunks
    assert bubbles(schedule, (1, 1.5, 1))[0] == bubble
