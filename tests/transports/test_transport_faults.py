"""Whatever goes wrong with a transfer ends in a TransportError on all ranks, in bounded time."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import pytest
import torch
from torch.distributed import TCPStore
from transport_cases import payload, process_opener, run_scenario

from ppruntime.transports import agree, open_transport, p2p, shared_memory, shared_slots
from ppruntime.transports.base import Boundary, Channel, TensorSpec, TransportError

BETWEEN_PROCESSES = ("gloo", "shared_memory")
LIMIT_SECONDS = 60.0
"""The transfers' time limit where a test is about being told sooner."""
SOON_SECONDS = 45.0
"""How long a test allows for being told; the machine may be busy."""

SMALL = Boundary((TensorSpec("x", (3, 5), torch.float32), TensorSpec("i", (4,), torch.int32)))
LARGE = Boundary((TensorSpec("x", (4, 1 << 20), torch.float32),))


def _chain(num_ranks, boundary=SMALL, slots=2):
    """Forward channel r from rank r to rank r + 1."""
    return [
        Channel(r, "forward", r, r + 1, r, r + 1, boundary, slots) for r in range(num_ranks - 1)
    ]


def _caught(action):
    """The error of `action` and the seconds until it came."""
    start = time.monotonic()
    try:
        action()
    except TransportError as error:
        return str(error), time.monotonic() - start
    return None, time.monotonic() - start


def _pass_on(transport, channels, rank, micro_batch):
    """What the middle and last ranks of a chain do with one micro-batch."""
    channel = channels[rank - 1]
    transport.post(channel, micro_batch)
    tensors = transport.take(channel, micro_batch)
    if rank < len(channels):
        transport.send(channels[rank], micro_batch, [t.clone() for t in tensors])
    transport.release(channel, micro_batch)


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


# A rank dies


def _first_rank_dies(rank, kind, num_sent_before, boundary):
    channels = _chain(3, boundary)
    transport = process_opener(rank, kind)(channels, timeout_seconds=LIMIT_SECONDS)
    if rank == 0:
        for micro_batch in range(num_sent_before):
            transport.send(channels[0], micro_batch, payload(channels[0], micro_batch, 0))
        if num_sent_before:
            time.sleep(0.02)  # in the middle of a large message, after a small one
        _die()

    def work():
        for micro_batch in range(num_sent_before + 1):
            _pass_on(transport, channels, rank, micro_batch)
        transport.step_end()

    result = _caught(work)
    transport.close()
    return result


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
@pytest.mark.parametrize(
    ("num_sent_before", "boundary"), [(0, SMALL), (1, SMALL), (2, SMALL), (2, LARGE)]
)
def test_a_rank_that_dies_is_reported_on_all_others_long_before_the_limit(
    rank_outcomes, kind, num_sent_before, boundary
):
    dead, middle, last = rank_outcomes(3, _first_rank_dies, kind, num_sent_before, boundary)
    assert dead.exit_code == -signal.SIGKILL
    for rank, outcome in ((1, middle), (2, last)):
        assert outcome.error_text is None, outcome.error_text
        message, seconds = outcome.value
        assert message is not None, f"rank {rank} noticed nothing"
        # Told while it takes from its one channel, or sends on the other.
        assert f"forward channel {rank - 1}" in message or f"forward channel {rank}" in message
        assert "micro-batch" in message
        assert "rank 0 is lost" in message
        assert seconds < SOON_SECONDS


