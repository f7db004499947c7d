"""What is put around a stage's units before it runs, in the one order that works.

Activation checkpointing first, so that FSDP's gathers stay outside the recompute; units that are
not recomputed may be compiled in its place; FSDP last, so that its hooks see whole units.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ppruntime.kept_results import KeptResults
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.engram import Engram
from ppruntime.models.moe import MoE


@dataclass(frozen=True, slots=True)
class Sharding:
    """How parameters lie over the data ranks. The meshes have one axis."""

    mesh: DeviceMesh
    compute_dtype: torch.dtype
    expert_mesh: DeviceMesh | None = None
    """With expert parallelism: the ranks that hold the same experts."""


def wrap_units(
    units: Sequence[nn.Module],
    *,
    recompute: Sequence[frozenset[str] | None],
    sharding: Sharding | None,
    fp32_names: Sequence[Collection[str]],
    compile_units: bool = False,
) -> None:
    """Wraps units in place: checkpointing or compilation, then FSDP.

    Units whose `recompute` entry is not None keep their inputs and what it names, and compute the
    rest again in the backward: bitwise. The others are compiled if wanted. With `sharding`,
    parameters become fp32 shards that are gathered in the compute dtype once a step; those in a
    unit's `fp32_names` stay whole and fp32 on every rank.
    """
    for unit, kept in zip(units, recompute, strict=True):
        if kept is not None:
            checkpoint_unit(unit, kept)
        elif compile_units:
            compile_unit(unit)
    if sharding is not None:
        for unit, names in zip(units, fp32_names, strict=True):
            shard_unit(unit, sharding, names)


def compile_unit(unit: nn.Module) -> None:
    """Compiles what is plain PyTorch in the unit, part by part.

    Between the parts stay what a compiler must not see: ops whose weight gradients may wait for a W
    (`linear.break_graph`); experts, whose sizes change from batch to batch; Engram, whose rows come
    from another stream. A recompute would take other parts than the forward took, so a
    unit is either recomputed or compiled.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
    for module in unit.modules():
        if isinstance(module, Engram):
            _keep_plain(module, "forward")
        elif isinstance(module, MoE):
            _keep_plain(module, "routed")
    setattr(unit, "forward", torch.compile(unit.forward, dynamic=False))  # noqa: B010


def _keep_plain(module: nn.Module, method: str) -> None:
    """No compiler looks into the module's method."""
    disable = cast(Callable[[Any], Any], torch.compiler.disable)
    setattr(module, method, disable(getattr(module, method)))


_MOST_VARIANTS = 256
"""Of one piece of code, which units of a kind share: they differ by layer. Torch's 8 would leave
most of a deep stage plain."""


def checkpoint_unit(unit: nn.Module, kept: frozenset[str] = frozenset()) -> None:
    """Makes the unit keep its inputs and what the ops of `kept` give, and compute the rest again in
    the backward. Names stay."""
    run = unit.forward

    def recomputed(carry: Carry, batch: MicroBatch) -> Carry:
        # One by one, so that checkpointing saves them as tensors: whoever moves saved tensors away
        # finds them, which does not look into a Carry.
        given = [*carry[:_LOADS], *batch, *carry.loads]
        if not torch.is_grad_enabled():
            return cast(Carry, run(carry, batch))
        results = KeptResults(kept)
        out = checkpoint(
            lambda *tensors: run(
                Carry._make((*tensors[:_LOADS], tensors[_LOADS + len(batch) :])),
                MicroBatch._make(tensors[_LOADS : _LOADS + len(batch)]),
            ),
            *given,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing in a model is random
            context_fn=results.contexts if kept else noop_context_fn,
        )
        results.save()
        return cast(Carry, out)

    # Replacing `forward` rather than the module keeps parameter names, and keeps FSDP's hooks,
    # which are attached to `__call__`, from running again in the recompute.
    setattr(unit, "forward", recomputed)  # noqa: B010 (mypy forbids the assignment)


_LOADS = Carry._fields.index("loads")
"""The carry's last field; those before are tensors or None."""


