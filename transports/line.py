"""A channel's Unix socket: small records both ways, and the last words of an end that goes.

The end of a process is known from its sockets at once, without a thread that listens.
"""

from __future__ import annotations

import contextlib
import socket
import struct

_RECORD = struct.Struct("=qq")
"""Two numbers; or, from an end that goes, how it goes and the size of the text that follows."""
_ABORTED, _CLOSED = -1, -2
_MOST_REASON_BYTES = 4096


class PeerGone(Exception):
    """The other end of a line has gone: with its reason, in order (None), or without a word."""

    def __init__(self, reason: str | None, *, was_orderly: bool) -> None:
        super().__init__(reason)
        self.reason, self.was_orderly = reason, was_orderly


class Line:
    """One end of a channel's socket, on which records cross. At most a few are ever under way (a
    message needs a slot), so that sending one never waits."""

    def __init__(self, end: socket.socket, timeout_seconds: float | None) -> None:
        self._socket = end
        end.settimeout(timeout_seconds)

    def send(self, number: int, value: int) -> None:
        """Sends two numbers, the first of which is 0 or more. Raises OSError if the other end has
        gone."""
        self._socket.send(_RECORD.pack(number, value))

    def receive(self, flags: int = 0) -> tuple[int, int]:
        """The next record. Raises PeerGone; TimeoutError when the line's time is up; with
        MSG_DONTWAIT BlockingIOError if there is none."""
        number, value = _RECORD.unpack(self._read(_RECORD.size, flags))
        if number >= 0:
            return number, value
        reason = self._read(value).decode(errors="ignore") if value else None
        raise PeerGone(reason, was_orderly=number == _CLOSED)

    def leave(self, reason: str | None) -> None:
        """Tells the other end that this one goes, in order if `reason` is None, and ends what waits
        on this end. Idempotent, from any thread."""
        kind, text = _CLOSED, b""
        if reason is not None:
            kind, text = _ABORTED, reason.encode()[:_MOST_REASON_BYTES]
        with contextlib.suppress(OSError):
            self._socket.send(_RECORD.pack(kind, len(text)) + text, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, flags: int = 0) -> bytes:
        parts = b""
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts), 0 if parts else flags)
            except (BlockingIOError, TimeoutError):
                raise
            except OSError:
                part = b""
            if not part:
                raise PeerGone(None, was_orderly=False)
            parts += part
        return parts