def _receiver_dies(rank, kind):
    channels = _chain(3)
    transport = process_opener(rank, kind)(channels, timeout_seconds=LIMIT_SECONDS)
    if rank == 2:
        _die()

    def work():
        num_until_stuck = channels[0].slots + 1  # a kind may fill the slots of who never reads
        for _ in range(num_until_stuck if rank == 1 else 2 * num_until_stuck):
            if rank == 1:
                _pass_on(transport, channels, rank, 0)
            else:
                transport.send(channels[0], 0, payload(channels[0], 0, 0))
            transport.step_end()

    result = _caught(work)
    transport.close()
    return result


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_receiver_that_dies_is_reported_to_senders_up_the_chain(kind, rank_outcomes):
    outcomes = rank_outcomes(3, _receiver_dies, kind)
    for outcome in outcomes[:2]:
        assert outcome.error_text is None, outcome.error_text
        message, seconds = outcome.value
        assert message is not None
        assert "rank 2 is lost" in message
        assert seconds < SOON_SECONDS


def _store_host_dies(rank):
    own = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        host = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        own.set("port", str(host.port))
    else:
        host = TCPStore("127.0.0.1", int(own.get("port")), is_master=False)
    (channel,) = _chain(2)
    transport = open_transport(
        "gloo", [channel], rank, device=torch.device("cpu"), timeout_seconds=5, store=host
    )
    if rank == 0:
        _die()
    transport.post(channel, 3)
    result = _caught(lambda: transport.take(channel, 3))
    transport.close()
    return result


def test_the_death_of_the_rank_that_hosts_the_store_is_reported_like_any_other(rank_outcomes):
    _, outcome = rank_outcomes(2, _store_host_dies)
    message, seconds = outcome.value
    assert "forward channel 0" in message
    assert "micro-batch 3" in message
    assert "rank 0 is lost" in message
    assert seconds < SOON_SECONDS


def _ends_without_closing(rank, kind):
    (channel,) = _chain(2)
    transport = process_opener(rank, kind)([channel], timeout_seconds=LIMIT_SECONDS)
    if rank == 0:
        transport.send(channel, 0, payload(channel, 0, 0))
        transport.step_end()
        return None
    _pass_on(transport, [channel], rank, 0)
    transport.post(channel, 1)
    return _caught(lambda: transport.take(channel, 1))


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_process_that_ends_without_closing_ends_normally_and_is_reported(kind, rank_outcomes):
    ended, waiting = rank_outcomes(2, _ends_without_closing, kind)
    assert ended.exit_code == 0
    message, seconds = waiting.value
    assert "micro-batch 1" in message
    assert seconds < SOON_SECONDS


# A rank is silent


def _sleeper(rank, open_channels, limit_seconds):
    channels = _chain(3)
    transport = open_channels(channels, timeout_seconds=limit_seconds)

    def work():
        if rank == 0:
            time.sleep(2 * limit_seconds)
            transport.send(channels[0], 5, payload(channels[0], 5, 0))
        else:
            if rank == 2:
                time.sleep(limit_seconds / 2)  # its own limit is up after rank 1's
            _pass_on(transport, channels, rank, 5)

    result = _caught(work)
    transport.close()
    return result


@pytest.mark.parametrize("kind", ["local", *BETWEEN_PROCESSES])
def test_a_rank_that_sleeps_past_the_limit_ends_the_transfers_of_all(kind):
    for message, seconds in run_scenario(kind, 3, _sleeper, 3.0):
        assert message is not None
        assert "forward channel 0" in message
        assert "micro-batch 5 did not come from rank 0 within 3.0 s" in message
        assert seconds < 3.0 + SOON_SECONDS


def _never_received(rank, open_channels):
    (channel,) = _chain(2)
    transport = open_channels([channel], timeout_seconds=3.0)
    if rank == 0:
        for micro_batch in range(channel.slots + 1):
            transport.send(channel, micro_batch, payload(channel, micro_batch, 0))
        result = _caught(transport.step_end)
    else:
        time.sleep(5.0)

        def work():
            for micro_batch in range(channel.slots + 1):
                _pass_on(transport, [channel], rank, micro_batch)

        result = _caught(work)
    transport.close()
    return result


