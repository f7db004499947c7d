"""Experts over the ranks of a group: bitwise what one process makes of their tokens.

In fp32 of each rank's tokens by themselves, the experts' gradients added up; in FP8, whose experts'
gradients have scales over 128 rows, of all tokens together.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fp8_cases import ON_GPU
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ppruntime.experts.exchange import DispatchError, ProcessExchange
from ppruntime.models.all_to_all import OPS, AllToAll, orders_by_expert
from ppruntime.models.dims import preset
from ppruntime.models.init import init_parameters
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.moe import MoE, MoEOptions
from ppruntime.models.router import Routing, expert_counts

pytestmark = pytest.mark.skipif(ON_GPU, reason="these ranks talk through gloo")
TINY = preset("tiny")
NUM_EXPERTS, PER_TOKEN = TINY.num_experts, TINY.experts_per_token
SMALL_FP8 = replace(TINY, hidden_size=128, expert_width=128, num_experts=4)


def routing_of(case: str, num_tokens: int, num_experts: int) -> torch.Tensor:
    """[N, K] experts of one rank's tokens."""
    order = torch.rand(num_tokens, num_experts).argsort(-1)
    if case == "all to the first experts":
        return torch.arange(PER_TOKEN).expand(num_tokens, -1).contiguous()
    if case == "one expert has most":
        order[:, 0] = torch.where(torch.rand(num_tokens) < 0.9, num_experts - 1, order[:, 0])
        order[:, 1] = torch.where(order[:, 1] == order[:, 0], (order[:, 0] + 1) % 3, order[:, 1])
    return order[:, :PER_TOKEN].contiguous()


CASES = {
    "even": (12, 12),
    "uneven": (9, 5),
    "all to the first experts": (9, 5),
    "one expert has most": (40, 30),
    "a rank without tokens": (9, 0),
    "no tokens at all": (0, 0),
}


def routed(moe: MoE, x, experts_NK, weights_NK, grad):
    """Outputs and gradients of the routed experts under a given routing."""
    x, weights_NK = x.clone().requires_grad_(), weights_NK.clone().requires_grad_()
    routing = Routing(experts_NK, weights_NK, weights_NK)
    y = moe.routed(x, routing, expert_counts(experts_NK, 1, moe.dims.num_experts))
    y.backward(grad)
    grads = [w.grad for w in moe.experts.parameters()]
    return [y.detach(), x.grad, weights_NK.grad, *grads]


def make(dims, options, dtype):
    moe = MoE(dims, options=options, dtype=dtype)
    init_parameters(moe, "moe", 1, std=0.1)
    return moe


def compare_with_one_process(rank: int, fp8: bool):
    dist.init_process_group("gloo")
    spread = AllToAll(ProcessExchange.of(dist.new_group([0, 1])))
    dims, dtype, options = TINY, torch.float32, None
    if fp8:
        from ppruntime.models.fp8_experts import Fp8Options
        from ppruntime.models.kernels.expert_backends import ExpertBackend

        dims, dtype = SMALL_FP8, torch.bfloat16
        options = Fp8Options(backend=ExpertBackend.REFERENCE)
    found: dict[str, list[str]] = {}
    names = ("y", "dx", "dp", "dW13", "dW2")
    for case, sizes in CASES.items():
        torch.manual_seed(len(case))
        num, hidden = sum(sizes), dims.hidden_size
        x, grad = torch.randn(num, hidden, dtype=dtype), torch.randn(num, hidden)
        weights = torch.rand(num, PER_TOKEN) + 0.1
        experts = torch.cat([routing_of(case, n, dims.num_experts) for n in sizes])
        slices = [slice(0, sizes[0]), slice(sizes[0], num)]
        own, here = slices[rank], spread.held(dims.num_experts)
        whole = make(dims, MoEOptions(options), dtype)
        # Gradients of parameters add up over the parts.
        parts = [
            routed(whole, x[part], experts[part], weights[part], grad[part])
            for part in ([slice(0, num)] if fp8 else slices)
        ]
        tokens = [torch.cat(results) for results in zip(*(part[:3] for part in parts), strict=True)]
        moe = make(dims, MoEOptions(options, spread), dtype)
        part = routed(moe, x[own], experts[own], weights[own], grad[own])
        expected = [t[own] for t in tokens] + [g[here.start : here.stop] for g in parts[-1][3:]]
        found[case] = [
            name for name, a, b in zip(names, part, expected, strict=True) if not torch.equal(a, b)
        ]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "FP8"])
