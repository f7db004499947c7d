"""The fused MoE layer's phases run one by one, on one rank in the interpreter."""

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU
from mega_cases import make_ranks
from msgspec.structs import replace

from ppruntime.launch.bench_moe_fused import fused_parts, fused_phases
from ppruntime.launch.moe_floor import BACKWARD, FORWARD
from ppruntime.models.dims import preset
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options
from ppruntime.models.mega_moe_rules import ArenaShape
from ppruntime.models.router import Routing

pytestmark = [pytest.mark.long, *([pytest.mark.gpu] if ON_GPU else [])]


DIMS = replace(preset("tiny"), hidden_size=128, expert_width=128, num_experts=2)


def _layer(experts):
    """The rank, its tokens and their routing."""
    shape = ArenaShape(most_tokens=3, per_token=1, num_experts=2, hidden=128)
    (rank,) = make_ranks(1, shape)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(0, 0.06)
    weights = torch.rand(3, 1, device=DEVICE)
    routing = Routing(torch.tensor([[0], [1], [0]], device=DEVICE), weights, weights)
    return rank, torch.randn(3, 128, device=DEVICE).bfloat16(), routing


def test_the_phases_that_the_fused_layer_does_together_are_all_of_a_micro_batch():
    experts = Fp8Experts(DIMS, Fp8Options(), device=DEVICE, dtype=torch.bfloat16)
    rank, x, routing = _layer(experts)
    counts = torch.tensor([2, 1], device=DEVICE)
    y = rank.routed(experts, x.requires_grad_(), routing, counts)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected = [weight.grad.clone() for weight in experts.parameters()]
    parts = list(fused_parts(rank, experts, x.detach(), routing, grad))
    names = [name for part in parts for name in part.name.split(" + ")]
    assert names == [*FORWARD, *BACKWARD]
    for part in parts:
        part.run()
    assert not rank.arena.error.item()
    for weight, one in zip(experts.parameters(), expected, strict=True):
        assert torch.equal(weight.grad, 2 * one)  # the same operands


def test_every_phase_of_the_fused_layer_runs_alone():
    experts = Experts(DIMS, device=DEVICE, dtype=torch.bfloat16)
    rank, x, routing = _layer(experts)
    phases = list(fused_phases(rank, experts, x, routing))
    for phase in phases:
        phase.run()
    assert not rank.arena.error.item()
    flops = {phase.name: phase.flops for phase in phases}
    assert flops["L1"] == flops["pull + L1"] == 2 * 3 * 128 * 256
    assert flops["L2"] == flops["L2 + push"] == 2 * 3 * 128 * 128
    assert not any(phase.num_bytes for phase in phases)  # nothing crosses between GPUs