# gloo sends nothing that is not posted, shared_memory what finds a slot.
@pytest.mark.parametrize(("kind", "oldest"), [("gloo", 0), ("shared_memory", 2)])
def test_a_message_that_nobody_receives_ends_the_step_with_an_error(kind, oldest):
    for message, seconds in run_scenario(kind, 2, _never_received):
        assert "forward channel 0" in message
        assert f"micro-batch {oldest} was not received by rank 1 within 3.0 s" in message
        assert seconds < SOON_SECONDS


def _absent(rank, num_ranks):
    channels = _chain(num_ranks)
    if rank == 1:
        return None
    opener = process_opener(rank, "gloo")
    return _caught(lambda: opener(channels, timeout_seconds=3.0))


def test_a_rank_that_does_not_open_its_transport_is_named_on_all_others(rank_outcomes):
    first, _, last = rank_outcomes(3, _absent, 3)
    for outcome in (first, last):
        message, seconds = outcome.value
        assert "rank 1 did not come to opening the transport within 3.0 s" in message
        assert seconds < SOON_SECONDS


def _never_connects(rank):
    channels = _chain(3)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 2:  # came to the agreement, then vanished before it connected
        return None

    def work():
        transport = p2p.open(
            channels,
            rank,
            device=torch.device("cpu"),
            timeout_seconds=4.0,
            store=store,
            options={},
        )
        transport.send(channels[0], 0, payload(channels[0], 0, 0))
        transport.step_end()

    return _caught(work)


def test_a_rank_that_vanishes_before_it_connects_is_named_on_all_others(rank_outcomes):
    for outcome in rank_outcomes(3, _never_connects)[:2]:
        message, seconds = outcome.value
        assert "rank 1 could not connect to rank 2 within 4.0 s" in message
        assert seconds < 4.0 + SOON_SECONDS


def _vanishes_when_met(rank):
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 2:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")
            card = [shared_slots.host_of_sockets(), listener.getsockname().hex(), "00" * 16]
        agree.gather(store, 2, range(3), json.dumps(card), timeout_seconds=30, what="the test")
        return None
    return _caught(
        lambda: shared_memory.open(
            _chain(3),
            rank,
            device=torch.device("cpu"),
            timeout_seconds=30.0,
            store=store,
            options={},
        )
    )


def test_a_rank_that_vanishes_before_it_is_called_is_named_by_its_peer(rank_outcomes):
    first, second, _ = rank_outcomes(3, _vanishes_when_met)
    assert second.error_text is None, second.error_text
    message, _ = second.value
    assert "rank 1 could not connect to rank 2" in message
    message, _ = first.value
    assert "rank 0 could not connect to rank 1" in message


def test_ranks_on_two_hosts_are_told_which_is_where():
    with pytest.raises(TransportError, match=r"rank 0 is on a, rank 3 is on b; set pp.transport"):
        shared_slots.check_one_host({3: "b", 0: "a"})


# The ranks disagree


def _disagree(rank, make_other):
    channels = _chain(3)
    if rank == 2:
        channels = make_other(channels)
    return _caught(lambda: process_opener(rank, "gloo")(channels, timeout_seconds=LIMIT_SECONDS))


def _other_shape(channels):
    other = Boundary((TensorSpec("x", (3, 6), torch.float32), SMALL.tensors[1]))
    return [channels[0], Channel(1, "forward", 1, 2, 1, 2, other, 2)]


def _other_dtype(channels):
    other = Boundary((TensorSpec("x", (3, 5), torch.int32), SMALL.tensors[1]))
    return [channels[0], Channel(1, "forward", 1, 2, 1, 2, other, 2)]


def _other_peer(channels):
    return [channels[0], Channel(1, "forward", 0, 2, 0, 2, SMALL, 2)]


