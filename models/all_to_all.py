"""Rows to the ranks that hold their experts, and back, in plain PyTorch: dispatcher `torch`.

Each rank of a group has tokens of its own and holds every E/P-th part of the experts, in rank
order. Rows in expert order are in owner order, so a rank's share for each owner is one slice:

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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppruntime.models.dispatch import AnyExperts, Exchange, Finish, WireOptions
from ppruntime.models.expert_products import can_group
from ppruntime.models.expert_rows import by_row, expert_layout, sum_rows, to_rows, weighted_sum
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_wire import from_wire, packed, to_wire, unpacked
from ppruntime.models.linear import WeightGradQueue
from ppruntime.models.precision import widened
from ppruntime.models.router import Routing

OPS = ("ppruntime::expert_counts", "ppruntime::expert_dispatch", "ppruntime::expert_combine")
"""Ops whose outputs a checkpointed layer has to keep, so that its recompute does not communicate.
Kept without checkpointing too: the rows are the experts' inputs, the results are weighted."""

AS_THEY_ARE = WireOptions()

_EXCHANGES: dict[str, Exchange] = {}
"""Ops take names, not objects."""


class AllToAll:
    """Sends one row per token and expert. The same numbers as `dispatch.AllHere`, see above."""

    def __init__(self, exchange: Exchange, wire: WireOptions = AS_THEY_ARE) -> None:
        self.exchange, self.wire = exchange, wire
        _EXCHANGES[exchange.name] = exchange

    def held(self, num_experts: int) -> range:
        share = num_experts // self.exchange.num_ranks
        return range(self.exchange.rank * share, (self.exchange.rank + 1) * share)

    def routed(
        self, experts: AnyExperts, x_ND: Tensor, routing: Routing, counts_E: Tensor
    ) -> Tensor:
        layout = expert_layout(routing.experts_NK)
        x_RD = to_rows(x_ND, layout)
        routes = self.routes(counts_E)
        late = _late_queue(experts) if self.wire.weight_grads_after_combine else None
        if isinstance(experts, Experts):
            x_SD, _ = self.dispatch(x_RD, None, routes, late)
            run = _by_expert if can_group(x_SD, experts.gate_up.weight) else Experts.forward
            y_RD = self.combine(run(experts, x_SD, routes.rows_per_expert), routes)
            return weighted_sum(y_RD, routing.weights_NK, layout)
        # There the weights go in before rounding, and so they travel.
        x_SD, weight_S = self.dispatch(x_RD, by_row(routing.weights_NK, layout), routes, late)
        assert weight_S is not None
        expert_S1 = routes.expert_S.to(x_ND.device, non_blocking=True).unsqueeze(1)
        y_RD = self.combine(experts.forward(x_SD, expert_S1, weight_S.unsqueeze(1)), routes)
        # Rounded as the FP8 experts themselves round where all are here.
        return widened(sum_rows(y_RD, layout).to(x_ND.dtype))

    def routes(self, counts_E: Tensor) -> Routes:
        """The routes of rows in expert order, counts_E[e] for expert e. A collective of the group
        that waits for its ranks on the host: who is late or gone is found here, before a device
        waits."""
        counts_PL = torch.ops.ppruntime.expert_counts(counts_E, self.exchange.name)
        num_ranks, here = counts_PL.shape
        experts = torch.arange(here).repeat(num_ranks)
        return Routes(
            send=counts_E.view(num_ranks, here).sum(1).tolist(),
            receive=counts_PL.sum(1).tolist(),
            rows_per_expert=counts_PL.flatten().tolist(),
            expert_S=experts.repeat_interleave(counts_PL.flatten()),
        )

    def dispatch(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        routes: Routes,
        late: LateQueue | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rows, and their routing weights if given, on the rank of their expert. What waits in
        `late` is done while the gradients travel."""
        rows_SD, weights_S = _Dispatch.apply(  # type: ignore[no-untyped-call]
            rows_RD, weights_R, routes, self.exchange, self.wire.fp8, late
        )
        return rows_SD, weights_S

    def combine(self, rows_SD: Tensor, routes: Routes) -> Tensor:
        """Results of the received rows back where the rows came from."""
        rows_RD: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
            rows_SD, routes, self.exchange, self.wire.fp8_grad
        )
        return rows_RD


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


class LateQueue(WeightGradQueue):
    """Holds the weight gradients of one layer's experts until their tokens' gradients have been
    sent, unless the queue behind it wants them to wait for longer."""

    def __init__(self, behind: WeightGradQueue | None) -> None:
        super().__init__()
        self.behind, self.deferring = behind, True

    def add(self, task: Callable[[], None]) -> None:
        if self.behind is not None and self.behind.deferring:
            self.behind.add(task)
        else:
            super().add(task)


def _late_queue(experts: AnyExperts) -> LateQueue:
    """The queue of these experts, made late if it is not yet."""
    layers = [experts.gate_up, experts.down] if isinstance(experts, Experts) else [experts]
    queue = layers[0].queue
    late = queue if isinstance(queue, LateQueue) else LateQueue(queue)
    for layer in layers:
        layer.queue = late
    return late


def _by_expert(experts: Experts, x_SD: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
    """Experts over rows that come by source and expert, each expert's together: for products that
    take one count per expert. Their weights' gradients are one sum over all sources."""
    counts_PL = torch.tensor(rows_per_expert).view(-1, len(experts.gate_up.weight))
    order, place = orders_by_expert(counts_PL, x_SD.device)
    sorted_SD = _Permute.apply(x_SD, order, place)  # type: ignore[no-untyped-call]
    y_SD = experts.forward(sorted_SD, counts_PL.sum(0).tolist())
    back_SD: Tensor = _Permute.apply(y_SD, place, order)  # type: ignore[no-untyped-call]
    return back_SD


def orders_by_expert(counts_PL: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(order, place) of rows that lie by source and expert, `counts_PL` (on the host) of each, and
    are wanted by expert and source: row order[i] comes to place i, row s to place[s]. On `device`,
    which waits for nothing: blocks move as they are, so nothing is sorted."""
    counts_LP = counts_PL.t()
    there_PL = _starts(counts_PL)
    wanted_PL = _starts(counts_LP).t()
    num_rows = int(counts_PL.sum())
    index = torch.arange(num_rows, device=device)

    def moved(by: Tensor, counts: Tensor) -> Tensor:
        by, counts = (t.flatten().to(device, non_blocking=True) for t in (by, counts))
        return index + by.repeat_interleave(counts, output_size=num_rows)

    order = moved((there_PL - wanted_PL).t(), counts_LP)
    return order, moved(wanted_PL - there_PL, counts_PL)


def _starts(counts: Tensor) -> Tensor:
    """Where each block begins, of blocks that lie row by row."""
    flat = counts.flatten()
    return (flat.cumsum(0) - flat).view(counts.shape)


class _Permute(torch.autograd.Function):
    """x[order]; the gradient is gathered by the inverse."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, order_S: Tensor, place_S: Tensor) -> Tensor:
        ctx.save_for_backward(place_S)
        return x_SD[order_S]

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (place_S,) = ctx.saved_tensors
        return grad_SD[place_S], None, None


class _Dispatch(torch.autograd.Function):
    """One node for rows and weights: the order of their exchanges is written here, not found by
    autograd. The gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        routes: Routes,
        exchange: Exchange,
        fp8: bool,
        late: LateQueue | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.routes, ctx.exchange, ctx.late = routes, exchange, late
        rows_SD = _sent(rows_RD, routes, exchange, fp8)
        if weights_R is None:
            return rows_SD, None
        return rows_SD, _sent(weights_R, routes, exchange, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        routes: Routes = ctx.routes
        back: list[Tensor | None] = []
        waiting: list[Finish] = []
        for grad in grads:
            if grad is None:
                back.append(None)
                continue
            received, finish = _begin(
                grad.contiguous(), routes.receive, routes.send, ctx.exchange, BACK
            )
            back.append(received)
            waiting.append(finish)
        if ctx.late is not None:
            for task in ctx.late.pop():
                task()
        for finish in waiting:
            finish()
        return *back, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_SD: Tensor, routes: Routes, exchange: Exchange, fp8_grad: bool
    ) -> Tensor:
        ctx.routes, ctx.exchange, ctx.fp8_grad = routes, exchange, fp8_grad
        rows_RD: Tensor = torch.ops.ppruntime.expert_combine(
            rows_SD, routes.receive, routes.send, exchange.name
        )
        return rows_RD

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        return _sent(grad_RD.contiguous(), ctx.routes, ctx.exchange, ctx.fp8_grad), None, None, None


def _sent(rows: Tensor, routes: Routes, exchange: Exchange, fp8: bool) -> Tensor:
    """Rows to the owners of their experts; checkpointing keeps what was received as it was."""
    message = packed(to_wire(rows)) if fp8 else rows
    received: Tensor = torch.ops.ppruntime.expert_dispatch(
        message, routes.send, routes.receive, exchange.name
    )
    return from_wire(unpacked(received), rows.dtype) if fp8 else received


THERE, BACK = "rows for the experts", "the experts' results"
"""What an exchange is called in an error."""


@torch.library.custom_op("ppruntime::expert_counts", mutates_args=())
def _counts_op(counts_E: Tensor, exchange: str) -> Tensor:
    """[P, L] on the host: rows that each rank has for each of this rank's experts."""
    there = _EXCHANGES[exchange]
    outgoing_PL = counts_E.cpu().view(there.num_ranks, -1)
    incoming_PL = torch.empty_like(outgoing_PL)
    there.begin(list(outgoing_PL), list(incoming_PL), "token counts")()
    return incoming_PL


@torch.library.custom_op("ppruntime::expert_dispatch", mutates_args=())
def _dispatch_op(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], exchange: str
) -> Tensor:
    return _exchanged(rows, send, receive, exchange, THERE)


@torch.library.custom_op("ppruntime::expert_combine", mutates_args=())
def _combine_op(rows: Tensor, send: Sequence[int], receive: Sequence[int], exchange: str) -> Tensor:
    return _exchanged(rows, send, receive, exchange, BACK)


@_counts_op.register_fake
def _(counts_E: Tensor, exchange: str) -> Tensor:
    num_ranks = _EXCHANGES[exchange].num_ranks
    return counts_E.new_empty(num_ranks, len(counts_E) // num_ranks, device="cpu")


@_dispatch_op.register_fake
@_combine_op.register_fake
def _(rows: Tensor, send: Sequence[int], receive: Sequence[int], exchange: str) -> Tensor:
    return rows.new_empty(sum(receive), *rows.shape[1:])


def _exchanged(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], exchange: str, what: str
) -> Tensor:
    received, finish = _begin(rows, send, receive, _EXCHANGES[exchange], what)
    finish()
    return received


def _begin(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], exchange: Exchange, what: str
) -> tuple[Tensor, Finish]:
    """What will have been received once the second has returned."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    outgoing, incoming = torch.split(rows, list(send)), torch.split(received, list(receive))
    return received, exchange.begin(outgoing, incoming, what)
