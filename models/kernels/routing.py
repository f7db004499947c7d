# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""What follows a router's product, in two passes each way: scores, picks and weights; mean shares.

    s = sqrt(softplus(l))       picks: the K highest s + bias       w_k = f s_k / sum_k s_k
    P_be = mean over a sequence's tokens of s_e / sum_e s_e

Plain PyTorch takes some forty launches for it, and a stable sort of all experts of every token.
Kept for the backward: logits, scores and picks. Bytes of N tokens and E experts, fp32: 8 N E
forward, 12 N E backward; the shares 4 N E and 8 N E more.

Picks are by the rule of `topk.top_k`: equal sums by the smaller number, NaN before all numbers.
Where a score is 0 its gradient is 0; the reference's is NaN. Numeric class: summation order
(exponential and logarithm, to their last bits; picks differ where sums do by that much).
Shape letters: N tokens (B sequences of T), E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.rounding import sigmoid
from ppruntime.models.router import Routing

_TILE = 2048
"""Scores that a program works on at a time."""
_TOKENS = 128
"""Of one sequence, whose shares a program adds up."""


def route(
    logits_NE: Tensor,
    bias_E: Tensor | None,
    given_NK: Tensor | None,
    per_token: int,
    factor: float,
) -> Routing:
    """As `router.route`. Raises ValueError for logits that are not fp32, and for shapes that do not
    belong together."""
    if logits_NE.dtype is not torch.float32:
        raise ValueError(f"route: logits are {logits_NE.dtype}; the kernel takes float32")
    num_tokens, num_experts = logits_NE.shape
    for name, tensor, wanted in (
        ("the bias", bias_E, (num_experts,)),
        ("given experts", given_NK, (num_tokens, per_token)),
    ):
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(
                f"route: {name} is {list(tensor.shape)}; with logits {list(logits_NE.shape)} and "
                f"{per_token} experts a token it has to be {list(wanted)}"
            )
    experts_NK, weights_NK, scores_NE = _Route.apply(logits_NE, bias_E, given_NK, per_token, factor)
    return Routing(experts_NK if given_NK is None else given_NK, weights_NK, scores_NE)


def mean_shares(scores_NE: Tensor, batch: int) -> Tensor:
    """As `router.mean_shares`: [B, E] fp32, a sequence's tokens added up in blocks, in order.
    Raises ValueError for tokens that are no whole number of each sequence."""
    if batch < 1 or scores_NE.shape[0] % batch:
        raise ValueError(
            f"mean_shares: {scores_NE.shape[0]} tokens are not {batch} sequences of equal length"
        )
    shares_BE: Tensor = _MeanShares.apply(scores_NE, batch)
    return shares_BE


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        given: Tensor | None,
        per_token: int,
        factor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        experts, weights, scores = _route(logits, bias, given, per_token, factor)
        ctx.save_for_backward(logits, scores, experts if given is None else given)
        ctx.factor = factor
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        return experts, weights, scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        _, dweights, dscores = grads
        if dweights is None and dscores is None:
            return None, None, None, None, None
        logits, scores, experts = ctx.saved_tensors
        dlogits = _route_backward(dweights, dscores, logits, scores, experts, ctx.factor)
        return dlogits, None, None, None, None