@pytest.mark.parametrize(
    ("make_other", "views"),
    [
        (_other_shape, ("x float32 (3, 5)", "x float32 (3, 6)")),
        (_other_dtype, ("x float32 (3, 5)", "x int32 (3, 5)")),
        (_other_peer, ("stage 1 on rank 1", "stage 0 on rank 0")),
    ],
)
def test_ranks_that_disagree_on_a_channel_all_raise_the_same_error_at_open(
    run_ranks, make_other, views
):
    results = run_ranks(3, _disagree, make_other)
    (message,) = {message for message, _ in results}
    assert "channel 1 is" in message
    assert all(view in message for view in views)
    assert "on rank 2" in message
    assert max(seconds for _, seconds in results) < SOON_SECONDS


def _other_order(rank, open_channels):
    (channel,) = _chain(2)
    transport = open_channels([channel], timeout_seconds=LIMIT_SECONDS)

    def work():
        if rank == 0:
            for micro_batch in (0, 2):
                transport.send(channel, micro_batch, payload(channel, micro_batch, 0))
            time.sleep(0.5)
            transport.send(channel, 3, payload(channel, 3, 0))
            transport.step_end()
        else:
            _pass_on(transport, [channel], rank, 0)
            _pass_on(transport, [channel], rank, 1)

    result = _caught(work)
    transport.close()
    return result


@pytest.mark.parametrize("kind", ["local", *BETWEEN_PROCESSES])
def test_ends_that_use_different_orders_of_micro_batches_both_raise(kind):
    for message, seconds in run_scenario(kind, 2, _other_order):
        assert message is not None
        assert "forward channel 0" in message
        assert "micro-batch 1" in message
        assert "both ends must use one order" in message
        assert seconds < SOON_SECONDS


# The caller errs: it raises before anything moves, and the transport goes on


def _misuse(rank, open_channels):
    (channel,) = _chain(2)
    stranger = Channel(9, "forward", 0, 1, 0, 1, SMALL, 1)
    wrong_way = Channel(0, "backward", 1, 0, 1, 0, SMALL, 1)
    transport = open_channels([channel], timeout_seconds=LIMIT_SECONDS)
    x, i = payload(channel, 0, 0)

    def refuses(text, action):
        with pytest.raises(TransportError, match=text):
            action()

    if rank == 0:
        refuses("x.*is torch.float64", lambda: transport.send(channel, 0, (x.double(), i)))
        refuses(r"x.*\(5, 3\)", lambda: transport.send(channel, 0, (x.T, i)))
        refuses("has 1 tensors", lambda: transport.send(channel, 0, (x,)))
        refuses("rank 0 cannot send on", lambda: transport.send(stranger, 0, (x, i)))
        refuses("rank 0 cannot send on", lambda: transport.send(wrong_way, 0, (x, i)))
        refuses("rank 0 cannot receive on", lambda: transport.post(channel, 0))
        transport.send(channel, 0, (x, i))
        refuses("sent already", lambda: transport.send(channel, 0, (x, i)))
        transport.send(channel, 1, (x, i))
        transport.send(channel, 2, (x, i))
    else:
        refuses("never posted", lambda: transport.take(channel, 0))
        refuses("not taken", lambda: transport.release(channel, 0))
        transport.post(channel, 0)
        refuses("posted already", lambda: transport.post(channel, 0))
        transport.post(channel, 1)
        refuses("no slot is free for micro-batch 2", lambda: transport.post(channel, 2))
        refuses("0 was posted before it", lambda: transport.take(channel, 1))
        refuses("not taken", lambda: transport.release(channel, 0))
        assert torch.equal(transport.take(channel, 0)[0], x)
        refuses("taken already", lambda: transport.take(channel, 0))
        refuses("posted already", lambda: transport.post(channel, 0))
        transport.release(channel, 0)
        refuses("released already", lambda: transport.release(channel, 0))
        refuses("released already", lambda: transport.take(channel, 0))
        refuses("posted but not taken", transport.step_end)
        transport.post(channel, 2)
        for micro_batch in (1, 2):
            assert torch.equal(transport.take(channel, micro_batch)[0], x)
            if micro_batch == 2:
                refuses("taken but not released", transport.step_end)
            transport.release(channel, micro_batch)
    transport.step_end()
    transport.close()


