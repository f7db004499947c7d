"""What of the GPU transports can be checked without a GPU: arithmetic, layouts, choices, texts."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import socket
import subprocess
import threading

import pytest
import torch
from gpu_cases import in_turn_order
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from ppruntime.launch import transport_record
from ppruntime.transports import (
    copy_engine,
    lives,
    meeting,
    nccl,
    nccl_api,
    nccl_library,
    opening,
    put,
    ring,
)
from ppruntime.transports.base import Boundary, Channel, TensorSpec, TransportError
from ppruntime.transports.driver import AccessDesc, AllocationProp
from ppruntime.transports.peer_memory import swap_descriptors
from ppruntime.transports.selftest import first_difference, irregular_bytes, payload
from ppruntime.transports.watchdog import Pending, overdue

SMALL = Boundary((TensorSpec("x", (3, 5), torch.float32), TensorSpec("i", (4,), torch.int32)))


def _channel(id_=0, src=0, dst=1, boundary=SMALL, slots=2):
    return Channel(id_, "forward", src, dst, 2 * id_, 2 * id_ + 1, boundary, slots)


# Slots, credits and words


@given(st.integers(1, 8), st.lists(st.integers(0, 7), max_size=60))
def test_the_ring_reuses_a_slot_exactly_when_its_last_message_was_released(num_slots, picks):
    receiver, held = ring.ReceiveRing(_channel(slots=num_slots)), []
    for pick in picks:
        if pick % 2 and held:
            released = held.pop(pick % len(held))
            before = receiver.num_released
            assert receiver.release(released) == receiver.num_released - before
        elif receiver.is_full:
            message = receiver.num_reserved
            assert message - num_slots in held  # its slot's last owner
            with pytest.raises(TransportError, match=f"slot of message {message - num_slots}"):
                receiver.reserve()
        else:
            message = receiver.num_reserved
            assert ring.credits_needed(message, num_slots) <= receiver.num_released
            slots = {ring.slot_of(m, num_slots) for m in held}
            receiver.reserve()
            held.append(message)
            assert ring.slot_of(message, num_slots) not in slots
        assert receiver.num_released == min([*held, receiver.num_reserved])


@given(st.integers(0, 1 << 40), st.integers(0, (1 << 30) - 1))
def test_counts_wrap_as_the_hardware_compares_them(count, ahead):
    word = count % ring.WORD
    assert ring.has_reached(word, word)
    assert not ring.has_reached(word, (word + 1 + ahead) % ring.WORD)
    assert ring.has_reached((word + ahead) % ring.WORD, word)
    # An abort lets the next 2**30 waits pass.
    assert ring.has_reached(ring.releasing_word(count), (word + ahead) % ring.WORD)


@given(st.data())
def test_nothing_overlaps_in_the_memory_of_two_neighbours(data):
    num_channels = data.draw(st.integers(1, 8))
    channels = []
    for i in range(num_channels):
        extents = data.draw(st.lists(st.integers(0, 700), max_size=3))
        boundary = Boundary(tuple(TensorSpec("x", (e,), torch.int16) for e in extents))
        src = data.draw(st.integers(0, 1))
        channels.append(_channel(i, src, 1 - src, boundary, data.draw(st.integers(1, 4))))
    layout = copy_engine.plan_pair(channels)
    assert layout == copy_engine.plan_pair(channels[::-1])
    for rank in (0, 1):
        parts = []
        for c in channels:
            if c.dst_rank == rank:
                parts.append((layout.landed[c.id], 4))
                parts.append((layout.slots[c.id], c.slots * c.boundary.slot_bytes))
                assert layout.slots[c.id] % 256 == 0
                assert layout.slots[c.id] >= layout.word_bytes
            else:
                parts.append((layout.credits[c.id], 4))
        parts = sorted(p for p in parts if p[1])
        ends = [start + size for start, size in parts]
        assert all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False))
        assert max(ends, default=0) <= layout.num_bytes.get(rank, 0) or not parts


def test_the_words_of_many_channels_stay_before_the_slots():
    channels = [_channel(i) for i in range(100)]
    layout = copy_engine.plan_pair(channels)
    assert max([*layout.landed.values(), *layout.credits.values()]) < layout.word_bytes


BOUNDARIES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 7, 300, 1 << 19, 1 << 20, (1 << 22) + 5, 70 << 20]),
        st.sampled_from([torch.uint8, torch.float32]),
    ),
    max_size=5,
).map(lambda specs: Boundary(tuple(TensorSpec("x", (extent,), dtype) for extent, dtype in specs)))


@given(BOUNDARIES)
def test_nccl_sends_large_tensors_from_where_they_are_and_every_byte_once(boundary):
    pieces = nccl.pieces_of(_channel(boundary=boundary))
    assert [i for p in pieces for i in p.tensors] == [
        i for i, spec in enumerate(boundary.tensors) if spec.num_bytes
    ]
    for piece in pieces:
        for i in piece.tensors:
            spec, offset = boundary.tensors[i], boundary.offsets[i]
            assert piece.offset <= offset
            assert offset + spec.num_bytes <= piece.offset + piece.num_bytes
            assert len(piece.tensors) == 1 or spec.num_bytes < 1 << 20
    ends = [p.offset + p.num_bytes for p in pieces]
    assert all(end <= p.offset for end, p in zip(ends, pieces[1:], strict=False))
    assert len(pieces) >= 1
    assert ends[-1] <= max(boundary.slot_bytes, 256)


@given(BOUNDARIES)
def test_put_stages_every_byte_once_and_puts_the_whole_slot_once(boundary):
    parts = put.parts_of(boundary)
    assert put.num_signals(boundary) == max(1, len(parts))
    assert [start for start, _ in parts] == [0, *(end for _, end in parts)][: len(parts)]
    assert not parts or parts[-1][1] == boundary.slot_bytes
    staged = {i: 0 for i, spec in enumerate(boundary.tensors) if spec.num_bytes}
    for start, end in parts:
        assert start % 256 == 0
        assert start < end
        for i, in_tensor, in_slot, num_bytes in put.copies_into(boundary, start, end):
            assert in_tensor == staged[i]  # from front to back, no gap
            assert in_slot == boundary.offsets[i] + in_tensor
            assert start <= in_slot
            assert in_slot + num_bytes <= end
            staged[i] += num_bytes
    assert staged == {i: s.num_bytes for i, s in enumerate(boundary.tensors) if s.num_bytes}


def test_a_large_message_is_put_in_a_sixth_and_the_rest_a_small_one_at_once():
    large = Boundary((TensorSpec("x", (8192, 4, 5120), torch.bfloat16),))
    (_, cut), (start, end) = put.parts_of(large)
    assert cut == start
    assert end == large.slot_bytes
    assert cut / end == pytest.approx(1 / 6, rel=1e-5)
    assert put.parts_of(SMALL) == ((0, SMALL.slot_bytes),)


def test_both_ends_of_a_put_channel_make_windows_of_one_size_of_whole_pages():
    assert put.window_bytes(_channel(slots=9)) == -(-9 * SMALL.slot_bytes // 4096) * 4096


# NCCL


def test_structs_are_as_large_as_the_headers_say():
    assert ctypes.sizeof(nccl_api.Config) == 96  # nccl.h 2.30.7
    assert nccl_api.Config.net_name.offset == 32
    assert nccl_api.Config.cta_policy.offset == 60
    assert ctypes.sizeof(nccl_api.UniqueId) == 128
    assert ctypes.sizeof(nccl_api.WaitSignalDesc) == 16
    assert ctypes.sizeof(AllocationProp) == 32  # cuda.h 13.1
    assert AllocationProp.compression.offset == 24
    assert ctypes.sizeof(AccessDesc) == 12


def test_a_communicator_is_configured_for_no_thread_block():
    config = nccl_api.make_config(23203, b"a name")
    put._no_thread_blocks(config)
    assert (config.size, config.magic, config.version) == (96, 0xCAFEBEEF, 23007)
    assert (config.cta_policy, config.min_ctas, config.max_ctas) == (2, 1, 1)
    assert (config.blocking, config.split_share) == (1, 0)
    torchs = nccl_api.make_config(22809, b"")
    assert torchs.version == 22809
    assert torchs.cta_policy == torchs.max_ctas == -(2**31)  # NCCL's own choice
    assert config.num_rma_ctx == config.graph_stream_ordering == -(2**31)
    assert config.net_name is None
    assert config.comm_name == b"a name"


@pytest.mark.parametrize(
    ("code", "text"), [(2708, "2.7.8"), (21003, "2.10.3"), (22809, "2.28.9"), (23203, "2.32.3")]
)
def test_version_codes_read_as_versions(code, text):
    assert nccl_api.version_text(code) == text


def test_a_given_library_is_the_only_candidate_else_the_package_comes_before_torchs_own():
    assert [c.path for c in nccl_library.candidates(nccl_library.FOR_PUT, "/x/libnccl.so.2")] == [
        "/x/libnccl.so.2"
    ]
    package, torchs = nccl_library.candidates(nccl_library.FOR_PUT)
    assert package.source == "the installed nvidia-nccl package"
    assert torchs.source == "torch's own"
    # Sends and receives need no newer one than torch has.
    assert nccl_library.candidates(nccl_library.FOR_SEND_RECV) == (torchs, package)


def test_the_refusal_names_every_version_found_and_the_remedy():
    text = nccl_library.too_old(
        nccl_library.FOR_PUT, [("torch's own: libnccl.so.2", 22809), ("elsewhere", 22907)]
    )
    assert "needs NCCL >= 2.30.0" in text
    assert "2.28.9 (torch's own: libnccl.so.2)" in text
    assert "2.29.7 (elsewhere)" in text
    assert "pp.nccl_library" in text
    assert 'pp.transport = "nccl"' in text
    assert "found none" in nccl_library.too_old(nccl_library.FOR_PUT, [])


def test_a_missing_library_is_refused_with_its_path(tmp_path):
    with pytest.raises(TransportError, match=r"cannot load NCCL from .*no/libnccl\.so\.2"):
        nccl_library.load(nccl_library.FOR_PUT, str(tmp_path / "no" / "libnccl.so.2"))


def test_a_library_that_is_not_nccl_is_refused():
    with pytest.raises(TransportError, match=r"is not NCCL.*ncclGetVersion"):
        nccl_library.load(nccl_library.FOR_PUT, "libc.so.6")


@pytest.fixture
def make_library(tmp_path):
    """Compiles a library that says it is NCCL of some version."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def make(version, more=""):
        source, library = tmp_path / "fake.c", tmp_path / f"libnccl{version}.so.2"
        source.write_text(
            f"int ncclGetVersion(int *v) {{ *v = {version}; return 0; }}\n"
            'const char *ncclGetErrorString(int code) { return "it broke"; }\n'
            'const char *ncclGetLastError(void *comm) { return "a cable"; }\n' + more
        )
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        return str(library)

    return make


