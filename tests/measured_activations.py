"""What autograd really saves in units, measured by running them: the yardstick of the formulas.

On the meta device tensors have shapes and no memory, so that a full model's unit is measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppruntime.models.activation_bytes import Kept
from ppruntime.models.carry import CROSSING, DIFFERENTIABLE, Carry, MicroBatch
from ppruntime.models.dims import ModelDims, UnitSpec, carry_shape, unit_specs
from ppruntime.models.moe import HERE, MoEOptions
from ppruntime.models.save_points import SAVE_NAMES, is_kept
from ppruntime.models.units import build_unit


@dataclass(frozen=True)
class Measured:
    """What autograd holds after a forward."""

    own_bytes: int
    """Each piece of memory once; parameters, buffers, tokens and the carry's not counted."""
    kept_fields: frozenset[str]
    """Crossing fields of the carry, got or given, whose memory it holds."""
    results: Mapping[str, Kept]
    """What each op and each group of ops that can be kept gave, how much of it autograd holds, and
    which crossing fields of the carry it is."""


def measure_on_meta(
    dims: ModelDims,
    spec: UnitSpec,
    batch: int,
    seq_len: int,
    dtype: str,
    *,
    moe: MoEOptions = HERE,
    change: Callable[[torch.nn.Module], object] = lambda unit: None,
) -> Measured:
    """One unit on the meta device, on a carry as the unit before would hand it on. `change` puts
    kernels into it."""
    specs = unit_specs(dims)
    index = specs.index(spec)
    before = specs[index - 1] if index else None
    carry = blank_carry(dims, before, batch, seq_len, dtype)
    unit = build_unit(dims, spec, moe=moe, device="meta", dtype=getattr(torch, dtype))
    change(unit)
    tokens = MicroBatch(*(_blank(batch, seq_len) for _ in range(3)))
    return measure([unit], carry, tokens)


def measure(units: Sequence[torch.nn.Module], carry: Carry, tokens: MicroBatch) -> Measured:
    """Runs the units one after another, on whatever device they are."""
    saved: list[Tensor] = []  # keeps every storage alive, so that no two share an address
    carries = [carry]

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), _Results() as results:
        for unit in units:
            carries.append(unit(carries[-1], tokens))
    fields = {
        storage(tensor): name
        for each in carries
        for name, tensor in each._asdict().items()
        if isinstance(tensor, Tensor)
    }
    held = [tensor for unit in units for tensor in (*unit.parameters(), *unit.buffers())]
    held += [tensor for tensor in tokens if tensor is not None]
    elsewhere = {storage(tensor) for tensor in held} | fields.keys()
    sizes = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    return Measured(
        sum(size for address, size in sizes.items() if address not in elsewhere),
        frozenset(fields[address] for address in sizes if fields.get(address) in CROSSING),
        {name: _kept(results.of(name), fields, sizes) for name in SAVE_NAMES},
    )


def _kept(made: Sequence[Tensor], fields: Mapping[int, str], saved: Mapping[int, int]) -> Kept:
    """Of what was made: all bytes and those that are saved too, fields of the carry apart."""
    own = [t for t in made if fields.get(storage(t)) not in CROSSING]
    return Kept(
        sum(t.untyped_storage().nbytes() for t in own),
        sum(t.untyped_storage().nbytes() for t in own if storage(t) in saved),
        frozenset(fields[storage(t)] for t in made if fields.get(storage(t)) in CROSSING),
    )


class _Results(TorchDispatchMode):
    """Keeps what the ops give that can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_kept(_ANY, func.name()):
            self._made += [(func.name(), t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        return result

    def of(self, name: str) -> list[Tensor]:
        """What the op or the group gave."""
        return [tensor for op, tensor in self._made if is_kept(frozenset({name}), op)]


_ANY = frozenset(SAVE_NAMES)


def one_of_each_kind(dims: ModelDims) -> tuple[UnitSpec, ...]:
    """A unit for each combination of kind, role, ratio, Engram and slots that live on."""
    kinds = {
        (unit.kind, unit.role)
        if unit.layer is None or unit.kind == "moe"
        else (
            unit.role,
            "slots" in unit.live_after,
            dims.compress_ratios[unit.layer],
            unit.layer in dims.engram_layers,
        ): unit
        for unit in reversed(unit_specs(dims))
    }
    return tuple(kinds.values())


def bytes_left_behind(run: Callable[[], object]) -> int:
    """Bytes of the memory that was allocated in `run` and outlives it, its result apart: what
    autograd holds and what Python still refers to. For real devices."""
    with _Allocations() as made:
        run()
    return sum(size for reference, size in made.storages.values() if not reference.expired())


class _Allocations(TorchDispatchMode):
    """Notes the storage of every tensor that an operation makes, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        # A weak reference keeps the storage's address from being given to another one.
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and storage(tensor) not in given:
                memory = tensor.untyped_storage()
                self.storages[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        return result


def storage(tensor: Tensor) -> int:
    """Which piece of memory a tensor lies in; comparable while both tensors are alive."""
    return tensor.untyped_storage()._cdata


def blank_carry(
    dims: ModelDims,
    before: UnitSpec | None,
    batch: int,
    seq_len: int,
    dtype: str,
) -> Carry:
    """The carry after the unit `before`, on the meta device."""
    fields: dict[str, Any] = {}
    for name in before.live_after if before else ():
        shape, dtype_name = carry_shape(dims, name, batch, seq_len, after=before, dtype=dtype)
        field = torch.empty(shape, dtype=getattr(torch, dtype_name), device="meta")
        fields[name] = field.requires_grad_(name in DIFFERENTIABLE)
    return Carry(**fields)


def _blank(batch: int, seq_len: int) -> Tensor:
    return torch.empty(batch, seq_len, dtype=torch.int64, device="meta")
