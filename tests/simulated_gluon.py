"""Runs Gluon kernels on CPU tensors, one program after another, for tests of what they compute.

Gluon has no interpreter. Here a kernel's Python function runs with the language swapped for torch:
pointers are a tensor and offsets, layouts mean nothing, warps do not exist. So wrong indices,
masks, strides and formulas show; wrong layouts and missing barriers do not. Copies to shared memory
arrive only when they are waited for, and until then the target holds NaN; so does a product, which
reads its operands as late.

Specialised warps take turns at every barrier and copy, in an order drawn by chance: what their
mbarriers do not order happens in any order, and where none can go on the launch fails. TMA reads
what it adds to memory, and adds it, at any two times before those are waited for.
"""

from __future__ import annotations

import itertools
import random
import threading
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


class _Products:
    """Asynchronous products: worked out, in order, when they are waited for."""

    def __init__(self) -> None:
        self.running: list[Callable[[], None]] = []

    def multiply(
        self, a: Any, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False
    ) -> Value:
        left = a.data if isinstance(a, Shared) else a
        assert left.dtype == b.data.dtype
        assert left.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        result = _value(torch.full(tuple(acc.shape), torch.nan))

        def work() -> None:
            product = left.as_subclass(Tensor).float() @ b.data.float()
            result.copy_(acc.as_subclass(Tensor) + product if use_acc else product)

        self.running.append(work)
        if not is_async:
            self.wait(0, ())
        return result

    def wait(self, num_outstanding: int, deps: tuple[Tensor, ...]) -> Any:
        while len(self.running) > num_outstanding:
            self.running.pop(0)()
        return deps[0] if len(deps) == 1 else deps


class Descriptor:
    """A tensor that boxes are copied from; what lies outside is zero."""

    def __init__(self, described: Any) -> None:
        self.tensor, self.block_shape = described.base, list(described.block_shape)
        self.dtype, self.layout = described.base.dtype, described.layout

    def at(self, place: list[Any]) -> Tensor:
        """What of the box at `place` lies inside, in memory."""
        inside = []
        for start, length, size in zip(
            map(int, place), self.block_shape, self.tensor.shape, strict=True
        ):
            assert 0 <= start < size, f"box at {start} of {size}"
            inside.append(slice(start, min(start + length, size)))
        return self.tensor[tuple(inside)]

    def load(self, place: list[Any]) -> Tensor:
        box = torch.zeros(self.block_shape, dtype=self.dtype)
        found = self.at(place)
        _plain(box)[tuple(slice(0, n) for n in found.shape)] = _plain(found)
        return box


class _Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.num_bytes = self.phase = 0

    def settle(self) -> None:
        assert self.pending >= 0
        if self.pending == 0 and self.num_bytes == 0:
            self.phase, self.pending = 1 - self.phase, self.count


class _Stopped(BaseException):
    """Ends the thread of a partition whose launch has failed."""


class _Partition:
    """Specialised warps: a thread that runs only while `run` waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.products = _Products()
        self.reading: list[object] = []
        self.adding: list[object] = []
        self.is_done, self.error = False, None
        self.waits_for: Callable[[], bool] = lambda: True
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_stopped = False

        def run() -> None:
            self._go.acquire()
            try:
                if not self._is_stopped:
                    work()
            except BaseException as error:
                self.error = error
            self.is_done = True
            self._back.release()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Until it lets others go on."""
        self._go.release()
        self._back.acquire()
        if self.error is not None and not self._is_stopped:
            raise self.error

    def let_go(self, until: Callable[[], bool]) -> None:
        """Called by the thread itself: others' turn, at least until that holds."""
        self.waits_for = until
        self._back.release()
        self._go.acquire()
        if self._is_stopped:
            raise _Stopped

    def stop(self) -> None:
        self._is_stopped = True
        if not self.is_done:
            self.run()
        self._thread.join()