@pytest.mark.parametrize("version", [21906, 22809, 22907])
def test_an_old_nccl_is_refused_by_what_the_loaded_library_says(make_library, version):
    path = make_library(version)
    with pytest.raises(TransportError) as caught:
        nccl_library.load(nccl_library.FOR_PUT, path)
    assert f"found {nccl_api.version_text(version)} (pp.nccl_library: {path})" in str(caught.value)


def test_a_new_nccl_is_taken_and_what_it_lacks_or_refuses_is_named(make_library):
    library = nccl_library.load(
        nccl_library.FOR_PUT,
        make_library(
            23203, "int ncclSignal(int p, int s, int c, unsigned f, void *m, void *t) {return 3;}"
        ),
    )
    assert library.version == 23203
    with pytest.raises(TransportError, match=r"ncclSignal failed: it broke \(a cable\).*2\.32\.3"):
        library.signal(1, 0, 0)
    with pytest.raises(TransportError, match=r"2\.32\.3 .* has no ncclWaitSignal"):
        library.wait_signal(1, 1, 0, 0)


def test_put_says_without_a_gpu_why_it_cannot_work():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for module in (put, copy_engine, nccl):
        assert 'set pp.transport = "gloo"' in module.unavailable_reason() or "NCCL" in (
            module.unavailable_reason()
        )


