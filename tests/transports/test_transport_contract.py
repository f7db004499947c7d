"""Every kind of transport keeps the contract: one suite, run for each kind that the machine has."""

from __future__ import annotations

import random
import time
import weakref

import pytest
import torch
from hypothesis import settings
from transport_cases import (
    GPU_KINDS,
    assert_same_bits,
    kinds,
    legal_order,
    payload,
    pipeline_channels,
    ring_channels,
    run_order,
    run_scenario,
)

from ppruntime.transports.base import Boundary, Channel, TensorSpec

NUM_CASES = settings.default.max_examples // 10
NUM_STEPS = 2


def _device(rank, kind):
    return torch.device("cuda", rank) if kind in GPU_KINDS else "cpu"


def _random_pipelines(rank, open_channels, kind, stage_to_rank, seeds):
    num_received = 0
    for seed in seeds:
        rng = random.Random(seed)
        if stage_to_rank is None:
            channels = ring_channels(4, rng)
        else:
            channels = pipeline_channels(stage_to_rank, rng)
        num_messages = {c.id: rng.randint(0, 6) for c in channels}
        orders = [legal_order(channels, num_messages, rng) for _ in range(NUM_STEPS)]
        pauses = random.Random(seed * 31 + rank)
        transport = open_channels(channels)
        for step, order in enumerate(orders):
            num_received += run_order(
                transport,
                order[rank],
                seed * NUM_STEPS + step,
                delay=lambda pauses=pauses: time.sleep(max(0.0, pauses.uniform(-0.01, 0.001))),
                device=_device(rank, kind),
            )
        transport.close()
    return num_received


def _check_random_pipelines(kind, num_ranks, stage_to_rank):
    # Opening costs a second on a GPU, where the stress test moves the masses.
    seeds = range(3 if kind in GPU_KINDS else NUM_CASES)
    received = run_scenario(kind, num_ranks, _random_pipelines, kind, stage_to_rank, seeds)
    assert sum(received) > len(seeds)


@pytest.mark.parametrize("kind", kinds(2))
def test_what_two_stages_send_each_other_arrives_bitwise_in_any_legal_order(kind):
    _check_random_pipelines(kind, 2, (0, 1))


@pytest.mark.parametrize("kind", kinds(2))
def test_a_loop_placement_on_two_ranks_keeps_its_channels_apart(kind):
    _check_random_pipelines(kind, 2, (0, 1, 0, 1))


@pytest.mark.parametrize("kind", kinds(4))
def test_a_ring_of_four_ranks_keeps_the_contract(kind):
    _check_random_pipelines(kind, 4, None)


@pytest.mark.parametrize("kind", kinds(4))
def test_a_v_placement_turns_inside_the_last_rank(kind):
    _check_random_pipelines(kind, 4, (0, 1, 2, 3, 3, 2, 1, 0))


def _two_pipelines(rank, open_channels, kind):
    pipeline, pipeline_rank = divmod(rank, 2)
    rng = random.Random(pipeline)  # other shapes in each pipeline
    channels = pipeline_channels((0, 1), rng)
    order = legal_order(channels, {c.id: 5 for c in channels}, rng)
    transport = open_channels(channels, pipeline=str(pipeline), rank=pipeline_rank)
    num_received = run_order(
        transport, order[pipeline_rank], seed=pipeline, device=_device(rank, kind)
    )
    transport.close()
    return num_received


@pytest.mark.parametrize("kind", kinds(4))
def test_two_pipelines_side_by_side_with_different_shapes_do_not_mix(kind):
    assert run_scenario(kind, 4, _two_pipelines, kind) == [5, 5, 5, 5]


def _many_tensors(rank, open_channels, kind):
    boundary = Boundary(tuple(TensorSpec(f"t{i}", (i % 7,), torch.int32) for i in range(512)))
    channel = Channel(0, "forward", 0, 1, 0, 1, boundary, slots=2)
    transport = open_channels([channel])
    for micro_batch in range(3):
        sent = payload(channel, micro_batch, seed=7, device=_device(rank, kind))
        if rank == 0:
            transport.send(channel, micro_batch, sent)
        else:
            transport.post(channel, micro_batch)
            assert_same_bits(transport.take(channel, micro_batch), sent, f"{micro_batch}")
            transport.release(channel, micro_batch)
    transport.step_end()
    transport.close()


@pytest.mark.parametrize("kind", kinds(2))
def test_512_small_tensors_cross_in_one_hop(kind):
    run_scenario(kind, 2, _many_tensors, kind)


def _starts(rank, open_channels, kind, num_starts):
    pauses = random.Random(rank)
    channels = pipeline_channels((0, 1, 2, 3), random.Random(3))
    order = legal_order(channels, {c.id: 1 for c in channels}, random.Random(4))
    for start in range(num_starts):
        time.sleep(pauses.uniform(0, 0.03))
        transport = open_channels(channels)
        time.sleep(pauses.uniform(0, 0.01))
        run_order(transport, order[rank], seed=start, device=_device(rank, kind))
        transport.close()


@pytest.mark.parametrize("kind", kinds(4))
def test_twenty_starts_with_random_delays_all_come_up(kind):
    run_scenario(kind, 4, _starts, kind, 20)


