"""Pages of host memory and lanes of copies: what moving tensors off a device and back is made of.

On CUDA the pages are pinned and each direction has a stream of its own; for tensors that live on
the host all of it is plain copies, done at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.cuda import Event

_ALIGNMENT = 256
"""Bytes on which every piece starts: copies of aligned pieces are the fastest."""


@dataclass(slots=True)
class Page:
    """Host memory of the pool's page size. `last_read` is the copy after which it may be
    written."""

    memory: Tensor
    last_read: Event | None = None


class HostPool:
    """Host memory in pages of one size, shared by everything on this rank that is moved away.

    Pages are allocated when they are first needed and stay for the pool's life: a step like the
    one before allocates nothing. What is moved at once lies back to back, so that less than a page
    of it is waste, however its sizes vary from one micro-batch to the next.
    """

    def __init__(self, device: torch.device, *, page_bytes: int = 32 << 20) -> None:
        assert page_bytes % _ALIGNMENT == 0, f"a page has {page_bytes} bytes"
        self.page_bytes = page_bytes
        self._pinned = device.type == "cuda"
        # The longest free first: its last copy is over, and a new one need not wait for it.
        self._free: deque[Page] = deque()
        self._num_pages = 0
        self._addresses = set[int]()

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, in use or not."""
        return self._num_pages * self.page_bytes

    @property
    def num_bytes_used(self) -> int:
        """Bytes of the pages that hold something."""
        return (self._num_pages - len(self._free)) * self.page_bytes

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is the memory of one of the pages."""
        return storage.data_ptr() in self._addresses

    def take(self, num_bytes: int) -> list[Page]:
        """Pages for so many bytes. The caller owns them until `give`."""
        wanted = -(-num_bytes // self.page_bytes)
        taken = [self._free.popleft() for _ in range(min(wanted, len(self._free)))]
        return taken + [self._new_page() for _ in range(wanted - len(taken))]

    def give(self, pages: Iterable[Page], last_read: Event | None) -> None:
        """Takes pages back. They are written again once `last_read` has come."""
        for page in pages:
            page.last_read = last_read
            self._free.append(page)

    def _new_page(self) -> Page:
        try:
            memory = torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            error.add_note(
                f"the host gave no page of {self.page_bytes} bytes beside the {self.num_bytes} that"
                " hold what is moved off the device; a larger pp.offload_every moves less"
            )
            raise
        self._num_pages += 1
        self._addresses.add(memory.untyped_storage().data_ptr())
        return Page(memory)


def bytes_back_to_back(sizes: Iterable[int]) -> int:
    """What pieces of these sizes take up in pages."""
    return sum(_aligned(size) for size in sizes)


def pieces(memories: Sequence[Tensor], pages: Sequence[Page]) -> Iterator[tuple[Tensor, Tensor]]:
    """(part of a memory, where in the pages it lies) for flat byte tensors, back to back."""
    at = 0
    for memory in memories:
        done, size = 0, memory.numel()
        while done < size:
            page, offset = divmod(at + done, pages[0].memory.numel())
            length = min(size - done, pages[0].memory.numel() - offset)
            yield memory[done : done + length], pages[page].memory[offset : offset + length]
            done += length
        at += _aligned(size)


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as a flat byte tensor, which shares it."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


class Lane:
    """Copies in one direction, one after another, beside the computations."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream | None:
        """The current stream, in whose pool memory taken now lies; None where all is done at
        once."""
        return None if self._stream is None else torch.cuda.current_stream()

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Iterable[Event | None] = ()
    ) -> Event | None:
        """Copies from each pair's first to its second tensor, after what the current stream has
        been given so far and after the events. Gives the event at the end; None: it is done."""
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        for event in {id(e): e for e in after if e is not None}.values():
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record(self._stream)
        return end


def wait_for(event: Event | None, *, owner: torch.cuda.Stream | None = None) -> None:
    """Makes the current stream, not the host, wait; and the stream in whose pool the memory lies
    that is free behind the event, as the allocator gives it to that one's work."""
    if event is None:
        return
    current = torch.cuda.current_stream()
    for stream in (current,) if owner in (None, current) else (current, owner):
        stream.wait_event(event)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
