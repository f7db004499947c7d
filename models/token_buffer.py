"""Tokens to every rank that has experts of theirs, once each, and sums back: the interface of
DeepEP's buffer, and a readable one over `dispatch.Exchange` that says what it does.

    dispatch   each token to the ranks that hold at least one of its experts, with its experts as
               those ranks count them (-1: not there) and their weights; tokens come by (source
               rank, token), at most one row per token
    again      other rows of the same tokens, the same way: gradients in the backward
    combine    rows of what came back to where they came from, and summed there: in fp32, in rank
               order, rounded to the rows' dtype once

Compared with a row per token and expert a token travels once to a rank, however many of its experts
are there. Source: DeepEP's README and `Buffer` (normal kernels, inside a host). Shape letters:
N tokens here, S tokens received, K experts per token, E experts, P ranks, L = E/P, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ppruntime.models.dispatch import Exchange
from ppruntime.models.fp8_wire import WireRows, as_bytes

T = TypeVar("T", covariant=True)


class Pending(Protocol, Generic[T]):
    """Something on its way. Calling it, once, makes the current stream wait and gives it."""

    def __call__(self) -> T: ...


class Arrived(NamedTuple):
    """Tokens on a rank of some of their experts."""

    x: WireRows
    """[S, D], as they were sent."""
    expert_SK: Tensor
    """int64, counted from the first expert held here; -1: elsewhere or nowhere."""
    weight_SK: Tensor
    """fp32; 0 where the expert is -1."""
    counts: Sequence[int]
    """Rows for each expert held here; on the host."""
    handle: tuple[Tensor, ...]
    """What `again` and `combine` need to know the way."""


class TokenBuffer(Protocol):
    """What a dispatcher of tokens asks of whoever moves them. Every call is a collective, begun in
    the order of calls. Raises an error that names group and exchange if a rank does not come."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def now(self) -> object:
        """This moment on the current stream: what a call may begin after."""

    def dispatch(
        self, x: WireRows, expert_NK: Tensor, weight_NK: Tensor, num_experts: int, *, after: object
    ) -> Pending[Arrived]:
        """Begins to send tokens once all before `after` is computed. The host waits for counts."""

    def again(self, x: WireRows, handle: tuple[Tensor, ...], *, after: object) -> Pending[WireRows]:
        """Begins to send other rows [N, D] of the tokens of `handle`; gives [S, D]."""

    def combine(
        self, y_SD: Tensor, handle: tuple[Tensor, ...], weight_SK: Tensor | None, *, after: object
    ) -> Pending[tuple[Tensor, Tensor | None]]:
        """Begins to send rows back; gives their sums [N, D] and, if given, those of weights
        [N, K]."""


class ExchangeBuffer:
    """The reference: plain exchanges, done when a call returns. Any dtype."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def num_ranks(self) -> int:
        return self.exchange.num_ranks

    def now(self) -> None:
        return None

    def dispatch(
        self, x: WireRows, expert_NK: Tensor, weight_NK: Tensor, num_experts: int, *, after: object
    ) -> Pending[Arrived]:
        num_ranks, share = self.num_ranks, num_experts // self.num_ranks
        rank_NK = torch.where(expert_NK >= 0, expert_NK.div(share, rounding_mode="floor"), -1)
        goes_PN = (rank_NK.unsqueeze(0) == torch.arange(num_ranks).view(-1, 1, 1)).any(-1)
        send_P = goes_PN.sum(1)
        receive_P = torch.empty_like(send_P)
        self._swap(torch.split(send_P, 1), torch.split(receive_P, 1), "token counts")
        token_R = goes_PN.nonzero()[:, 1]  # tokens for rank 0, then those for rank 1, ...
        handle = (token_R, send_P, receive_P, torch.tensor([len(expert_NK)]))
        to_rank_R1 = torch.arange(num_ranks).repeat_interleave(send_P).unsqueeze(1)
        there_RK = rank_NK[token_R] == to_rank_R1
        expert_RK = torch.where(there_RK, expert_NK[token_R] - to_rank_R1 * share, -1)
        weight_RK = torch.where(there_RK, weight_NK[token_R], 0)
        expert_SK = self._there(expert_RK, handle, "the tokens' experts")
        arrived = Arrived(
            self.again(x, handle, after=after)(),
            expert_SK,
            self._there(weight_RK, handle, "routing weights"),
            torch.bincount(expert_SK[expert_SK >= 0], minlength=share).tolist(),
            handle,
        )
        return lambda: arrived

    def again(self, x: WireRows, handle: tuple[Tensor, ...], *, after: object) -> Pending[WireRows]:
        token_R = handle[0]
        if isinstance(x, Tensor):
            rows: WireRows = self._there(x[token_R], handle, "tokens")
        else:
            data, scale = (as_bytes(part)[token_R] for part in x)
            rows = (
                self._there(data, handle, "tokens").view(x[0].dtype),
                self._there(scale, handle, "the tokens' scales").view(x[1].dtype),
            )
        return lambda: rows

    def combine(
        self, y_SD: Tensor, handle: tuple[Tensor, ...], weight_SK: Tensor | None, *, after: object
    ) -> Pending[tuple[Tensor, Tensor | None]]:
        total_ND = self._back(y_SD, handle, "the experts' results")
        weight_NK = None
        if weight_SK is not None:
            weight_NK = self._back(weight_SK, handle, "gradients of routing weights")
        return lambda: (total_ND, weight_NK)

    def _there(self, rows: Tensor, handle: tuple[Tensor, ...], what: str) -> Tensor:
        _, send_P, receive_P, _ = handle
        received = rows.new_empty(int(receive_P.sum()), *rows.shape[1:])
        outgoing, incoming = _parts(rows, send_P), _parts(received, receive_P)
        self._swap(outgoing, incoming, what)
        return received

    def _back(self, rows: Tensor, handle: tuple[Tensor, ...], what: str) -> Tensor:
        token_R, send_P, receive_P, num_tokens = handle
        received = rows.new_empty(len(token_R), *rows.shape[1:])
        parts = _parts(received, send_P)
        self._swap(_parts(rows, receive_P), parts, what)
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(int(num_tokens), *rows.shape[1:], dtype=wide)
        for tokens, part in zip(_parts(token_R, send_P), parts, strict=True):
            total[tokens] += part.to(wide)  # distinct within a rank
        return total.to(rows.dtype)

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], what: str) -> None:
        finish: Callable[[], None] = self.exchange.begin(outgoing, incoming, what)
        finish()


def _parts(rows: Tensor, sizes_P: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, sizes_P.tolist())
