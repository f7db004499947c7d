"""Opening a transport: which kind carries what, what all ranks agree on first, what is refused."""

from __future__ import annotations

import os
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore
from transport_cases import payload, process_opener

from ppruntime import transports
from ppruntime.transports import KINDS, open_transport, options_of, unavailable_reason
from ppruntime.transports.agree import Fact, agree, find_differences
from ppruntime.transports.base import Boundary, Channel, TensorSpec, TransportError
from ppruntime.transports.per_channel import choose_kind

CPU = torch.device("cpu")
BOUNDARY = Boundary((TensorSpec("x", (4,), torch.float32),))


def _channel(number, src_rank, dst_rank, slots=1):
    return Channel(number, "forward", src_rank, dst_rank, number, number + 1, BOUNDARY, slots)


def _open(kind, channels, rank=0, **options):
    return open_transport(kind, channels, rank, device=CPU, timeout_seconds=2, **options)


# Which kind carries what


@given(
    src_rank=st.integers(0, 3),
    dst_rank=st.integers(0, 3),
    device_type=st.sampled_from(["cpu", "cuda"]),
    available=st.sets(st.sampled_from(KINDS[1:])),
    hosts=st.lists(st.sampled_from("ab"), min_size=4, max_size=4),
)
def test_auto_takes_local_inside_a_rank_and_else_the_cheapest_that_reaches(
    src_rank, dst_rank, device_type, available, hosts
):
    kind = choose_kind(
        _channel(0, src_rank, dst_rank),
        device_type=device_type,
        host_of=dict(enumerate(hosts)),
        available=frozenset(available),
    )
    if src_rank == dst_rank:
        assert kind == "local"
    elif device_type == "cpu":
        is_near = hosts[src_rank] == hosts[dst_rank] and "shared_memory" in available
        assert kind == ("shared_memory" if is_near else "gloo")
    elif hosts[src_rank] == hosts[dst_rank] and "copy_engine" in available:
        assert kind == "copy_engine"
    else:
        assert kind == ("put" if "put" in available else "nccl")


@pytest.mark.parametrize("kind", ["auto", "local", "gloo", "shared_memory"])
def test_a_pipeline_of_one_rank_needs_no_store_and_no_peer(kind):
    channel = _channel(0, 0, 0)
    transport = _open(kind, [channel])
    transport.send(channel, 0, payload(channel, 0, 0))
    transport.post(channel, 0)
    assert torch.equal(transport.take(channel, 0)[0], payload(channel, 0, 0)[0])
    transport.release(channel, 0)
    transport.step_end()
    transport.close()


def test_a_pipeline_without_a_channel_opens_and_ends_its_steps():
    transport = _open("gloo", [])
    transport.step_end()
    transport.close()


def _mixed(rank, kind):
    hop = _channel(1, 0, 1)
    channels = [_channel(0, 0, 0), hop, _channel(2, 1, 1)]
    turn = channels[2 * rank]
    transport = process_opener(rank, kind)(channels)
    transport.send(turn, 0, payload(turn, 0, 0))
    transport.post(turn, 0)
    transport.take(turn, 0)
    if rank == 0:
        transport.send(hop, 0, payload(hop, 0, 0))
    else:
        transport.post(hop, 0)
        assert torch.equal(transport.take(hop, 0)[0], payload(hop, 0, 0)[0])
        transport.release(hop, 0)
    with pytest.raises(TransportError, match="taken but not released"):
        transport.step_end()
    transport.release(turn, 0)
    transport.step_end()
    with pytest.raises(TransportError, match=r"none of the channels \[0, 1, 2\]"):
        transport.post(_channel(7, 0, 1), 0)
    meeting = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    meeting.set(f"rank {rank} has all", "")
    meeting.wait(["rank 0 has all", "rank 1 has all"])
    transport.abort("enough")
    for channel in (turn, hop):
        with pytest.raises(TransportError, match="enough"):
            transport.post(channel, 1)
    transport.close()


def test_channels_inside_a_rank_and_between_ranks_are_driven_as_one_transport(run_ranks):
    run_ranks(2, _mixed, "gloo")


# What is refused


def test_kinds_that_need_a_gpu_say_so_and_the_others_are_there():
    assert [unavailable_reason(kind) for kind in ("auto", *KINDS[1:4])] == [None] * 4
    assert "choose one of auto, local, gloo" in unavailable_reason("nvlink")