def _stuck_channel(rank, open_channels, kind):
    boundary = Boundary((TensorSpec("x", (1000, 7), torch.float32),))
    stuck = Channel(0, "forward", 0, 1, 0, 1, boundary, slots=4)
    moving = Channel(1, "backward", 1, 0, 1, 0, boundary, slots=1)
    same_way = Channel(2, "forward", 0, 1, 2, 3, boundary, slots=1)
    transport = open_channels([stuck, moving, same_way])
    device = _device(rank, kind)
    if rank == 0:
        for micro_batch in range(4):  # nobody has posted these yet: must not hold what follows
            transport.send(stuck, micro_batch, payload(stuck, micro_batch, 1, device))
        for micro_batch in range(8):
            transport.send(same_way, micro_batch, payload(same_way, micro_batch, 1, device))
            transport.post(moving, micro_batch)
            got = transport.take(moving, micro_batch)
            assert_same_bits(got, payload(moving, micro_batch, 1, device), f"{micro_batch}")
            transport.release(moving, micro_batch)
    else:
        for micro_batch in range(8):
            transport.post(same_way, micro_batch)
            got = transport.take(same_way, micro_batch)
            assert_same_bits(got, payload(same_way, micro_batch, 1, device), f"{micro_batch}")
            transport.release(same_way, micro_batch)
            transport.send(moving, micro_batch, payload(moving, micro_batch, 1, device))
        for micro_batch in range(4):
            transport.post(stuck, micro_batch)
        for micro_batch in range(4):
            got = transport.take(stuck, micro_batch)
            assert_same_bits(got, payload(stuck, micro_batch, 1, device), f"{micro_batch}")
            transport.release(stuck, micro_batch)
    transport.step_end()
    transport.close()


@pytest.mark.parametrize("kind", kinds(2))
def test_a_channel_whose_receiver_is_late_holds_no_other_and_no_host(kind):
    run_scenario(kind, 2, _stuck_channel, kind)


def _autograd(rank, open_channels, kind):
    boundary = Boundary(
        (TensorSpec("x", (4, 6), torch.float32), TensorSpec("i", (3,), torch.int64))
    )
    channel = Channel(0, "forward", 0, 1, 0, 1, boundary, slots=1)
    transport = open_channels([channel])
    device = _device(rank, kind)
    for micro_batch in range(2):
        weight = torch.ones(6, 4, requires_grad=True, device=device)
        if rank == 0:
            x = (weight * (micro_batch + 1)).t()  # part of a graph, not contiguous
            transport.send(channel, micro_batch, (x, torch.arange(6, device=device)[::2]))
        else:
            transport.post(channel, micro_batch)
            x, index = transport.take(channel, micro_batch)
            assert index.tolist() == [0, 2, 4]
            assert x.is_leaf
            assert not x.requires_grad
            assert x.grad is None
            x.requires_grad_()
            (x * x).sum().backward()
            assert torch.equal(x.grad, torch.full((4, 6), 2.0 * (micro_batch + 1), device=device))
            transport.release(channel, micro_batch)
    transport.step_end()
    transport.close()


@pytest.mark.parametrize("kind", kinds(2))
def test_outputs_of_a_graph_arrive_as_fresh_leaves_and_views_are_sent_as_they_are(kind):
    run_scenario(kind, 2, _autograd, kind)


def _freed_when_left(rank, open_channels, kind):
    channel = Channel(
        0, "forward", 0, 1, 0, 1, Boundary((TensorSpec("x", (64, 64), torch.float32),)), slots=2
    )
    transport = open_channels([channel])
    device = _device(rank, kind)
    alive = []
    for micro_batch in range(4):
        if rank == 0:
            weight = torch.ones(64, 64, requires_grad=True, device=device)
            output = weight.exp()  # its graph holds it, and whoever holds it holds the graph
            alive += [weakref.ref(weight), weakref.ref(output)]
            transport.send(channel, micro_batch, (output,))
            del weight, output
        else:
            transport.post(channel, micro_batch)
            transport.take(channel, micro_batch)
            transport.release(channel, micro_batch)
    transport.step_end()
    deadline = time.monotonic() + 10
    while any(ref() is not None for ref in alive) and time.monotonic() < deadline:
        time.sleep(0.01)
    num_alive = sum(ref() is not None for ref in alive)
    transport.close()
    return num_alive


@pytest.mark.parametrize("kind", kinds(2))
def test_sent_tensors_and_their_graphs_are_freed_once_they_have_left(kind):
    assert run_scenario(kind, 2, _freed_when_left, kind) == [0, 0]


def _closes_at_once(rank, open_channels, kind):
    boundary = Boundary((TensorSpec("x", (8 << 20,), torch.uint8),))
    channel = Channel(0, "forward", 0, 1, 0, 1, boundary, slots=1)
    device = _device(rank, kind)
    for opening in range(4):
        transport = open_channels([channel])
        message = payload(channel, 0, opening, device)
        if rank == 0:
            transport.send(channel, 0, message)
        else:
            transport.post(channel, 0)
            time.sleep(0.05)
            assert_same_bits(transport.take(channel, 0), message, f"opening {opening}")
            transport.release(channel, 0)
        transport.step_end()
        transport.close()


@pytest.mark.parametrize("kind", kinds(2))
def test_what_has_left_arrives_though_its_sender_closes_at_once(kind):
    run_scenario(kind, 2, _closes_at_once, kind)
