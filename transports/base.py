"""What every way of moving a boundary between two stages promises: the `Transport` protocol.

A transport knows tensors, peers and slots; it knows no op, no stage's content and no schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256


class TransportError(RuntimeError):
    """A transfer failed or cannot work: names channel, micro-batch and peer, and the remedy."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a boundary: its name, static shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        num_elements = 1
        for extent in self.shape:
            num_elements *= extent
        return num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses between two stages, one way, for one micro-batch: tensors in a fixed order."""

    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Payload bytes, without alignment."""
        return sum(spec.num_bytes for spec in self.tensors)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor in a slot, each 256-byte aligned."""
        offsets, end = [], 0
        for spec in self.tensors:
            offsets.append(end)
            end += -(-spec.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tuple(offsets)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, alignment included."""
        return sum(-(-s.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for s in self.tensors)

    @property
    def digest(self) -> str:
        """Equal on both ends if and only if names, shapes, dtypes and order are."""
        text = ";".join(f"{s.name}:{s.dtype}:{','.join(map(str, s.shape))}" for s in self.tensors)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Channel:
    """One boundary in one direction between two neighbouring stages.

    `kind` is "forward" (activations) or "backward" (their gradients). `slots` receive buffers lie
    at the destination and go round as a ring: message n has slot n mod `slots`. Two channels
    between the same ranks (V and loop placements) differ in their stages.
    """

    id: int
    kind: Literal["forward", "backward"]
    src_rank: int
    dst_rank: int
    src_stage: int
    dst_stage: int
    boundary: Boundary
    slots: int

    def __str__(self) -> str:
        return (
            f"{self.kind} channel {self.id} (stage {self.src_stage} on rank {self.src_rank}"
            f" -> stage {self.dst_stage} on rank {self.dst_rank})"
        )


@runtime_checkable
class HoldsDeviceMemory(Protocol):
    """A transport whose buffers are not all of torch's allocator."""

    @property
    def outside_bytes(self) -> int:
        """Bytes of this rank's GPU in buffers that the allocator does not count."""


class Transport(Protocol):
    """Moves boundaries along the channels it was opened with. One host thread drives it.

    Every transport guarantees:
    1. per channel in order, exactly once, the whole boundary or nothing visible;
    2. data read after `take` (on the stream then current) is the sender's as of `send` (likewise);
    3. `post`, `send` and `release` return without waiting for the peer; on devices `take` does too
       (the current stream waits), on the CPU `take` waits on the host, at most the time limit;
    4. no slot is overwritten between `take` and `release`;
    5. a wrong shape, dtype, channel or call order raises on the caller before anything moves;
    6. a lost or silent peer becomes a TransportError within the time limit, never a hang;
    7. channels are independent: a stuck one does not hold another.
    """

    def post(self, channel: Channel, micro_batch: int) -> None:
        """At the destination: micro-batch is expected next on this channel, a slot is reserved for
        it. Two-sided transports start their receive here; to others it is bookkeeping. Raises
        TransportError when the slot whose turn it is has not been released."""

    def send(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """At the source: sends the boundary. The transport holds the tensors until they have left;
        the caller drops its own references and must not write to them."""

    def take(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        """At the destination: the boundary's tensors, views of the slot, valid until `release`."""

    def release(self, channel: Channel, micro_batch: int) -> None:
        """At the destination: the slot's last reader has been issued; it may be overwritten."""

    def step_end(self) -> None:
        """Waits until all that was sent has left and all that was taken is there; checks that
        nothing is posted, taken or pending. When it returns the step has had its data."""

    def abort(self, reason: str) -> None:
        """Ends all transfers; later calls raise TransportError with `reason`. Idempotent, from any
        thread."""

    def close(self) -> None:
        """Gives back buffers and groups. Idempotent."""
