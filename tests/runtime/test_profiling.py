"""A measured step adds up, on one clock, and its pictures can be opened."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import accumulate, pairwise
from xml.etree import ElementTree

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pipelines import run_local, toy_stages
from toy_units import micro_batches

from ppruntime import profiling
from ppruntime.clocks import OpTimes
from ppruntime.profiling import (
    ClockOffset,
    MeasuredOp,
    MeasuredStep,
    ProfilingError,
    align_clocks,
    gather_step,
    measured_costs,
    measured_hops,
    measured_pair_costs,
    measured_step,
    planned_step,
    report,
    split_times,
    write_timeline,
)
from ppruntime.schedules import make
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import Kind, Op, Schedule, ops_of, parse_op
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.schedules.timeline import simulate

MS = 1_000_000


def _measured(timeline):
    """The step that an ideal executor would have measured: its wait begins where an op ended."""
    rows = []
    for row in timeline.rows:
        before, ops = 0, []
        for timed in row:
            ready, end = round(timed.start * MS), round(timed.finish * MS)
            ops.append(MeasuredOp(timed.op, before, ready, end))
            before = end
        rows.append(tuple(ops))
    return MeasuredStep(timeline.schedule, tuple(rows))


def _measured_on_lanes(timeline):
    """The same of a step whose pairs overlap: both halves wait from where the op before ended."""
    rows = []
    for order, row in zip(timeline.schedule.orders, timeline.rows, strict=True):
        at = {timed.op: (round(timed.start * MS), round(timed.finish * MS)) for timed in row}
        before, ops = 0, []
        for step in order:
            ops += [MeasuredOp(op, before, *at[op]) for op in reversed(ops_of(step))]
            before = max(at[op][1] for op in ops_of(step))
        rows.append(tuple(ops))
    return MeasuredStep(timeline.schedule, tuple(rows), pairs_overlap=True)


def _schedule(name, num_ranks, num_micro_batches):
    return make(name, num_ranks, num_micro_batches)


def _costs(schedule, seed):
    num = schedule.num_stages
    return Costs(
        tuple(1.0 + 0.25 * ((seed + s) % 3) for s in range(num)),
        tuple(1.0 + 0.5 * ((seed + s) % 2) for s in range(num)),
        tuple(0.5 + 0.25 * (s % 2) for s in range(num)),
    )


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]),
    st.integers(2, 5),
    st.integers(1, 10),
    st.sampled_from([0.0, 0.125, 2.0]),
    st.integers(0, 5),
)
def test_parts_of_a_step_are_those_of_the_simulation_and_add_up(name, ranks, num, hop, seed):
    schedule = _schedule(name, ranks, num)
    timeline = simulate(schedule, _costs(schedule, seed), Hops.both(hop))
    step = _measured(timeline)
    assert step.step_ns == round(timeline.makespan * MS)
    for rank, part in enumerate(split_times(step)):
        idle = timeline.idle[rank]
        assert part.step == step.step_ns
        assert part.compute == pytest.approx(timeline.busy[rank] * MS)
        assert part.idle == pytest.approx(idle.drain * MS)
        assert part.peer + part.transfer == pytest.approx(
            (idle.fill + idle.dependency + idle.transfer) * MS
        )
        # Before a rank's first op the last hop is a transfer; the simulation calls it fill.
        assert 0 <= part.transfer - idle.transfer * MS <= hop * MS + 1
    if hop == 0:
        assert all(part.transfer == 0 for part in split_times(step))
        again = planned_step(step)
        assert again.makespan == pytest.approx(timeline.makespan)


@given(st.integers(1, 5), st.integers(0, 8), st.sampled_from([0.0, 0.125, 2.0]), st.integers(0, 5))
def test_a_step_whose_pairs_overlap_adds_up_too_and_is_planned_as_it_ran(ranks, more, hop, seed):
    schedule = _schedule("dualpipe_v", ranks, ranks + 1 + more)
    costs = _costs(schedule, seed)
    alone = costs.forward, costs.input_grad, costs.weight_grad
    stretched = Costs(*(tuple(1.5 * time for time in times) for times in alone))
    timeline = simulate(schedule, costs, Hops.both(hop), paired=stretched)
    step = _measured_on_lanes(timeline)
    assert step.step_ns == round(timeline.makespan * MS)
    for rank, part in enumerate(split_times(step)):
        assert part.step == step.step_ns
        assert part.compute == pytest.approx(timeline.busy[rank] * MS, abs=10)
        assert min(part.peer, part.transfer, part.idle) >= 0
    planned = planned_step(step)
    if hop == 0:
        assert planned.makespan == pytest.approx(timeline.makespan, abs=1e-3)
    assert measured_pair_costs(replace(step, pairs_overlap=False)) is None
    wide = max(_covering(step).values())
    assert wide <= 2


def _covering(step):
    """How many ops of a rank run at once at the most, by rank."""
    found = {}
    for rank, row in enumerate(step.compute_rows):
        moments = sorted(
            [(t.start, 1) for t in row if t.finish > t.start]
            + [(t.finish, -1) for t in row if t.finish > t.start]
        )
        found[rank] = max(accumulate(change for _, change in moments), default=0)
    return found


def _by_hand():
    schedule = Schedule("by hand", 1, (0, 1), ((parse_op("0F0"),), (parse_op("1F0"),)))
    rows = (
        (
            MeasuredOp(Op(0, parse_op("0F0").kind, 0), 2, 2, 10),
            MeasuredOp(parse_op("0SEND_F0"), 11, 11, 14),
        ),
        (
            MeasuredOp(parse_op("1RECV_F0"), 0, 0, 1),
            MeasuredOp(parse_op("1F0"), 3, 16, 30),
        ),
    )
    return MeasuredStep(schedule, rows)


def test_a_wait_is_the_peers_until_the_input_is_made_and_a_transfer_after():
    sender, receiver = split_times(_by_hand())
    assert (sender.compute, sender.transfer, sender.peer, sender.idle) == (8, 3, 0, 2 + 1 + 16)
    assert (receiver.compute, receiver.peer) == (14, 10 - 3)
    assert (receiver.transfer, receiver.idle) == (1 + 16 - 10, 2)
    assert sender.step == receiver.step == 30


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_real_steps_parts_add_up_and_its_compute_is_what_the_ops_took(name):
    schedule = make(name, 2, 4)
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    cuts = [1, 3, 5][: schedule.num_stages - 1]
    times = run_local(lowered, toy_stages(6, cuts, 7), micro_batches(4, 1, 4, seed=1), slots)
    step = measured_step(schedule, times)
    wall = max(t.end for row in times for t in row) - min(t.start for row in times for t in row)
    assert step.step_ns == wall
    computes = {str(op) for rank in range(2) for op in schedule.ops(rank)}
    for part, row in zip(split_times(step), times, strict=True):
        assert part.step == wall
        assert part.compute == sum(t.end - t.ready for t in row if t.op in computes)
        assert min(part.compute, part.transfer, part.peer, part.idle) >= 0
    assert planned_step(step).makespan > 0


def test_the_report_has_a_line_a_rank_whose_shares_make_a_hundred():
    lines = report(_by_hand()).splitlines()
    assert lines[0].startswith("step 0.00 ms")
    assert lines[1].split() == ["rank", "compute", "transfer", "peer", "idle"]
    for line in lines[2:]:
        assert sum(map(float, line.split()[1:])) == pytest.approx(100, abs=0.3)
    assert len(lines) == 4


def test_costs_are_means_per_stage_and_a_whole_backward_is_halved():
    schedule = make("1f1b", 2, 4)
    timeline = simulate(schedule, Costs((1.0, 2.0), (1.5, 2.5), (1.5, 2.5)))
    rows = list(_measured(timeline).rows)
    late, shift = rows[1][0], 100 * MS  # one op of four took that much longer
    rows[1] = (
        MeasuredOp(late.op, late.start, late.ready, late.end + shift),
        *(MeasuredOp(m.op, m.start + shift, m.ready + shift, m.end + shift) for m in rows[1][1:]),
    )
    step = MeasuredStep(schedule, tuple(rows))
    costs = measured_costs(step)
    assert costs.forward == pytest.approx((1.0, 2.0 + 100 / 4))
    assert costs.input_grad == costs.weight_grad == (1.5, 2.5)
    # So the plan has each rank work as long as it did.
    assert planned_step(step).busy == pytest.approx([p.compute / MS for p in split_times(step)])


@pytest.mark.parametrize("name", ["1f1b", "1f1b_w"])
def test_backwards_that_take_turns_are_planned_as_they_ran(name):
    """Where weight gradients of two are added at once, one backward in two has both."""
    schedule = make(name, 2, 8)
    light, heavy = (Costs((5.0, 5.0), (9.0, 9.0), (w, w)) for w in (0.0, 10.0))
    even = Costs((5.0, 5.0), (9.0, 9.0), (5.0, 5.0))
    timeline = simulate(schedule, replace(even, by_turn=(light, heavy)))
    by_turn = planned_step(replace(_measured(timeline), turns=2))
    assert by_turn.makespan == pytest.approx(timeline.makespan)
    by_means = planned_step(_measured(timeline))
    assert by_means.makespan == pytest.approx(simulate(schedule, even).makespan)
    # Ranks wait for the backwards of two; weight gradients that come later hold nobody up.
    loss = timeline.makespan / by_means.makespan - 1
    assert loss > 0.1 if name == "1f1b" else loss < 0.05


def test_a_whole_backward_is_planned_as_long_as_it_took_not_as_its_two_parts():
    """On a GPU whole backwards run beside transfers, the two parts at the ends of a step."""
    schedule = make("dualpipe_v", 2, 8)
    stages = schedule.num_stages
    costs = Costs((1.0,) * stages, (1.0,) * stages, (1.0,) * stages, (2.5,) * stages)
    timeline = simulate(schedule, costs)
    kinds = {timed.op.kind for row in timeline.rows for timed in row}
    assert {Kind.B, Kind.I, Kind.W} <= kinds
    planned = planned_step(_measured(timeline))
    assert planned.makespan == pytest.approx(timeline.makespan)
    assert timeline.makespan > simulate(schedule, Costs(*(costs.forward,) * 3)).makespan


def _gather(rank, skews):
    dist.init_process_group("gloo")
    schedule = make("1f1b", 3, 4)
    timeline = simulate(schedule, Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3))
    row = _measured(timeline).rows[rank]
    skew = skews[rank]
    times = [OpTimes(str(m.op), m.start + skew, m.ready + skew, m.end + skew) for m in row]
    step = gather_step(
        schedule, times, offset=ClockOffset(skew - skews[0], 0), group=dist.group.WORLD
    )
    dist.destroy_process_group()
    return step


def test_ranks_whose_clocks_differ_are_gathered_on_one_clock(run_ranks):
    schedule = make("1f1b", 3, 4)
    wanted = _measured(simulate(schedule, Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3)))
    for step in run_ranks(3, _gather, (10**15, 7, -(10**12))):
        assert step == wanted


def _align(rank, skew, same_host):
    dist.init_process_group("gloo")
    if not same_host:
        boots = (b"a", b"b", b"a")
        profiling._boot_id = lambda: boots[rank]
        clock = time.perf_counter_ns
        if rank == 1:
            profiling.time = type("Clock", (), {"perf_counter_ns": lambda: clock() + skew})
    offset = align_clocks(dist.group.WORLD)
    dist.destroy_process_group()
    return offset


def test_ranks_of_one_host_share_its_clock(run_ranks):
    assert run_ranks(3, _align, 0, True) == [ClockOffset(0, 0)] * 3
    assert align_clocks(None) == ClockOffset(0, 0)


def test_another_hosts_clock_is_found_to_within_the_error_that_is_stated(run_ranks):
    skew = 5 * 10**12
    first, other, neighbour = run_ranks(3, _align, skew, False)
    assert first == neighbour == ClockOffset(0, 0)
    assert abs(other.ns - skew) <= other.error_ns < 10**9


def test_times_that_run_backwards_or_overlap_are_refused():
    schedule = make("gpipe", 1, 1)
    backwards = [OpTimes("0F0", 5, 4, 9)]
    overlapping = [OpTimes("0F0", 0, 0, 5), OpTimes("0B0", 4, 4, 9)]
    for times, op in ((backwards, "0F0"), (overlapping, "0B0")):
        with pytest.raises(ProfilingError, match=f"rank 0 ran {op} from"):
            gather_step(schedule, times, offset=ClockOffset(0, 0), group=None)


def test_ops_of_two_stages_may_overlap_only_where_pairs_do():
    schedule = make("dualpipe_v", 1, 2)
    texts = ("0F0", 0, 0, 5), ("1B0", 1, 1, 9), ("0B0", 9, 9, 10)
    times = [OpTimes(*one) for one in texts]
    with pytest.raises(ProfilingError, match="rank 0 ran 1B0 from"):
        measured_step(schedule, [times])
    step = measured_step(schedule, [times], pairs_overlap=True)
    assert split_times(step)[0].compute == 10
    overlapping = [*times, OpTimes("0F1", 9, 9, 12)]
    with pytest.raises(ProfilingError, match="rank 0 ran 0F1 from 9 over 9 to 12 ns"):
        measured_step(schedule, [overlapping], pairs_overlap=True)


def test_a_step_whose_pairs_overlap_is_drawn_with_a_thread_for_each_stage(tmp_path):
    schedule = make("dualpipe_v", 2, 6)
    costs = _costs(schedule, 1)
    step = _measured_on_lanes(simulate(schedule, costs, Hops.both(0.5), paired=costs))
    write_timeline(step, tmp_path / "timeline.svg", tmp_path / "trace.json", title="tiny")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans: dict[tuple[int, int], list] = {}
    for e in events:
        if e["ph"] == "X":
            spans.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(spans) == 2 * 2 * 2
    for found in spans.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(sorted(found)))


def test_the_picture_shows_plan_above_measurement_with_every_op_and_escapes_names(tmp_path):
    schedule = make("1f1b", 2, 3)
    step = _measured(simulate(schedule, Costs((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), Hops.both(0.5)))
    title = '<script>alert("&")</script>'
    write_timeline(step, tmp_path / "timeline.svg", tmp_path / "trace.json", title=title)
    root = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text.removeprefix(title) for text in texts if text.startswith(title)] == [
        ", planned: 1f1b",
        ", measured",
    ]
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    hovers = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    for op in schedule.ops(0):
        assert sum(hover.startswith(f"{op} ") for hover in hovers) == 2
    assert {f.name for f in tmp_path.iterdir()} == {"timeline.svg", "trace.json"}


def test_the_trace_has_plan_and_measurement_side_by_side_and_its_waits(tmp_path):
    schedule = make("1f1b", 2, 3)
    step = _measured(simulate(schedule, Costs((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), Hops.both(0.5)))
    write_timeline(step, tmp_path / "timeline.svg", tmp_path / "trace.json", title="tiny")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names == {0: "planned", 1: "measured"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in events:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    measured = {e["name"]: e for e in events if e["pid"] == 1 and e["cat"] != "wait"}
    for row in step.rows:
        for m in row:
            event = measured[str(m.op)]
            assert event["ts"] == pytest.approx(m.ready / 1e3)
            assert event["dur"] == pytest.approx((m.end - m.ready) / 1e3)
    for rank, part in enumerate(split_times(step)):
        assert trace["otherData"][f"rank {rank}"]["peer_ns"] == part.peer
        for name, ns in (("wait for peer", part.peer), ("exposed transfer", part.transfer)):
            waits = [e["dur"] for e in events if e["name"] == name and e["tid"] == 2 * rank]
            assert sum(waits) == pytest.approx(ns / 1e3)


def test_a_step_in_which_nothing_ran_is_drawn_as_nothing(tmp_path):
    step = MeasuredStep(Schedule("nothing", 0, (0,), ((),)), ((),))
    assert [part.step for part in split_times(step)] == [0]
    write_timeline(step, tmp_path / "timeline.svg", tmp_path / "trace.json", title="nothing")
    ElementTree.parse(tmp_path / "timeline.svg")


def test_hops_are_those_that_a_rank_waited_for():
    # 0F0 is made at 10 ns and is there at 16 ns; nothing came back.
    hops = measured_hops(_by_hand())
    assert hops == Hops(6e-6, 0.0)
    planned, fed = planned_step(_by_hand()), planned_step(_by_hand(), hops)
    assert fed.makespan == pytest.approx(planned.makespan + 6e-6)
