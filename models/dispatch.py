"""Rows to the ranks that hold their experts, and back: expert parallelism in plain PyTorch.

Each rank of an expert group has tokens of its own and holds every E/P-th part of the experts, in
rank order. Rows in expert order are in owner order, so a rank's share for each owner is one slice:

    counts     rows that each rank has for each of my experts; on the host, before anything waits
    dispatch   rows to their experts' owners: they come by (source rank, expert, token)
    ...        the owner computes
    combine    the results back, into the places that the rows came from

The readable experts multiply the rows of each source and expert by themselves, as that source would
if it held all experts: outputs and gradients of tokens are bitwise those of one process, gradients
of experts are sums over the sources, in rank order. The FP8 experts sort what comes by (expert,
source rank, token), which is the order of one process that has the ranks' tokens one after another:
with it they agree bitwise in all.

Why no rank waits for ever. All ranks of a group run the same order of work, and within an op the
same exchanges in the same order: dispatch and combine are one node of the autograd graph each, and
nothing here branches on what is in a tensor. Take one pipeline's ops in an order that its transfers
allow (there is one, the schedule is checked for it), and of the ops that some rank never finishes
the first. All before it are done on all ranks: so each rank of its group has what it takes as input
and enters the op, they meet in its exchanges, and it finishes. The argument needs that an exchange
and a pipeline transfer never wait for each other's turn: they go through groups, sockets and
communicators of their own. On a GPU both are kernels and need room to run side by side, which a
transfer leaves (`pp.transport_ctas`); all kernels and communicators are loaded before the first
step, see `boundaries.warm_up`.

Each exchange is a registered op: activation checkpointing that saves the outputs of `OPS` neither
sends nor waits in a recompute. Shape letters: R rows here, S rows received, E experts, P ranks,
L = E/P experts here, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

OPS = ("ppruntime::expert_counts", "ppruntime::expert_dispatch", "ppruntime::expert_combine")
"""Ops whose outputs a checkpointed layer has to keep, so that its recompute does not communicate.
Kept without checkpointing too: the rows are the experts' inputs, the results are weighted."""


class DispatchError(RuntimeError):
    """A rank of an expert group did not take part in an exchange. Names both and the exchange."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ranks over which a layer's experts lie. Its process group is used for nothing else, and
    has the limit for one exchange as its timeout."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Ranks in the world, by rank in the group."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ExpertGroup:
        """The group, known from then on to the ops by its name."""
        found = cls(group, tuple(dist.get_process_group_ranks(group)))
        _GROUPS[found.name] = found
        return found

    @property
    def name(self) -> str:
        """What the ops are given for it."""
        return ",".join(map(str, self.ranks))

    @property
    def rank(self) -> int:
        """This process in the group."""
        return dist.get_rank(self.group)

    def held(self, num_experts: int) -> range:
        """The experts of this rank."""
        share = num_experts // len(self.ranks)
        return range(self.rank * share, (self.rank + 1) * share)


_GROUPS: dict[str, ExpertGroup] = {}
"""Ops take names, not objects."""


class Routes(NamedTuple):
    """Where the rows of one micro-batch go."""

    send: list[int]
    """Rows for each rank of the group."""
    receive: list[int]
    """Rows from each rank."""
    rows_per_expert: list[int]
    """Rows from rank 0 for each expert here, then those from rank 1, ..."""
    expert_S: Tensor
    """int64 expert of each received row, counted from this rank's first; on the host."""


def make_routes(counts_E: Tensor, group: ExpertGroup) -> Routes:
    """The routes of rows in expert order, counts_E[e] for expert e. A collective of the group that
    waits for its ranks on the host: who is late or gone is found here, before a device waits."""
    counts_PL = torch.ops.ppruntime.expert_counts(counts_E, group.name)
    num_ranks, here = counts_PL.shape
    experts = torch.arange(here).repeat(num_ranks)
    return Routes(
        send=counts_E.view(num_ranks, here).sum(1).tolist(),
        receive=counts_PL.sum(1).tolist(),
        rows_per_expert=counts_PL.flatten().tolist(),
        expert_S=experts.repeat_interleave(counts_PL.flatten()),
    )


def dispatch(
    rows_RD: Tensor, weights_R: Tensor | None, routes: Routes, group: ExpertGroup
) -> tuple[Tensor, Tensor | None]:
    """Rows, and their routing weights if given, on the rank of their expert."""
    rows_SD, weights_S = _Dispatch.apply(rows_RD, weights_R, routes, group.name)  # type: ignore[no-untyped-call]
    return rows_SD, weights_S


