"""Saved activations that leave the device between a micro-batch's forward and its backward.

What autograd saves in a forward is collected by hooks, each piece of memory once, and moved as a
whole: OFFLOAD starts it, OFFLOADED is where computations wait for it and the device's memory is
free, RELOAD starts the way back, and the backward waits for that alone. When each comes is in the
order (`schedules.passes.add_offload`); here is how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.cuda import Event

from ppruntime.host_memory import (
    HostPool,
    Lane,
    Page,
    as_bytes,
    bytes_back_to_back,
    pieces,
    wait_for,
)
from ppruntime.models.quantize import power_of_two_ceiling

_SMALL_SHARE = 1 / 1024
"""A piece of memory below this share of the micro-batch's largest stays: its copy would cost more
than its place."""
_GROUP = 128
_E4M3_MAX = 448.0


class Memory:
    """One piece of memory that saved tensors lie in; `storage` is None while it is away."""

    __slots__ = ("dtype", "num_bytes", "storage")

    def __init__(self, tensor: Tensor) -> None:
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.num_bytes = self.storage.nbytes()
        self.dtype: torch.dtype | None = tensor.dtype
        """Of all tensors in it; None: they differ."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor: where it lies in its memory."""

    memory: Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        storage = self.memory.storage
        assert storage is not None, "a backward reads saved tensors that are still away"
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Away(Protocol):
    """The memory of one micro-batch on its way out and back. The calls come in this order."""

    def leave(self) -> None:
        """The current stream waits until it has left; its memory is free."""

    def come_back(self) -> None:
        """Starts the way back, into memory of the current stream's pool."""

    def arrive(self) -> None:
        """The current stream waits until it is back."""


class Mover(Protocol):
    """Where memory goes to."""

    def start(self, memories: Sequence[Memory]) -> Away:
        """Starts moving what it can; the rest stays."""


