"""Receive buffers of one channel: fixed memory, handed out per micro-batch, typed views into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppruntime.transports.base import ALIGNMENT_BYTES, Boundary, Channel, TransportError


@dataclass(slots=True)
class Slot:
    """One buffer: `buffer` is its bytes (uint8, 256-byte aligned), `views` the boundary's tensors
    in it.

    On a CUDA device `free_event` is passed when the last reader before the latest release is done:
    whoever writes the slot next has its stream wait for it. None before the first release and on
    CPU.
    """

    index: int
    buffer: Tensor
    views: tuple[Tensor, ...]
    free_event: torch.cuda.Event | None = None


def aligned_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """`num_bytes` uninitialised bytes (uint8) that start at a multiple of 256."""
    raw = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[start : start + num_bytes]


def typed_views(boundary: Boundary, buffer: Tensor) -> tuple[Tensor, ...]:
    """The boundary's tensors as views of `buffer` at the boundary's offsets; an empty tensor is
    itself."""
    return tuple(
        buffer[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)
        if spec.num_bytes
        else torch.empty(spec.shape, dtype=spec.dtype, device=buffer.device)
        for spec, offset in zip(boundary.tensors, boundary.offsets, strict=True)
    )


class SlotPool:
    """The `channel.slots` buffers of one channel, used in turn as a ring. The pool never grows.

    A slot belongs to a micro-batch from `reserve` to `release`. `trailer_bytes` more lie behind the
    boundary in each buffer, for a transport's own use. `buffers` are the slots' memory where they
    are to lie in a given place. Not thread-safe: the transport's host thread drives it.
    """

    def __init__(
        self,
        channel: Channel,
        device: torch.device,
        *,
        trailer_bytes: int = 0,
        buffers: Sequence[Tensor] | None = None,
    ) -> None:
        self._channel = channel
        self._on_cuda = device.type == "cuda"
        if buffers is None:
            num_bytes = channel.boundary.slot_bytes + trailer_bytes
            buffers = [aligned_bytes(num_bytes, device) for _ in range(channel.slots)]
        self.slots: tuple[Slot, ...] = tuple(
            Slot(index, buffer, typed_views(channel.boundary, buffer))
            for index, buffer in enumerate(buffers)
        )
        self._owners: list[int | None] = [None] * channel.slots
        self._num_reserved = 0
        self._in_use: dict[int, Slot] = {}

    def reserve(self, micro_batch: int) -> Slot:
        """The slot that is `micro_batch`'s until its release: the one whose turn it is. Raises
        TransportError if it is not released yet, or if the micro-batch has one."""
        index = self._num_reserved % len(self.slots)
        owner = self._owners[index]
        if owner is not None:
            raise TransportError(
                f"{self._channel}: no slot for micro-batch {micro_batch}, slot {index} of"
                f" {len(self.slots)} is next and is micro-batch {owner}'s; release that one first"
                " or open the channel with more slots"
            )
        if micro_batch in self._in_use:
            raise TransportError(f"{self._channel}: micro-batch {micro_batch} has a slot already")
        self._num_reserved += 1
        self._owners[index] = micro_batch
        slot = self._in_use[micro_batch] = self.slots[index]
        return slot

    def slot_of(self, micro_batch: int) -> Slot:
        """The slot reserved for `micro_batch`. Raises TransportError if there is none."""
        slot = self._in_use.get(micro_batch)
        if slot is None:
            raise TransportError(
                f"{self._channel}: micro-batch {micro_batch} has no slot; post it first"
            )
        return slot

    def release(self, micro_batch: int) -> Slot:
        """Frees the slot of `micro_batch` once the current stream's work so far has run, and gives
        it. Raises TransportError if the micro-batch has none."""
        slot = self.slot_of(micro_batch)
        if self._on_cuda:
            # One event per slot, recorded again and again: making one costs more than recording.
            if slot.free_event is None:
                slot.free_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            slot.free_event.record()
        del self._in_use[micro_batch]
        self._owners[slot.index] = None
        return slot
