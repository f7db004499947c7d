"""The yardstick of `bench moe --ranks`: a routed layer in bf16, as fast as torch alone makes it.

    tokens  -> rows by expert          one gather
    rows    -> their experts' ranks    one `all_to_all_single`
            -> by expert and source    one gather: those of an expert lie together
    z = x W13^T, h = SwiGLU(z), o = h W2^T         `grouped_mm`; SwiGLU in one kernel, as compiled
    back the same way, and y = sum_k w_k o_k       one gather, and what is fastest there of WAYS

How many rows go where is known beforehand on all hosts, and the orders of what comes are made once:
the host waits for nothing. Nothing in a token's width is ever in fp32. The dispatcher `torch`
(`models.all_to_all`) is the readable way of a run instead: its host waits for counts, and its
weighted sums and SwiGLU pass through fp32. Both give the same but for rounding.

Shape letters: N tokens, K experts per token, R = N K rows here, S rows received, D model width,
L experts here, P ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppruntime.models.all_to_all import orders_by_expert
from ppruntime.models.dispatch import AnyExperts
from ppruntime.models.expert_rows import Layout, expert_layout
from ppruntime.models.experts import Experts
from ppruntime.models.router import Routing


class Yardstick:
    """A dispatcher for one routing, whose counts it learns when it is made: a collective of
    `group`. The experts are `models.experts.Experts`."""

    def __init__(self, group: dist.ProcessGroup, counts_E: Tensor) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        everyones = [torch.empty_like(counts_E) for _ in range(self.num_ranks)]
        dist.all_gather(everyones, counts_E, group=group)
        counts_PPL = torch.stack(everyones).cpu().view(self.num_ranks, self.num_ranks, -1)
        mine_PL = counts_PPL[:, self.rank]
        self.send: list[int] = counts_PPL[self.rank].sum(1).tolist()
        self.receive: list[int] = mine_PL.sum(1).tolist()
        self.rows_per_expert: list[int] = mine_PL.sum(0).tolist()
        self.order_S, self.place_S = orders_by_expert(mine_PL, counts_E.device)
        self.sums = next(iter(WAYS))
        """How tokens' rows are weighted and summed, of WAYS; `choose_sums` finds the fastest."""

    def held(self, num_experts: int) -> range:
        share = num_experts // self.num_ranks
        return range(self.rank * share, (self.rank + 1) * share)

    def routed(
        self, experts: AnyExperts, x_ND: Tensor, routing: Routing, counts_E: Tensor
    ) -> Tensor:
        """The weighted sum [N, D], in x's dtype."""
        del counts_E
        assert isinstance(experts, Experts)
        layout = expert_layout(routing.experts_NK)
        x_SD = _ToExperts.apply(x_ND, layout, self)  # type: ignore[no-untyped-call]
        o_SD = experts(x_SD, self.rows_per_expert)
        y_ND: Tensor = _ToTokens.apply(o_SD, routing.weights_NK, layout, self)  # type: ignore[no-untyped-call]
        return y_ND

    def choose_sums(
        self,
        milliseconds: Callable[[Callable[[], object]], float],
        x_ND: Tensor,
        weights_NK: Tensor,
    ) -> None:
        """Takes the fastest of WAYS for such tokens, forward and backward, by the median of three
        times that `milliseconds` takes of a call; alike on all ranks if its times are."""
        rows_NKD = x_ND.unsqueeze(1).repeat(1, weights_NK.shape[1], 1)

        def once(name: str) -> None:
            WAYS[name].weighted(rows_NKD, weights_NK)
            WAYS[name].dots(rows_NKD, x_ND)

        times = {
            name: statistics.median([milliseconds(partial(once, name)) for _ in range(4)][1:])
            for name in WAYS
        }
        self.sums = min(times, key=lambda name: times[name])

    # The steps; `bench_moe_parts` times them one by one.

    def there(self, rows_RD: Tensor) -> Tensor:
        """Rows by expert to their experts' ranks; they come by (source, expert)."""
        return self._exchanged(rows_RD, self.send, self.receive)

    def back(self, rows_SD: Tensor) -> Tensor:
        """Rows by (source, expert) to where they came from."""
        return self._exchanged(rows_SD, self.receive, self.send)

    def by_expert(self, rows_SD: Tensor) -> Tensor:
        """From (source, expert) to (expert, source)."""
        return rows_SD.index_select(0, self.order_S)

    def by_source(self, rows_SD: Tensor) -> Tensor:
        """From (expert, source) to (source, expert)."""
        return rows_SD.index_select(0, self.place_S)

    def _exchanged(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        received = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(received, rows, [*receive], [*send], group=self.group)
        return received


def by_token(rows_RD: Tensor, layout: Layout) -> Tensor:
    """[N, K, D]: each token's rows."""
    picked = rows_RD.index_select(0, layout.row_NK.flatten())
    return picked.view(*layout.row_NK.shape, rows_RD.shape[1])


class Sums(NamedTuple):
    """A way to weight and sum tokens' rows."""

    weighted: Callable[[Tensor, Tensor], Tensor]
    """(rows [N, K, D], weights [N, K]) -> sum_k w_nk rows_nk, summed in fp32."""
    dots: Callable[[Tensor, Tensor], Tensor]
    """(rows [N, K, D], grad [N, D]) -> [N, K]: the weights' gradients."""


WAYS = {
    "batched products": Sums(
        lambda rows, weights: torch.bmm(weights.to(rows.dtype).unsqueeze(1), rows).squeeze(1),
        lambda rows, grad: torch.bmm(rows, grad.unsqueeze(2)).squeeze(2),
    ),
    "product by product": Sums(
        lambda rows, weights: (rows * weights.to(rows.dtype).unsqueeze(2)).sum(1),
        lambda rows, grad: (rows * grad.unsqueeze(1)).sum(2),
    ),
}


def weighted_grads(
    way: Yardstick, grad_ND: Tensor, rows_NKD: Tensor, weights_NK: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Gradients of the weighted sum, of the rows by expert and of the weights."""
    grad_weights_NK = WAYS[way.sums].dots(rows_NKD, grad_ND)
    weight_R = torch.empty_like(layout.token_R, dtype=grad_ND.dtype)
    weight_R[layout.row_NK.flatten()] = weights_NK.flatten().to(grad_ND.dtype)
    grad_RD = grad_ND.index_select(0, layout.token_R).mul_(weight_R.unsqueeze(1))
    return grad_RD, grad_weights_NK.to(weights_NK.dtype)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, layout: Layout, way: Yardstick) -> Tensor:
        ctx.layout, ctx.way = layout, way
        return way.by_expert(way.there(x_ND.index_select(0, layout.token_R)))

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        grad_RD = ctx.way.back(ctx.way.by_source(grad_SD))
        return by_token(grad_RD, ctx.layout).sum(1), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o_SD: Tensor, weights_NK: Tensor, layout: Layout, way: Yardstick
    ) -> Tensor:
        rows_NKD = by_token(way.back(way.by_source(o_SD)), layout)
        ctx.save_for_backward(rows_NKD, weights_NK)
        ctx.layout, ctx.way = layout, way
        return WAYS[way.sums].weighted(rows_NKD, weights_NK)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_NKD, weights_NK = ctx.saved_tensors
        way, layout = ctx.way, ctx.layout
        grad_RD, grad_weights_NK = weighted_grads(way, grad_ND, rows_NKD, weights_NK, layout)
        return way.by_expert(way.there(grad_RD)), grad_weights_NK, None, None
