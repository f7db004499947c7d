"""Any interleaving of legal calls keeps FIFO and slot safety; any other call raises and changes
nothing."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transport_cases import DTYPES, assert_same_bits, payload, poison, random_boundary

from ppruntime.transports.base import (
    ALIGNMENT_BYTES,
    Boundary,
    Channel,
    TensorSpec,
    TransportError,
)
from ppruntime.transports.ledger import Ledger
from ppruntime.transports.slots import SlotPool, aligned_bytes, typed_views

CPU = torch.device("cpu")
MICRO_BATCHES = st.integers(0, 5)


def _channel(boundary, slots):
    return Channel(0, "forward", 0, 0, 0, 1, boundary, slots)


class CallsOnOneChannel(RuleBasedStateMachine):
    """A channel made of the ledger and a slot pool alone, whose messages land whenever they may.

    `arrive` is the adversary: it writes a message into its slot at any time after its post and
    send.
    """

    boundary = Boundary(
        (TensorSpec("x", (3,), torch.float32), TensorSpec("flags", (5,), torch.bool))
    )

    def __init__(self):
        super().__init__()
        self.channel = _channel(self.boundary, slots=2)
        self.ledger = Ledger([self.channel], 0, CPU)
        self.pool = SlotPool(self.channel, CPU)
        self.step = 0
        self._start_step()

    def _start_step(self):
        self.posted, self.sent = [], []
        self.num_landed = self.num_taken = 0
        self.taken, self.released = {}, set()

    def _call(self, name, *args, is_legal):
        """Makes a call of the ledger; raises if it is taken to be legal and is not, or the
        reverse."""
        if is_legal:
            getattr(self.ledger, name)(*args)
            return
        with pytest.raises(TransportError):
            getattr(self.ledger, name)(*args)

    @rule(micro_batch=MICRO_BATCHES)
    def post(self, micro_batch):
        unreleased = [i for i, m in enumerate(self.posted) if m not in self.released]
        # Slots go round as a ring: the oldest message that is not released and all after it hold
        # one.
        held = len(self.posted) - min(unreleased, default=len(self.posted))
        is_legal = micro_batch not in self.posted and held < self.channel.slots
        self._call("post", self.channel, micro_batch, is_legal=is_legal)
        if is_legal:
            self.posted.append(micro_batch)
            self.pool.reserve(micro_batch)

    @rule(micro_batch=MICRO_BATCHES)
    def send(self, micro_batch):
        is_legal = micro_batch not in self.sent
        message = payload(self.channel, micro_batch, self.step)
        self._call("send", self.channel, micro_batch, message, is_legal=is_legal)
        if is_legal:
            self.sent.append(micro_batch)

    @rule()
    def arrive(self):
        if self.num_landed < min(len(self.posted), len(self.sent)):
            came, expected = self.sent[self.num_landed], self.posted[self.num_landed]
            views = self.pool.slot_of(expected).views
            for view, tensor in zip(views, payload(self.channel, came, self.step), strict=True):
                view.copy_(tensor)
            self.num_landed += 1

    @rule(micro_batch=MICRO_BATCHES)
    def take(self, micro_batch):
        is_next = self.posted[self.num_taken : self.num_taken + 1] == [micro_batch]
        if is_next and self.num_landed == self.num_taken:
            return  # a take would wait
        self._call("take", self.channel, micro_batch, is_legal=is_next)
        if is_next:
            self.taken[micro_batch] = self.sent[self.num_taken]  # first in, first out
            self.num_taken += 1

    @rule(micro_batch=MICRO_BATCHES)
    def release(self, micro_batch):
        is_legal = micro_batch in self.taken
        self._call("release", self.channel, micro_batch, is_legal=is_legal)
        if is_legal:
            poison(self.pool.slot_of(micro_batch).views)
            self.pool.release(micro_batch)
            del self.taken[micro_batch]
            self.released.add(micro_batch)

    @rule()
    def step_end(self):
        is_legal = self.num_taken == len(self.posted) and not self.taken
        self._call("step_end", is_legal=is_legal)
        if is_legal:
            self.step += 1
            self._start_step()

    @invariant()
    def taken_slots_hold_what_was_sent_until_their_release(self):
        for micro_batch, came in self.taken.items():
            expected = payload(self.channel, came, self.step)
            assert_same_bits(self.pool.slot_of(micro_batch).views, expected, f"{micro_batch}")


CallsOnOneChannel.TestCase.settings = settings(
    max_examples=settings.default.max_examples, stateful_step_count=30
)
TestCallsOnOneChannel = CallsOnOneChannel.TestCase


@given(seed=st.integers(0, 10**6), num_slots=st.integers(1, 4))
def test_slots_are_aligned_disjoint_and_hold_every_tensor_bitwise(seed, num_slots):
    channel = _channel(random_boundary(random.Random(seed)), num_slots)
    pool = SlotPool(channel, CPU, trailer_bytes=16)
    messages = [payload(channel, m, seed) for m in range(num_slots)]
    for micro_batch, message in enumerate(messages):
        slot = pool.reserve(micro_batch)
        assert slot.buffer.data_ptr() % ALIGNMENT_BYTES == 0
        assert slot.buffer.numel() == channel.boundary.slot_bytes + 16
        slot.buffer[-16:] = 255
        for view, tensor in zip(slot.views, message, strict=True):
            view.copy_(tensor)
    for micro_batch, message in enumerate(messages):
        assert_same_bits(pool.slot_of(micro_batch).views, message, f"{micro_batch}")


@given(releases=st.permutations(range(3)))
def test_slots_are_handed_out_in_turn_in_whatever_order_they_are_released(releases):
    pool = SlotPool(_channel(Boundary((TensorSpec("x", (2,), torch.int64),)), 3), CPU)
    assert [pool.reserve(m).index for m in range(3)] == [0, 1, 2]
    with pytest.raises(TransportError, match="slot 0 of 3 is next and is micro-batch 0's"):
        pool.reserve(3)
    for micro_batch in releases:
        assert pool.release(micro_batch).index == micro_batch
        if micro_batch == 0:
            break
        with pytest.raises(TransportError, match="slot 0 of 3 is next and is micro-batch 0's"):
            pool.reserve(3)
    assert pool.reserve(3).index == 0
    with pytest.raises(TransportError, match="micro-batch 0 has no slot"):
        pool.release(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 3)])
def test_views_of_a_buffer_keep_dtype_shape_and_alignment(dtype, shape):
    boundary = Boundary((TensorSpec("first", (3,), torch.uint8), TensorSpec("x", shape, dtype)))
    _, view = typed_views(boundary, aligned_bytes(boundary.slot_bytes, CPU))
    assert (tuple(view.shape), view.dtype) == (shape, dtype)
    assert view.data_ptr() % ALIGNMENT_BYTES == 0
    assert view.is_contiguous()


@given(seed=st.integers(0, 10**6))
def test_a_boundarys_digest_differs_when_a_name_shape_dtype_or_the_order_does(seed):
    rng = random.Random(seed)
    boundary = random_boundary(rng)
    first, *rest = boundary.tensors
    others = [
        TensorSpec(first.name + "'", first.shape, first.dtype),
        TensorSpec(first.name, (*first.shape, 1), first.dtype),
        TensorSpec(first.name, first.shape, rng.choice([d for d in DTYPES if d != first.dtype])),
    ]
    changed = [Boundary((other, *rest)) for other in others] + [Boundary(tuple(rest))]
    if rest:
        changed.append(Boundary((*rest, first)))
    assert boundary.digest == Boundary(tuple(boundary.tensors)).digest
    assert len({boundary.digest, *(b.digest for b in changed)}) == 1 + len(changed)


def test_the_first_reason_for_an_end_stays():
    channel = _channel(random_boundary(random.Random(0)), 1)
    ledger = Ledger([channel], 0, CPU)
    assert ledger.end("the first")
    assert not ledger.end("the second")
    for call in (
        lambda: ledger.post(channel, 0),
        lambda: ledger.send(channel, 0, payload(channel, 0, 0)),
        lambda: ledger.take(channel, 0),
        lambda: ledger.release(channel, 0),
    ):
        with pytest.raises(TransportError, match="micro-batch 0 cannot go on: the first"):
            call()
    with pytest.raises(TransportError, match="the step cannot go on: the first"):
        ledger.step_end()