def test_a_wrong_request_is_refused_with_the_remedy():
    inside, across = _channel(0, 0, 0), _channel(1, 0, 1)
    for message, kind, channels, options in (
        ("no transport 'mpi'; choose one of", "mpi", [inside], {}),
        ("need a store", "gloo", [across], {}),
        ("local takes no options, got", "local", [inside], {"recv_lead": 1}),
    ):
        with pytest.raises(TransportError, match=message):
            _open(kind, channels, **options)


class _Recorder:
    """Stands for a module of a kind; keeps the options that it is opened with."""

    def __init__(self, *taken):
        if taken:
            self.OPTIONS = frozenset(taken)
        self.options = None

    def open(self, channels, rank, *, options, **_):
        self.options = options
        return self

    def unavailable_reason(self, *_):
        return None


def _recorded(monkeypatch, kind, **options):
    """Opens channels inside a rank and between hosts and ranks, in one process; what each kind
    used got."""
    modules = {
        "local": _Recorder(),
        "nccl": _Recorder("transport_ctas", "recv_lead"),
        "copy_engine": _Recorder("uncredited"),
        "put": _Recorder("uncredited", "nccl_library"),
    }
    chosen = {0: "local", 1: "copy_engine", 2: "put"}
    if kind != "auto":
        chosen = {number: used if used == "local" else kind for number, used in chosen.items()}
    monkeypatch.setattr(transports, "_module", modules.__getitem__)
    monkeypatch.setattr(transports, "_agreed_kinds", lambda *_: chosen)
    channels = [_channel(0, 0, 0), _channel(1, 0, 1), _channel(2, 1, 2)]
    open_transport(kind, channels, 0, device=CPU, timeout_seconds=2, store=HashStore(), **options)
    return {used: m.options for used, m in modules.items() if m.options is not None}


def test_each_kind_gets_the_options_that_it_takes(monkeypatch):
    uncredited = frozenset({1})
    assert _recorded(monkeypatch, "auto", nccl_library="x", uncredited=uncredited) == {
        "local": {},
        "copy_engine": {"uncredited": uncredited},
        "put": {"uncredited": uncredited, "nccl_library": "x"},
    }
    assert _recorded(monkeypatch, "nccl", recv_lead=2, uncredited=uncredited) == {
        "local": {},
        "nccl": {"recv_lead": 2},
    }


def test_an_option_that_no_kind_in_use_takes_is_refused(monkeypatch):
    with pytest.raises(TransportError, match=r"^put takes the options nccl_library, got \['recv_"):
        _recorded(monkeypatch, "put", recv_lead=2, nccl_library="x")
    with pytest.raises(
        TransportError, match=r"auto took copy_engine and put, which take the .*got \['recv_lead'"
    ):
        _recorded(monkeypatch, "auto", recv_lead=2)


def test_the_options_of_every_kind_are_known_without_a_gpu():
    assert options_of("gloo") == options_of("local") == options_of("shared_memory") == frozenset()
    assert options_of("nccl") == {"transport_ctas", "recv_lead", "selftest"}
    assert options_of("copy_engine") == {"selftest"}
    assert options_of("put") == {"nccl_library", "selftest"}
    assert options_of("auto") == options_of("nccl") | options_of("put")


def _refused_by_all(rank):
    with pytest.raises(TransportError, match="leaves the process, which local cannot"):
        process_opener(rank, "local")([_channel(0, 0, 1)])
    for kind in ("gloo", "shared_memory"):
        with pytest.raises(TransportError, match=f"{kind} takes no options, got .'transport_ctas"):
            process_opener(rank, kind)([_channel(0, 0, 1)], transport_ctas=4)
    kind = "gloo" if rank == 0 else "auto"
    with pytest.raises(TransportError, match="the transport is gloo on rank 0 but auto on rank 1"):
        process_opener(rank, kind)([_channel(0, 0, 1)], pipeline="other")
    uncredited = frozenset({0} if rank == 0 else ())
    with pytest.raises(TransportError, match=r"without credits is \[0\] on rank 0 but \[\] on"):
        process_opener(rank, "gloo")([_channel(0, 0, 1)], pipeline="third", uncredited=uncredited)


def test_what_a_kind_cannot_do_is_refused_on_every_rank(run_ranks):
    run_ranks(2, _refused_by_all)


# Agreement