def combine(rows_SD: Tensor, routes: Routes, group: ExpertGroup) -> Tensor:
    """Results of the received rows back where the rows came from."""
    rows_RD: Tensor = _Combine.apply(rows_SD, routes, group.name)  # type: ignore[no-untyped-call]
    return rows_RD


class _Dispatch(torch.autograd.Function):
    """One node for rows and weights: the order of their exchanges is written here, not found by
    autograd. The gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_R: Tensor | None, routes: Routes, group: str
    ) -> tuple[Tensor, Tensor | None]:
        ctx.routes, ctx.group = routes, group
        send = torch.ops.ppruntime.expert_dispatch
        rows_SD = send(rows_RD, routes.send, routes.receive, group)
        if weights_R is None:
            return rows_SD, None
        return rows_SD, send(weights_R, routes.send, routes.receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        routes: Routes = ctx.routes
        back = [
            None
            if grad is None
            else torch.ops.ppruntime.expert_combine(
                grad.contiguous(), routes.receive, routes.send, ctx.group
            )
            for grad in grads
        ]
        return *back, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, routes: Routes, group: str) -> Tensor:
        ctx.routes, ctx.group = routes, group
        rows_RD: Tensor = torch.ops.ppruntime.expert_combine(
            rows_SD, routes.receive, routes.send, group
        )
        return rows_RD

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        routes: Routes = ctx.routes
        grad_SD = torch.ops.ppruntime.expert_dispatch(
            grad_RD.contiguous(), routes.send, routes.receive, ctx.group
        )
        return grad_SD, None, None


@torch.library.custom_op("ppruntime::expert_counts", mutates_args=())
def _counts_op(counts_E: Tensor, group: str) -> Tensor:
    """[P, L] on the host: rows that each rank has for each of this rank's experts."""
    here = _GROUPS[group]
    outgoing_PL = counts_E.cpu().view(len(here.ranks), -1)
    incoming_PL = torch.empty_like(outgoing_PL)
    _swap(here, list(outgoing_PL), list(incoming_PL), "token counts")
    return incoming_PL


@torch.library.custom_op("ppruntime::expert_dispatch", mutates_args=())
def _dispatch_op(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    return _exchanged(rows, send, receive, group, "rows for the experts")


@torch.library.custom_op("ppruntime::expert_combine", mutates_args=())
def _combine_op(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    return _exchanged(rows, send, receive, group, "the experts' results")


@_counts_op.register_fake
def _(counts_E: Tensor, group: str) -> Tensor:
    num_ranks = len(_GROUPS[group].ranks)
    return counts_E.new_empty(num_ranks, len(counts_E) // num_ranks, device="cpu")


@_dispatch_op.register_fake
@_combine_op.register_fake
def _(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    return rows.new_empty(sum(receive), *rows.shape[1:])


def _exchanged(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str, what: str
) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    _swap(_GROUPS[group], torch.split(rows, list(send)), torch.split(received, list(receive)), what)
    return received


def _swap(
    here: ExpertGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], what: str
) -> None:
    """Sends outgoing[p] to rank p and fills incoming[p] from it. Empty ones do not travel: both
    ends know that. Point to point, so that a failure says who failed."""
    own, num_ranks = here.rank, len(here.ranks)
    incoming[own].copy_(outgoing[own])
    ops: list[dist.P2POp] = []
    peers: list[int] = []
    for shift in range(1, num_ranks):
        # Every rank begins with another peer, so that no link has all of the traffic at once.
        for act, tensors, peer in (
            (dist.irecv, incoming, (own - shift) % num_ranks),
            (dist.isend, outgoing, (own + shift) % num_ranks),
        ):
            if tensors[peer].numel():
                ops.append(dist.P2POp(act, tensors[peer], group=here.group, group_peer=peer))
                peers.append(peer)
    if not ops:
        return
    num_done = 0
    try:
        # NCCL makes one work of all, whose wait is the stream's and cannot fail here.
        for work in dist.batch_isend_irecv(ops):
            work.wait()
            num_done += 1
    except RuntimeError as error:
        raise DispatchError(
            f"rank {here.ranks[peers[num_done]]} of the expert group of ranks {list(here.ranks)}"
            f" did not take part in exchanging {what}: it is late or has ended"
            f" ({_first_line(error)})"
        ) from error


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]
