"""A CUDA driver simulated on the CPU: what `copy_engine` and `put` ask of streams, events, stream
memory operations, peer memory and NCCL's one-sided calls, with the asynchrony that matters.

Every stream is a thread that works off its queue, so work runs late, streams overtake each other
and a wait holds its stream alone. Ranks are threads of one process; a rank's memory is a memfd that
its peer maps a second time, handed over through the real sockets. Nothing of our own code is
replaced but what calls C: `Driver`, `Nccl` and the mapping of memory.
"""

from __future__ import annotations

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

from ppruntime.transports import copy_engine, meeting, nccl, put
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

    def new_stream(self):
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
    """NCCL's one-sided calls: signal counts that waits consume, one order per communicator end."""

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
                rank=rank, edge=meeting_place, signals=0, waited=0, last=None, address=0
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
        pass

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


class Group:
    """A 2-rank NCCL process group: sends and receives meet in order, on the stream of the caller,
    and neither ends before the other has begun."""

    _lock = threading.Lock()
    _pipes: ClassVar[dict[tuple[int, int], SimpleNamespace]] = {}

    def __init__(self, store, channel):
        with self._lock:
            made = store.add(f"simulated {channel.id}", 1)
            key = int(store.get(f"simulated key {channel.id}")) if made == 2 else id(self)
            if made == 1:
                store.set(f"simulated key {channel.id}", str(key))
                self._pipes[channel.id, key] = SimpleNamespace(
                    sent=queue.SimpleQueue(), taken=queue.SimpleQueue()
                )
            self._pipe = self._pipes[channel.id, key]
            _KEPT.append(self)  # so that no other group gets its id
        self._aborted = threading.Event()

    def send(self, tensors, peer, tag):
        def meet():
            self._pipe.sent.put(tensors[0])
            self._get(self._pipe.taken)

        return SimpleNamespace(wait=lambda: current_stream().do(meet))

    def recv(self, tensors, peer, tag):
        def meet():
            payload = self._get(self._pipe.sent)
            if payload is not None:
                tensors[0].copy_(payload)
                self._pipe.taken.put(True)

        return SimpleNamespace(wait=lambda: current_stream().do(meet))

    def _get(self, pipe):
        while not self._aborted.is_set():
            try:
                return pipe.get(timeout=0.01)
            except queue.Empty:
                continue
        return None

    def abort(self):
        self._aborted.set()

    def shutdown(self):
        pass


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
    monkeypatch.setattr(nccl, "_communicator", lambda store, channel, *_: Group(store, channel))
    for module in (copy_engine, put):
        monkeypatch.setattr(module, "tensor_at", _tensor_at)
    monkeypatch.setattr(copy_engine, "allocate", _allocate)
    monkeypatch.setattr(
        copy_engine, "map_peer", lambda driver, device, fd, num_bytes: _Memory(fd, num_bytes)
    )
    monkeypatch.setattr(put.nccl_api, "load", lambda path=None: Nccl())
    monkeypatch.setattr(meeting, "checked_device", lambda kind, device: device)