def test_two_ranks_compute_bitwise_what_one_process_makes_of_their_tokens(fp8, run_ranks):
    for found in run_ranks(2, compare_with_one_process, fp8):
        assert found == {case: [] for case in CASES}


LAYOUTS = (
    # Experts, of a token, each rank's tokens, how likely an expert is by its number.
    (8, 2, (7, 3, 11, 2), lambda e: torch.ones_like(e)),
    (8, 1, (5, 0, 0, 6), lambda e: (e == 7) + 1e-9),
    (40, 6, (13, 1, 0, 8), lambda e: (e + 1) ** -2.0),
    (16, 3, (6, 6, 0, 6), lambda e: (e > 12) + 1e-9),
    (8, 8, (4, 4, 4, 4), lambda e: torch.ones_like(e)),
    (4, 1, (0, 0, 1, 0), lambda e: torch.ones_like(e)),
)


def loop_over_pairs(x, experts, weights, grad, gate_up, down, limit):
    """Outputs and gradients in fp64, one token and expert after the other."""
    x, weights, gate_up, down = (
        t.detach().double().requires_grad_() for t in (x, weights, gate_up, down)
    )
    y = torch.zeros_like(x)
    for token, chosen in enumerate(experts.tolist()):
        for k, expert in enumerate(chosen):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            result = weights[token, k] * (down[expert] @ inner)
            y = y.index_add(0, torch.tensor([token]), result.unsqueeze(0))
    y.backward(grad.double())
    return [y.detach(), x.grad, weights.grad, gate_up.grad, down.grad]


def compare_with_the_loop(rank: int):
    """Largest relative distance of each result over all layouts, by who brings the tokens."""
    from ppruntime.models.dispatch import WireOptions
    from ppruntime.models.token_buffer import ExchangeBuffer
    from ppruntime.models.token_dispatch import TokenDispatcher

    dist.init_process_group("gloo")
    exchange = ProcessExchange.of(dist.new_group([0, 1, 2, 3]))
    ways = {"rows": AllToAll(exchange)}
    for num in (1, 3):
        buffer = ExchangeBuffer(exchange)
        ways[f"tokens in {num}"] = TokenDispatcher(buffer, WireOptions(), num_chunks=num)
    worst = {}
    for seed, (num_experts, per_token, sizes, likely) in enumerate(LAYOUTS):
        torch.manual_seed(100 + seed)
        dims = replace(TINY, num_experts=num_experts, experts_per_token=per_token)
        whole = make(dims, MoEOptions(), torch.float32)
        chances = likely(torch.arange(num_experts).double()).double()
        num, hidden = sum(sizes), dims.hidden_size
        x, grad = torch.randn(num, hidden), torch.randn(num, hidden)
        experts = torch.multinomial(chances.expand(num, -1), per_token)
        weights = torch.rand(num, per_token) + 0.1
        matrices = tuple(whole.experts.parameters())
        exact = loop_over_pairs(
            x, experts, weights, grad, *matrices, float(whole.experts.limit)
        )  # fmt: skip
        first = sum(sizes[:rank])
        own = slice(first, first + sizes[rank])
        for way, dispatcher in ways.items():
            moe = make(dims, MoEOptions(dispatcher=dispatcher), torch.float32)
            got = routed(moe, x[own], experts[own], weights[own], grad[own])
            here = dispatcher.held(num_experts)
            held = slice(here.start, here.stop)
            for name, a, t, part in zip(
                ("y", "dx", "dp", "dW13", "dW2"), got, exact, (*[own] * 3, held, held), strict=True
            ):
                error = (a.double() - t[part]).norm() / t[part].norm().clamp_min(1e-30)
                worst[way, name] = max(worst.get((way, name), 0.0), float(error))
    dist.destroy_process_group()
    return worst


def test_four_ranks_compute_what_a_loop_in_fp64_does_whatever_the_routing(run_ranks):
    for worst in run_ranks(4, compare_with_the_loop):
        assert len(worst) == 15
        assert max(worst.values()) < 3e-6, worst


