"""Tokens sent once to a rank, in chunks beside the experts, and rows in FP8: against all-to-all.

The buffer is the readable one, over gloo: what deep_ep's does, by its definition.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fp8_cases import ON_GPU
from msgspec.structs import replace
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ppruntime.experts.exchange import ProcessExchange
from ppruntime.models.all_to_all import AllToAll, _by_expert
from ppruntime.models.dims import preset
from ppruntime.models.dispatch import WireOptions
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_experts import Fp8Options
from ppruntime.models.fp8_wire import as_bytes, from_wire, packed, to_wire, unpacked
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.moe import MoE, MoEOptions
from ppruntime.models.router import Routing, expert_counts
from ppruntime.models.save_points import SavePoint, point_of
from ppruntime.models.token_buffer import ExchangeBuffer
from ppruntime.models.token_dispatch import TokenDispatcher

pytestmark = pytest.mark.skipif(ON_GPU, reason="these ranks talk through gloo")
SMALL = replace(
    preset("tiny"), hidden_size=128, expert_width=128, num_experts=6, experts_per_token=3
)
NAMES = ("y", "dx", "dp", "dW13", "dW2")
CASES = {
    "even": (12, 12),
    "uneven": (9, 5),
    "to one rank": (9, 5),
    "a rank without tokens": (7, 0),
    "no tokens": (0, 0),
}


class Told(ProcessExchange):
    """An exchange that writes down what it is for, and whether a weight has its gradient yet."""

    def begin(self, outgoing, incoming, what):
        CALLS.append((what, any(w.grad is not None for w in WATCHED)))
        return super().begin(outgoing, incoming, what)


CALLS: list[tuple[str, bool]] = []
WATCHED: list[torch.nn.Parameter] = []


def tokens_of(case: str, rank: int, dtype):
    """x, experts, weights and the gradient of y of one rank's tokens."""
    torch.manual_seed(100 * len(case) + rank)
    num = CASES[case][rank]
    experts = torch.rand(num, SMALL.num_experts).argsort(-1)[:, : SMALL.experts_per_token]
    if case == "to one rank":
        experts = torch.rand(num, 3).argsort(-1)
    x = torch.randn(num, SMALL.hidden_size, dtype=dtype)
    return x, experts, torch.rand(num, SMALL.experts_per_token) + 0.1, torch.randn_like(x).float()


def results(dispatcher, case: str, rank: int, *, fp8: Fp8Options | None, late=False):
    """Outputs and gradients of the routed experts, and the exchanges made."""
    dtype = torch.bfloat16 if fp8 else torch.float32
    moe = MoE(SMALL, options=MoEOptions(fp8, dispatcher), dtype=dtype)
    init_parameters(moe, "moe", 1, std=0.1)
    queue = WeightGradQueue()
    set_queue(moe, queue)
    queue.deferring = late
    x, experts, weights, grad = tokens_of(case, rank, dtype)
    x.requires_grad_(), weights.requires_grad_()
    WATCHED[:] = moe.experts.parameters()
    CALLS.clear()
    routing = Routing(experts, weights, weights)
    y = moe.routed(x, routing, expert_counts(experts, 1, SMALL.num_experts))
    y.backward(grad)
    calls = list(CALLS)
    for task in queue.pop():
        task()
    assert len(CALLS) == len(calls), "a weight gradient made an exchange"
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in WATCHED]
    return [y.detach(), x.grad, weights.grad, *grads], calls