def _agree(rank, facts):
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    time.sleep(0.05 * rank)
    start = time.monotonic()
    try:
        agree(store, rank, range(3), facts[rank], timeout_seconds=60, what="the test")
    except TransportError as error:
        return str(error), time.monotonic() - start
    return None, time.monotonic() - start


def test_ranks_that_hold_the_same_facts_agree(run_ranks):
    facts = [[Fact("order", "abc"), Fact("config", "é\n'\"")]] * 3
    assert [message for message, _ in run_ranks(3, _agree, facts)] == [None] * 3


def test_ranks_that_differ_all_raise_one_error_that_says_who_differs_and_how(run_ranks):
    facts = [[Fact("order", "abc"), Fact("config", "1")] for _ in range(3)]
    facts[1] = [Fact("order", "xyz"), Fact("config", "1")]
    results = run_ranks(3, _agree, facts)
    (message,) = {message for message, _ in results}
    assert "disagree before the test: order is abc on ranks 0, 2 but xyz on rank 1;" in message
    assert "config" not in message.replace("configuration", "")
    assert max(seconds for _, seconds in results) < 40


def test_ranks_that_differ_are_told_the_remedy_of_what_they_differ_in(run_ranks):
    others = [Fact("order", "abc"), Fact("a", "1", remedy="paint it"), Fact("b", "1", (0, 1))]
    first = [Fact("order", "abc"), Fact("a", "2", remedy="paint it"), Fact("b", "1", (0, 1))]
    results = run_ranks(3, _agree, [first, others, others[:2]])
    assert {message for message, _ in results} == {
        "the ranks disagree before the test: a is 2 on rank 0 but 1 on ranks 1, 2; paint it"
    }


class _SlowReader:
    """A store of which a rank on a busy machine reads late."""

    def __init__(self, store):
        self.set, self.wait, self.add = store.set, store.wait, store.add
        self._get = store.get

    def get(self, key):
        time.sleep(0.2)
        return self._get(key)


def _agree_over_a_store_of_rank_0(rank):
    meeting = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = _SlowReader(TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False))
    fact = Fact("rank", str(rank))
    with pytest.raises(TransportError, match="rank is 0 on rank 0 but 1 on rank 1"):
        agree(store, rank, range(3), [fact], timeout_seconds=20, what="the test")
    if rank == 0:
        os._exit(3)  # and its store with it, at once


def test_the_rank_that_hosts_the_store_stays_until_all_have_read_the_differences(rank_outcomes):
    host, *others = rank_outcomes(3, _agree_over_a_store_of_rank_0)
    assert host.exit_code == 3
    for outcome in others:
        assert outcome.error_text is None, outcome.error_text


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2"])),
        min_size=1,
        max_size=4,
    )
)
def test_differences_are_found_if_and_only_if_ranks_do_not_all_state_the_same(views):
    stated = {r: [Fact(n, v) for n, v in view.items()] for r, view in enumerate(views)}
    names = {n for view in views for n in view}
    expected = {n for n in names if len({view.get(n) for view in views}) > 1}
    assert find_differences(stated).keys() == expected


def test_a_fact_of_some_ranks_is_asked_of_those_alone():
    both = Fact("channel 0", "v", (0, 1))
    assert find_differences({0: [both], 1: [both], 2: []}) == {}
    assert find_differences({0: [both], 1: [], 2: []}) == {
        "channel 0": "channel 0 is v on rank 0 but absent on rank 1"
    }


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(TransportError, match=r"ranks 1, 2 did not come to the test within 0.2 s"):
        agree(HashStore(), 0, range(3), [], timeout_seconds=0.2, what="the test")


# Cost


def test_local_costs_the_host_far_less_than_an_ops_budget_of_40_us():
    boundary = Boundary(tuple(TensorSpec(f"x{i}", (8, 8), torch.float32) for i in range(4)))
    channel = Channel(0, "forward", 0, 0, 0, 1, boundary, 4)
    transport = _open("local", [channel])
    tensors = payload(channel, 0, 0)
    seconds = []
    for _ in range(20):  # the best of them: the machine may be busy
        start = time.perf_counter()
        for micro_batch in range(50):
            transport.post(channel, micro_batch)
            transport.send(channel, micro_batch, tensors)
            transport.take(channel, micro_batch)
            transport.release(channel, micro_batch)
        seconds.append((time.perf_counter() - start) / 50)
        transport.step_end()
    assert min(seconds) < 40e-6
