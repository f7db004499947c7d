"""The norm of the whole model's gradient, bitwise the same at every cut, and clipping by it."""

from __future__ import annotations

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
            squares[index[name]] = local_square(local)
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
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    norm: Tensor = torch.linalg.vector_norm(local, dtype=torch.float64)
    return norm.square()


def clip_(params: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)), in place; infinity clips nothing.

    `norm` is what `global_norm` gave. Check that it is finite first: a norm that is not spreads to
    every gradient. Source: Pascanu et al. 2013, algorithm 1.
    """
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach=False)


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
