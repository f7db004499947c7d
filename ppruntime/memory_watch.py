"""Counts live bytes around every op of one step, for `memory_record`.

On CUDA the allocator counts. On a CPU nobody does: there every operation of torch is looked at, and
every piece of memory it makes is followed until it dies. That slows the step down.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppruntime.ledger import UPDATE
from ppruntime.memory_record import OpMemory


class Counter(Protocol):
    """Live bytes of one device. On while it is entered."""

    def begin(self) -> None:
        """A span begins, whose most is asked for."""

    def read(self) -> tuple[int, int, int | None]:
        """Live bytes now, the most since `begin`, and what the allocator holds."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


class MemoryWatch:
    """What one step held, op by op. Enter it around the step, hand it to the executor."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._found: list[OpMemory] = []

    @property
    def ops(self) -> tuple[OpMemory, ...]:
        """In the order they ran, `UPDATE` at the end."""
        return tuple(self._found)

    @property
    def peak_bytes(self) -> int:
        """The most of all ops."""
        return max((op.peak_bytes for op in self._found), default=0)

    @property
    def reserved_bytes(self) -> int:
        """The most that the allocator held behind an op; 0 where there is none."""
        return max((op.reserved_bytes or 0 for op in self._found), default=0)

    def watched(
        self, program: Iterable[tuple[str, Callable[[], None]]]
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """The same program, each op watched."""
        for text, act in program:
            yield text, partial(self._run, text, act)

    def _run(self, text: str, act: Callable[[], None]) -> None:
        self._counter.begin()
        act()
        self._note(text)
        self._counter.begin()  # what comes behind the last op is the update's

    def _note(self, text: str) -> None:
        live, peak, reserved = self._counter.read()
        self._found.append(OpMemory(text, live, peak, reserved))

    def __enter__(self) -> MemoryWatch:
        self._counter.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._note(UPDATE)
        finally:
            self._counter.__exit__(kind, error, trace)


class DeviceCounter:
    """CUDA's allocator, and `other_bytes` that are there throughout. `begin` resets its peak:
    whoever wants the step's asks `MemoryWatch`."""

    def __init__(self, device: torch.device, *, other_bytes: int = 0) -> None:
        self._device, self._other_bytes = device, other_bytes

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> tuple[int, int, int | None]:
        stats = torch.cuda.memory_stats(self._device)
        return (
            stats["allocated_bytes.all.current"] + self._other_bytes,
            stats["allocated_bytes.all.peak"] + self._other_bytes,
            stats["reserved_bytes.all.current"] + self._other_bytes,
        )

    def __enter__(self) -> DeviceCounter:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


_SMALL_SHARE = 1 / 256
"""Of the peak: fewer than 256 pieces of memory can be larger at a time."""


class TensorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every piece of memory that torch's operations make on this thread while it is on, from then
    until it dies, and those of `standing`. `other_bytes` are there throughout; what `is_elsewhere`
    stands for another memory, such as a host's beside a device, and does not count.

    What changes its size in place (FSDP's gathered weights, masters that leave) counts with its new
    size from the next new peak on if it is of `standing` or large, else from the end of the span.
    """

    def __init__(
        self,
        standing: Iterable[Tensor],
        *,
        other_bytes: int = 0,
        is_elsewhere: Callable[[torch.UntypedStorage], bool] = lambda _: False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._followed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._large = set[int]()
        """What was made and is more than a small share of the peak: so few that all can be looked
        at wherever there may be a new one."""
        self._is_elsewhere = is_elsewhere
        self._live = self._peak = other_bytes
        for tensor in standing:
            if (storage := _memory_of(tensor)) is not None:
                self._follow(storage)
        self._standing = tuple(self._followed)
        self._large.clear()

    def begin(self) -> None:
        self._measure_again(tuple(self._followed))
        self._peak = self._live

    def read(self) -> tuple[int, int, int | None]:
        self._measure_again(tuple(self._followed))
        return self._live, self._peak, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for leaf in tree_leaves(result):
            storage = _memory_of(leaf)
            if storage is None or id(storage) in self._followed:
                continue
            if given is None:  # what lies in memory that was given is not made here
                given = {id(_memory_of(each)) for each in tree_leaves((args, kwargs))}
            if id(storage) not in given:
                self._follow(storage)
        if self._live > self._peak:  # unless something has become smaller meanwhile
            self._measure_again((*self._standing, *self._large))
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._followed or self._is_elsewhere(storage):
            return
        # The wrapper lives as long as the memory, so that its end is the memory's.
        self._followed[key] = weakref.ref(storage, partial(self._gone, key))
        self._sizes[key] = storage.nbytes()
        self._live += self._sizes[key]
        if self._sizes[key] > self._peak * _SMALL_SHARE:
            self._large.add(key)

    def _gone(self, key: int, _: object) -> None:
        self._followed.pop(key)
        self._large.discard(key)
        self._live -= self._sizes.pop(key)

    def _measure_again(self, keys: Iterable[int]) -> None:
        for key in keys:
            reference = self._followed.get(key)
            storage = None if reference is None else reference()
            if storage is not None:
                self._live += storage.nbytes() - self._sizes[key]
                self._sizes[key] = storage.nbytes()
        self._peak = max(self._peak, self._live)


def _memory_of(value: object) -> torch.UntypedStorage | None:
    """The host memory that a tensor, or this rank's part of one, lies in; None for all else."""
    value = getattr(value, "_local_tensor", value)
    if type(value) not in (Tensor, torch.nn.Parameter):
        return None
    assert isinstance(value, Tensor)
    return value.untyped_storage() if value.device.type == "cpu" else None
