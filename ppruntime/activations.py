"""Bytes that one micro-batch in flight holds on a stage, found without allocating any of them.

A unit runs on the meta device, where tensors have shapes and no memory; what autograd saves there
is what it saves in training. Exact for the plain path on the CPU; a caching allocator rounds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ppruntime.models.carry import DIFFERENTIABLE, Carry, MicroBatch
from ppruntime.models.dims import ModelDims, UnitKind, UnitSpec, carry_shape, unit_specs
from ppruntime.models.units import build_unit
from ppruntime.plan import StagePlan


def activation_bytes(
    dims: ModelDims,
    stage: StagePlan,
    *,
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
    recompute: bool,
) -> int:
    """Bytes held between the forward and the backward of a micro-batch: the received boundary and
    what autograd saves, each piece of memory once, parameters and tokens not counted.

    With `recompute`, halves save nothing but the carry that they get.
    """
    total = _carry_bytes(dims, stage.before, stage.inputs, batch, seq_len, dtype)
    for spec in stage.units:
        if not (recompute and spec.kind in (UnitKind.ATTENTION, UnitKind.MOE)):
            total += _saved_bytes(dims, _twin(dims, spec), batch, seq_len, dtype)
        if spec is not stage.after:
            made = tuple(name for name in spec.live_after if name in spec.writes)
            total += _carry_bytes(dims, spec, made, batch, seq_len, dtype)
    return total


def _twin(dims: ModelDims, spec: UnitSpec) -> UnitSpec:
    """The first unit of the model that saves the same as `spec`."""

    def kin(unit: UnitSpec) -> tuple[Any, ...]:
        ratio = None if unit.layer is None else dims.compress_ratios[unit.layer]
        engram = unit.layer in dims.engram_layers
        return unit.kind, unit.role, unit.live_after, unit.kind != UnitKind.MOE and (ratio, engram)

    return next(unit for unit in unit_specs(dims) if kin(unit) == kin(spec))


@lru_cache(maxsize=1024)
def _saved_bytes(
    dims: ModelDims, spec: UnitSpec, batch: int, seq_len: int, dtype: torch.dtype
) -> int:
    """What autograd saves in a unit beside its parameters and the carry that it gets or gives."""
    specs = unit_specs(dims)
    index = specs.index(spec)
    carry = _received(dims, specs[index - 1] if index else None, batch, seq_len, dtype)
    unit = build_unit(dims, spec, device="meta", dtype=dtype)
    tokens = MicroBatch(*(_blank(batch, seq_len) for _ in range(3)))
    saved: list[Tensor] = []  # keeps every storage alive, so that no two share an address
    with _saving(saved.append):
        passed_on = unit(carry, tokens)
    others = (*unit.parameters(), *unit.buffers(), *tokens, *carry, *passed_on)
    elsewhere = {t.untyped_storage()._cdata for t in others if isinstance(t, Tensor)}
    storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in saved)}
    return sum(size for address, size in storages.items() if address not in elsewhere)


@contextmanager
def _saving(hold: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `hold` with every tensor that autograd saves inside."""

    def pack(tensor: Tensor) -> Tensor:
        hold(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _received(
    dims: ModelDims, before: UnitSpec | None, batch: int, seq_len: int, dtype: torch.dtype
) -> Carry:
    """The carry after the unit `before`, on the meta device."""
    fields: dict[str, Any] = {}
    for name in before.live_after if before else ():
        shape, dtype_name = carry_shape(
            dims, name, batch, seq_len, after=before, dtype=_name(dtype)
        )
        fields[name] = torch.empty(shape, dtype=getattr(torch, dtype_name), device="meta")
        fields[name].requires_grad_(name in DIFFERENTIABLE)
    return Carry(**fields)


def _carry_bytes(
    dims: ModelDims,
    after: UnitSpec | None,
    names: tuple[str, ...],
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
) -> int:
    total = 0
    for name in names:
        assert after is not None
        shape, dtype_name = carry_shape(dims, name, batch, seq_len, after=after, dtype=_name(dtype))
        total += torch.Size(shape).numel() * getattr(torch, dtype_name).itemsize
    return total


def _blank(batch: int, seq_len: int) -> Tensor:
    return torch.empty(batch, seq_len, dtype=torch.int64, device="meta")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
