"""The GPU transports over a simulated driver: order, slots, credits, deadlines, without a GPU."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import simulated_cuda
import torch
from gpu_cases import in_turn_order
from simulated_ranks import KINDS, SMALL, run_simulated
from torch.distributed import HashStore, PrefixStore
from transport_cases import assert_same_bits, payload, pipeline_channels, poison

from ppruntime.transports import (
    copy_engine,
    device,
    nccl,
    per_channel,
    put,
    ring,
)
from ppruntime.transports.base import Boundary, Channel, TensorSpec, TransportError


@pytest.fixture(autouse=True)
def _simulated(monkeypatch):
    simulated_cuda.install(monkeypatch)


def _play(transport, calls, seed):
    """Makes the calls; a reader on the current stream compares and poisons, as late as it likes."""
    held, checks = {}, []
    current = torch.cuda.current_stream()
    for name, channel, micro_batch in calls:
        if name == "post":
            transport.post(channel, micro_batch)
        elif name == "send":
            tensors = payload(channel, micro_batch, seed)
            sent = tuple(torch.zeros_like(t) for t in tensors)

            def compute(sent=sent, tensors=tensors):
                for target, value in zip(sent, tensors, strict=True):
                    target.copy_(value)

            current.do(compute)
            transport.send(channel, micro_batch, sent)
        elif name == "take":
            held[channel.id, micro_batch] = transport.take(channel, micro_batch)
        else:
            tensors = held.pop((channel.id, micro_batch))

            def read(tensors=tensors, channel=channel, micro_batch=micro_batch):
                try:
                    assert_same_bits(tensors, payload(channel, micro_batch, seed), str(channel))
                    poison(tensors)
                except AssertionError as error:
                    checks.append(error)

            current.do(read)
            transport.release(channel, micro_batch)
    transport.step_end()
    current.synchronize()
    assert not checks, checks[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage_to_rank", [(0, 1), (0, 1, 0, 1), (0, 1, 2)])
def test_messages_arrive_bitwise_and_slots_are_safe_however_streams_overtake(kind, stage_to_rank):
    for seed in range(4):
        rng = random.Random(seed)
        channels = pipeline_channels(stage_to_rank, rng)
        counts = {c.id: rng.randint(1, 8) for c in channels}
        orders = [in_turn_order(channels, counts, rng) for _ in range(2)]

        def run(rank, transport, orders=orders, seed=seed):
            for step, order in enumerate(orders):
                _play(transport, order[rank], seed * 10 + step)
            transport.close()
            return transport.start_up

        for found in run_simulated(kind, channels, run, num_ranks=max(stage_to_rank) + 1):
            assert not isinstance(found, BaseException), found
            assert found.seconds < 20


@pytest.mark.parametrize("kind", ["put", "nccl"])
def test_a_message_that_goes_in_several_transfers_arrives_as_one(kind, monkeypatch):
    monkeypatch.setattr(put, "_CUT_BYTES", 512)
    monkeypatch.setattr(nccl, "_LARGE_BYTES", 32)
    specs = [("a", 1500), ("b", 31), ("c", 0), ("d", 7), ("e", 400), ("f", 3)]
    boundary = Boundary(tuple(TensorSpec(name, (size,), torch.uint8) for name, size in specs))
    channels = [
        Channel(i, direction, i, 1 - i, i, 1 - i, boundary, slots=2)
        for i, direction in enumerate(("forward", "backward"))
    ]
    assert len(put.parts_of(boundary)) == 2
    assert [p.tensors for p in nccl.pieces_of(channels[0])] == [(0,), (1, 3), (4,), (5,)]
    order = in_turn_order(channels, {0: 12, 1: 12}, random.Random(2))

    def run(rank, transport):
        _play(transport, order[rank], 5)
        transport.close()

    assert run_simulated(kind, channels, run) == [None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_that_is_not_released_in_turn_is_refused_at_the_post(kind):
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=2)

    def run(rank, transport):
        if rank == 0:
            for m in range(2):
                transport.send(channel, m, payload(channel, m, 0))
            return
        for m in range(2):
            transport.post(channel, m)
            transport.take(channel, m)
        transport.release(channel, 1)
        transport.post(channel, 2)

    _, error = run_simulated(kind, [channel], run)
    assert "no slot is free for micro-batch 2: the 2 go round as a ring" in str(error)
    assert "the oldest is micro-batch 0's" in str(error)


@pytest.mark.parametrize("kind", ["copy_engine", "nccl"])
def test_a_message_that_does_not_come_ends_the_transfers_of_both_ranks_in_time(kind):
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)

    def run(rank, transport):
        start = time.monotonic()
        current = torch.cuda.current_stream()
        try:
            if rank == 1:
                transport.post(channel, 7)
                transport.take(channel, 7)
                current.synchronize()  # the abort lets it go
                assert time.monotonic() - start < 15
                transport.step_end()
            else:
                while True:
                    transport.step_end()
                    time.sleep(0.05)
        except TransportError as error:
            transport.close()
            return str(error)

    for text in run_simulated(kind, [channel], run, timeout_seconds=1.0):
        assert "waited 1 s for micro-batch 7 on the forward channel 0" in text
        assert "from rank 0" in text


@pytest.mark.parametrize("kind", ["copy_engine", "nccl"])
def test_a_step_does_not_end_well_before_all_that_was_taken_is_there(kind):
    # A stage's last op may wait for a gradient: nothing is sent after it that would tell.
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)

    def run(rank, transport):
        if rank == 1:
            transport.post(channel, 7)
            transport.take(channel, 7)
            transport.release(channel, 7)
        else:
            time.sleep(0.5)
            transport.abort("the operator said so")
        try:
            transport.step_end()
        except TransportError as error:
            transport.close()
            return str(error)

    for text in run_simulated(kind, [channel], run):
        assert text is not None, "a rank took the step for done, without its message"
        assert text.count("the operator said so") == 1


@pytest.mark.parametrize("kind", ["copy_engine", "nccl"])
def test_an_abort_lets_go_of_a_send_that_waits_for_a_slot(kind):
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)

    def run(rank, transport):
        if rank == 0:
            transport.send(channel, 0, payload(channel, 0, 0))
            transport.send(channel, 1, payload(channel, 1, 0))  # nobody releases the first
            transport.abort("the operator said so")
        else:
            while True:
                try:
                    transport.step_end()
                except TransportError as error:
                    transport.close()
                    return str(error)
        transport.close()
        with pytest.raises(TransportError, match="the operator said so"):
            transport.send(channel, 2, payload(channel, 2, 0))
        return "the operator said so"

    for text in run_simulated(kind, [channel], run):
        assert "the operator said so" in text


@pytest.mark.parametrize("kind", ["put", "nccl"])
def test_a_close_does_not_wait_for_ever_for_a_peer_that_never_closes(kind, capsys):
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)

    def run(rank, transport):
        if rank == 0:
            start = time.monotonic()
            transport.close()
            return time.monotonic() - start
        return None  # and never closes

    seconds, _ = run_simulated(kind, [channel], run, timeout_seconds=1.0)
    assert 1.0 <= seconds < 30
    said = capsys.readouterr().err
    assert f"rank 0: {kind} did not close within 1." in said
    assert "its buffers stay until the process ends" in said


def test_a_close_gives_up_soon_after_the_peers_process_has_ended(monkeypatch, capsys):
    class Ended:
        has_ended = True

    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)

    def run(rank, transport):
        if rank == 0:
            transport._lives = {1: Ended()}
            start = time.monotonic()
            transport.close()
            return time.monotonic() - start
        return None

    seconds, _ = run_simulated("nccl", [channel], run, timeout_seconds=60.0)
    assert seconds < 30
    assert "a peer has ended" in capsys.readouterr().err


def test_where_even_an_abort_of_nccl_hangs_the_process_ends_with_a_report(monkeypatch):
    monkeypatch.setattr(simulated_cuda.Nccl, "abort_hangs", True)
    reports, ended = [], threading.Event()

    def end_process(report):
        reports.append(report)
        ended.set()
        threading.Event().wait()  # what follows would be after the end

    monkeypatch.setattr(device, "end_process", end_process)
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)

    def run(rank, transport):
        if rank == 1:
            transport.post(channel, 7)
            transport.take(channel, 7)
            transport.abort("enough")
            assert ended.wait(20), "the process was not ended"

    start = time.monotonic()
    run_simulated("nccl", [channel], run)
    assert time.monotonic() - start < 15
    assert "rank 1: nccl gave up: nccl, rank 1: enough" in reports[0]
    assert "waits for micro-batch 7 on the forward channel 0" in reports[0]


@pytest.mark.parametrize("recv_lead", [0, 1, 3])
def test_any_recv_lead_carries_the_same_messages(recv_lead):
    rng = random.Random(recv_lead)
    channels = pipeline_channels((0, 1), rng)
    order = in_turn_order(channels, {c.id: 6 for c in channels}, rng)

    def run(rank, transport):
        _play(transport, order[rank], 3)
        transport.close()

    assert run_simulated("nccl", channels, run, recv_lead=recv_lead) == [None, None]


@pytest.mark.parametrize("selftest", [True, False])
@pytest.mark.parametrize("kind", ["copy_engine", "put"])
def test_channels_without_credits_work_where_the_order_proves_their_slots_free(kind, selftest):
    forward = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)
    backward = Channel(1, "backward", 1, 0, 1, 0, SMALL, slots=1)

    def run(rank, transport):
        # Ping-pong on the device: each answer is sent after the question's slot was released.
        current = torch.cuda.current_stream()
        out, back = (forward, backward) if rank == 0 else (backward, forward)
        for m in range(6):
            if rank == 0:
                transport.send(out, m, payload(out, m, 0))
            transport.post(back, m)
            views = transport.take(back, m)
            current.synchronize()
            assert_same_bits(views, payload(back, m, 0), f"{m}")
            poison(views)
            transport.release(back, m)
            if rank == 1:
                transport.send(out, m, payload(out, m, 0))
        transport.step_end()
        transport.close()

    uncredited = frozenset({0, 1})
    options = {"uncredited": uncredited, "selftest": selftest}
    assert run_simulated(kind, [forward, backward], run, **options) == [None] * 2


def test_an_abort_of_one_kind_ends_the_others_before_streams_go_on_without_data():
    # Rank 1 reads what rank 0 owes it and sends it on. Its host is in the step's end by then.
    first = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)
    second = Channel(1, "forward", 1, 2, 1, 2, SMALL, slots=1)
    store, results = HashStore(), {}

    def opened(rank, kind, channel, timeout_seconds):
        transport = KINDS[kind].open(
            [channel],
            rank,
            device=torch.device("cpu", rank),
            timeout_seconds=timeout_seconds,
            store=PrefixStore(kind, store),
            options={},
        )
        return transport, [channel]

    def work(rank):
        carriers = []
        if rank > 0:
            carriers.append(opened(rank, "copy_engine", second, 60.0))
        if rank < 2:
            carriers.append(opened(rank, "nccl", first, 60.0 if rank == 0 else 1.0))
        transport = per_channel.PerChannelTransport(carriers)
        try:
            if rank == 1:
                transport.post(first, 0)
                views = transport.take(first, 0)
                transport.send(second, 0, views)
                transport.release(first, 0)
            elif rank == 2:
                transport.post(second, 0)
                transport.take(second, 0)
                transport.release(second, 0)
            while True:
                transport.step_end()
                if rank > 0:
                    results[rank] = "took the step for done"
                    return
                time.sleep(0.05)
        except TransportError as error:
            results[rank] = str(error)
            transport.close()

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), f"a rank hangs: {results}"
    for rank in range(3):
        assert "waited 1 s for micro-batch 0 on the forward channel 0" in results[rank], results


@pytest.mark.parametrize("kind", ["copy_engine", "nccl"])
def test_an_error_that_a_kernel_left_behind_is_told_to_all_and_does_not_keep_a_close(
    kind, monkeypatch
):
    # From then on every call into CUDA reports it.
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)
    broken = set()

    class Event(simulated_cuda.Event):
        def query(self):
            if self.owner in broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().query()

        def record(self, stream=None):
            super().record(stream)
            self.owner = threading.current_thread().name

    monkeypatch.setattr(torch.cuda, "Event", Event)

    def run(rank, transport):
        thread = threading.current_thread()
        try:
            if rank == 1:
                monkeypatch.setattr(transport._fabric, "close", given_back.append)
                transport.post(channel, 3)
                transport.take(channel, 3)
                transport.release(channel, 3)
                broken.add(thread.name)
            while True:
                transport.step_end()
                time.sleep(0.05)
        except RuntimeError as error:
            transport.abort(f"rank {rank} failed: {error}")  # as the executor does
            transport.close()
            transport.close()
            with pytest.raises(TransportError):
                transport.step_end()
            if rank == 1:  # where it hangs the GPU may still write to its slots
                left.append(weakref.ref(transport))
            return str(error)

    left, given_back = [], []
    for text in run_simulated(kind, [channel], run):
        assert "an illegal memory access was encountered" in text
    gc.collect()
    assert left[0]() is not None
    assert not given_back  # it would wait for what hangs


@pytest.mark.parametrize("recv_lead", [0, 1, 2])
def test_no_more_receives_wait_on_the_gpu_than_their_lead_before_the_reader_is_there(
    recv_lead, monkeypatch
):
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=3)
    begun, receive = [], simulated_cuda.Nccl.recv

    def recv(self, target, num_bytes, peer, comm, stream):
        simulated_cuda.Stream.by_handle[stream].do(lambda: begun.append(num_bytes))
        receive(self, target, num_bytes, peer, comm, stream)

    def run(rank, transport):
        if rank == 0:
            for m in range(3):
                transport.send(channel, m, payload(channel, m, 0))
        else:
            gate = threading.Event()
            torch.cuda.current_stream().do(gate.wait)  # what is computed before the first is read
            begun.clear()
            for m in range(3):
                transport.post(channel, m)
            for m in range(3):
                transport.take(channel, m)
            time.sleep(0.3)
            num_early = len(begun)
            gate.set()
            for m in range(3):
                transport.release(channel, m)
        transport.step_end()
        transport.close()
        return None if rank == 0 else (num_early, len(begun))

    monkeypatch.setattr(simulated_cuda.Nccl, "recv", recv)
    assert run_simulated("nccl", [channel], run, recv_lead=recv_lead, selftest=False) == [
        None,
        (recv_lead, 3),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_close_waits_for_what_is_on_its_way_as_long_as_the_limit_says(kind, monkeypatch):
    monkeypatch.setattr(device, "_DRAIN_SECONDS", 0.05)
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)

    def run(rank, transport):
        if rank == 0:
            time.sleep(1.0)
            transport.send(channel, 0, payload(channel, 0, 0))
            transport.close()
            return
        transport.post(channel, 0)
        views = transport.take(channel, 0)
        copies = [torch.zeros_like(view) for view in views]

        def read():
            for copy, view in zip(copies, views, strict=True):
                copy.copy_(view)

        torch.cuda.current_stream().do(read)
        transport.release(channel, 0)
        start = time.monotonic()
        transport.close()
        assert time.monotonic() - start > 0.5
        torch.cuda.current_stream().synchronize()
        assert_same_bits(copies, payload(channel, 0, 0), "after the close")

    assert run_simulated(kind, [channel], run) == [None, None]


def test_a_step_does_not_end_well_where_its_host_slept_through_an_abort():
    # All waits are let go while the host does not look: nothing is pending when it does.
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)

    def run(rank, transport):
        if rank == 1:
            pending = transport._pending.prune

            def sleepy(now):
                transport._pending.prune = pending
                transport.abort("the operator said so")
                return ()

            transport._pending = SimpleNamespace(prune=sleepy, add=transport._pending.add)
        try:
            while True:
                transport.step_end()
                if rank == 1:
                    return "took the step for done"
                time.sleep(0.05)
        except TransportError as error:
            transport.close()
            return str(error)

    for text in run_simulated("copy_engine", [channel], run):
        assert "the operator said so" in text


class _WordsTold:
    """A driver that remembers the words written and the values waited for."""

    def __init__(self):
        self.waited, self.written = [], []

    def wait_word(self, stream, address, value):
        self.waited.append(value % ring.WORD)

    def write_word(self, stream, address, value):
        self.written.append(value % ring.WORD)

    def copy(self, stream, destination, source, num_bytes):
        pass


@pytest.mark.parametrize("message", [0, 1, (1 << 30) + 5, (1 << 31) - 1, (1 << 32) - 2, 1 << 33])
def test_an_abort_lets_go_of_waits_whatever_their_counts_have_come_to(message):
    stream = SimpleNamespace(handle=1)
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)
    told = _WordsTold()
    source = copy_engine._Source(
        told,
        stream,
        channel,
        slots_address=0,
        credit_address=8,
        landed=copy_engine._Words(told, torch.zeros(1, dtype=torch.int32), 0),
    )
    source.push(message, tuple(torch.zeros(s.shape, dtype=s.dtype) for s in SMALL.tensors), None)
    told.written.clear()
    source.release_waits(1)
    destination = copy_engine._Destination(
        told,
        stream,
        channel,
        slots=torch.zeros(SMALL.slot_bytes, dtype=torch.uint8),
        landed_address=0,
        credits=None,
    )
    destination.wait(message, SimpleNamespace(cuda_stream=1))
    destination.release_waits(1)
    waited = told.waited if message else [0, *told.waited]  # the first message needs no credit
    for word, value in zip(told.written, waited, strict=True):
        assert ring.has_reached(word, value), (word, value)