def count_exchanges(rank: int):
    """Exchanges of one forward and backward: plain, with weight gradients that wait, and with a
    checkpointed layer that keeps what the exchanges gave. And whether gradients are the same."""
    dist.init_process_group("gloo")
    made: list[str] = []

    class Counted(ProcessExchange):
        def begin(self, outgoing, incoming, what):
            made.append(what)
            return super().begin(outgoing, incoming, what)

    spread = AllToAll(Counted.of(dist.new_group([0, 1])))
    kept = {getattr(torch.ops.ppruntime, op.partition("::")[2]).default for op in OPS}

    def contexts():
        def policy(context, op, *args, **kwargs):
            del context, args, kwargs
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    results = {}
    for way in ("plain", "waiting", "checkpointed"):
        moe = make(TINY, MoEOptions(dispatcher=spread), torch.float32)
        queue = WeightGradQueue()
        set_queue(moe, queue)
        queue.deferring = way == "waiting"
        torch.manual_seed(rank)
        x = torch.randn(1, 12, TINY.hidden_size, requires_grad=True)
        ids = torch.zeros(1, 12, dtype=torch.int64)
        made.clear()
        if way == "checkpointed":
            y = checkpoint(
                lambda x, moe=moe, ids=ids: moe(x, ids).y_BTD,
                x,
                use_reentrant=False,
                context_fn=contexts,
            )
        else:
            y = moe(x, ids).y_BTD
        y.square().sum().backward()
        calls = list(made)
        for task in queue.pop():
            task()
        assert made == calls, "a weight gradient that waited made an exchange"
        results[way] = calls, [x.grad, *(p.grad for p in moe.parameters())]
    dist.destroy_process_group()
    calls, grads = results["plain"]
    return calls, {
        way: other == calls and all(map(torch.equal, theirs, grads))
        for way, (other, theirs) in results.items()
    }


def test_each_exchange_is_made_once_also_by_a_recompute_and_never_by_a_weight_gradient(run_ranks):
    there, back = "rows for the experts", "the experts' results"
    for calls, same in run_ranks(2, count_exchanges):
        assert calls == ["token counts", there, back, there, back]
        assert same == {"plain": True, "waiting": True, "checkpointed": True}


def lose_a_peer(rank: int, how: str):
    """Three ranks exchange counts; the last one ends or sleeps at its second exchange."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=6))
    spread = AllToAll(ProcessExchange.of(group))
    counts = torch.tensor([rank, 2, 3])
    assert spread.routes(counts).rows_per_expert == [[0, 1, 2], [2, 2, 2], [3, 3, 3]][rank]
    if rank == 2 and how == "ends":
        os._exit(7)
    if rank == 2:
        with suppress(Exception):
            dist.distributed_c10d._get_default_store().wait(["told"], timedelta(seconds=60))
        return None
    with pytest.raises(DispatchError) as caught:
        spread.routes(counts)
    store = dist.distributed_c10d._get_default_store()
    if store.add("heard", 1) == 2:
        store.set("told", "")
    return str(caught.value)


@pytest.mark.parametrize("how", ["ends", "is late"])
def test_a_peer_that_ends_or_is_late_is_named_with_its_group_by_all_others(how, rank_outcomes):
    outcomes = rank_outcomes(3, lose_a_peer, how, timeout_seconds=60)
    for outcome in outcomes[:2]:
        assert outcome.error_text is None
        assert outcome.value.startswith(
            "rank 2 of the expert group of ranks [0, 1, 2] did not take part in exchanging token"
            " counts: it is late or has ended ("
        )


def test_ops_give_shapes_on_the_meta_device():
    AllToAll(ProcessExchange(None, (4, 5)))
    rows = torch.empty(7, 3, dtype=torch.bfloat16, device="meta")
    sent = torch.ops.ppruntime.expert_dispatch(rows, [3, 4], [2, 2], "4,5")
    assert (sent.shape, sent.dtype) == ((4, 3), torch.bfloat16)
    assert torch.ops.ppruntime.expert_combine(sent, [2, 2], [3, 4], "4,5").shape == (7, 3)
    counts = torch.ops.ppruntime.expert_counts(torch.empty(6, device="meta"), "4,5")
    assert counts.shape == (2, 3)


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_by_source_come_by_expert_as_a_stable_sort_would_have_them(counts):
    counts_PL = torch.tensor(counts)
    expert_of_block = torch.arange(3).repeat(len(counts))
    wanted = expert_of_block.repeat_interleave(counts_PL.flatten()).argsort(stable=True)
    order, place = orders_by_expert(counts_PL, torch.device("cpu"))
    assert torch.equal(order, wanted)
    assert torch.equal(place[order], torch.arange(len(order)))
