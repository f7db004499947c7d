"""The bf16 yardstick of `bench moe` computes the layer that the readable dispatcher does, and what
is timed by itself is what layers do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from ppruntime.launch.bench_moe_parts import (
    readable_steps,
    token_phases,
    whole_phases,
    yardstick_steps,
)
from ppruntime.launch.bench_moe_ranks import YARDSTICK_BOUND
from ppruntime.launch.moe_floor import BACKWARD, FORWARD
from ppruntime.launch.moe_yardstick import WAYS, Yardstick
from ppruntime.models.dims import preset

NAMES = ("y", "dx", "dp", "dW13", "dW2")
NUM_EXPERTS, PER_TOKEN, TOKENS, HIDDEN = 6, 3, 40, 64


def _compared(rank: int, skewed: bool, sums: str):
    """Relative distances of the yardstick's results from the readable layer's; what its steps, run
    one after another, add to the weights' gradients, over what its backward does; their names."""
    from ppruntime.experts.exchange import ProcessExchange
    from ppruntime.models.all_to_all import AllToAll
    from ppruntime.models.experts import Experts
    from ppruntime.models.router import Routing

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    dims = replace(
        preset("tiny"),
        hidden_size=HIDDEN,
        expert_width=32,
        num_experts=NUM_EXPERTS,
        experts_per_token=PER_TOKEN,
    )
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(TOKENS, NUM_EXPERTS, generator=generator)
    if skewed:
        scores[:, : NUM_EXPERTS // 2] += 1  # none for the second rank
    experts_NK = scores.topk(PER_TOKEN).indices
    counts_E = torch.bincount(experts_NK.flatten(), minlength=NUM_EXPERTS)
    plain = AllToAll(ProcessExchange.of(group))
    layer = Experts(dims, held=plain.held(NUM_EXPERTS), dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0, 0.1, generator=generator)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(TOKENS, PER_TOKEN, generator=generator) + 0.1
    grad = torch.randn(TOKENS, HIDDEN, generator=generator)
    yardstick = Yardstick(group, counts_E)
    yardstick.sums = sums
    results = []
    for way in (plain, yardstick):
        inputs, factors = x.clone().requires_grad_(), weights.clone().requires_grad_()
        for weight in layer.parameters():
            weight.grad = None
        y = way.routed(layer, inputs, Routing(experts_NK, factors, factors), counts_E)
        torch.autograd.backward(y, grad.to(y.dtype))
        grads = (inputs.grad, factors.grad, *(w.grad for w in layer.parameters()))
        results.append([t.detach().double() for t in (y, *grads)])
    distances = {
        name: float((b - a).norm() / a.norm()) if a.any() else float(b.norm())
        for name, a, b in zip(NAMES, *results, strict=True)
    }
    routing = Routing(experts_NK, weights, weights)
    steps = list(yardstick_steps(yardstick, layer, x, routing, grad))
    for part in whole_phases(steps):
        part.run()
    again = [
        float((w.grad.double() - 2 * one).abs().max())
        for w, one in zip(layer.parameters(), results[1][3:], strict=True)
    ]
    with torch.no_grad():
        readable = list(readable_steps(plain, layer, x, routing, counts_E))
    for step in readable:
        step.run()
    dist.barrier()
    dist.destroy_process_group()
    return distances, again, list(dict.fromkeys(step.phase for step in steps))


@pytest.mark.parametrize(("skewed", "sums"), [*zip([False, True], WAYS, strict=True)])
def test_results_are_those_of_the_readable_layer_but_for_rounding(run_ranks, skewed, sums):
    for distances, again, phases in run_ranks(2, _compared, skewed, sums):
        assert set(distances) == set(NAMES)
        assert max(distances.values()) < YARDSTICK_BOUND, distances
        assert max(again) == 0  # its steps are what it does
        assert phases == [*FORWARD, *BACKWARD]


def _token_phases(rank: int, num_fused: int):
    """Names of the phases; how far the weights' gradients that they add are from a backward's."""
    from ppruntime.experts.exchange import ProcessExchange
    from ppruntime.models.dispatch import WireOptions
    from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options
    from ppruntime.models.kernels.expert_backends import ExpertBackend
    from ppruntime.models.router import Routing
    from ppruntime.models.token_buffer import ExchangeBuffer
    from ppruntime.models.token_dispatch import TokenDispatcher
    from ppruntime.models.weight_copies import WeightVersion, set_weight_version

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    dims = replace(preset("tiny"), hidden_size=128, expert_width=128, num_experts=4)
    way = TokenDispatcher(ExchangeBuffer(ProcessExchange.of(group)), WireOptions(fp8=True))
    options = Fp8Options(backend=ExpertBackend.REFERENCE, fused_wgrad_micro_batches=num_fused)
    experts = Fp8Experts(dims, options, held=way.held(4), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(0, 0.1, generator=generator)
    set_weight_version(experts, WeightVersion())
    experts_NK = torch.rand(20, 4, generator=generator).topk(2).indices
    weights = torch.rand(20, 2, generator=generator) + 0.1
    routing, counts_E = Routing(experts_NK, weights, weights), torch.zeros(4)
    x = torch.randn(20, 128, generator=generator).bfloat16()
    grad = torch.randn(20, 128, generator=generator).bfloat16()
    for _ in range(num_fused):
        way.routed(experts, x.clone().requires_grad_(), routing, counts_E).backward(grad)
    expected = [weight.grad.clone() for weight in experts.parameters()]
    parts = list(token_phases(way, experts, x, routing, grad))
    for part in parts:
        part.run()
    equal = [
        torch.equal(weight.grad, 2 * one)
        for weight, one in zip(experts.parameters(), expected, strict=True)
    ]
    dist.barrier()
    dist.destroy_process_group()
    return [part.name for part in parts], equal


@pytest.mark.parametrize("num_fused", [1, 2])
def test_phases_of_tokens_sent_once_per_rank_are_all_that_the_layer_does(run_ranks, num_fused):
    for names, equal in run_ranks(2, _token_phases, num_fused):
        assert names == [*FORWARD, *BACKWARD]
        assert equal == [True, True]
