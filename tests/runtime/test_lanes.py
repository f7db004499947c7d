"""The executor's lanes on streams that only remember what they were given: afterwards they work it
off in any order that events allow, on memory that an allocator hands out again as CUDA's does."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock
from ppruntime.config import load
from ppruntime.executor import Executor
from ppruntime.gemm_budget import GemmBudget, with_gemm_budget
from ppruntime.lanes import OneLane, StreamLanes, open_lanes
from ppruntime.order import make_order
from ppruntime.schedules import make
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import COMPUTE, Kind, Pair, ScheduleError, ops_of
from ppruntime.schedules.passes import add_frees, add_transfers, split_backward
from ppruntime.transports.base import Boundary


class Event:
    """Passed once the stream that records it has come to it."""

    def __init__(self, **_):
        self.is_past = False

    def record(self, stream=None):
        self.is_past = False
        (stream or HERE.stream).do(self._pass)

    def _pass(self):
        self.is_past = True


class Stream:
    """A list of actions, and of events that it waits for."""

    def __init__(self):
        self.entries, self.num_done = [], 0

    def do(self, action):
        self.entries.append(action)

    def wait_event(self, event):
        self.entries.append(event)

    @property
    def can_go_on(self):
        if self.num_done == len(self.entries):
            return False
        entry = self.entries[self.num_done]
        return not isinstance(entry, Event) or entry.is_past

    def go_on(self):
        entry = self.entries[self.num_done]
        self.num_done += 1
        if not isinstance(entry, Event):
            entry()


TINY = "launch/configs/tiny.toml"
HERE = SimpleNamespace(stream=None)


def work_off(streams, seed):
    """Everything that the streams were given, in an order that is drawn, unfairly."""
    rng = random.Random(seed)
    speed = [rng.choice((1, 1, 30)) for _ in streams]
    while ready := [i for i, stream in enumerate(streams) if stream.can_go_on]:
        streams[rng.choices(ready, [speed[i] for i in ready])[0]].go_on()
    assert all(stream.num_done == len(stream.entries) for stream in streams), "a stream hangs"


@contextmanager
def recording():
    """Inside, what torch calls streams and events only remembers."""
    HERE.stream = Stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: HERE.stream)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(HERE, "stream", stream))
        yield


@pytest.fixture
def streams():
    with recording():
        yield


class Memory:
    """A caching allocator: what is let go of on the host is the stream's next piece, at once."""

    def __init__(self):
        self.values: list = []
        self.free = defaultdict(list)
        self.log: list[str] = []
        """Ops in the order in which their kernels ran."""

    def take(self, stream):
        if self.free[stream]:
            return Piece(self, stream, self.free[stream].pop())
        self.values.append(None)
        return Piece(self, stream, len(self.values) - 1)


class Piece:
    """A tensor: lives as long as somebody on the host has it."""

    def __init__(self, memory, stream, number):
        self.memory, self.stream, self.number = memory, stream, number

    def __del__(self):
        self.memory.free[self.stream].append(self.number)


