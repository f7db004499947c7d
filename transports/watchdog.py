"""Finds transfers that do not finish: the device would wait for ever, so a host thread watches.

A transfer's clock runs from the moment the device really waits for it (its `begun` event is past),
not from the host's call, which may be seconds earlier. A second thread listens for other ranks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ppruntime.transports.driver import Driver, is_past
from ppruntime.transports.lives import Life

POLL_SECONDS = 0.05
LISTEN_SECONDS = 0.5
ANNOUNCE_SECONDS = 2.0
ABORT_KEY: Final = "abort"
"""In the store that a kind is opened with: why a rank gave up, be it while it opened or later."""
_CLOSED_KEY: Final = "closed"


@dataclass(slots=True, eq=False)
class Pending:
    """One transfer as the device sees it. `holds` are the tensors that it reads; they are let go
    once `done` is past, and not before: the allocator must not hand them out again earlier."""

    text: str
    peer: int
    begun: torch.cuda.Event
    done: torch.cuda.Event
    is_send: bool
    holds: tuple[Tensor, ...] = ()
    waits_since: float | None = None


@dataclass(slots=True)
class PendingList:
    """The transfers not known to be done, oldest first. Any thread may call it."""

    _entries: list[Pending] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, pending: Pending) -> None:
        with self._lock:
            self._entries.append(pending)

    def prune(self, now: float) -> tuple[Pending, ...]:
        """Lets go of what is done, starts the clock of what has begun; gives what is left."""
        with self._lock:
            self._entries = [p for p in self._entries if not is_past(p.done)]
            for pending in self._entries:
                if pending.waits_since is None and is_past(pending.begun):
                    pending.waits_since = now
            return tuple(self._entries)


class Watchdog:
    """Calls `expire(reason)` when a transfer waits longer than `timeout_seconds`, when another rank
    announced an abort through `store`, or when one of `lives` (peers on this host, by rank) ended.

    `tick()` is called at every poll, for what an abort repeats.
    """

    def __init__(
        self,
        pending: PendingList,
        driver: Driver,
        store: Store,
        *,
        rank: int,
        timeout_seconds: float,
        lives: Mapping[int, Life],
        expire: Callable[[str], None],
        tick: Callable[[Sequence[Pending]], None],
    ) -> None:
        self._pending, self._driver, self._store, self._rank = pending, driver, store, rank
        self._timeout_seconds, self._expire, self._tick = timeout_seconds, expire, tick
        self._lives = dict(lives)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="transport watchdog", daemon=True),
            threading.Thread(target=self._listen, name="transport listener", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def announce(self, reason: str) -> None:
        """Tells all ranks why this one gave up; returns after 2 s even if the store does not. If it
        is gone, the others notice that themselves and give up too."""

        def tell() -> None:
            try:
                # The first reason stays: who hears of it gives up too, and has no other.
                self._store.compare_set(ABORT_KEY, "", f"rank {self._rank}: {reason}")
            except Exception as error:
                print(f"rank {self._rank} could not announce its abort: {error}", file=sys.stderr)

        thread = threading.Thread(target=tell, name="transport abort", daemon=True)
        thread.start()
        thread.join(ANNOUNCE_SECONDS)

    def close(self) -> None:
        """Ends both threads. Idempotent; callable from one of them."""
        if not self._stop.is_set():
            with contextlib.suppress(Exception):  # without the store nobody is left to be told
                self._store.set(f"{_CLOSED_KEY} {self._rank}", "")
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(ANNOUNCE_SECONDS)

    def _watch(self) -> None:
        self._driver.enter_thread()
        while not self._stop.wait(POLL_SECONDS):
            try:
                left = self._pending.prune(time.monotonic())
                self._tick(left)
            except RuntimeError as error:  # a CUDA error that some kernel left behind
                self._expire(f"the GPU reports an error: {error}")
                return
            late = overdue(left, time.monotonic(), self._timeout_seconds)
            if late is not None:
                self._expire(f"waited {self._timeout_seconds:g} s for {late.text}")

    def _listen(self) -> None:
        while not self._stop.wait(LISTEN_SECONDS):
            try:
                if self._store.check([ABORT_KEY]):
                    self._expire(self._store.get(ABORT_KEY).decode())
                    return
                self._look_for_the_dead()
            except Exception as error:
                if not self._stop.is_set():
                    self._expire(
                        f"the store by which the ranks hear of each other is gone: {error}"
                    )
                return

    def _look_for_the_dead(self) -> None:
        for rank in [r for r, life in self._lives.items() if life.has_ended]:
            del self._lives[rank]
            if self._store.check([f"{_CLOSED_KEY} {rank}"]):
                continue  # it had closed its ends: whatever it owed has been sent
            waiting = [p.text for p in self._pending.prune(time.monotonic()) if p.peer == rank]
            what = f"; it leaves behind {waiting[0]}" if waiting else ""
            self._expire(f"rank {rank} is lost, its process has ended{what}")


def overdue(pending: Sequence[Pending], now: float, timeout_seconds: float) -> Pending | None:
    """The transfer that has waited longest beyond the limit, or None."""
    late = [
        p for p in pending if p.waits_since is not None and now - p.waits_since > timeout_seconds
    ]
    return min(late, key=lambda p: p.waits_since or 0.0, default=None)
