"""What gloo gives to `p2p.py`: connections of two ranks, and links that tell of a peer's end.

The facts about gloo behind both are at the top of `p2p.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, ProcessGroupGloo, Store

NOTICE_SECONDS = 1.0
"""How long a rank that ends waits for a peer to take the notice, and how long a rank whose
connection broke waits to hear why."""

_NOTICE_BYTES = 2048
"""Size of the one message that ever crosses a link: blank for an orderly close, else the reason."""
_FOR_EVER = timedelta(days=3650)
_AT_ONCE = timedelta(milliseconds=1)
_TAG, _UNUSED_TAG = 0, 1


class Connection:
    """The two ranks' sockets of one channel or link."""

    def __init__(self, store: Store, *, is_first: bool, timeout_seconds: float) -> None:
        """Meets the other end, which says the reverse of `is_first`, by a store of their own.
        Raises RuntimeError if it does not come within the time limit."""
        # Not by new_group: this needs no default group and involves the two ranks alone.
        rank, self._peer = (0, 1) if is_first else (1, 0)
        limit = timedelta(seconds=timeout_seconds)
        # torch's stubs lack the two methods that the group has.
        self._group = cast(ProcessGroup, ProcessGroupGloo(store, rank, 2, limit))

    def send(self, message: Tensor, wait: timedelta = _FOR_EVER) -> None:
        """Waits until `message` has left. Raises RuntimeError if the connection is closed or
        lost."""
        self._group.send([message], self._peer, _TAG).wait(wait)

    def receive(self, message: Tensor) -> None:
        """Waits until `message` is filled. Raises RuntimeError if the connection is closed or
        lost."""
        self._group.recv([message], self._peer, _TAG).wait(_FOR_EVER)

    def close(self) -> None:
        """Makes both ends' waits raise, except that of a transfer that is under way. Idempotent."""
        with contextlib.suppress(RuntimeError):
            # gloo closes a connection when a wait on it times out.
            self._group.recv([torch.empty(1)], self._peer, _UNUSED_TAG).wait(_AT_ONCE)


class Link:
    """A connection to one peer on which nothing comes but the news that the peer has ended."""

    def __init__(self, peer: int, connection: Connection, end: Callable[[str], None]) -> None:
        self.peer = peer
        self.connection = connection
        self.news_came = threading.Event()
        self.peer_closed = False
        self._end = end
        self.thread = threading.Thread(target=self._watch, name=f"link to rank {peer}", daemon=True)
        self.thread.start()

    def notify(self, reason: str) -> None:
        """Tells the peer that this rank has ended, in vain if it is gone."""
        notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8)
        text = reason.encode()[:_NOTICE_BYTES]
        notice[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            self.connection.send(notice, timedelta(seconds=NOTICE_SECONDS))

    def _watch(self) -> None:
        notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8)
        try:
            self.connection.receive(notice)
            reason = bytes(notice.tolist()).rstrip(b"\0").decode(errors="ignore")
        except RuntimeError:
            reason = f"rank {self.peer} is lost, its process or its host has ended"
        if reason:
            self._end(reason)  # without effect if it was this rank that ended
        self.peer_closed = not reason
        self.news_came.set()
