"""The fused MoE layer's phases run one by one, on one rank in the interpreter."""

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU
from mega_cases import make_ranks
from msgspec.structs import replace

from ppruntime.launch.bench_moe_fused import fused_phases
from ppruntime.models.dims import preset
from ppruntime.models.experts import Experts
from ppruntime.models.mega_moe_rules import ArenaShape
from ppruntime.models.router import Routing

pytestmark = [pytest.mark.long, *([pytest.mark.gpu] if ON_GPU else [])]


def test_every_phase_of_the_fused_layer_runs_alone():
    dims = replace(preset("tiny"), hidden_size=128, expert_width=128, num_experts=2)
    shape = ArenaShape(most_tokens=3, per_token=1, num_experts=2, hidden=128)
    (rank,) = make_ranks(1, shape)
    experts = Experts(dims, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(0, 0.06)
    weights = torch.rand(3, 1, device=DEVICE)
    routing = Routing(torch.tensor([[0], [1], [0]], device=DEVICE), weights, weights)
    x = torch.randn(3, 128, device=DEVICE).bfloat16()
    phases = list(fused_phases(rank, experts, x, routing))
    for phase in phases:
        phase.run()
    assert not rank.arena.error.item()
    flops = {phase.name: phase.flops for phase in phases}
    assert flops["L1"] == flops["pull + L1"] == 2 * 3 * 128 * 256
    assert flops["L2"] == flops["L2 + push"] == 2 * 3 * 128 * 128
    assert not any(phase.num_bytes for phase in phases)  # nothing crosses between GPUs