class _Warps:
    """A program's specialised warps with their mbarriers and TMA copies."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.products = chance, _Products()
        self.barriers: dict[int, _Barrier] = {}
        self.turns = [False, False]
        self.arriving: list[Callable[[], None]] = []
        self.partition: _Partition | None = None

    def specialize(
        self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any
    ) -> None:
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        partitions = [_Partition(lambda f=f, a=a: f(*a)) for f, a in parts]  # type: ignore[misc]
        # Some are much faster than others, in every launch others.
        speed = {part: self.chance.choice((1, 50)) for part in partitions}
        speed_of_copies = self.chance.choice((1, 50))
        try:
            while not all(part.is_done for part in partitions):
                free = [part for part in partitions if not part.is_done and part.waits_for()]
                assert free or self.arriving, "deadlock: all warps wait"
                choices: list[Any] = [*free, *self.arriving]
                speeds = [speed.get(choice, speed_of_copies) for choice in choices]
                [chosen] = self.chance.choices(choices, speeds)
                if isinstance(chosen, _Partition):
                    self.partition = chosen
                    chosen.run()
                else:
                    self.arriving.remove(chosen)
                    chosen()
            assert not self.arriving, "copies that nobody waited for"
        finally:
            self.partition = None
            for part in partitions:
                part.stop()

    def let_go(self, until: Callable[[], bool] = lambda: True) -> None:
        if self.partition is not None:
            self.partition.let_go(until)

    def multiply(self, *args: Any, **options: Any) -> Value:
        return self._products().multiply(*args, **options)

    def wait_products(self, num_outstanding: int, deps: tuple[Tensor, ...]) -> Any:
        return self._products().wait(num_outstanding, deps)

    def _products(self) -> _Products:
        return self.products if self.partition is None else self.partition.products

    # mbarrier

    def barrier(self, shared: Shared) -> _Barrier:
        return self.barriers[shared.data.data_ptr()]

    def init(self, shared: Shared, count: int) -> None:
        self.barriers[shared.data.data_ptr()] = _Barrier(count)

    def wait(self, shared: Shared, phase: Any) -> None:
        barrier, phase = self.barrier(shared), int(phase)
        self.let_go(lambda: barrier.phase != phase)

    def expect(self, shared: Shared, num_bytes: int) -> None:
        self.barrier(shared).num_bytes += num_bytes
        self.arrive(shared)

    def arrive(self, shared: Shared, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier = self.barrier(shared)
            barrier.pending -= count
            barrier.settle()
        self.let_go()

    # Named barriers by which warpgroups take turns

    def give_turn(self, warpgroup: int) -> None:
        assert not self.turns[warpgroup], "a turn that was not taken yet"
        self.turns[warpgroup] = True
        self.let_go()

    def take_turn(self, warpgroup: int) -> None:
        self.let_go(lambda: self.turns[warpgroup])
        self.turns[warpgroup] = False

    # TMA

    def copy(self, source: Descriptor, place: list[Any], shared: Shared, target: Shared) -> None:
        box, barrier = source.load(place), self.barrier(shared)
        assert list(box.shape) == target.shape
        target.data.fill_(torch.nan)

        def arrive() -> None:
            target.store(box)
            barrier.num_bytes -= box.numel() * box.element_size()
            barrier.settle()

        self.arriving.append(arrive)
        self.let_go()

    def add(self, target: Descriptor, place: list[Any], source: Shared) -> None:
        """A tile added to the box at `place`: read at some time, added at some later one."""
        part = self.partition
        assert part is not None
        assert source.shape == target.block_shape
        box = target.at(place)
        assert list(box.shape) == target.block_shape, "a box that reaches over the end"
        this = object()
        part.reading.append(this)
        part.adding.append(this)

        def read() -> None:
            values = source.data.clone()
            part.reading.remove(this)

            def add() -> None:
                box.add_(values)
                part.adding.remove(this)

            self.arriving.append(add)

        self.arriving.append(read)
        self.let_go()

    def wait_reads(self, pending: int) -> None:
        """Until but so many of the warps' tiles are read."""
        part = self.partition
        assert part is not None
        self.let_go(lambda: len(part.reading) <= pending)

    def wait_additions(self) -> None:
        """Until all of the warps' tiles are added."""
        part = self.partition
        assert part is not None
        self.let_go(lambda: not part.adding)


