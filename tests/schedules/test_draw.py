"""Pictures: what they show is what ran."""

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.draw import (
    Panel,
    chrome_trace,
    nice_step,
    ops_beside_others,
    svg,
    text_overview,
    text_picture,
)
from ppruntime.schedules.timeline import Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, ranks: int, micro_batches: int, latency: float = 0.0) -> Timeline:
    schedule = make(name, ranks, micro_batches)
    return simulate(schedule, Costs.even(1, 1, 1, schedule.stage_to_rank), Hops.both(latency))


def test_text_picture_of_1f1b():
    picture = text_picture(timeline_of("1f1b", 3, 4).rows, width=100)
    assert picture == (
        "time    0                             10\n"
        "rank 0  F0 F1 F2 ........... B0--- F3 B1--- .. B2--- .. B3---\n"
        "rank 1  .. F0 F1 ..... B0--- F2 B1--- F3 B2--- .. B3--- .....\n"
        "rank 2  ..... F0 B0--- F1 B1--- F2 B2--- F3 B3--- ..........."
    )


@given(name=st.sampled_from(NAMES), ranks=st.integers(1, 5), micro_batches=st.integers(1, 6))
def test_the_text_picture_names_every_op_once(name, ranks, micro_batches):
    timeline = timeline_of(name, ranks, micro_batches)
    picture = text_picture(timeline.rows, width=10_000)
    several = len(timeline.schedule.stage_to_rank) > ranks
    for rank, row in enumerate(timeline.rows):
        line = next(line for line in picture.splitlines() if line.startswith(f"rank {rank} "))
        shown = re.findall(r"\d*[FIWB]\d+", line)
        texts = [str(t.op) if several else f"{t.op.kind.value}{t.op.micro_batch}" for t in row]
        assert shown == texts


def test_a_long_step_is_drawn_as_an_overview():
    rows = timeline_of("1f1b", 16, 320).rows
    picture = text_picture(rows, width=100)
    assert picture == text_overview(rows, 100)
    assert max(map(len, picture.splitlines())) <= 100
    assert "B" in picture


def test_a_picture_that_is_wider_than_the_terminal_wraps():
    rows = timeline_of("1f1b", 4, 8).rows
    picture = text_picture(rows, width=60)
    assert max(map(len, picture.splitlines())) <= 60
    assert picture.count("rank 0") == 2


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 6),
    latency=st.floats(0, 1),
)
def test_svg_has_every_op_at_its_place(name, ranks, micro_batches, latency):
    timeline = timeline_of(name, ranks, micro_batches, latency)
    picture = ElementTree.fromstring(svg([Panel("a < b & c", "facts", timeline.rows)], unit="ms"))
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    ops = [timed for row in timeline.rows for timed in row]
    assert len(boxes) == len(ops)
    scales = []
    for box, timed in zip(boxes, ops, strict=True):
        hover = box.find(f"{SVG}title").text
        assert hover == f"{timed.op}  {timed.start:g} to {timed.finish:g} ms"
        scales.append(float(box.get("width")) / (timed.finish - timed.start))
    assert max(scales) == pytest.approx(min(scales), rel=0.01)
    words = " ".join(text.text for text in picture.iter(f"{SVG}text"))
    assert "a < b & c" in words
    assert "bubble; numbers are micro-batches" in words
    assert all(f"rank {rank}" in words for rank in range(ranks))


def test_kinds_chunks_and_bubble_have_colours_of_their_own():
    picture = svg([Panel("", "", timeline_of("dualpipe_v", 4, 8).rows)])
    pattern = r'fill="(#[0-9a-f]{6})" stroke="#ffffff" stroke-width="0.6"><title>(\d+)([FIWB])'
    colours = {(kind, int(stage) >= 4): fill for fill, stage, kind in re.findall(pattern, picture)}
    assert len(colours) == 8
    assert len({*colours.values(), "#ececec", "#ffffff"}) == 10


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (16, 64)])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
def test_every_op_of_an_svg_shows_its_micro_batch(name, ranks, micro_batches):
    timeline = timeline_of(name, ranks, micro_batches)
    picture = ElementTree.fromstring(svg([Panel("", "", timeline.rows)]))
    numbers = [t.text for t in picture.iter(f"{SVG}text") if t.get("text-anchor") == "middle"]
    sizes = [float(t.get("font-size")) for t in picture.iter(f"{SVG}text")]
    shown = [str(timed.op.micro_batch) for row in timeline.rows for timed in row]
    assert numbers[: len(shown)] == shown
    assert min(sizes) >= 8