@pytest.mark.parametrize("kind", ["local", *BETWEEN_PROCESSES])
def test_a_wrong_call_raises_on_the_caller_and_what_was_right_still_arrives(kind):
    run_scenario(kind, 2, _misuse)


# Abort and close


def _abort_while_waiting(rank, open_channels):
    channels = _chain(3)
    transport = open_channels(channels, timeout_seconds=LIMIT_SECONDS)

    def work():
        if rank == 0:
            time.sleep(0.3)
            transport.abort("the operator said so")
            transport.abort("another reason")
            transport.send(channels[0], 0, payload(channels[0], 0, 0))
        else:
            if rank == 2:
                thread = threading.Timer(LIMIT_SECONDS / 2, transport.abort, ["too late"])
                thread.daemon = True
                thread.start()
            _pass_on(transport, channels, rank, 0)

    result = _caught(work)
    after = _caught(lambda: transport.step_end())
    transport.close()
    transport.close()
    return result, after


@pytest.mark.parametrize("kind", ["local", *BETWEEN_PROCESSES])
def test_an_abort_ends_the_takes_that_wait_on_all_ranks_and_all_later_calls(kind):
    for (message, seconds), (after, _) in run_scenario(kind, 3, _abort_while_waiting):
        assert message is not None
        assert "micro-batch 0" in message
        assert "the operator said so" in message
        assert "the operator said so" in after
        assert seconds < SOON_SECONDS


def _abort_from_a_thread(rank, open_channels):
    (channel,) = _chain(2)
    transport = open_channels([channel], timeout_seconds=LIMIT_SECONDS)
    result = None
    if rank == 1:
        transport.post(channel, 4)
        threading.Timer(0.3, transport.abort, ["the watchdog said so"]).start()
        result = _caught(lambda: transport.take(channel, 4))
    transport.close()
    return result


@pytest.mark.parametrize("kind", ["local", *BETWEEN_PROCESSES])
def test_an_abort_from_another_thread_ends_a_take_that_waits(kind):
    _, (message, seconds) = run_scenario(kind, 2, _abort_from_a_thread)
    assert "micro-batch 4" in message
    assert seconds < SOON_SECONDS


def _close_with_pending(rank, open_channels, boundary):
    channels = _chain(2, boundary)
    transport = open_channels(channels, timeout_seconds=LIMIT_SECONDS)
    if rank == 0:
        # Refused where rank 1 is known to have closed before.
        _caught(lambda: transport.send(channels[0], 0, payload(channels[0], 0, 0)))
        if boundary is LARGE:
            time.sleep(0.02)
    else:
        transport.post(channels[0], 0)
        transport.post(channels[0], 1)
    start = time.monotonic()
    transport.close()
    seconds = time.monotonic() - start
    assert "is closed" in _caught(lambda: transport.post(channels[0], 0))[0] or rank == 0
    return seconds


@pytest.mark.parametrize("kind", ["local", *BETWEEN_PROCESSES])
@pytest.mark.parametrize("boundary", [SMALL, LARGE])
def test_a_transport_closes_with_transfers_pending(kind, boundary):
    assert max(run_scenario(kind, 2, _close_with_pending, boundary)) < SOON_SECONDS


def _take_first(rank, open_channels):
    channel = Channel(0, "forward", 0, 0, 0, 1, SMALL, 1)
    transport = open_channels([channel], timeout_seconds=LIMIT_SECONDS)
    transport.post(channel, 0)
    return _caught(lambda: transport.take(channel, 0))


@pytest.mark.parametrize("kind", ["local", *BETWEEN_PROCESSES])
def test_a_take_before_its_send_on_one_rank_raises_at_once(kind):
    ((message, seconds),) = run_scenario(kind, 1, _take_first)
    assert "micro-batch 0 is taken before it is sent" in message
    assert seconds < LIMIT_SECONDS / 2