def _atomic_add(pointer: Pointer, value: Tensor, mask: Tensor | None = None, *, sem: str) -> None:
    indices, valid = pointer.places(mask)
    value = value.as_subclass(Tensor).broadcast_to(indices.shape)
    pointer.flat.index_add_(0, indices[valid], value[valid].to(pointer.flat.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    indices, valid = pointer.places(mask)
    value = torch.as_tensor(value).as_subclass(Tensor).to(pointer.flat.dtype)
    _plain(pointer.flat)[indices[valid]] = _plain(value).broadcast_to(indices.shape)[valid]


def _empty(dtype: torch.dtype, shape: list[int], _: Any) -> Shared:
    """Shared memory with NaN, or zeros where there is none."""
    fill = torch.nan if dtype.is_floating_point else 0
    return Shared(torch.full(shape, fill, dtype=dtype))


_SAME = ("bfloat16", "float32", "int32", "int64", "exp2", "log2")


def _language(
    program: tuple[int, ...], grid: tuple[int, ...], warps: _Warps
) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        abs=torch.abs,
        minimum=lambda a, b: torch.minimum(a, torch.as_tensor(b)),
        num_programs=lambda axis: _value(grid[axis]),
        SwizzledSharedLayout=lambda *_: None,
        **{name: getattr(torch, name) for name in _SAME},
        NVMMADistributedLayout=lambda *_: None,
        NVMMASharedLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
        DotOperandLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
        allocate_shared_memory=_empty,
        arange=lambda start, end, layout: _value(torch.arange(start, end, dtype=torch.int32)),
        atomic_add=_atomic_add,
        convert_layout=lambda x, _: x,
        fma=lambda a, b, c: a * b + c,
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
        warp_specialize=warps.specialize,
        where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
        zeros=lambda shape, dtype, layout: _value(torch.zeros(shape, dtype=dtype)),
    )


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    return Descriptor(x) if hasattr(x, "block_shape") else x


class _Simulated:
    """A kernel that is launched as the real one is."""

    def __init__(self, kernel: Any, names: dict[str, Any]) -> None:
        self.function, self.names = kernel.fn, names
        self.chance = random.Random(0)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *arguments: Any,
            num_warps: int,
            num_stages: int = 1,
            maxnreg: int | None = None,
            **constants: Any,
        ) -> None:
            pointers = [_argument(x) for x in arguments]
            for program in itertools.product(*map(range, grid)):
                self._bound(program, grid)(*pointers, **constants)

        return launch

    def _bound(self, program: tuple[int, ...], grid: tuple[int, ...]) -> Callable[..., None]:
        """The function with the language swapped, in it and in all it calls."""
        copies, warps = _Copies(), _Warps(self.chance)
        scope = dict(self.names)
        _take_globals(self.function, scope)
        scope |= {
            "gl": _language(program, grid, warps),
            "range": lambda *ends: map(_value, range(*map(int, ends))),
            "async_copy": copies,
            "fence_async_shared": lambda: None,
            "_barrier": lambda: None,
            "_take_turn": warps.take_turn,
            "give_turn": warps.give_turn,
            "all_threads": lambda: None,
            "_add_from_shared": warps.add,
            "_all_added": warps.wait_additions,
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: None,
                arrive=warps.arrive,
                expect=warps.expect,
                init=warps.init,
                wait=warps.wait,
            ),
            "tma": types.SimpleNamespace(
                async_copy_global_to_shared=warps.copy, store_wait=warps.wait_reads
            ),
            "warpgroup_mma": warps.multiply,
            "warpgroup_mma_init": lambda x: x,
            "warpgroup_mma_wait": warps.wait_products,
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
