"""Matrices of which every rank has some rows, brought whole to one rank each and back.

Who owns what follows from sizes alone, so that all ranks know it. Matrices travel in rounds, in
each at most one per owner: a rank holds one whole matrix at a time, and about one more in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def rounds_of(costs: Sequence[float], num_ranks: int) -> tuple[tuple[int | None, ...], ...]:
    """By round and rank, the number of the matrix that the rank owns; None: nothing.

    The dearest first, each to the rank with the least so far, the lower one of equals: no rank gets
    more than a fair share and one matrix (Graham 1969, LPT).
    """
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        own[rank].append(number)
        loads[rank] += costs[number]
    return tuple(
        tuple(numbers[i] if i < len(numbers) else None for numbers in own)
        for i in range(max(map(len, own)))
    )


def rows_of(num_rows: int, num_ranks: int) -> tuple[int, ...]:
    """Rows of each rank where a tensor is cut along its first axis as torch's `Shard(0)` does."""
    most = -(-num_rows // num_ranks)
    return tuple(min(most, max(0, num_rows - rank * most)) for rank in range(num_ranks))


def through_owners(
    rows: Sequence[Tensor | None],
    num_rows: Sequence[int],
    act: Callable[[int, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> list[Tensor | None]:
    """One round: `rows` are this rank's [r, C] of each owner's matrix, None for an owner without
    one; `act(owner, matrix)` gives what becomes of this rank's own matrix, of the same shape and
    dtype. Gives this rank's rows of what became of each. A collective of `group`.

    `num_rows`: of the whole matrices, by owner. All are of one dtype.
    """
    me, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    there = [tensor for tensor in rows if tensor is not None]
    outgoing = torch.cat([tensor.reshape(-1) for tensor in there])
    sent = [0 if tensor is None else tensor.numel() for tensor in rows]
    mine = rows[me]
    width = 0 if mine is None else mine.shape[1]
    received = [count * width for count in rows_of(num_rows[me], num_ranks)] if width else []
    received = received or [0] * num_ranks
    whole = outgoing.new_empty(sum(received))
    _all_to_all(whole, outgoing, received, sent, group)
    if width:
        whole = act(me, whole.view(-1, width)).reshape(-1)
    _all_to_all(outgoing, whole, sent, received, group)
    pieces = iter(torch.split(outgoing, [tensor.numel() for tensor in there]))
    return [None if tensor is None else next(pieces).view(tensor.shape) for tensor in rows]


def _all_to_all(
    into: Tensor, of: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> None:
    """As bytes: not every backend knows every type."""
    size = of.element_size()
    dist.all_to_all_single(
        into.view(torch.uint8),
        of.view(torch.uint8),
        [count * size for count in received],
        [count * size for count in sent],
        group=group,
    )
