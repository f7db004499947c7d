"""Which experts a token goes to, and with what weight.

Shape letters: N tokens (B sequences of T), E experts, K experts per token, D model width.
Sources: DeepSeek-V3 report, section 2.1.2 (bias without auxiliary loss, sequence balance loss);
DeepSeek-V4.1 report for sqrt(softplus) scores and the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import comb, gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.attention_kernels import REFERENCE as PLAIN
from ppruntime.models.dims import ModelDims
from ppruntime.models.linear import Linear
from ppruntime.models.precision import holder_dtype
from ppruntime.models.topk import top_k


class Routing(NamedTuple):
    """Where tokens go."""

    experts_NK: Tensor
    """int64, distinct within a token."""
    weights_NK: Tensor
    """fp32 factor on each chosen expert's output."""
    scores_NE: Tensor
    """fp32 affinity to every expert, without the bias."""


class Router(nn.Module):
    """Scores, chosen experts and their weights. The gate is fp32 and so is its product.

    A scoring router adds `bias` to the scores only to choose; the trainer moves the bias against
    the load (`updated_bias`). A hash router (V4's first layers) looks experts up by token id.
    """

    bias: Tensor
    experts_of_token: Tensor

    def __init__(
        self,
        dims: ModelDims,
        *,
        by_token_id: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims = dims
        self.by_token_id = by_token_id
        self.wide_products = PLAIN.wide_products
        self.route: Callable[..., Routing] = route
        wide = holder_dtype(dtype)
        self.gate = Linear(dims.hidden_size, dims.num_experts, device=device, dtype=wide)
        if by_token_id:
            shape = (dims.vocab_size, dims.experts_per_token)
            table = torch.zeros(shape, dtype=torch.int64, device=device)
            self.register_buffer("experts_of_token", table)
        else:
            bias = torch.zeros(dims.num_experts, dtype=torch.float32, device=device)
            self.register_buffer("bias", bias)

    def reset_table(self, generator: torch.Generator) -> None:
        """Draws distinct experts for every token id. Only for a hash router."""
        order = torch.rand(self.dims.vocab_size, self.dims.num_experts, generator=generator)
        self.experts_of_token.copy_(order.argsort(-1)[:, : self.dims.experts_per_token])

    def forward(self, x_ND: Tensor, ids_N: Tensor) -> Routing:
        dims = self.dims
        (logits_NE,) = self.wide_products([self.gate], x_ND)
        bias_E = None if self.by_token_id else self.bias
        given_NK = self._given(ids_N)
        return self.route(logits_NE, bias_E, given_NK, dims.experts_per_token, dims.routed_scale)

    def _given(self, ids_N: Tensor) -> Tensor | None:
        """Experts that the scores do not choose."""
        dims = self.dims
        if dims.force_balanced_routing:
            return balanced_experts(
                len(ids_N), dims.num_experts, dims.experts_per_token, device=ids_N.device
            )
        return self.experts_of_token[ids_N] if self.by_token_id else None


def route(
    logits_NE: Tensor,
    bias_E: Tensor | None,
    given_NK: Tensor | None,
    per_token: int,
    factor: float,
) -> Routing:
    """The `per_token` experts with the highest score + bias, or those given, and their scores'
    shares of the picks' sum, times `factor`."""
    scores_NE = functional.softplus(logits_NE).sqrt()
    experts_NK = given_NK
    if experts_NK is None:
        sums_NE = scores_NE.detach() if bias_E is None else scores_NE.detach() + bias_E
        # A copy: the picks are a view of all experts' order, which would live as long as they do.
        experts_NK = top_k(sums_NE, per_token).contiguous()
    chosen_NK = scores_NE.gather(-1, experts_NK)
    total_N1 = chosen_NK.sum(-1, keepdim=True) + 1e-20
    return Routing(experts_NK, chosen_NK / total_N1 * factor, scores_NE)


def updated_bias(bias_E: Tensor, loads_E: Tensor, rate: float) -> Tensor:
    """The routing bias after a step in which expert e got loads_E[e] tokens; overloaded ones lose.

    Sign rule of DeepSeek-V3, section 2.1.2; `rate` is 0.001 in V4.1.
    """
    loads_E = loads_E.to(torch.float64)
    return bias_E + rate * torch.sign(loads_E.mean() - loads_E).to(bias_E.dtype)


def expert_counts(experts_NK: Tensor, batch: int, num_experts: int) -> Tensor:
    """[B, E] int64: tokens of each sequence that go to each expert."""
    experts = experts_NK.reshape(batch, -1)
    counts_BE = torch.zeros(batch, num_experts, dtype=torch.int64, device=experts.device)
    return counts_BE.scatter_add_(1, experts, torch.ones_like(experts))


def mean_shares(scores_NE: Tensor, batch: int) -> Tensor:
    """[B, E]: mean over a sequence's tokens of an expert's share in the token's scores."""
    scores_BTE = scores_NE.view(batch, -1, scores_NE.shape[-1])
    shares_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
    return shares_BTE.mean(1)


def sequence_balance_loss(
    scores_NE: Tensor,
    counts_BE: Tensor,
    experts_per_token: int,
    shares: Callable[[Tensor, int], Tensor] = mean_shares,
) -> Tensor:
    """sum_e f_e P_e, summed over the B sequences; no weight yet. fp32 scalar.

    f_e = E / (K T) count_e is the real load, P_e the mean share of e in the scores, which carries
    the gradient; `shares` computes it. Balanced routing gives about 1 per sequence. DeepSeek-V3
    report, eq. 17-20.
    """
    batch, num_experts = counts_BE.shape
    num_pairs = experts_per_token * (len(scores_NE) // batch)
    load_BE = counts_BE.to(scores_NE.dtype) * (num_experts / num_pairs)
    return (load_BE * shares(scores_NE, batch)).sum()


_REFERENCE_RANKS = 8
"""Ranks over which the spread of balanced routing is judged: the GPUs of one host."""


def balanced_stride(num_experts: int, experts_per_token: int) -> tuple[int, float]:
    """The stride s of balanced routing and the mean number of ranks (of 8) that a token reaches.

    97 for 384 experts, as in published measurements; else the first s coprime to the number of
    experts that reaches 0.9 of the ranks that random routing would. With s = 1 all experts of a
    token sit on one rank, which hides the cost of dispatch.
    """
    goal = 0.9 * random_ranks_per_token(num_experts, experts_per_token)
    candidates = [97] if num_experts == 384 else range(1, num_experts + 1)
    best = (1, 0.0)
    for stride in candidates:
        if gcd(stride, num_experts) != 1:
            continue
        mean = mean_ranks_per_token(num_experts, experts_per_token, stride)
        if mean >= goal:
            return stride, mean
        best = max(best, (stride, mean), key=lambda pair: pair[1])
    return best


def mean_ranks_per_token(num_experts: int, experts_per_token: int, stride: int) -> float:
    """Mean number of ranks, of 8 with consecutive experts each, under balanced routing."""
    ranks = min(_REFERENCE_RANKS, num_experts)
    reached = [
        {
            (experts_per_token * token + k) * stride % num_experts * ranks // num_experts
            for k in range(experts_per_token)
        }
        for token in range(num_experts // gcd(num_experts, experts_per_token))
    ]
    return sum(map(len, reached)) / len(reached)


def random_ranks_per_token(num_experts: int, experts_per_token: int) -> float:
    """Expected number of ranks, of 8, that hold one of a token's experts, drawn at random."""
    ranks = min(_REFERENCE_RANKS, num_experts)
    bounds = [-(-rank * num_experts // ranks) for rank in range(ranks + 1)]
    choices = comb(num_experts, experts_per_token)
    return sum(
        1 - comb(num_experts - (stop - start), experts_per_token) / choices
        for start, stop in pairwise(bounds)
    )


def balanced_experts(
    num_tokens: int, num_experts: int, experts_per_token: int, *, device: torch.device | str
) -> Tensor:
    """[N, K] experts (K t + k) s mod E: equal loads, each token spread over many ranks."""
    stride, _ = balanced_stride(num_experts, experts_per_token)
    pairs = torch.arange(num_tokens * experts_per_token, device=device) * stride % num_experts
    return pairs.view(num_tokens, experts_per_token)