class ActivationOffload:
    """The micro-batches of one rank's stages that are moved; keys are (stage, micro-batch).

    `standing` gives, by stage, the tensors that live as long as the stage: they stay.
    """

    def __init__(
        self, mover: Mover, standing: Mapping[int, Callable[[], Iterable[Tensor]]]
    ) -> None:
        self._mover, self._standing = mover, standing
        self._collected: dict[tuple[int, int], list[Memory]] = {}
        self._away: dict[tuple[int, int], Away] = {}

    @property
    def num_held(self) -> int:
        """Micro-batches collected, away or back, and not yet taken by their backward."""
        return len(self._collected) + len(self._away)

    @contextmanager
    def collecting(self, key: tuple[int, int], staying: Iterable[Tensor]) -> Iterator[None]:
        """Around a forward: what autograd saves in it will move.

        `staying` are tensors that others hold as well, such as received boundaries: moving them
        would free nothing.
        """
        found: dict[int, Memory] = {}

        def pack(tensor: Tensor) -> _Saved | Tensor:
            # Without its node: a graph that holds its own output through Python is never freed.
            tensor = tensor.detach()
            if not _is_plain(tensor):
                return tensor
            # A memory that is remembered lives, so that no other one gets its number.
            memory = found.setdefault(_number(tensor), Memory(tensor))
            if memory.dtype is not tensor.dtype:
                memory.dtype = None
            return _Saved(
                memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        def unpack(saved: _Saved | Tensor) -> Tensor:
            return saved if isinstance(saved, Tensor) else saved.tensor()

        with saved_tensors_hooks(pack, unpack):
            yield
        # Asked now: parameters that are gathered were not when the forward began.
        for tensor in (*staying, *self._standing[key[0]]()):
            if _is_plain(tensor):
                found.pop(_number(tensor), None)
        least = max((m.num_bytes for m in found.values()), default=0) * _SMALL_SHARE
        self._collected[key] = [m for m in found.values() if m.num_bytes >= least]
        # Every saved tensor keeps both hooks: the last one would keep all memory for the backward.
        found.clear()

    def offload(self, key: tuple[int, int]) -> None:
        self._away[key] = self._mover.start(self._collected.pop(key))

    def offloaded(self, key: tuple[int, int]) -> None:
        self._away[key].leave()

    def reload(self, key: tuple[int, int]) -> None:
        self._away[key].come_back()

    def arrive(self, key: tuple[int, int]) -> None:
        """Before the backward; the micro-batch is its alone from then on."""
        self._away.pop(key).arrive()


class ToHost:
    """Moves memory to pages of the host, both directions at once. Bitwise."""

    def __init__(self, device: torch.device, pool: HostPool) -> None:
        self.device, self.pool = device, pool
        self.outwards, self.homewards = Lane(device), Lane(device)

    def start(self, memories: Sequence[Memory]) -> Away:
        return _OnHost(self, memories)


class _OnHost:
    def __init__(self, route: ToHost, memories: Sequence[Memory]) -> None:
        self._route, self._memories = route, memories
        self._pages: list[Page] = route.pool.take(bytes_back_to_back(m.num_bytes for m in memories))
        self._back: Event | None = None
        sources = [as_bytes(_storage(memory)) for memory in memories]
        self._gone = route.outwards.copy(
            pieces(sources, self._pages), after=[page.last_read for page in self._pages]
        )

    def leave(self) -> None:
        wait_for(self._gone)
        for memory in self._memories:
            memory.storage = None

    def come_back(self) -> None:
        device = self._route.device
        targets = [
            torch.empty(memory.num_bytes, dtype=torch.uint8, device=device)
            for memory in self._memories
        ]
        pairs = ((page, target) for target, page in pieces(targets, self._pages))
        self._back = self._route.homewards.copy(pairs, after=[self._gone])
        self._route.pool.give(self._pages, self._back)
        for memory, target in zip(self._memories, targets, strict=True):
            memory.storage = target.untyped_storage()

    def arrive(self) -> None:
        wait_for(self._back)


class ToFp8:
    """Keeps memory on the device as FP8 (E4M3), in groups of 128 values with a power of two as
    scale: about half of bf16's bytes. Changes numerics.

    Only memory whose tensors are all of `dtype`, the compute dtype, is moved: what a model keeps
    wider than that is meant to be exact. Groups go along the memory: along the channels of a
    contiguous tensor with a multiple of 128 of them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def start(self, memories: Sequence[Memory]) -> Away:
        return _AsFp8([memory for memory in memories if memory.dtype is self._dtype])


class _AsFp8:
    """Both ways piece by piece: no more than one lies here in both forms."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = memories
        self._kept: list[_Narrow | None] = []
        for memory in memories:
            self._kept.append(_narrowed(_values(memory)))
            memory.storage = None  # nothing reads it before it is back

    def leave(self) -> None:
        """It has: the copies are the current stream's own work."""

    def come_back(self) -> None:
        for place, memory in enumerate(self._memories):
            memory.storage = _widened(self._kept[place]).untyped_storage()
            self._kept[place] = None
        self._kept = []

    def arrive(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Narrow:
    """Values as FP8 [N, 128] with scales [N] fp32, and the last few, which fill no group."""

    data: Tensor
    scale: Tensor
    rest: Tensor


def _narrowed(values: Tensor) -> _Narrow:
    num_grouped = values.numel() // _GROUP * _GROUP
    groups, rest = values[:num_grouped].view(-1, _GROUP), values[num_grouped:].clone()
    if groups.is_cuda:
        from ppruntime.models.kernels.quantize import quantize_rows

        data, scale = quantize_rows(groups, power_of_two=True)
        return _Narrow(data, scale.squeeze(1), rest)
    largest = groups.abs().amax(1).float().clamp_min(1e-10)
    scale = power_of_two_ceiling(largest * (1 / _E4M3_MAX))
    scaled = (groups.float() / scale.unsqueeze(1)).clamp(-_E4M3_MAX, _E4M3_MAX)
    return _Narrow(scaled.to(torch.float8_e4m3fn), scale, rest)


def _widened(kept: _Narrow | None) -> Tensor:
    assert kept is not None, "it is back already"
    num_grouped = kept.data.numel()
    values = kept.rest.new_empty(num_grouped + kept.rest.numel())
    values[num_grouped:] = kept.rest
    # Both factors and the product are exact in bf16: three bits of mantissa and a power of two.
    groups = values[:num_grouped].view(-1, _GROUP).copy_(kept.data)
    groups.mul_(kept.scale.to(values.dtype).unsqueeze(1))
    return values


def _values(memory: Memory) -> Tensor:
    assert memory.dtype is not None
    storage = _storage(memory)
    empty = torch.empty(0, dtype=memory.dtype, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes() // memory.dtype.itemsize,), (1,))


def _storage(memory: Memory) -> torch.UntypedStorage:
    assert memory.storage is not None, "it is away already"
    return memory.storage


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than a view of a piece of memory."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.untyped_storage().nbytes() > 0
    )


def _number(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
