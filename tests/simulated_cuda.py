"""A CUDA driver simulated on the CPU: what the GPU transports ask of streams, events, stream memory
operations, peer memory and NCCL, with the asynchrony that matters, hangs included.

Every stream is a thread that works off its queue, so work runs late, streams overtake each other
and a wait holds its stream alone. Ranks are threads of one process; a rank's memory is a memfd that
its peer maps a second time, handed over through the real sockets. Nothing of our own code is
replaced but what calls C: `Driver`, `Nccl` and the mapping of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import queue
import random
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import torch

from ppruntime.transports import copy_engine, meeting, nccl, nccl_library, put, selftest
from ppruntime.transports import driver as driver_module

_HERE = threading.local()
_LAG = random.Random(5)


class Stream:
    """Works off closures in order, each a little late. Handles count from 1."""

    by_handle: ClassVar[dict[int, Stream]] = {}
    _handles = itertools.count(1)

    def __init__(self, device=None, **_):
        self.cuda_stream = next(self._handles)
        self.by_handle[self.cuda_stream] = self
        self.num_done = 0
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            action = self._queue.get()
            if _LAG.random() < 0.1:
                time.sleep(_LAG.uniform(0, 0.002))
            action()

    def do(self, action):
        self._queue.put(action)

    def wait_event(self, event):
        recorded = event.recorded
        self.do(recorded.wait)

    def wait_stream(self, stream):
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self):
        event = Event()
        event.record(self)
        event.recorded.wait()


class Event:
    def __init__(self, **_):
        self.recorded = threading.Event()
        self.recorded.set()

    def record(self, stream=None):
        self.recorded = recorded = threading.Event()
        self.time = None

        def mark():
            self.time = time.perf_counter()
            recorded.set()

        (stream or current_stream()).do(mark)

    def query(self):
        return self.recorded.is_set()

    def synchronize(self):
        self.recorded.wait()

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


def current_stream(device=None):
    if not hasattr(_HERE, "stream"):
        _HERE.stream = Stream()
    return _HERE.stream


@contextmanager
def use_stream(stream):
    before = current_stream()
    _HERE.stream = stream
    try:
        yield
    finally:
        _HERE.stream = before


class Driver(driver_module.Driver):
    """The calls of `Driver`, on simulated streams and this process's memory."""

    def __init__(self, device):
        pass

    def enter_thread(self):
        pass

    def new_stream(self, *, high_priority=True):
        return Stream().cuda_stream

    def destroy_stream(self, stream):
        pass

    def copy(self, stream, destination, source, num_bytes):
        Stream.by_handle[stream].do(lambda: ctypes.memmove(destination, source, num_bytes))

    def write_word(self, stream, address, value):
        word = ctypes.c_uint32.from_address(address)
        Stream.by_handle[stream].do(lambda: setattr(word, "value", value & 0xFFFFFFFF))

    def wait_word(self, stream, address, value):
        word = ctypes.c_uint32.from_address(address)

        def wait():
            while (word.value - value) % (1 << 32) >= 1 << 31:
                time.sleep(1e-4)

        Stream.by_handle[stream].do(wait)


class _Memory:
    """A file in memory, mapped; the descriptor is what a peer maps again."""

    def __init__(self, descriptor, num_bytes):
        self._map = mmap.mmap(descriptor, num_bytes)
        self._view = (ctypes.c_ubyte * num_bytes).from_buffer(self._map)
        self.address, self.num_bytes = ctypes.addressof(self._view), num_bytes
        _KEPT.append(self)  # a stream may wait on it for ever

    def free(self):
        pass  # the test's tensors may still look at it


def _allocate(driver, device, num_bytes):
    descriptor = os.memfd_create("device memory")
    num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    os.truncate(descriptor, num_bytes)
    return _Memory(descriptor, num_bytes), os.dup(descriptor)


def _tensor_at(address, num_bytes, device):
    buffer = (ctypes.c_ubyte * max(1, num_bytes)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8)[:num_bytes]


