"""What is put around a stage's units before it runs, in the one order that works.

Activation checkpointing first, so that FSDP's gathers stay outside the recompute; FSDP second, so
that its hooks see whole units; compilation last, so that it sees both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

CheckpointMode = Literal["none", "full"]


def wrap_units(
    units: Sequence[nn.Module],
    *,
    checkpoint_mode: CheckpointMode,
    checkpointed: Sequence[bool],
    data_mesh: DeviceMesh | None,
    compute_dtype: torch.dtype,
    compile_units: bool = False,
) -> None:
    """Wraps units in place: checkpointing -> FSDP -> compile.

    With `checkpoint_mode` "full", units whose `checkpointed` entry is True keep only their inputs
    and run again in the backward: bitwise. With a `data_mesh`, each unit's parameters are sharded
    over it as fp32 masters, gathered in `compute_dtype` once a step; their gradients are averaged
    over it.
    """
    if checkpoint_mode == "full":
        for unit, wanted in zip(units, checkpointed, strict=True):
            if wanted:
                checkpoint_unit(unit)
    if data_mesh is not None:
        for unit in units:
            shard_unit(unit, data_mesh, compute_dtype)
    if compile_units:
        for unit in units:
            unit.compile()


def checkpoint_unit(unit: nn.Module) -> None:
    """Makes the unit keep its inputs only and recompute the rest in the backward. Names stay."""
    # Replacing `forward` rather than the module keeps parameter names, and keeps hooks (FSDP's)
    # from running again in the recompute, since those are attached to `__call__`.
    recomputed = partial(checkpoint, unit.forward, use_reentrant=False, preserve_rng_state=False)
    setattr(unit, "forward", recomputed)  # noqa: B010 (mypy forbids the assignment)


def shard_unit(unit: nn.Module, data_mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shards the unit's parameters over the data ranks (FSDP2, fp32 masters, fp32 gradient sums).

    Gathered parameters are kept from the first forward of a step to `reduce_grads`: a pipeline
    stage uses them for every micro-batch.
    """
    if not any(True for _ in unit.parameters()):
        return
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype is torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    fully_shard(unit, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)


def hold_gradients(units: Sequence[nn.Module]) -> None:
    """Before a step: gradients are summed on this rank and parameters stay gathered until
    `reduce_grads`. Without FSDP there is nothing to do."""
    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.set_is_last_backward(False)
            unit.set_reshard_after_backward(False)
            unit.set_requires_gradient_sync(False)


def reduce_grads(units: Sequence[nn.Module]) -> None:
    """After a stage's last weight gradient: averages its gradients over the data ranks, once a
    step.

    Weight gradients that an order puts off are added outside autograd, after FSDP's own hooks have
    run; so its post-backward is called here, as torch's pipelining does.
    """
    for unit in units:
        if not isinstance(unit, FSDPModule):
            continue
        unit.set_is_last_backward(True)
        unit.set_reshard_after_backward(True)
        unit.set_requires_gradient_sync(True)
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch >= 2.12
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                group.post_backward()
        state._root_post_backward_final_callback()
