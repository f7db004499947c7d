"""The formulas that `schedule list` and the documents print, against the timeline."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.costs import Costs
from ppruntime.schedules.counts import num_transfers
from ppruntime.schedules.formulas import FORMULAS
from ppruntime.schedules.progress import slots_needed
from ppruntime.schedules.timeline import simulate


def value(formula: str, **letters: float) -> float:
    """`2M(P-1)` with numbers for its letters."""
    product = re.sub(r"(?<=[\dA-Zrs)])\s?(?=[A-Zrs(]|max|min)", "*", formula)
    product = re.sub(r"(max|min)\*", r"\1", product)
    return eval(product, {"__builtins__": {}, "max": max, "min": min}, letters)  # noqa: S307


def test_letters_and_products_are_read():
    assert value("2M(P-1)", M=3, P=4) == 18
    assert value("(P-1) max(F, F+I-2W)/V", P=3, F=1, I=5, W=1, V=2) == 4


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(
    ranks=st.sampled_from((1, 2, 3, 4, 5, 8)),
    chunks=st.integers(2, 3),
    rounds=st.integers(3, 4),
    times=st.tuples(*[st.integers(1, 8)] * 3),
)
def test_bubbles_are_their_formulas(name, ranks, chunks, rounds, times):
    formula = FORMULAS[name]
    chunks = int(formula.stages_per_rank) if formula.stages_per_rank != "V" else chunks
    schedule = make(name, ranks, rounds * ranks, stages_per_rank=chunks)
    F, I, W = (6 * t for t in times)  # noqa: E741 (the field's letters); 6: chunks are whole
    if "at F=I=W" in formula.bubble:
        F = I = W = 12  # noqa: E741
    letters = {"P": ranks, "V": chunks, "F": F, "I": I, "W": W}
    timeline = simulate(schedule, Costs.even(F, I, W, schedule.stage_to_rank))
    if "P=4 8 16" in formula.bubble:
        golden = dict(zip((4, 8, 16), re.findall(r"([\d.]+)F", formula.bubble), strict=True))
        if ranks in golden:
            assert timeline.makespan_bubble == float(golden[ranks]) * F
        return
    bubble, span = formula.bubble.split(" at ")[0], formula.span_bubble.split(" at ")[0]
    assert timeline.makespan_bubble == value(bubble, **letters)
    assert timeline.span_bubble == value(bubble if span == "same" else span, **letters)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(ranks=st.integers(2, 8), micro_batches=st.integers(1, 24), chunks=st.integers(2, 3))
def test_counts_are_their_formulas(name, ranks, micro_batches, chunks):
    formula = FORMULAS[name]
    chunks = int(formula.stages_per_rank) if formula.stages_per_rank != "V" else chunks
    if chunks > 1:  # these formulas are for steps long enough to fill the pipeline
        micro_batches = ranks * (2 + micro_batches % 3)
    schedule = make(name, ranks, micro_batches, stages_per_rank=chunks)
    letters = {"P": ranks, "V": chunks, "M": micro_batches}
    assert num_transfers(schedule) == value(formula.transfers, **letters)
    peaks = simulate(schedule, Costs.even(1, 1, 1, schedule.stage_to_rank)).peak_in_flight
    for rank, peak in enumerate(peaks):
        if formula.in_flight.startswith("about"):
            assert abs(peak - value(formula.in_flight.removeprefix("about "), **letters)) <= 2
        else:
            assert peak == value(formula.in_flight, r=rank, s=2, **letters)
    if formula.slots.isdigit() or ranks % 2 == 0:
        assert slots_needed(schedule) == max(1, value(formula.slots, **letters))