def error(found, expected) -> float:
    if expected is None or not expected.numel():
        return 0.0
    return float(
        (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    )


def differing(found, expected) -> list[str]:
    return [n for n, a, b in zip(NAMES, found, expected, strict=True) if not torch.equal(a, b)]


def compare(rank: int):
    """By case and variant: relative errors, or names of what is not equal bit by bit."""
    dist.init_process_group("gloo")
    exchange = Told.of(dist.new_group([0, 1]))
    buffer = ExchangeBuffer(exchange)
    found: dict[str, object] = {}

    def tokens(chunks: int = 1, **wire):
        return TokenDispatcher(buffer, WireOptions(**wire), num_chunks=chunks)

    fp8 = Fp8Options(backend=ExpertBackend.REFERENCE)
    both = {"fp8": True, "fp8_grad": True}
    for case in CASES:
        plain, _ = results(AllToAll(exchange), case, rank, fp8=None)
        for chunks in (1, 3):
            ours, calls = results(tokens(chunks), case, rank, fp8=None)
            found[f"fp32, {case}, {chunks}"] = [
                error(a, b) for a, b in zip(ours, plain, strict=True)
            ]
        again, _ = results(tokens(3), case, rank, fp8=None, late=True)
        found[f"deferred, {case}"] = differing(again, ours)
        rows, _ = results(AllToAll(exchange), case, rank, fp8=fp8)
        once, _ = results(tokens(), case, rank, fp8=fp8)
        found[f"FP8, {case}"] = (
            [error(a, b) for a, b in zip(once[:3], rows[:3], strict=True)],
            differing(once, rows),
        )
        found[f"FP8 wire, all-to-all, {case}"] = differing(
            results(AllToAll(exchange, WireOptions(fp8=True)), case, rank, fp8=fp8)[0], rows
        )
        found[f"FP8 wire, tokens, {case}"] = differing(
            results(tokens(fp8=True), case, rank, fp8=fp8)[0], once
        )
        if case == "uneven":
            for name, base, make in (
                ("all-to-all", plain, lambda **w: AllToAll(exchange, WireOptions(**w))),
                ("tokens", ours, lambda **w: tokens(3, **w)),
            ):
                after, calls = results(make(weight_grads_after_combine=True), case, rank, fp8=None)
                found[f"after, {name}"] = differing(after, base), calls
                wired, _ = results(make(**both), case, rank, fp8=None)
                found[f"both, {name}"] = wired
            grad_options = Fp8Options(
                backend=ExpertBackend.REFERENCE, power_of_two_grad_scales=True
            )
            by_row, _ = results(
                AllToAll(exchange, WireOptions(**both)), case, rank, fp8=grad_options
            )
            by_token, _ = results(tokens(**both), case, rank, fp8=grad_options)
            found["both, FP8"] = (
                [error(a, b) for a, b in zip(by_row, rows, strict=True)],
                differing(by_token, by_row),
            )
    sums = [sum_by_expert(AllToAll(exchange), case, rank) for case in ("uneven", "to one rank")]
    found["by expert"] = sums
    found["recompute"] = recomputed(tokens(3, fp8=True))
    dist.destroy_process_group()
    return found


def sum_by_expert(dispatcher, case, rank):
    """Errors of experts over sorted rows against experts over rows by source."""
    experts = Experts(SMALL, held=dispatcher.held(SMALL.num_experts))
    init_parameters(experts, "moe", 1, std=0.1)
    _, chosen, *_ = tokens_of(case, rank, torch.float32)
    counts = expert_counts(chosen, 1, SMALL.num_experts).sum(0)
    routes = dispatcher.routes(counts)
    rows = torch.randn(sum(routes.receive), SMALL.hidden_size, requires_grad=True)
    found = []
    for run in (Experts.forward, _by_expert):
        experts.zero_grad()
        rows.grad = None
        y = run(experts, rows, routes.rows_per_expert)
        y.square().sum().backward()
        found.append([y.detach(), rows.grad, *(w.grad for w in experts.parameters())])
    return [error(a, b) for a, b in zip(*found, strict=True)]


def recomputed(dispatcher):
    """Exchanges of a layer, plain and checkpointed, and whether gradients agree."""

    def contexts():
        def policy(context, op, *args, **kwargs):
            keep = point_of(op.name()) is SavePoint.EXPERTS
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    ways = []
    for way in ("plain", "checkpointed"):
        moe = MoE(SMALL, options=MoEOptions(dispatcher=dispatcher))
        init_parameters(moe, "moe", 1, std=0.1)
        torch.manual_seed(3)
        x = torch.randn(1, 11, SMALL.hidden_size, requires_grad=True)
        ids = torch.zeros(1, 11, dtype=torch.int64)
        CALLS.clear()

        def run(x, moe=moe, ids=ids):
            return moe(x, ids).y_BTD

        if way == "plain":
            y = run(x)
        else:
            y = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
        ways.append(([what for what, _ in CALLS], [x.grad, *(p.grad for p in moe.parameters())]))
    (calls, grads), (others, theirs) = ways
    return calls == others, all(map(torch.equal, grads, theirs)), len(calls)


@pytest.fixture(scope="module")
def found(run_ranks):
    return run_ranks(2, compare)


@pytest.mark.parametrize("case", CASES)
def test_tokens_sent_once_give_all_to_alls_results_in_another_order_of_sums(case, found):
    for of_rank in found:
        for chunks in (1, 3):
            assert max(of_rank[f"fp32, {case}, {chunks}"]) < 1e-6
        assert of_rank[f"deferred, {case}"] == []


@pytest.mark.parametrize("case", CASES)
def test_fp8_experts_add_the_same_weight_gradients_bit_by_bit(case, found):
    for of_rank in found:
        errors, differ = of_rank[f"FP8, {case}"]
        assert max(errors) < 6e-3  # results of a rank are summed before they are rounded
        assert set(differ) <= {"y", "dx"}


@pytest.mark.parametrize("case", CASES)
def test_fp8_rows_on_the_wire_change_no_bit_for_fp8_experts(case, found):
    for of_rank in found:
        assert of_rank[f"FP8 wire, all-to-all, {case}"] == []
        assert of_rank[f"FP8 wire, tokens, {case}"] == []


def exact() -> list[list[torch.Tensor]]:
    """Per rank y, dx, dp and the gradients of its experts, in fp64."""
    moe = MoE(SMALL)
    init_parameters(moe, "moe", 1, std=0.1)
    moe = moe.double()
    parts = []
    for rank in range(2):
        x, experts, weights, grad = tokens_of("uneven", rank, torch.float32)
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        routing = Routing(experts, weights, weights)
        y = moe.routed(x, routing, expert_counts(experts, 1, SMALL.num_experts))
        y.backward(grad.double())
        parts.append([y.detach(), x.grad, weights.grad])
    halves = [w.grad.chunk(2) for w in moe.experts.parameters()]
    return [[*part, *(h[rank] for h in halves)] for rank, part in enumerate(parts)]


@pytest.mark.parametrize("way", ["all-to-all", "tokens"])
def test_fp8_rows_and_gradients_stay_within_their_rounding_of_fp64(way, found):
    """One rounding of E4M3 is 2.7 % of a vector; a result has one from x and one from dy. The
    routing weights' gradients are products of two rounded vectors that cancel in part."""
    for of_rank, expected in zip(found, exact(), strict=True):
        errors = [error(a, b) for a, b in zip(of_rank[f"both, {way}"], expected, strict=True)]
        assert max(errors) < 0.09, dict(zip(NAMES, errors, strict=True))
        assert min(errors) > 2e-3, "nothing was rounded"


def test_fp8_gradients_of_fp8_experts_move_within_a_rounding_and_alike_on_both_ways(found):
    for of_rank in found:
        errors, differ = of_rank["both, FP8"]
        assert max(errors) < 0.08
        assert errors[0] == 0, "the forward has no part in it"
        assert min(errors[1:]) > 1e-3
        assert set(differ) <= {"y", "dx"}


@pytest.mark.parametrize("way", ["all-to-all", "tokens"])
def test_weight_gradients_after_the_combine_begin_when_all_is_on_its_way_and_are_bitwise(
    way, found
):
    for of_rank in found:
        differ, calls = of_rank[f"after, {way}"]
        assert differ == []
        back = [had_grad for what, had_grad in calls if what == "the experts' results"]
        assert len(back) >= 2
        assert not any(back)


def test_rows_sorted_by_expert_give_the_same_results(found):
    for of_rank in found:
        for errors in of_rank["by expert"]:
            assert max(errors) < 1e-6


def test_a_recompute_neither_sends_nor_multiplies_again(found):
    for same_calls, same_grads, num_calls in (of_rank["recompute"] for of_rank in found):
        assert same_calls
        assert same_grads
        assert num_calls > 12


class Alone:
    """The exchange of a group of one."""

    name, rank, num_ranks = "alone", 0, 1

    def begin(self, outgoing, incoming, what):
        incoming[0].copy_(outgoing[0])
        return lambda: None


class Noted(ExchangeBuffer):
    """A buffer that notes its calls and the moment after which each may begin."""

    def __init__(self) -> None:
        super().__init__(Alone())
        self.moments, self.calls = 0, []

    def now(self):
        self.moments += 1
        return self.moments

    def dispatch(self, *args, after):
        coming = super().dispatch(*args, after=after)
        del self.calls[-1]  # its rows go by `again`
        self.calls.append(("there", after))
        return coming

    def again(self, *args, after):
        self.calls.append(("there", after))
        return super().again(*args, after=after)

    def combine(self, *args, after):
        self.calls.append(("back", after))
        return super().combine(*args, after=after)


@pytest.mark.parametrize("wire", [WireOptions(), WireOptions(fp8=True, fp8_grad=True)])
def test_a_part_is_sent_while_the_one_before_is_computed_and_waits_for_none_of_it(wire):
    buffer = Noted()
    results(TokenDispatcher(buffer, wire, num_chunks=3), "even", 0, fp8=None)
    order = ["there", "there", "back", "there", "back", "back"]
    forward, backward = buffer.calls[:6], buffer.calls[6:]
    for calls in (forward, backward):
        assert [what for what, _ in calls] == order
        assert len({after for what, after in calls if what == "there"}) == 1
        back = [after for what, after in calls if what == "back"]
        assert back == sorted(set(back)), "each waits for its own experts"


def test_what_travels_in_fp8_is_exact_on_arrival_and_takes_a_byte_a_value_and_four_a_group():
    torch.manual_seed(0)
    rows = torch.randn(5, 256, dtype=torch.bfloat16) * torch.logspace(-6, 6, 5).unsqueeze(1)
    rows[2] = 0
    sent = to_wire(rows.bfloat16())
    message = packed(sent)
    assert message.shape == (5, 256 + 4 * 2)
    received = unpacked(message)
    for one, other in zip(sent, received, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))
    wide, narrow = from_wire(received, torch.float32), from_wire(received, torch.bfloat16)
    assert torch.equal(wide, narrow.float())
    again = from_wire(to_wire(narrow), torch.bfloat16)
    assert torch.equal(again, narrow)
