"""The routed rows' layout: kernels against the sort, gathers against autograd."""

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU, random_routing
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.models.kernels import moe_layout

pytestmark = pytest.mark.gpu if ON_GPU else []

ROUTINGS = {
    "spread": random_routing(70, 3, 5),
    "some routed nowhere": random_routing(70, 3, 5, unrouted=0.3),
    "experts without rows": random_routing(70, 2, 7, experts=[0, 3, 4]),
    "all to one expert": torch.full((300, 1), 2, device=DEVICE),
    "one token": random_routing(1, 4, 8),
    "all routed nowhere": torch.full((5, 2), -1, device=DEVICE),
    "no tokens": random_routing(0, 2, 4),
    "just 128 rows each": (torch.arange(512, device=DEVICE) % 4).view(256, 2),
    "several programs": random_routing(360, 3, 4),
}
CASES = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
FEW = [name for name in ROUTINGS if ON_GPU or name not in ("several programs", "all to one expert")]
FEW_CASES = pytest.mark.parametrize("routing", [ROUTINGS[name] for name in FEW], ids=FEW)


def num_experts(routing):
    return max(8, int(routing.max()) + 1 if routing.numel() else 0)


@CASES
def test_kernels_give_the_layout_of_a_stable_sort(routing):
    layout = moe_layout.expert_layout(routing, num_experts(routing))
    expected = moe_layout.expert_layout_reference(routing, num_experts(routing))
    for name, got in layout._asdict().items():
        assert torch.equal(got, getattr(expected, name)), name


@CASES
def test_a_pool_of_the_rows_that_the_host_counted_is_the_others_without_its_end(routing):
    num = num_experts(routing)
    usual = moe_layout.expert_layout_reference(routing, num)
    num_rows = moe_layout.padded_rows(usual.count_E.tolist())
    assert num_rows == usual.start_E1[-1]
    for layout in (moe_layout.expert_layout, moe_layout.expert_layout_reference):
        exact = layout(routing, num, num_rows)
        assert torch.equal(exact.pair_P, usual.pair_P[:num_rows])
        assert torch.equal(exact.expert_B, usual.expert_B[: num_rows // 128])
        for name in ("row_NK", "start_E1", "count_E"):
            assert torch.equal(getattr(exact, name), getattr(usual, name)), name


@settings(max_examples=60)
@given(
    num_tokens=st.integers(0, 60),
    per_token=st.integers(1, 4),
    experts=st.integers(4, 40),
    unrouted=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_a_layout_holds_every_pair_once_and_in_order(
    num_tokens, per_token, experts, unrouted, seed
):
    routing = random_routing(num_tokens, per_token, experts, seed=seed, unrouted=unrouted).cpu()
    layout = moe_layout.expert_layout_reference(routing, experts)
    routed = routing.flatten() >= 0
    row = layout.row_NK.flatten()
    assert ((row >= 0) == routed).all()
    assert torch.equal(layout.pair_P[row[routed].long()].long(), routed.nonzero().flatten())
    assert (layout.pair_P >= 0).sum() == routed.sum() == layout.count_E.sum()
    assert (layout.start_E1 % 128 == 0).all()
    assert layout.start_E1[-1] <= layout.num_rows
    for expert in range(experts):
        start, count = int(layout.start_E1[expert]), int(layout.count_E[expert])
        pairs = layout.pair_P[start : start + count]
        assert (routing.flatten()[pairs.long()] == expert).all()
        assert (pairs.diff() > 0).all()
        blocks = layout.expert_B[start // 128 : int(layout.start_E1[expert + 1]) // 128]
        assert (blocks == expert).all()
        assert len(blocks) == -(-count // 128)


def test_the_pool_is_as_small_as_the_worst_routing_allows():
    # One row in each of E - 1 experts, the rest in one: the most padding there can be.
    for pairs, experts in [(1, 4), (4, 4), (5, 4), (300, 3), (1000, 7)]:
        alone = min(experts - 1, pairs - 1)
        counts = [1] * alone + [pairs - alone]
        worst = sum(-(-count // 128) for count in counts) * 128
        assert worst <= moe_layout.most_rows(pairs, experts) < worst + 128 * experts
    assert moe_layout.most_rows(0, 4) == 0
    assert moe_layout.most_rows(128 * 3 + 4, 4) == 7 * 128


@FEW_CASES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_rows_are_gathered_with_zeros_in_padding(routing, dtype):
    layout = moe_layout.expert_layout(routing, num_experts(routing))
    x = torch.randn(len(routing), 384, device=DEVICE).to(dtype)
    scale = torch.rand(len(routing), 3, device=DEVICE)
    rows, scales = moe_layout.gather_rows(x, layout, scale)
    used = int(layout.start_E1[-1])
    expected = moe_layout.gather_rows_reference(x, layout)
    assert torch.equal(rows[:used].float(), expected[:used].float())
    expected = moe_layout.gather_rows_reference(scale, layout).t()
    assert torch.equal(scales[:, :used], expected[:, :used])
    (alone,) = moe_layout.gather_rows(x, layout)
    assert torch.equal(alone[:used].float(), rows[:used].float())


@FEW_CASES
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_rows_are_summed_back_in_fp32(routing, weighted):
    layout = moe_layout.expert_layout(routing, num_experts(routing))
    y = torch.randn(layout.num_rows, 384, device=DEVICE).bfloat16()
    y[layout.pair_P < 0] = torch.nan  # padding is never read
    weights = torch.rand(routing.shape, device=DEVICE) if weighted else None
    got = moe_layout.gather_sum(y, layout, weights, dtype=torch.float32)
    expected = moe_layout.gather_sum_reference(y, layout, weights, dtype=torch.float32)
    torch.testing.assert_close(got, expected, rtol=0, atol=0 if not weighted else 1e-6)
    rounded = moe_layout.gather_sum(y, layout, weights, dtype=torch.bfloat16)
    assert torch.equal(rounded, got.bfloat16())


def test_there_and_back_is_the_gradient_of_index_select():
    routing = random_routing(40, 3, 6, unrouted=0.2)
    layout = moe_layout.expert_layout(routing, 6)
    x = torch.randn(40, 128, device=DEVICE, requires_grad=True)
    live = layout.pair_P >= 0
    rows = x[layout.pair_P[live].long() // 3]
    grad = torch.randn(layout.num_rows, 128, device=DEVICE)
    rows.backward(grad[live])
    torch.testing.assert_close(
        moe_layout.gather_sum(grad, layout, dtype=torch.float32), x.grad, rtol=1e-5, atol=1e-6
    )