class FakeStage:
    """Enqueues kernels that check what they read and write what they make."""

    def __init__(self, index, memory, sms=None):
        self.index, self.memory, self.sms = index, memory, sms
        self.in_flight, self.waiting = {}, {}
        self.budgets = []

    @property
    def num_in_flight(self):
        return len(self.in_flight) + len(self.waiting)

    def forward(self, m, received, batch):
        del batch
        kept, out = self._take(), self._take()
        self._kernel(
            f"{self.index}F{m}",
            [(piece, ("F", self.index - 1, m)) for piece in received],
            [(kept, ("kept", self.index, m)), (out, ("F", self.index, m))],
        )
        self.in_flight[m] = (received, kept)
        return (out,)

    def backward(self, m, grads):
        received, kept = self.in_flight.pop(m)
        scratch, grad = self._take(), self._take()
        reads = [(kept, ("kept", self.index, m))]
        reads += [(piece, ("F", self.index - 1, m)) for piece in received]
        reads += [(piece, ("B", self.index + 1, m)) for piece in grads]
        name = f"{self.index}B{m}"
        self._kernel(name, reads, [(scratch, ("scratch", self.index, m))])
        self._kernel(name, reads, [(grad, ("B", self.index, m))])
        return (grad,)

    def backward_input(self, m, grads):
        self.waiting[m] = (*self.in_flight[m], grads)
        return self.backward(m, grads)

    def weight_grads(self, m):
        received, kept, grads = self.waiting.pop(m)
        reads = [(kept, ("kept", self.index, m))]
        reads += [(piece, ("F", self.index - 1, m)) for piece in received]
        reads += [(piece, ("B", self.index + 1, m)) for piece in grads]
        self._kernel(f"{self.index}W{m}", reads, [])

    def _take(self):
        return self.memory.take(HERE.stream)

    def _kernel(self, name, reads, writes):
        """Knows addresses, and keeps nothing alive."""
        reads = [(piece.number, value) for piece, value in reads]
        writes = [(piece.number, value) for piece, value in writes]
        values, log = self.memory.values, self.memory.log
        if self.sms is not None:
            self.budgets.append((name, self.sms.now))

        def run():
            log.append(name)
            for number, value in reads:
                assert values[number] == value, f"{values[number]} where {value} was to be"
            for number, value in writes:
                values[number] = value

        HERE.stream.do(run)


class FakeTransport:
    """Local channels as `local` has them; others bring what is due, in slots, at once, and send on
    a stream of their own."""

    def __init__(self, memory):
        self.memory, self.sender = memory, Stream()
        self.slots, self.sent, self.held = Stream(), {}, []

    def post(self, channel, m):
        pass

    def send(self, channel, m, tensors):
        event = Event()
        event.record()
        if channel.src_rank == channel.dst_rank:
            self.sent[channel.id, m] = (tensors, event)
            return
        kind = "F" if channel.kind == "forward" else "B"
        number, values = tensors[0].number, self.memory.values

        def leave():
            assert values[number] == (kind, channel.src_stage, m)

        self.sender.wait_event(event)
        self.sender.do(leave)
        self.held.append(tensors)  # until they have left, which the host sees late

    def take(self, channel, m):
        if channel.src_rank == channel.dst_rank:
            tensors, event = self.sent.pop((channel.id, m))
            HERE.stream.wait_event(event)
            return tensors
        slot = self.memory.take(self.slots)
        kind = "F" if channel.kind == "forward" else "B"
        self.memory.values[slot.number] = (kind, channel.src_stage, m)
        self.held.append((slot,))  # a slot of its own: slots are others' to check
        return (slot,)

    def release(self, channel, m):
        pass

    def step_end(self):
        pass

    def abort(self, reason):
        pass


def dualpipe_v(num_ranks, num_micro_batches, split=False):
    """A lowered order, its pairs and its channels."""
    schedule = make("dualpipe_v", num_ranks, num_micro_batches)
    if split:
        schedule = split_backward(schedule)
    slots = slots_held(schedule)
    channels = make_channels(
        [Boundary(())] * (schedule.num_stages - 1), schedule.stage_to_rank, slots
    )
    pairs = [step for order in schedule.orders for step in order if isinstance(step, Pair)]
    return add_frees(add_transfers(schedule, slots=slots)), pairs, channels


def run_rank(rank, order, pairs, channels, *, budget=None):
    """Two steps of one rank, as its streams remember them; and its stages."""
    memory = Memory()
    lanes = StreamLanes(order.stages_of(rank), [Stream()])
    sms = budget.sms if budget else None
    stages = {s: FakeStage(s, memory, sms) for s in order.stages_of(rank)}
    transport = FakeTransport(memory)
    executor = Executor(
        order,
        rank,
        stages,
        channels,
        transport,
        clock=HostClock(),
        lanes=lanes,
        pairs=pairs,
        budget=budget,
    )
    outer = HERE.stream
    for _ in range(2):
        executor.run([None] * order.num_micro_batches)
        assert HERE.stream is outer, "the step left another stream current"
    return [*lanes._streams.values(), transport.sender], stages


