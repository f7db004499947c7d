"""Opening the GPU transports over a simulated driver: who comes late, gives up or does not fit."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest
import simulated_cuda
import torch
from simulated_ranks import KINDS, SMALL, run_simulated
from torch.distributed import HashStore, PrefixStore

from ppruntime.transports import (
    copy_engine,
    meeting,
    nccl_library,
    open_transport,
    per_channel,
    put,
    selftest,
    slots,
)
from ppruntime.transports.base import Channel, TransportError


@pytest.fixture(autouse=True)
def _simulated(monkeypatch):
    simulated_cuda.install(monkeypatch)


@pytest.fixture
def ended(monkeypatch):
    """(reports, event): what would have ended the process, at a limit half a second after what has
    one of its own."""
    reports, event = [], threading.Event()

    def end_process(report):
        reports.append(report)
        event.set()

    monkeypatch.setattr(meeting, "end_process", end_process)
    monkeypatch.setattr(meeting, "_GRACE_SECONDS", 0.5)
    return reports, event


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_cannot_open_is_named_by_its_peers_at_once(kind, monkeypatch):
    # As a GPU without room for the slots is: the others wait for it, in a poll or in NCCL.
    channels = [
        Channel(i, "forward", i, i + 1, i, i + 1, SMALL, slots=1) for i in range(2)
    ]  # rank 0 has no channel with rank 2, which fails
    views = slots.typed_views
    monkeypatch.setattr(meeting, "_GRACE_SECONDS", 1.0)

    def typed_views(boundary, buffer):
        if threading.current_thread().name == "rank 2":
            raise RuntimeError("CUDA out of memory")
        return views(boundary, buffer)

    monkeypatch.setattr(KINDS[kind], "typed_views", typed_views)
    start, store, texts = time.monotonic(), HashStore(), {}

    def work(rank):
        try:
            transport = KINDS[kind].open(
                channels,
                rank,
                device=torch.device("cpu", rank),
                timeout_seconds=60.0,
                store=PrefixStore("test", store),
                options={},
            )
            while True:  # rank 0 may be through by then
                transport.step_end()
                time.sleep(0.01)
        except RuntimeError as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}") for r in range(3)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), f"a rank hangs: {texts}"
    assert time.monotonic() - start < 20
    assert texts[2] == "CUDA out of memory"
    for rank in range(2):
        said = f"rank 2 could not open its {kind} channels: CUDA out of memory"
        assert said in texts[rank], texts


def test_a_call_that_waits_for_a_rank_that_gave_up_ends_the_process_and_says_why(
    monkeypatch, ended
):
    # Registering a window waits for the peer inside NCCL, where nothing reaches it.
    reports, event = ended

    def register(self, comm, address, num_bytes):
        if self._comms[comm].rank == 0:
            assert event.wait(20), "the process was not ended"
        raise TransportError("ncclCommWindowRegister failed: out of memory")

    monkeypatch.setattr(simulated_cuda.Nccl, "register", register)
    channel = Channel(4, "forward", 0, 1, 0, 1, SMALL, slots=1)
    run_simulated("put", [channel], lambda rank, transport: None, timeout_seconds=60.0)
    assert "rank 0: put cannot open its channels: rank 1 could not open its put" in reports[0]
    assert "ncclCommWindowRegister failed: out of memory" in reports[0]
    assert f"It opens the {channel}, with rank 1" in reports[0]


def test_a_call_that_waits_beyond_the_limit_says_for_whom(monkeypatch, ended):
    reports, event = ended

    def init(self, unique_id, rank, config):
        assert event.wait(20), "the process was not ended"
        raise TransportError("the process has ended")

    monkeypatch.setattr(simulated_cuda.Nccl, "init", init)
    channel = Channel(4, "forward", 0, 1, 0, 1, SMALL, slots=1)
    run_simulated("nccl", [channel], lambda rank, transport: None, timeout_seconds=0.5)
    assert "nccl could not open its channels within 1 s" in reports[0]
    assert f"It opens the {channel}, with rank " in reports[0]


def test_what_is_open_already_is_ended_where_another_kind_cannot_be_opened(monkeypatch):
    here, there = (Channel(i, "forward", i, i + 1, i, i + 1, SMALL, slots=1) for i in range(2))
    monkeypatch.setattr(
        per_channel,
        "choose_kind",
        lambda channel, **_: "copy_engine" if channel is here else "put",
    )
    monkeypatch.setattr(put, "unavailable_reason", lambda options=None: None)
    monkeypatch.setattr(copy_engine, "unavailable_reason", lambda: None)

    def register(self, comm, address, num_bytes):
        raise TransportError("ncclCommWindowRegister failed: out of memory")

    monkeypatch.setattr(simulated_cuda.Nccl, "register", register)
    store, texts = HashStore(), {}

    def work(rank):
        try:
            transport = open_transport(
                "auto",
                [here, there],
                rank,
                device=torch.device("cpu", rank),
                timeout_seconds=60.0,
                store=PrefixStore("test", store),
            )
        except TransportError as error:
            texts[rank] = str(error)
            return
        try:
            while True:
                transport.step_end()
                time.sleep(0.01)
        except TransportError as error:
            texts[rank] = str(error)
            transport.close()

    before = set(threading.enumerate())
    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), f"a rank hangs: {texts}"
    for rank in range(3):  # rank 0 has no channel of the kind that failed
        assert "ncclCommWindowRegister failed: out of memory" in texts[rank], texts
    new = [t for t in threading.enumerate() if t not in before]
    assert not [t.name for t in new if t.name.startswith("transport ")]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_on_one_gpu_are_refused_on_both_before_a_call_that_waits(kind, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1")
    )
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)
    for error in run_simulated(kind, [channel], lambda rank, transport: None):
        assert f"{kind} cannot carry the {channel}: ranks 0 and 1 are on one GPU" in str(error)
        assert "give each rank its own, or set pp.size = 1" in str(error)


# The start-up test


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_that_holds_another_stream_is_found_at_start_and_told_to_both_ranks(
    kind, monkeypatch
):
    # Two streams of rank 1 are one hardware queue.
    queues = {}

    def new_stream(device):
        return queues.setdefault(threading.current_thread(), simulated_cuda.Stream())

    monkeypatch.setattr(selftest, "new_stream", new_stream)
    monkeypatch.setattr(selftest, "ALIAS_SECONDS", 1.0)
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)
    for error in run_simulated(kind, [channel], lambda rank, transport: None):
        said = f"{kind}: a stream that waits for the {channel} held "
        assert said in str(error)
        assert "set CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts" in str(error)
        assert ('or set pp.transport = "nccl"' in str(error)) is (kind != "nccl")


def test_a_wrong_byte_is_found_at_start_and_told_to_both_ranks(monkeypatch):
    def copy(self, stream, destination, source, num_bytes):
        def move():
            ctypes.memmove(destination, source, num_bytes)
            if num_bytes == SMALL.tensors[0].num_bytes:
                ctypes.c_ubyte.from_address(destination + 7).value ^= 1

        simulated_cuda.Stream.by_handle[stream].do(move)

    monkeypatch.setattr(simulated_cuda.Driver, "copy", copy)
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)
    for error in run_simulated("copy_engine", [channel], lambda rank, transport: None):
        assert f"copy_engine: the {channel} carries wrong bytes: tensor 0 differs in 1 of 60" in (
            str(error)
        )
        assert "first at byte 7" in str(error)


# NCCL


@pytest.mark.parametrize("kind", ["put", "nccl"])
@pytest.mark.parametrize("wrong", ["other", "old", "missing"])
def test_an_nccl_that_does_not_fit_on_one_rank_is_named_with_its_version_on_both(
    kind, wrong, monkeypatch
):
    def load(need, path=None):
        if threading.current_thread() is not threads[1]:
            return simulated_cuda.Nccl()
        if wrong == "other":
            other = simulated_cuda.Nccl()
            other.version = 23102
            return other
        found = [("torch's own: libnccl.so.2", 22105)] if wrong == "old" else []
        raise TransportError(nccl_library.too_old(need, found))

    monkeypatch.setattr(nccl_library, "load", load)
    channel = Channel(0, "forward", 0, 1, 0, 1, SMALL, slots=1)
    store, texts = HashStore(), {}

    def work(rank):
        try:
            KINDS[kind].open(
                [channel],
                rank,
                device=torch.device("cpu", rank),
                timeout_seconds=20.0,
                store=PrefixStore("test", store),
                options={},
            )
        except TransportError as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = {"other": "rank 1: 2.31.2", "old": "found 2.21.5", "missing": "found none"}[wrong]
    for rank in range(2):
        assert f"{kind} needs one NCCL version on both ends of every channel" in texts[rank]
        assert "rank 0: 2.32.3" in texts[rank]
        assert expected in texts[rank]
        assert "set pp.nccl_library to" in texts[rank]
    assert texts[0] == texts[1]