class _MeanShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, batch: int) -> Tensor:
        ctx.save_for_backward(scores)
        shares: Tensor = _mean_shares(scores, batch)
        return shares

    @staticmethod
    def backward(ctx: Any, dshares: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        return _mean_shares_backward(dshares, scores), None


# The ops


@torch.library.custom_op("ppruntime::route", mutates_args=())
def _route(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, per_token: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Picks [N, K] int64 (empty where they are given), weights [N, K], scores [N, E]."""
    experts, weights, scores = outputs = _outputs(logits, given, per_token)
    num_tokens, num_experts = logits.shape
    if num_tokens:
        padded, tokens = _tile(num_experts)
        _route_kernel[(triton.cdiv(num_tokens, tokens),)](
            logits.contiguous(), bias, None if given is None else given.contiguous(),
            scores, experts, weights, factor, num_tokens, num_experts, per_token, padded,
            triton.next_power_of_2(per_token), tokens, num_warps=4,
        )  # fmt: skip
    return outputs


def _outputs(logits: Tensor, given: Tensor | None, per_token: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = logits.shape[0]
    return (
        logits.new_empty(num_tokens if given is None else 0, per_token, dtype=torch.int64),
        logits.new_empty(num_tokens, per_token),
        torch.empty_like(logits, memory_format=torch.contiguous_format),
    )


@_route.register_fake
def _(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, per_token: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(logits, given, per_token)


@torch.library.custom_op("ppruntime::route_backward", mutates_args=())
def _route_backward(
    dweights: Tensor | None,
    dscores: Tensor | None,
    logits: Tensor,
    scores: Tensor,
    experts: Tensor,
    factor: float,
) -> Tensor:
    """The logits' gradient; None stands for zeros."""
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    num_tokens, num_experts = logits.shape
    if num_tokens:
        padded, tokens = _tile(num_experts)
        _route_backward_kernel[(triton.cdiv(num_tokens, tokens),)](
            None if dweights is None else dweights.contiguous(),
            None if dscores is None else dscores.contiguous(),
            logits.contiguous(), scores, experts.contiguous(), dlogits, factor,
            num_tokens, num_experts, experts.shape[1], padded, tokens, num_warps=4,
        )  # fmt: skip
    return dlogits


@_route_backward.register_fake
def _(
    dweights: Tensor | None,
    dscores: Tensor | None,
    logits: Tensor,
    scores: Tensor,
    experts: Tensor,
    factor: float,
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("ppruntime::mean_shares", mutates_args=())
def _mean_shares(scores: Tensor, batch: int) -> Tensor:
    num_experts, length = scores.shape[1], scores.shape[0] // batch
    padded, tokens = _tile(num_experts)
    blocks = max(1, triton.cdiv(length, _TOKENS))
    parts = scores.new_empty(batch, blocks, num_experts)
    _mean_shares_kernel[(batch, blocks)](
        scores.contiguous(), parts, length, num_experts, padded, min(tokens, _TOKENS), _TOKENS,
        num_warps=4,
    )  # fmt: skip
    return parts.sum(1) / length


@_mean_shares.register_fake
def _(scores: Tensor, batch: int) -> Tensor:
    return scores.new_empty(batch, scores.shape[1])


@torch.library.custom_op("ppruntime::mean_shares_backward", mutates_args=())
def _mean_shares_backward(dshares: Tensor, scores: Tensor) -> Tensor:
    dscores = torch.empty_like(scores, memory_format=torch.contiguous_format)
    num_tokens, num_experts = scores.shape
    if num_tokens:
        padded, tokens = _tile(num_experts)
        _mean_shares_backward_kernel[(triton.cdiv(num_tokens, tokens),)](
            dshares.contiguous(), scores.contiguous(), dscores, num_tokens,
            num_tokens // len(dshares), num_experts, padded, tokens, num_warps=4,
        )  # fmt: skip
    return dscores


@_mean_shares_backward.register_fake
def _(dshares: Tensor, scores: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _tile(num_experts: int) -> tuple[int, int]:
    """(experts as a power of two, tokens of a tile)."""
    padded = triton.next_power_of_2(num_experts)
    return padded, max(1, _TILE // padded)


# The kernels


@triton.jit
def _score(logits):
    """sqrt(log(1 + exp(l))); from 20 on the logarithm is l, as torch has it."""
    power = tl.exp(tl.minimum(logits, 20.0))
    sum_ = 1.0 + power
    # What rounding took from the sum is given back: without it small scores have few bits.
    added = tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)
    logarithm = tl.where(sum_ == 1.0, power, tl.log(sum_) * (power / added))
    return tl.sqrt(tl.where(logits > 20.0, logits, logarithm))


@triton.jit
def _rank(sums, experts):
    """A number that is larger the earlier an expert is picked; no two are equal."""
    bits = (sums + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(sums != sums, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - experts).to(tl.int64)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, given_ptr, scores_ptr, experts_ptr, weights_ptr, factor, num_tokens,
    E: tl.constexpr, K: tl.constexpr, E_PADDED: tl.constexpr, K_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    experts = tl.arange(0, E_PADDED)
    is_token, is_expert = tokens < num_tokens, experts < E
    inside = is_token[:, None] & is_expert[None, :]
    offsets = tokens[:, None] * E + experts[None, :]
    scores = _score(tl.load(logits_ptr + offsets, mask=inside, other=0.0))
    tl.store(scores_ptr + offsets, scores, mask=inside)
    places = tl.arange(0, K_PADDED)
    picks = tl.zeros([TOKENS, K_PADDED], tl.int64)
    chosen = tl.zeros([TOKENS, K_PADDED], tl.float32)
    if given_ptr is None:
        sums = scores
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)[None, :]
        lowest: tl.constexpr = -(2**63)
        ranks = tl.where(is_expert[None, :], _rank(sums, experts[None, :]), lowest)
    for k in tl.static_range(K):
        if given_ptr is None:
            best = tl.max(ranks, axis=1)
            pick = 0x7FFFFFFF - (best & 0xFFFFFFFF)
            ranks = tl.where(ranks == best[:, None], lowest, ranks)
        else:
            pick = tl.load(given_ptr + tokens * K + k, mask=is_token, other=0)
        is_pick = experts[None, :] == pick[:, None]
        score = tl.sum(tl.where(is_pick, scores, 0.0), axis=1)
        picks = tl.where(places[None, :] == k, pick[:, None], picks)
        chosen = tl.where(places[None, :] == k, score[:, None], chosen)
    total = tl.sum(chosen, axis=1) + 1e-20
    there = tokens[:, None] * K + places[None, :]
    wanted = is_token[:, None] & (places < K)[None, :]
    tl.store(weights_ptr + there, chosen / total[:, None] * factor, mask=wanted)
    if given_ptr is None:
        tl.store(experts_ptr + there, picks, mask=wanted)


@triton.jit
def _route_backward_kernel(
    dweights_ptr, dscores_ptr, logits_ptr, scores_ptr, experts_ptr, dlogits_ptr, factor, num_tokens,
    E: tl.constexpr, K: tl.constexpr, E_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    experts = tl.arange(0, E_PADDED)
    is_token = tokens < num_tokens
    inside = is_token[:, None] & (experts < E)[None, :]
    offsets = tokens[:, None] * E + experts[None, :]
    logits = tl.load(logits_ptr + offsets, mask=inside, other=0.0)
    scores = tl.load(scores_ptr + offsets, mask=inside, other=1.0)
    grad = tl.zeros([TOKENS, E_PADDED], tl.float32)
    if dscores_ptr is not None:
        grad = tl.load(dscores_ptr + offsets, mask=inside, other=0.0)
    if dweights_ptr is not None:
        total = tl.zeros([TOKENS], tl.float32)
        through = tl.zeros([TOKENS], tl.float32)
        for k in tl.static_range(K):
            pick = tl.load(experts_ptr + tokens * K + k, mask=is_token, other=0)
            score = tl.load(scores_ptr + tokens * E + pick, mask=is_token, other=1.0)
            total += score
            through += score * tl.load(dweights_ptr + tokens * K + k, mask=is_token, other=0.0)
        total += 1e-20
        through /= total
        for k in tl.static_range(K):
            pick = tl.load(experts_ptr + tokens * K + k, mask=is_token, other=0)
            dweight = tl.load(dweights_ptr + tokens * K + k, mask=is_token, other=0.0)
            dscore = (dweight - through) / total * factor
            grad += tl.where(experts[None, :] == pick[:, None], dscore[:, None], 0.0)
    # Far below 0 the sigmoid is the square of the score, which may be 0 itself.
    share = tl.where(logits > 20.0, 1.0, sigmoid(tl.maximum(logits, -20.0)))
    slope = share / (2.0 * tl.where(logits < -20.0, 1.0, scores))
    slope = tl.where(logits < -20.0, 0.5 * scores, slope)
    tl.store(dlogits_ptr + offsets, grad * slope, mask=inside)


@triton.jit
def _mean_shares_kernel(
    scores_ptr, parts_ptr, length, E: tl.constexpr, E_PADDED: tl.constexpr, TOKENS: tl.constexpr,
    OF_PROGRAM: tl.constexpr,
):  # fmt: skip
    """The sum of the shares of a block of a sequence's tokens."""
    sequence, block = tl.program_id(0), tl.program_id(1)
    experts = tl.arange(0, E_PADDED)
    total = tl.zeros([E_PADDED], tl.float32)
    for start in range(0, OF_PROGRAM, TOKENS):
        places = block * OF_PROGRAM + start + tl.arange(0, TOKENS)
        is_token = places < length
        inside = is_token[:, None] & (experts < E)[None, :]
        rows = sequence.to(tl.int64) * length + places
        scores = tl.load(scores_ptr + rows[:, None] * E + experts[None, :], mask=inside, other=0.0)
        sums = tl.where(is_token, tl.sum(scores, axis=1), 1.0)
        total += tl.sum(scores / sums[:, None], axis=0)
    place = (sequence * tl.num_programs(1) + block).to(tl.int64) * E + experts
    tl.store(parts_ptr + place, total, mask=experts < E)


@triton.jit
def _mean_shares_backward_kernel(
    dshares_ptr, scores_ptr, dscores_ptr, num_tokens, length, E: tl.constexpr,
    E_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    experts = tl.arange(0, E_PADDED)
    is_token = tokens < num_tokens
    inside = is_token[:, None] & (experts < E)[None, :]
    offsets = tokens[:, None] * E + experts[None, :]
    scores = tl.load(scores_ptr + offsets, mask=inside, other=0.0)
    of_sequence = (tokens // length)[:, None] * E + experts[None, :]
    grad = tl.load(dshares_ptr + of_sequence, mask=inside, other=0.0)
    sums = tl.where(is_token, tl.sum(scores, axis=1), 1.0)
    through = tl.sum(grad * scores, axis=1) / sums
    dscores = (grad - through[:, None]) / (sums * length)[:, None]
    tl.store(dscores_ptr + offsets, dscores, mask=inside)
