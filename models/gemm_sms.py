"""How many multiprocessors products may occupy just now, for all layers of a process together.

Without torch. Layers hold the number's place, not the number: who enqueues work changes it between
two launches, as where two streams share a GPU. A backward runs on a thread of autograd's, so the
place is the process's, not a thread's.
"""

from __future__ import annotations


class GemmSms:
    """`now` is read at every launch; None: all multiprocessors. One host thread at a time launches
    or writes it."""

    __slots__ = ("now",)

    def __init__(self, now: int | None = None) -> None:
        """Raises ValueError below 1."""
        if now is not None and now < 1:
            raise ValueError(f"gemm_sms = {now}; use at least 1, or None for all")
        self.now = now

    def __repr__(self) -> str:
        return f"GemmSms({self.now})"