def shard_unit(unit: nn.Module, sharding: Sharding, fp32_names: Collection[str]) -> None:
    """Shards the unit's parameters over the data ranks (FSDP2): fp32 masters, fp32 gradient sums.

    The gathered parameters are kept from a step's first forward to `reduce_grads`, since a pipeline
    stage uses them for every micro-batch. Where the compute dtype is lower, the few parameters that
    the model wants in fp32 are left whole: FSDP casts all that it gathers. Engram tables are never
    gathered; `engram_tables` has cut them.
    """
    # A unit passes on what it does not touch, as FSDP's own view of its input. Units never write to
    # a carry in place, which is what FSDP warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    lower = sharding.compute_dtype is not torch.float32
    whole = {p for name, p in unit.named_parameters() if lower and name in fp32_names}
    if sharding.expert_mesh is not None:
        of_experts = replace(sharding, mesh=sharding.expert_mesh, expert_mesh=None)
        for name, module in unit.named_modules():
            if name == "moe.experts":
                shard_unit(module, of_experts, ())
                # Before the unit runs, not before its experts do: a recompute runs those again.
                unit.register_forward_pre_hook(partial(_gather, module))
    policy = MixedPrecisionPolicy(
        param_dtype=sharding.compute_dtype if lower else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    fully_shard(
        unit,
        mesh=sharding.mesh,
        mp_policy=policy,
        reshard_after_forward=False,
        ignored_params=whole | {m.table for m in unit.modules() if isinstance(m, Engram)},
    )


def _gather(module: nn.Module, *_: object) -> None:
    assert isinstance(module, FSDPModule)
    module.unshard()


def release_gathered(units: Sequence[nn.Module]) -> None:
    """Frees gathered parameters: the units' `parameters()` are the shards again."""
    for module in (m for unit in units for m in unit.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered_weights(units: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """The memory into which FSDP gathers parameters; empty between steps."""
    for module in (m for unit in units for m in unit.modules()):
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                for parameter in group.fsdp_params:
                    yield from parameter.all_gather_outputs


def _groups(module: FSDPModule) -> list[Any]:
    """FSDP's own records of a module's parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # one group in older releases
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def hold_gradients(units: Sequence[nn.Module]) -> None:
    """Before a step: gradients are summed on this rank, and parameters stay gathered, until
    `reduce_grads`. Without FSDP there is nothing to do."""
    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.set_is_last_backward(False)
            unit.set_reshard_after_backward(False)
            unit.set_requires_gradient_sync(False)


def reduce_grads(units: Sequence[nn.Module], data_group: dist.ProcessGroup) -> None:
    """After a stage's last weight gradient: averages its gradients over the data ranks, once a
    step. Without FSDP there is nothing to do.

    Experts that lie over several data ranks have seen the tokens of all of them: their sum is taken
    over the ranks that hold the same ones, and the mean still over all.

    Weight gradients that an order puts off are added outside autograd, after FSDP's own hooks have
    run; so its post-backward is called here, as torch's pipelining does.
    """
    whole: list[torch.Tensor] = []
    for unit in units:
        if not isinstance(unit, FSDPModule):
            continue
        unit.set_is_last_backward(True)
        unit.set_reshard_after_backward(True)
        unit.set_requires_gradient_sync(True)
        for module in unit.modules():
            if isinstance(module, FSDPModule):
                for group in _groups(module):
                    _widen_gradients(group)
                    group.post_backward()
        unit._get_fsdp_state()._root_post_backward_final_callback()
        for parameter in unit.parameters():
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                share = parameter.device_mesh.size() / data_group.size()
                if share != 1:
                    parameter.grad.to_local().mul_(share)
        whole += [
            p.grad for p in unit.parameters() if not isinstance(p, DTensor) and p.grad is not None
        ]
    if whole and data_group.size() > 1:
        flat = torch.cat([grad.flatten() for grad in whole])
        dist.all_reduce(flat, group=data_group)
        flat /= data_group.size()
        for grad, mean in zip(whole, torch.split(flat, [g.numel() for g in whole]), strict=True):
            grad.copy_(mean.view_as(grad))


def _widen_gradients(group: Any) -> None:
    """fp32 for every gradient of an FSDP group, as its one reduction wants: linears add theirs in
    fp32, what autograd gave behind FSDP's last hook is in the compute dtype."""
    for parameter in group.fsdp_params:
        if hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
