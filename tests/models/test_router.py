from math import gcd

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ppruntime.models.dims import preset
from ppruntime.models.init import init_parameters
from ppruntime.models.router import (
    Router,
    balanced_experts,
    balanced_stride,
    expert_counts,
    mean_ranks_per_token,
    random_ranks_per_token,
    sequence_balance_loss,
    updated_bias,
)
from ppruntime.models.topk import top_k

TINY = preset("tiny")


def routed(dims=TINY, num_tokens=50, **kwargs):
    router = Router(dims, **kwargs)
    init_parameters(router, "router", 3)
    x, ids = torch.randn(num_tokens, dims.hidden_size), torch.arange(num_tokens) % dims.vocab_size
    return router, x, router(x, ids)


def test_equal_scores_go_by_index():
    assert top_k(torch.tensor([1.0, 2, 2, 0, 2, 1]), 4).tolist() == [1, 2, 4, 0]
    assert top_k(torch.zeros(2, 9), 3).tolist() == [[0, 1, 2]] * 2


def test_weights_are_normalised_scores_of_the_chosen():
    router, x, routing = routed()
    scores = torch.log1p((x @ router.gate.weight.T).exp()).sqrt()
    torch.testing.assert_close(routing.scores_NE, scores)
    chosen = scores.gather(1, routing.experts_NK)
    torch.testing.assert_close(routing.weights_NK, 1.5 * chosen / chosen.sum(1, keepdim=True))
    assert torch.equal(chosen, scores.topk(2).values)


def test_bias_chooses_but_does_not_weigh():
    router, x, before = routed()
    router.bias[5] = 100
    after = router(x, torch.zeros(50, dtype=torch.int64))
    assert (after.experts_NK[:, 0] == 5).all()
    assert torch.equal(after.scores_NE, before.scores_NE)
    assert after.weights_NK.sum(1).allclose(torch.tensor(1.5))


def test_gate_stays_fp32_in_a_bf16_model():
    router = Router(TINY, dtype=torch.bfloat16)
    assert router.gate.weight.dtype is torch.float32
    assert router.bias.dtype is torch.float32


def test_hash_router_looks_experts_up_by_token():
    dims = preset("tiny-v4")
    router, _, routing = routed(dims, by_token_id=True)
    assert torch.equal(routing.experts_NK, router.experts_of_token[:50])
    assert all(len(set(row.tolist())) == 2 for row in router.experts_of_token)
    assert router.experts_of_token.unique().numel() == dims.num_experts


def test_bias_moves_against_the_load_by_its_sign():
    moved = updated_bias(torch.zeros(4), torch.tensor([10, 5, 5, 0]), 0.001)
    assert moved.tolist() == pytest.approx([-0.001, 0, 0, 0.001])


def test_counts_are_per_sequence():
    experts = torch.tensor([[0, 1], [0, 2], [3, 1], [1, 2]])
    assert expert_counts(experts, 2, 4).tolist() == [[2, 1, 1, 0], [0, 2, 1, 1]]


def test_balance_loss_is_one_per_balanced_sequence():
    scores, counts = torch.full((6, 4), 0.7), torch.full((2, 4), 3)
    assert sequence_balance_loss(scores, counts, 4).item() == pytest.approx(2.0)


def test_balance_loss_follows_its_formula_and_grows_with_imbalance():
    torch.manual_seed(0)
    scores = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3], [0, 1], [0, 2]])
    counts = expert_counts(experts, 2, 4)
    loss = sequence_balance_loss(scores, counts, 2)
    plain = 0.0
    for b in range(2):
        rows = scores[3 * b : 3 * b + 3]
        for e in range(4):
            share = (rows[:, e] / rows.sum(1)).mean()
            plain += 4 / (2 * 3) * counts[b, e] * share
    torch.testing.assert_close(loss, plain)
    loss.backward()
    assert scores.grad[:, 0].min() > 0, "the overloaded expert's score has to fall"


def test_stride_is_97_for_384_experts_and_spreads_as_random_routing_does():
    stride, mean = balanced_stride(384, 6)
    assert stride == 97
    assert mean == mean_ranks_per_token(384, 6, 97)
    assert mean >= 4
    assert mean >= 0.9 * random_ranks_per_token(384, 6)
    assert mean_ranks_per_token(384, 6, 1) < 1.2


@given(st.integers(1, 300), st.integers(1, 8))
def test_stride_is_coprime_and_the_first_that_spreads(num_experts, per_token):
    per_token = min(per_token, num_experts)
    stride, mean = balanced_stride(num_experts, per_token)
    goal = 0.9 * random_ranks_per_token(num_experts, per_token)
    assert gcd(stride, num_experts) == 1
    assert mean >= goal
    if num_experts != 384:
        smaller = (s for s in range(1, stride) if gcd(s, num_experts) == 1)
        assert all(mean_ranks_per_token(num_experts, per_token, s) < goal for s in smaller)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 100))
def test_balanced_routing_gives_distinct_experts_and_even_loads(num_experts, k, num_tokens):
    k = min(k, num_experts)
    experts = balanced_experts(num_tokens, num_experts, k, device="cpu")
    assert all(len(set(row)) == k for row in experts.tolist())
    loads = torch.bincount(experts.flatten(), minlength=num_experts)
    assert loads.max() - loads.min() <= 1


def test_forced_balance_keeps_the_scores_as_weights():
    _, _, routing = routed(replace(TINY, force_balanced_routing=True))
    assert torch.equal(routing.experts_NK, balanced_experts(50, 8, 2, device="cpu"))
    chosen = routing.scores_NE.gather(1, routing.experts_NK)
    torch.testing.assert_close(routing.weights_NK, 1.5 * chosen / chosen.sum(1, keepdim=True))
