"""Runs Gluon kernels on CPU tensors, one program after another, for tests of what they compute.

Gluon has no interpreter. Here a kernel's Python function runs with the language swapped for torch:
pointers are a tensor and offsets, layouts mean nothing, warps do not exist. So wrong indices,
masks, strides and formulas show; wrong layouts and missing barriers do not. Copies to shared memory
arrive only when they are waited for, and until then the target holds NaN.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Value(torch.Tensor):
    """A tile. Gluon asks for its layout by its type."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]


def _value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


def _plain(x: Tensor) -> Tensor:
    """FP8 as bytes: torch has no indexing for it everywhere."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


class Pointer:
    """Elements of a tensor, by their offsets in it."""

    def __init__(self, tensor: Tensor, offsets: Any = 0) -> None:
        self.flat, self.offsets = tensor.view(-1), offsets

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offsets + more)

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(indices, which of them count), in the shape of both."""
        indices = torch.as_tensor(self.offsets).as_subclass(Tensor).long()
        valid = torch.tensor(True) if mask is None else torch.as_tensor(mask).as_subclass(Tensor)
        indices, valid = torch.broadcast_tensors(indices, valid)
        counted = indices[valid]
        inside = (counted >= 0) & (counted < self.flat.numel())
        assert inside.all(), f"offsets {counted[~inside][:4].tolist()} of {self.flat.numel()}"
        return indices.masked_fill(~valid, 0), valid

    def load(self, mask: Tensor | None, other: Any) -> Value:
        indices, valid = self.places(mask)
        if not self.flat.numel():
            return _value(torch.full(indices.shape, other, dtype=self.flat.dtype))
        loaded = _plain(self.flat)[indices]
        return _value(
            (loaded if mask is None else torch.where(valid, loaded, other).to(loaded.dtype)).view(
                self.flat.dtype
            )
        )


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.shape = data, list(data.shape)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def index(self, index: int) -> Shared:
        return Shared(self.data[int(index)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, _: Any) -> Value:
        return _value(self.data.clone())

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.data.dtype, f"{value.dtype} into {self.data.dtype}"
        self.data.copy_(value)


class _Copies:
    """Asynchronous copies: groups that arrive when they are waited for."""

    def __init__(self) -> None:
        self.groups: list[list[Callable[[], None]]] = [[]]

    def async_copy_global_to_shared(
        self, target: Shared, source: Pointer, mask: Tensor | None = None
    ) -> None:
        loaded = source.load(mask, 0)
        assert list(loaded.shape) == target.shape
        target.data.fill_(torch.nan)
        self.groups[-1].append(lambda: target.store(loaded))

    def commit_group(self) -> None:
        self.groups.append([])

    def wait_group(self, num_outstanding: int) -> None:
        while len(self.groups) - 1 > num_outstanding:
            for arrive in self.groups.pop(0):
                arrive()


def _multiply(
    a: Any, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False
) -> Value:
    left = a.data if isinstance(a, Shared) else a
    assert left.dtype == b.data.dtype == torch.bfloat16
    product = left.as_subclass(Tensor).float() @ b.data.float()
    return _value(acc.as_subclass(Tensor) + product if use_acc else product)


def _wait(_: int, deps: tuple[Tensor, ...]) -> Any:
    return deps[0] if len(deps) == 1 else deps


def _atomic_add(pointer: Pointer, value: Tensor, mask: Tensor, sem: str) -> None:
    indices, valid = pointer.places(mask)
    value = value.as_subclass(Tensor).broadcast_to(indices.shape)
    pointer.flat.index_add_(0, indices[valid], value[valid].to(pointer.flat.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    indices, valid = pointer.places(mask)
    value = torch.as_tensor(value).as_subclass(Tensor).to(pointer.flat.dtype)
    _plain(pointer.flat)[indices[valid]] = _plain(value).broadcast_to(indices.shape)[valid]


def _language(program: tuple[int, ...], grid: tuple[int, ...]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        abs=torch.abs,
        minimum=lambda a, b: torch.minimum(a, torch.as_tensor(b)),
        num_programs=lambda axis: _value(grid[axis]),
        SwizzledSharedLayout=lambda *_: None,
        **{name: getattr(torch, name) for name in ("bfloat16", "float32", "int64", "exp2", "log2")},
        NVMMADistributedLayout=lambda *_: None,
        NVMMASharedLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
        DotOperandLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
        allocate_shared_memory=lambda dtype, shape, _: Shared(
            torch.full(shape, torch.nan, dtype=dtype)
        ),
        arange=lambda start, end, layout: _value(torch.arange(start, end, dtype=torch.int32)),
        atomic_add=_atomic_add,
        convert_layout=lambda x, _: x,
        full=lambda shape, value, dtype, layout: _value(torch.full(shape, value, dtype=dtype)),
        join=lambda a, b: torch.stack((a, b), -1),
        load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
        max=lambda x, axis: x.amax(axis),
        maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b)),
        min=lambda x, axis: x.amin(axis),
        permute=torch.permute,
        program_id=lambda axis: _value(program[axis]),
        reshape=torch.reshape,
        split=lambda x: (x[..., 0], x[..., 1]),
        static_range=range,
        store=_store,
        sum=lambda x, axis: x.sum(axis),
        where=torch.where,
        zeros=lambda shape, dtype, layout: _value(torch.zeros(shape, dtype=dtype)),
    )


class _Simulated:
    """A kernel that is launched as the real one is."""

    def __init__(self, kernel: Any, names: dict[str, Any]) -> None:
        self.function, self.names = kernel.fn, names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *arguments: Any,
            num_warps: int,
            num_stages: int = 1,
            maxnreg: int | None = None,
            **constants: Any,
        ) -> None:
            pointers = [Pointer(x) if isinstance(x, Tensor) else x for x in arguments]
            for program in itertools.product(*map(range, grid)):
                self._bound(program, grid)(*pointers, **constants)

        return launch

    def _bound(self, program: tuple[int, ...], grid: tuple[int, ...]) -> Callable[..., None]:
        """The function with the language swapped, in it and in all it calls."""
        copies = _Copies()
        scope = dict(self.names)
        _take_globals(self.function, scope)
        scope |= {
            "gl": _language(program, grid),
            "range": lambda *ends: map(_value, range(*map(int, ends))),
            "async_copy": copies,
            "fence_async_shared": lambda: None,
            "_barrier": lambda: None,
            "warpgroup_mma": _multiply,
            "warpgroup_mma_init": lambda x: x,
            "warpgroup_mma_wait": _wait,
        }
        return types.FunctionType(self.function.__code__, scope, self.function.__name__)


def _take_globals(function: Any, scope: dict[str, Any]) -> None:
    """What `function` and the kernels' functions that it calls find in their modules; a name means
    one thing in all of them."""
    called = []
    for name, value in function.__globals__.items():
        if name in scope:
            continue
        scope[name] = value
        if hasattr(value, "fn"):
            scope[name] = types.FunctionType(value.fn.__code__, scope, name)
            called.append(value.fn)
        elif type(value).__name__ == "constexpr":
            scope[name] = value.value
    for value in called:
        _take_globals(value, scope)


def simulated(kernel: Any, **names: Any) -> Any:
    """`simulated(kernel)[grid](...)`, with tensors of the CPU. `names` stand for Triton's functions
    that the kernel calls, whose language is another."""
    return _Simulated(kernel, names)