class Nccl:
    """NCCL: signal counts that waits consume; sends and receives that meet in order and of which
    none ends before the other has begun; one order per communicator end.

    As the real one: an abort ends sends and receives, never a wait for a signal, and hangs while a
    kernel of a communicator outside its group runs (here: `abort_hangs`); a destroy waits for the
    other end's, for ever.
    """

    abort_hangs = False

    version, where = 23203, "simulated"
    _lock = threading.Lock()
    _ids = itertools.count(1)
    _meetings: ClassVar[dict[int, dict]] = {}
    _comms: ClassVar[dict[int, SimpleNamespace]] = {}

    def unique_id(self):
        return next(self._ids).to_bytes(128, "little")

    def init(self, unique_id, rank, config):
        edge = int.from_bytes(unique_id, "little")
        with self._lock:
            meeting_place = self._meetings.setdefault(
                edge, {"ready": threading.Barrier(2), "ends": {}}
            )
            end = SimpleNamespace(
                rank=rank,
                edge=meeting_place,
                signals=0,
                waited=0,
                last=None,
                address=0,
                inbox=queue.SimpleQueue(),
                taken=queue.SimpleQueue(),
                aborted=threading.Event(),
                destroyed=threading.Event(),
            )
            meeting_place["ends"][rank] = end
            comm = edge * 2 + rank
            self._comms[comm] = end
        meeting_place["ready"].wait(10)
        return comm

    def alloc(self, num_bytes):
        self._buffer = (ctypes.c_ubyte * num_bytes)()
        _KEPT.append(self._buffer)
        return ctypes.addressof(self._buffer)

    def register(self, comm, address, num_bytes):
        self._comms[comm].address = address
        self._comms[comm].edge["ready"].wait(10)
        return comm

    def free(self, address):
        pass

    def deregister(self, comm, window):
        pass

    def destroy(self, comm):
        self._comms[comm].destroyed.set()
        self._peer(comm).destroyed.wait()

    def abort(self, comms):
        if self.abort_hangs:
            threading.Event().wait()
        for comm in comms:
            self._comms[comm].aborted.set()

    @contextmanager
    def group(self):
        _HERE.group = []
        yield
        transfers, _HERE.group = _HERE.group, None
        ((comm, stream),) = {(comm, stream) for comm, stream, _ in transfers}
        self._do(comm, stream, lambda: [move() for *_, move in transfers])

    def send(self, source, num_bytes, peer, comm, stream):
        end, other = self._comms[comm], self._peer(comm)

        def move():
            other.inbox.put(ctypes.string_at(source, num_bytes))
            self._next(end.taken, end)

        self._transfer(comm, stream, move)

    def recv(self, target, num_bytes, peer, comm, stream):
        end, other = self._comms[comm], self._peer(comm)

        def move():
            payload = self._next(end.inbox, end)
            if payload is not None:
                assert len(payload) == num_bytes, "send and receive are of different sizes"
                ctypes.memmove(target, payload, num_bytes)
                other.taken.put(True)

        self._transfer(comm, stream, move)

    def _transfer(self, comm, stream, move):
        if getattr(_HERE, "group", None) is not None:
            _HERE.group.append((comm, stream, move))
        else:
            self._do(comm, stream, move)

    @staticmethod
    def _next(waiting, end):
        """What comes next; None after an abort."""
        while not end.aborted.is_set():
            with contextlib.suppress(queue.Empty):
                return waiting.get(timeout=0.01)
        return None

    def _peer(self, comm):
        end = self._comms[comm]
        return end.edge["ends"][1 - end.rank]

    def _do(self, comm, stream, action):
        """Behind all earlier work on this communicator, whatever its stream, as NCCL has it."""
        end = self._comms[comm]
        before, done = end.last, threading.Event()
        end.last = done

        def run():
            if before is not None:
                before.wait()
            action()
            done.set()

        Stream.by_handle[stream].do(run)

    def _raise_count(self, comm):
        with self._lock:
            self._peer(comm).signals += 1

    def put_signal(self, source, num_bytes, peer, window, offset, comm, stream):
        def move():
            ctypes.memmove(self._peer(comm).address + offset, source, num_bytes)
            self._raise_count(comm)

        self._do(comm, stream, move)

    def signal(self, peer, comm, stream):
        self._do(comm, stream, lambda: self._raise_count(comm))

    def wait_signal(self, peer, num_signals, comm, stream):
        end = self._comms[comm]
        end.waited += num_signals
        wanted = end.waited

        def wait():
            while end.signals < wanted:
                time.sleep(1e-4)

        self._do(comm, stream, wait)


_KEPT: list = []


def install(monkeypatch):
    """Replaces CUDA for the time of a test. The device of a rank is `cpu:RANK`."""
    cuda = torch.cuda
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "current_stream": current_stream,
        "stream": use_stream,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "is_available": lambda: True,
        "ExternalStream": lambda handle, device=None: Stream.by_handle[handle],
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"gpu{device.index}"),
    }.items():
        monkeypatch.setattr(cuda, name, value)
    for module in (copy_engine, put, nccl):
        monkeypatch.setattr(module, "Driver", Driver)
    monkeypatch.setattr(nccl, "unavailable_reason", lambda: None)
    for module in (copy_engine, put):
        monkeypatch.setattr(module, "tensor_at", _tensor_at)
    monkeypatch.setattr(copy_engine, "allocate", _allocate)
    monkeypatch.setattr(
        copy_engine, "map_peer", lambda driver, device, fd, num_bytes: _Memory(fd, num_bytes)
    )
    monkeypatch.setattr(nccl_library, "load", lambda need, path=None: Nccl())
    monkeypatch.setattr(meeting, "checked_device", lambda kind, device: device)
    # Streams are threads here, and a busy machine's may sleep for long.
    monkeypatch.setattr(selftest, "ALIAS_SECONDS", 20.0)
