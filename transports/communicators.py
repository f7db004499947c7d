"""The NCCL communicators of one rank: two ranks each, one per channel, ended together.

One per channel, because NCCL runs everything on a communicator in the order in which the host
issued it, whatever the streams: a channel that waits would hold every other one on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from torch._C._distributed_c10d import Store

from ppruntime.transports import meeting
from ppruntime.transports.background import Background
from ppruntime.transports.base import Channel, TransportError
from ppruntime.transports.nccl_api import Config, Nccl, make_config

SRC: Final = 0
DST: Final = 1
"""Ranks within a channel's communicator."""
_ABORT_SECONDS = 3.0  # NCCL raises the flags that end its kernels at once; the rest is clearing up
_LOCK_SECONDS = 1.0


class Communicators:
    """Makes communicators over `store`, and ends them from any thread."""

    def __init__(self, nccl: Nccl, store: Store, timeout_seconds: float) -> None:
        self.nccl, self._store, self._timeout_seconds = nccl, store, timeout_seconds
        self._comms: list[int] = []
        self._names: list[bytes] = []  # NCCL keeps the pointers
        self._lock = threading.Lock()
        self._ended = False
        self._abort: Background | None = None

    def open(
        self, channel: Channel, *, is_source: bool, configure: Callable[[Config], None]
    ) -> int:
        """The channel's communicator, on the current device. Blocks until the other end calls this:
        all ranks open their channels in one order. `configure` changes NCCL's defaults. Raises
        TransportError if the source does not come within the time limit."""
        key = f"nccl id of channel {channel.id}"
        if is_source:
            self._store.set(key, self.nccl.unique_id().hex())
        name = f"ppruntime channel {channel.id}".encode()
        self._names.append(name)
        config = make_config(self.nccl.version, name)
        configure(config)
        if not meeting.await_keys(self._store, [key], time.monotonic() + self._timeout_seconds):
            raise TransportError(
                f"rank {channel.src_rank} did not come to open the {channel} within"
                f" {self._timeout_seconds:g} s"
            )
        unique_id = bytes.fromhex(self._store.get(key).decode())
        comm = self.nccl.init(unique_id, SRC if is_source else DST, config)
        self._comms.append(comm)
        return comm

    def enqueue(self, call: Callable[[], None]) -> None:
        """Makes NCCL calls that enqueue work, unless an abort has taken the communicators away.
        Raises TransportError then."""
        with self._lock:
            if self._ended:
                raise TransportError("the communicators were ended by an abort")
            call()

    def destroy(self) -> None:
        """Gives all back, one after the other; on one host each waits for its other end."""
        comms = self._take_all()
        for comm in comms:
            self.nccl.destroy(comm)

    def abort(self) -> bool:
        """Ends kernels that wait for a peer and gives all back, in a thread, as it may hang.

        Call it again and again: False once it has had its time, whatever came of it.
        """
        if self._abort is None:
            comms = self._take_all()
            self._abort = Background("transport abort", lambda: self.nccl.abort(comms))
        return time.monotonic() - self._abort.started_at < _ABORT_SECONDS

    def wait_aborted(self) -> None:
        """Aborts and returns when it is done. For ever, if other work hangs on the GPU."""
        self.abort()
        assert self._abort is not None
        while not self._abort.wait(_ABORT_SECONDS):
            pass
        if self._abort.error is not None:
            raise self._abort.error

    def _take_all(self) -> list[int]:
        # A host thread that hangs in a call is ended by the abort: do not wait for it for long.
        locked = self._lock.acquire(timeout=_LOCK_SECONDS)
        self._ended = True
        comms, self._comms = self._comms, []
        if locked:
            self._lock.release()
        return comms
