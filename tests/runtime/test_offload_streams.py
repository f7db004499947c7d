"""The copies' order on streams, on the CPU: every lane is a thread that works late."""

from __future__ import annotations

import time

import pytest
import simulated_cuda
import torch
from torch.overrides import TorchFunctionMode

from ppruntime.activation_offload import ActivationOffload, Memory, ToHost
from ppruntime.host_memory import HostPool, Lane, wait_for
from ppruntime.master_offload import MasterOffload

CPU = torch.device("cpu")


class ComputeStream:
    """The host itself: its work is done when it is given, so it waits at once."""

    def do(self, action):
        action()

    def wait_event(self, event):
        assert event.recorded.wait(20), "an event never came"


class CopiesOnTheirStream(TorchFunctionMode):
    """A copy that does not block is queued on the stream that is current."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = args
            simulated_cuda.current_stream().do(lambda: target.copy_(source))
            return target
        return func(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch):
    """Simulated streams under the names of the real ones."""
    monkeypatch.setattr(simulated_cuda._HERE, "stream", ComputeStream(), raising=False)
    monkeypatch.setattr(torch.cuda, "Event", simulated_cuda.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", simulated_cuda.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", simulated_cuda.use_stream)
    with CopiesOnTheirStream():
        yield


def on_streams(*lanes):
    for lane in lanes:
        lane._stream = simulated_cuda.Stream()


def forward(x, weights):
    for weight in weights:
        x = torch.tanh(x @ weight) + x
    return x.square().sum()


def test_late_copies_change_no_bit(streams):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(32, 32)) for _ in range(3)]
    inputs = [torch.randn(16, 32) for _ in range(6)]
    for x in inputs:
        forward(x, weights).backward()
    expected = [w.grad.clone() for w in weights]
    route = ToHost(CPU, HostPool(CPU, page_bytes=512))
    on_streams(route.outwards, route.homewards)
    offload = ActivationOffload(route, {0: lambda: weights})
    for _ in range(8):
        for w in weights:
            w.grad = None
        losses = {}
        for m, x in enumerate(inputs):  # as an order has it: back one op ahead, pages go round
            if m >= 2:
                offload.reload((0, m - 2))
            with offload.collecting((0, m), [x]):
                losses[m] = forward(x, weights)
            offload.offload((0, m))
            offload.offloaded((0, m))
            if m >= 2:
                offload.arrive((0, m - 2))
                losses.pop(m - 2).backward()
        for m, loss in losses.items():
            offload.reload((0, m))
            offload.arrive((0, m))
            loss.backward()
        assert all(torch.equal(w.grad, g) for w, g in zip(weights, expected, strict=True))
        assert not offload.num_held
    assert route.pool.num_bytes_used == 0


def test_late_copies_of_masters_bring_back_what_left(streams, monkeypatch):
    masters = [torch.randn(1000), torch.randn(3, 7)]
    expected = [m.clone() for m in masters]
    monkeypatch.setattr(
        "ppruntime.master_offload._masters", lambda _: [m.untyped_storage() for m in masters]
    )
    offload = MasterOffload({4: torch.nn.Identity()}, CPU, HostPool(CPU, page_bytes=512))
    on_streams(offload._outwards, offload._homewards)
    assert offload.num_bytes(4) == 4 * 1021
    for _ in range(8):
        offload.leave(4)
        offload.left(4)
        assert offload.num_bytes(4) == 0
        offload.come_back(4)
        offload.arrive(4)
        assert all(map(torch.equal, masters, expected))


def test_a_copy_comes_behind_what_the_current_stream_was_given_before_it(streams):
    # Computations are late here: what they write is read after them, what they read is written
    # after them.
    lane = Lane(CPU)
    on_streams(lane)
    late = simulated_cuda.Stream()
    made, target, seen = torch.zeros(64), torch.ones(64), torch.zeros(64)

    def compute():
        time.sleep(0.05)
        seen.copy_(target)
        made.fill_(7)

    with simulated_cuda.use_stream(late):
        late.do(compute)
        wait_for(lane.copy([(made, target)]))
        late.synchronize()
    assert torch.equal(seen, torch.ones(64))
    assert torch.equal(target, torch.full((64,), 7.0))


def test_memory_that_has_left_may_be_given_to_others_at_once(streams):
    # As the allocator does: its next owner writes to it behind the wait, and no later.
    route = ToHost(CPU, HostPool(CPU, page_bytes=512))
    on_streams(route.outwards, route.homewards)
    tensor = torch.arange(1000.0)
    expected, memory = tensor.clone(), Memory(tensor)
    route.outwards._stream.do(lambda: time.sleep(0.05))
    away = route.start([memory])
    away.leave()
    tensor.fill_(-1)
    away.come_back()
    away.arrive()
    back = torch.empty(0).set_(memory.storage, 0, (1000,), (1,))
    assert torch.equal(back, expected)


class OwnedStorage:
    """A storage in the memory pool of a stream, whose next work gets it as soon as it is freed."""

    def __init__(self, memory, owner):
        self.memory, self.owner = memory, owner

    def nbytes(self):
        return self.memory.numel()

    def resize_(self, num_bytes):
        if num_bytes:
            self.owner = simulated_cuda.current_stream()
        else:
            self.owner.do(lambda: self.memory.fill_(255))


def test_masters_that_have_left_are_others_memory_on_the_stream_that_owns_it(streams, monkeypatch):
    # Of a rank's second stage: made on the stream that is the first one's lane, and used on its
    # own, while the first one's goes on.
    first, own = simulated_cuda.Stream(), simulated_cuda.Stream()
    memory = torch.arange(200, dtype=torch.uint8)
    expected, storage = memory.clone(), OwnedStorage(memory, first)
    monkeypatch.setattr("ppruntime.master_offload._masters", lambda _: [storage])
    monkeypatch.setattr("ppruntime.master_offload.as_bytes", lambda s: s.memory)
    monkeypatch.setattr("ppruntime.master_offload.Lane", lambda device: _lane_on_stream())
    with simulated_cuda.use_stream(first):
        offload = MasterOffload({4: torch.nn.Identity()}, CPU, HostPool(CPU, page_bytes=512))
    for _ in range(2):
        with simulated_cuda.use_stream(own):
            offload._outwards._stream.do(lambda: time.sleep(0.05))
            offload.leave(4)
            offload.left(4)
            own.synchronize()
            first.synchronize()
            assert not torch.equal(memory, expected)
            offload.come_back(4)
            offload.arrive(4)
            own.synchronize()
        assert torch.equal(memory, expected)


def _lane_on_stream():
    lane = Lane(CPU)
    on_streams(lane)
    return lane
