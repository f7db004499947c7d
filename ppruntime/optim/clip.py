"""The norm of the whole model's gradient, bitwise the same at every cut, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard


def global_norm(
    params: Mapping[str, nn.Parameter],
    order: Sequence[str],
    *,
    pp_group: dist.ProcessGroup | None,
    split: Mapping[str, dist.ProcessGroup] | None = None,
    freed: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The 2-norm over all gradients of the model: an fp32 scalar on `device`, equal on every rank.

    `params` are this rank's parameters; `order` names the parameters of the whole model, each held
    by one pipeline rank, the same list on every rank. A gradient that is None counts as zero.
    None as `pp_group`: this rank holds all of the model. `split`: parameters of which the ranks of
    a group hold different parts, beyond what their DTensors say, the same names on all of them.

    `freed`: the `local_square` of gradients that are no more.

    One fp64 sum of squares per parameter goes into a vector over `order`, which the ranks add up;
    all other ranks contribute exact zeros, so neither the vector nor its sum depends on the cut.
    Norms of stages, squared and added, do (torchtitan pull request 4312). Shards of a DTensor are
    added over its own mesh first. On a GPU nothing waits on the host.
    """
    index = {name: position for position, name in enumerate(order)}
    unknown = [name for name in params if name not in index]
    if unknown:
        raise ValueError(f"{unknown[0]} is not in the model's order of {len(order)} parameters")
    squares = torch.zeros(len(order), dtype=torch.float64, device=device)
    sharded: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    here: defaultdict[torch.device, dict[int, Tensor]] = defaultdict(dict)
    for name, param in params.items():
        groups: tuple[dist.ProcessGroup, ...] = ()
        if split is not None and name in split:
            groups = (split[name],)
        local = param.grad
        if isinstance(param, DTensor):
            groups = _shard_groups(name, param if local is None else local) + groups
        if groups:  # also without a gradient: the others may have one
            sharded.setdefault(groups, []).append(index[name])
        if freed is not None and name in freed:
            squares[index[name]] = freed[name]
        elif local is not None:
            grad = _local(local)
            here[grad.device][index[name]] = grad
    for of_device in here.values():  # tables may lie on the host
        # Together: one by one hundreds of launches, and each a copy of its gradient in fp64.
        norms = torch._foreach_norm(list(of_device.values()), 2, dtype=torch.float64)
        squares[list(of_device)] = torch.stack(list(norms)).square().to(device)
    for groups, positions in sharded.items():
        part = squares[positions]
        for group in groups:
            dist.all_reduce(part, group=group)
        squares[positions] = part
    if pp_group is not None:
        dist.all_reduce(squares, group=pp_group)
    return squares.sum().sqrt().float()


def local_square(grad: Tensor) -> Tensor:
    """The sum of squares of this rank's part of a gradient: an fp64 scalar."""
    (norm,) = torch._foreach_norm([_local(grad)], 2, dtype=torch.float64)
    return norm.square()


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def clip_(params: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)), in place; infinity clips nothing.

    `norm` is what `global_norm` gave. Check that it is finite first: a norm that is not spreads to
    every gradient. Source: Pascanu et al. 2013, algorithm 1.
    """
    here: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for param in params:
        if param.grad is not None:
            grad = _local(param.grad)
            here[grad.device].append(grad)
    share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device, grads in here.items():
        # Together, and not as DTensors: their calls take the host longer than the GPU.
        torch._foreach_mul_(grads, share.to(device))


def _shard_groups(name: str, grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which the squares of a gradient's shards add up to the whole."""
    assert isinstance(grad, DTensor), f"{name} is sharded and its gradient is not"
    groups = []
    for axis, placement in enumerate(grad.placements):
        if isinstance(placement, Shard):
            groups.append(grad.device_mesh.get_group(axis))
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"the gradient of {name} is {placement} on mesh axis {axis}; reduce it first"
            )
    return tuple(groups)