@settings(max_examples=40)
@given(
    num_ranks=st.integers(1, 4),
    more=st.integers(0, 6),
    split=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_whatever_the_streams_do_every_kernel_finds_what_it_reads(num_ranks, more, split, seed):
    order, pairs, channels = dualpipe_v(num_ranks, num_ranks + 1 + more, split)
    with recording():
        for rank in range(num_ranks):
            found, _ = run_rank(rank, order, pairs, channels)
            work_off(found, seed)


def test_messages_between_lanes_that_nobody_keeps_are_overwritten(streams, monkeypatch):
    order, pairs, channels = dualpipe_v(2, 8)
    take = Executor._take

    def forgetful(self, channel, m):
        tensors = take(self, channel, m)
        self._kept.clear()
        return tensors

    monkeypatch.setattr(Executor, "_take", forgetful)
    wrong = 0
    for seed in range(50):
        found, _ = run_rank(1, order, pairs, channels)
        try:
            work_off(found, seed)
        except AssertionError as error:
            assert "where" in str(error)  # noqa: PT017 (some seeds are lucky)
            wrong += 1
    assert wrong


def test_the_halves_of_every_pair_may_end_in_either_order_and_nothing_else_may(streams):
    order, pairs, channels = dualpipe_v(1, 6)

    def kernels(preferred):
        """Who computed when, if one lane goes as far as it can before the other does."""
        found, stages = run_rank(0, order, pairs, channels)
        lanes = [found[preferred], found[1 - preferred], found[2]]
        while ready := [stream for stream in lanes if stream.can_go_on]:
            ready[0].go_on()
        return list(dict.fromkeys(stages[0].memory.log))

    one, other = kernels(0), kernels(1)
    assert sorted(one) == sorted(other)
    place = {name: i for i, name in enumerate(other)}
    swapped = {
        frozenset((first, then))
        for i, first in enumerate(one)
        for then in one[i + 1 :]
        if place[then] < place[first]
    }
    assert swapped == {frozenset(map(str, (pair.forward, pair.backward))) for pair in pairs}


def test_a_step_that_fails_gives_the_stream_and_the_budget_back(streams, budget):
    order, pairs, channels = dualpipe_v(1, 6)
    pair = pairs[len(pairs) // 2]
    outer = HERE.stream

    def fails(self, m, received, batch):
        if (self.index, m) == (pair.forward.stage, pair.forward.micro_batch):
            assert HERE.stream is not outer or self.index == 0
            raise RuntimeError("no")
        return forward(self, m, received, batch)

    forward = FakeStage.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeStage, "forward", fails)
        with pytest.raises(RuntimeError, match="no"):
            run_rank(0, order, pairs, channels, budget=budget)
    assert HERE.stream is outer
    assert budget.sms.now is None


@pytest.fixture
def budget(monkeypatch):
    """Of a GPU with 132 multiprocessors: 88 for a pair's forward, 44 for its backward."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", lambda num: None)
    keys = ["pp.schedule=dualpipe_v", "pp.overlap_pairs=true", "pp.pair_gemm_sms=[88, 44]"]
    device = torch.device("cuda", 0)
    config = load([TINY], ["pp.size=2", *keys])
    return GemmBudget(with_gemm_budget(config, device), device)


def test_each_half_is_enqueued_with_its_share_and_all_else_with_the_usual_one(streams, budget):
    order, pairs, channels = dualpipe_v(1, 6)
    _, stages = run_rank(0, order, pairs, channels, budget=budget)
    halves = {str(op): sms for p in pairs for op, sms in ((p.forward, 88), (p.backward, 44))}
    found = {name: sms for stage in stages.values() for name, sms in stage.budgets}
    assert found == {name: halves.get(name) for name in found}
    assert set(found.values()) == {88, 44, None}


def test_an_order_that_has_no_pairs_for_so_few_micro_batches_is_refused():
    keys = ["pp.schedule=dualpipe_v", "pp.overlap_pairs=true", "train.num_micro_batches=4"]
    text = "has no pairs on 4 ranks with train.num_micro_batches = 4; .* use more than 4 micro-batc"
    with pytest.raises(ScheduleError, match=text):
        make_order(load([TINY], keys))
    assert make_order(load([TINY], [*keys, "train.num_micro_batches=5"])).pairs


def test_what_was_moved_away_starts_back_a_whole_pair_before_its_backward():
    keys = ["pp.size=2", "pp.schedule=dualpipe_v", "pp.activation_offload=true"]
    order = make_order(load([TINY], [*keys, "pp.overlap_pairs=true"]))
    step_of = {op: step for o in order.computations.orders for step in o for op in ops_of(step)}
    for rank in range(2):
        ops = list(order.lowered.ops(rank))
        reloads = [op for op in ops if op.kind is Kind.RELOAD]
        assert reloads
        for op in reloads:
            behind = [o for o in ops[ops.index(op) :] if o.kind in COMPUTE]
            backward = next(o for o in behind if o.kind is not Kind.F and _same(o, op))
            steps = list(dict.fromkeys(step_of[o] for o in behind))
            assert steps.index(step_of[backward]) == 1


def _same(one, other):
    return (one.stage, one.micro_batch) == (other.stage, other.micro_batch)


def test_without_a_gpu_or_without_pairs_there_is_one_lane():
    for device, overlap in (("cpu", True), ("cuda", False)):
        assert isinstance(open_lanes((0, 3), torch.device(device), overlap=overlap), OneLane)


@pytest.mark.parametrize("lanes", [None, OneLane()])
def test_one_lane_runs_the_order_as_it_is(lanes):
    order, pairs, channels = dualpipe_v(2, 8)
    stages = {s: FakeStage(s, None) for s in order.stages_of(0)}
    executor = Executor(
        order,
        0,
        stages,
        channels,
        FakeTransport(Memory()),
        clock=HostClock(),
        lanes=lanes,
        pairs=pairs,
    )
    assert [text for text, _ in executor._program] == [str(op) for op in order.ops(0)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_step_lies_between_what_its_stream_was_given_before_it_and_behind_it(seed):
    # As an optimizer's update does: it writes what the lanes read and reads what they wrote. The
    # second and third step begin on another stream than the one before.
    with recording():
        lane, outers = Stream(), [Stream(), Stream(), Stream()]
        lanes = StreamLanes([0, 1], [lane])
        weights, grads, wrong = [None], [None], []

        def expect(found, wanted):
            if found[0] != wanted:
                wrong.append((found[0], wanted))

        for step, outer in enumerate([outers[0], outers[0], *outers[1:]]):
            if HERE.stream is not outer:
                before, HERE.stream = HERE.stream, outer
                if step:  # the caller's own order between its streams
                    event = Event()
                    event.record(before)
                    outer.wait_event(event)
            outer.do(lambda step=step: weights.__setitem__(0, step))
            with lanes.step():
                lanes.enter(1, ())
                lane.do(lambda step=step: expect(weights, step))
                lane.do(lambda step=step: grads.__setitem__(0, step))
            assert HERE.stream is outer
            outer.do(lambda step=step: expect(grads, step))
        work_off([*outers, lane], seed)
        assert not wrong


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_stream_that_begins_a_step_anew_waits_for_lanes_that_others_waited_for(seed):
    with recording():
        lane, first, second = Stream(), HERE.stream, Stream()
        lanes = StreamLanes([0, 1], [lane])
        made, wrong = [None], []
        with lanes.step():
            lanes.enter(1, ())
            lane.do(lambda: made.__setitem__(0, "made"))
        HERE.stream = second
        with lanes.step():
            lanes.enter(0, ())
            second.do(lambda: wrong.append(made[0]) if made[0] is None else None)
        work_off([first, second, lane], seed)
        assert not wrong