# Where ranks are, what they are told


def test_one_hardware_queue_is_refused_and_more_are_not():
    assert "set it to 32" in meeting.queue_reason("put", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert meeting.queue_reason("put", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) is None
    assert meeting.queue_reason("put", {}) is None


def test_copy_engine_refuses_two_hosts_and_every_kind_two_ranks_on_one_gpu():
    places = {
        0: meeting.Place("here/1", "a", ""),
        1: meeting.Place("here/1", "b", ""),
        2: meeting.Place("there/2", "a", ""),
        3: meeting.Place("here/1", "a", ""),
    }
    copy_engine.check_places([_channel(0, 0, 1)], places)
    with pytest.raises(TransportError, match=r"rank 1 is on here/1, rank 2 on there/2") as caught:
        copy_engine.check_places([_channel(0, 1, 2)], places)
    assert 'set pp.transport = "auto", "put" or "nccl"' in str(caught.value)
    meeting.check_own_gpus("nccl", [_channel(0, 0, 1), _channel(1, 1, 2)], places)
    with pytest.raises(TransportError, match=r"nccl .* ranks 0 and 3 are on one GPU, a; give each"):
        meeting.check_own_gpus("nccl", [_channel(0, 0, 3)], places)


def test_a_place_is_the_same_after_its_text():
    place = meeting.Place("host/boot", "GPU-uuid", "12/34")
    assert meeting.parse_place(str(place)) == place


@pytest.mark.parametrize(
    ("module", "given", "text"),
    [
        (copy_engine, {"ctas": 4}, "takes the options selftest, uncredited, got ctas"),
        (
            put,
            {"uncredited": [1]},
            r"put: uncredited must be a frozenset of .*, got \[1\]",
        ),
        (put, {"nccl_library": 3}, "put: nccl_library must be a path, got 3"),
        (nccl, {"transport_ctas": 65}, "nccl: transport_ctas must be 1 to 64, got 65"),
        (nccl, {"transport_ctas": True}, "nccl: transport_ctas must be 1 to 64, got True"),
        (nccl, {"recv_lead": -1}, "nccl: recv_lead must be 0 or more, got -1"),
        (nccl, {"selftest": 0}, "nccl: selftest must be True or False, got 0"),
    ],
)
def test_unknown_and_wrong_options_are_refused_by_name(module, given, text):
    with pytest.raises(TransportError, match=text):
        opening.checked_options(module._KIND, given, module.OPTIONS)


def test_every_option_of_every_kind_has_a_rule_and_a_default():
    for module in (copy_engine, put, nccl):
        assert opening._RULES.keys() >= module.OPTIONS
    assert opening.checked_options("nccl", {}, nccl.OPTIONS) == opening.Options()
    options = opening.checked_options("put", {"uncredited": frozenset({1})}, put.OPTIONS)
    assert options.uncredited == {1}


def test_a_peer_that_does_not_come_is_named():
    store = HashStore()
    with pytest.raises(TransportError, match=r"rank 0: ranks \[1\] did not come.*within 0.1 s"):
        meeting.swap_texts(store, "place", "x", 0, [1], 0.1)


def test_a_file_descriptor_and_a_size_cross_between_processes():
    store, got = HashStore(), {}

    def end(rank):
        descriptor = os.memfd_create(f"rank {rank}")
        os.write(descriptor, f"rank {rank}".encode())
        got[rank] = swap_descriptors(
            store, "memory", descriptor, 100 + rank, is_first=rank == 0, timeout_seconds=5
        )

    threads = [threading.Thread(target=end, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for rank in (0, 1):
        descriptor, num_bytes = got[rank]
        assert num_bytes == 101 - rank
        assert os.pread(descriptor, 10, 0) == f"rank {1 - rank}".encode()
        os.close(descriptor)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_peer_that_hands_over_no_memory_is_reported_in_time(is_first):
    if not hasattr(socket, "send_fds"):
        pytest.skip("this system passes no descriptors")
    with pytest.raises(TransportError, match=r"memory: the peer did not hand over.*within 0.2 s"):
        swap_descriptors(HashStore(), "memory", 0, 1, is_first=is_first, timeout_seconds=0.2)


def _sleep(seconds):
    threading.Event().wait(seconds)


def test_a_life_ends_with_its_process_even_as_a_zombie():
    own = lives.life_of(os.getpid())
    assert own is not None
    assert not own.has_ended
    assert lives.parse_life(str(own)) == own
    assert lives.parse_life(f"{own.pid}/{own.start_time + 1}") is None  # the id was given away
    assert lives.parse_life("unseen") is None
    process = multiprocessing.get_context("forkserver").Process(target=_sleep, args=(60,))
    process.start()
    life = lives.life_of(process.pid)
    assert not life.has_ended
    process.kill()
    process.join()
    assert life.has_ended


class _Never:
    def query(self):
        return False


def test_the_transfer_that_waited_longest_beyond_the_limit_is_reported():
    def pending(text, since):
        return Pending(text, 0, _Never(), _Never(), is_send=False, waits_since=since)

    young, old, older = pending("young", 9.5), pending("old", 5.0), pending("older", 4.0)
    not_begun = pending("not begun", None)
    assert overdue([not_begun, young], 10.0, 1.0) is None
    assert overdue([not_begun, young, old, older], 10.0, 1.0) is older


# The start-up test's own tools


@given(st.integers(0, 5000), st.integers(0, 1 << 20))
def test_irregular_bytes_are_what_was_asked_and_depend_on_the_seed(num_bytes, seed):
    data = irregular_bytes(num_bytes, seed, torch.device("cpu"))
    assert data.shape == (num_bytes,)
    assert torch.equal(data, irregular_bytes(num_bytes, seed, torch.device("cpu")))
    if num_bytes >= 64:
        other = irregular_bytes(num_bytes, seed + 1, torch.device("cpu"))
        assert (data != other).float().mean() > 0.5


def test_one_wrong_bit_is_found_and_placed():
    sent = payload(_channel(), 3, torch.device("cpu"))
    assert first_difference(sent, payload(_channel(), 3, torch.device("cpu"))) is None
    got = tuple(t.clone() for t in sent)
    got[1].view(torch.uint8)[9] ^= 4
    assert first_difference(got, sent).startswith(
        "tensor 1 differs in 1 of 16 bytes, first at byte 9"
    )


@given(st.integers(0, 1000))
def test_orders_in_turn_can_always_be_made(seed):
    import random

    rng = random.Random(seed)
    channels = [_channel(0, 0, 1), _channel(1, 1, 0, slots=1)]
    orders = in_turn_order(channels, {0: 5, 1: 4}, rng)
    assert sum(map(len, orders.values())) == 4 * 9


# The bench's own arithmetic


def test_bars_compare_within_the_run_and_the_worse_rank_counts():
    largest = transport_record.SIZES_BYTES[-1]

    def row(metric, kind, median):
        return {"metric": metric, "kind": kind, "num_bytes": largest, "median": median}

    one = [
        row("both ways", transport_record.RAW, 400.0),
        row("both ways", "put", 390.0),
        row("bf16 matmul, one way", "put", 4.0),
        row("bf16 matmul, one way", "nccl", 20.0),
    ]
    other = [row("both ways", "put", 380.0), row("bf16 matmul, one way", "put", 5.0)]
    bars = transport_record.bars([one, other])
    assert bars["put both ways at 335 MB, of raw peer copy (bar 0.95)"] == 380 / 400
    assert bars["put slow-down of bf16 matmul, one way, of nccl's (bar 0.4)"] == 5 / 20
    assert len(bars) == 2  # what was not measured has no bar


def test_a_row_says_its_spread():
    row = transport_record.Row("one way", "put", 335_544_320, "GB/s", [380.0, 390.0, 400.0])
    assert "390.00 GB/s" in str(row)
    assert "+-  2.6 %" in str(row)
    record = row.record()
    assert (record["median"], record["lowest"], record["highest"]) == (390.0, 380.0, 400.0)