def test_two_panels_share_one_scale():
    slow, fast = timeline_of("gpipe", 2, 8), timeline_of("zb_v", 2, 2)
    picture = ElementTree.fromstring(svg([Panel("p", "", slow.rows), Panel("q", "", fast.rows)]))
    widths = {
        box.find(f"{SVG}title").text.split()[0]: float(box.get("width"))
        for box in picture.iter(f"{SVG}rect")
        if box.find(f"{SVG}title") is not None
    }
    assert widths["0B0"] == pytest.approx(2 * widths["0F7"], rel=0.01)  # 0F7 of the first panel
    assert widths["3F1"] == pytest.approx(widths["0F7"] / 2, rel=0.01)  # 3F1 of the second


def test_a_chrome_trace_has_an_event_per_op_and_transfer():
    timeline = timeline_of("1f1b", 3, 4, latency=0.5)
    trace = json.loads(chrome_trace(timeline.rows, timeline.transfers, seconds_per_unit=1e-3))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 3 * 4 * 2 + 2 * 2 * 4
    first = next(e for e in events if e["name"] == "2F0")
    assert (first["ts"], first["dur"], first["tid"]) == (3000.0, 1000.0, 4)
    sent = next(e for e in events if e["name"] == "0SEND_F0")
    assert (sent["ts"], sent["dur"], sent["tid"]) == (1000.0, 500.0, 1)
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert names == {
        0: "rank 0",
        1: "rank 0 sends",
        2: "rank 1",
        3: "rank 1 sends",
        4: "rank 2",
        5: "rank 2 sends",
    }


def test_ops_that_run_at_the_same_time_share_the_row_and_get_threads_of_their_own():
    schedule = make("dualpipe_v", 2, 6)
    costs = Costs.even(1, 1, 1, schedule.stage_to_rank)
    rows = simulate(schedule, costs, paired=costs).rows
    assert ops_beside_others(rows[0])
    heights = {
        box.find(f"{SVG}title").text.split()[0]: (float(box.get("y")), float(box.get("height")))
        for box in ElementTree.fromstring(svg([Panel("", "", rows)])).iter(f"{SVG}rect")
        if box.find(f"{SVG}title") is not None
    }
    beside = {str(timed.op) for timed in ops_beside_others(rows[0])}
    own = {str(timed.op): timed.op.stage for timed in rows[0]}
    whole = {height for name, (_, height) in heights.items() if name in own.keys() - beside}
    halves = {height for name, (_, height) in heights.items() if name in beside}
    assert {2 * height for height in halves} == whole
    tops = {own[name]: heights[name][0] for name in beside}
    assert tops[3] - tops[0] == halves.pop()
    events = json.loads(chrome_trace(rows))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"rank 0", "rank 0, stage 3", "rank 1", "rank 1, stage 2"}
    for tid in names:
        own_events = [e for e in events if e["ph"] == "X" and e["tid"] == tid]
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in own_events)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_nothing_to_draw_is_said():
    assert text_picture([[], []]) == "(nothing runs)"
    ElementTree.fromstring(svg([Panel("", "", [[], []])]))


@given(st.floats(1e-9, 1e9))
def test_scale_steps_are_round_and_not_too_small(at_least):
    step = nice_step(at_least)
    assert at_least * (1 - 1e-6) <= step <= 10 * at_least
    assert f"{step:.0e}"[0] in "125"
