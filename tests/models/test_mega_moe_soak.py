"""Many routings of the fused MoE layer under checkers of its memory, by ranks that one process
plays; and that the checkers see what they are for.

On a GPU with the sizes, the kernels and the routings of the 1,000 steps on two GPUs
(tests/runtime/test_mega_moe_soak_gpu.py), 270 steps; but there nobody waits for another rank.
"""

from __future__ import annotations

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU
from mega_cases import make_ranks, run_together
from msgspec.structs import replace
from routing_soak import FILLS, GUARD, KINDS, Guards, Sizes, Soak, routing

from ppruntime.models.dims import preset
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options
from ppruntime.models.kernels import grouped_gemm
from ppruntime.models.mega_moe_rules import ArenaShape

pytestmark = [pytest.mark.gpu] if ON_GPU else []
ON_TWO_GPUS = Sizes(num_tokens=512, per_token=4, num_experts=96, hidden=512)
SMALL = Sizes(num_tokens=5, per_token=2, num_experts=4, hidden=128)
SIZES, WIDTH = (ON_TWO_GPUS, 256) if ON_GPU else (SMALL, 128)
NUM_ROUTINGS = 3 * len(KINDS) if ON_GPU else 5
NUM_STEPS = 10 * NUM_ROUTINGS if ON_GPU else 8
"""In the interpreter a pass takes a second."""
KIND_PARAMETERS = ["bf16", pytest.param("FP8", marks=pytest.mark.slow)]
if ON_GPU:
    KIND_PARAMETERS.append("FP8 in large tiles")


def _layers(kind, ranks):
    dims = replace(
        preset("tiny"),
        hidden_size=SIZES.hidden,
        expert_width=WIDTH,
        num_experts=SIZES.num_experts,
        experts_per_token=SIZES.per_token,
    )
    made = []
    for rank in ranks:
        held = rank.held(SIZES.num_experts)
        options = {"held": held, "device": DEVICE, "dtype": torch.bfloat16}
        layer = (
            Experts(dims, **options)
            if kind == "bf16"
            else Fp8Experts(dims, Fp8Options(), **options)
        )
        generator = torch.Generator().manual_seed(1 + held.start)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.06)
        made.append(layer)
    return made


@pytest.mark.long
@pytest.mark.parametrize("kind", KIND_PARAMETERS)
def test_routings_write_nowhere_else_read_what_was_written_and_repeat(kind, monkeypatch):
    if kind == "FP8 in large tiles":  # the Gluon kernels take products of so few rows nowhere
        monkeypatch.setattr(grouped_gemm, "fills", lambda *_: True)
    ranks = make_ranks(2, SIZES.shape)
    soak = Soak(ranks, _layers(kind, ranks), run_together, SIZES)
    soak.steps(NUM_STEPS, NUM_ROUTINGS)
    assert not soak.wrong, "\n".join(soak.wrong)
    assert soak.num_guarded > 10 * NUM_STEPS
    assert not any(rank.arena.error.item() for rank in ranks)


def test_guards_see_a_write_on_either_side_and_what_nobody_wrote_changes():
    guards = Guards(DEVICE, FILLS[0])
    with guards:
        first = torch.empty(3, 5, device=DEVICE)
        zeros = torch.zeros(7, dtype=torch.int32, device=DEVICE)
        first.new_empty(2, dtype=torch.bfloat16)
    assert first.isnan().all()
    assert not zeros.any()
    assert first.data_ptr() % 512 == zeros.data_ptr() % 512 == GUARD % 512 == 0 or DEVICE == "cpu"
    assert guards.num_made == 3
    assert guards.broken(keep=True) == []
    torch.as_strided(zeros, (1,), (1,), zeros.storage_offset() + 7).zero_()
    torch.as_strided(first, (1,), (1,), first.storage_offset() - 1).zero_()
    wrong = guards.broken()
    assert wrong == ["before torch.float32 [3, 5]", "behind torch.int32 [7]"]
    assert guards.num_made == 0


def test_regions_of_a_guarded_arena_lie_as_in_a_plain_one_with_a_guard_before_each():
    plain = ArenaShape(most_tokens=5, per_token=2, num_experts=4, hidden=128)
    shape = SMALL.shape
    guards = dict(shape.guards())
    assert len(guards) == 10
    assert shape.num_bytes == plain.num_bytes + 10 * GUARD
    assert shape.offset("words") == GUARD
    assert shape.offset("places") - plain.offset("places") == 9 * GUARD
    assert guards["before places"] == shape.offset("places") - GUARD
    assert guards["behind the arena"] == shape.num_bytes - GUARD


@pytest.mark.parametrize("kind", KINDS)
def test_routings_are_what_their_kinds_say(kind):
    chosen = torch.cat([routing(kind, 2, rank, ON_TWO_GPUS) for rank in range(2)])
    chosen = chosen[chosen >= 0]
    loads = torch.bincount(chosen, minlength=96)
    if kind == "one expert in every token":
        assert loads.max() > 20 * loads.float().mean()
    if kind == "all to one expert":
        assert loads.max() == loads.sum() == 1024
    if kind == "none to the second rank":
        assert loads[48:].sum() == 0 < loads[:48].sum()
    if kind == "none to the first rank":
        assert loads[:48].sum() == 0 < loads[48:].sum()
    if kind == "some pairs nowhere":
        assert 0 < loads.sum() < 4096
    if kind == "tokens on one rank":
        assert loads.sum() == 2048
    assert (loads.sum() == 0) == (kind == "no tokens at all")
