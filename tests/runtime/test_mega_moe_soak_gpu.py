"""1,000 steps of random routings through the fused MoE layer on two GPUs, under checkers of its
memory, see routing_soak.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from rank_pool import run_in_pool
from routing_soak import KINDS, Sizes, Soak

from ppruntime.models.dims import preset

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZES = Sizes(num_tokens=512, per_token=4, num_experts=96, hidden=512)
WIDTH = 256
NUM_STEPS, NUM_ROUTINGS = 1000, 3 * len(KINDS)
SECONDS = 110


def soak_one_rank(rank: int, kind: str, num_steps: int):
    """What is wrong, a line each, and how many tensors lay between guards."""
    from ppruntime.experts.arena import open_arena
    from ppruntime.experts.exchange import ProcessExchange
    from ppruntime.models.experts import Experts
    from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options
    from ppruntime.models.mega_moe import MegaMoe
    from ppruntime.models.mega_moe_passes import MegaMoeOptions

    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    exchange = ProcessExchange.of(dist.new_group([0, 1]))
    store = dist.distributed_c10d._get_default_store()
    device = torch.device("cuda", rank)
    arena = open_arena(SIZES.shape, (0, 1), rank, device, store, timeout_seconds=40)
    mega = MegaMoe(exchange, arena, MegaMoeOptions(num_sms=16))
    dims = replace(
        preset("tiny"),
        hidden_size=SIZES.hidden,
        expert_width=WIDTH,
        num_experts=SIZES.num_experts,
        experts_per_token=SIZES.per_token,
    )
    options = {"held": mega.held(SIZES.num_experts), "device": device, "dtype": torch.bfloat16}
    layer = Fp8Experts(dims, Fp8Options(), **options) if kind == "FP8" else Experts(dims, **options)
    torch.manual_seed(rank)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0, 0.06)
    soak = Soak([mega], [layer], lambda ranks, passes: [ranks[0].run(passes[0])], SIZES)
    torch.cuda.synchronize()
    dist.barrier()  # nobody is written to before the guards are there
    soak.steps(num_steps, NUM_ROUTINGS)
    mega.check()
    torch.cuda.synchronize()
    dist.barrier()
    arena.close()
    dist.destroy_process_group()
    return soak.wrong, soak.num_guarded


def soak_in_large_tiles(rank: int, num_steps: int):
    """In FP8 by the Gluon kernels, which take products of so few rows nowhere by themselves."""
    from ppruntime.models.kernels import grouped_gemm

    fills, grouped_gemm.fills = grouped_gemm.fills, lambda *_: True
    try:
        return soak_one_rank(rank, "FP8", num_steps)
    finally:
        grouped_gemm.fills = fills


SOAKS = {
    "FP8": (soak_one_rank, "FP8", NUM_STEPS),
    "bf16": (soak_one_rank, "bf16", NUM_STEPS),
    "FP8 in large tiles": (soak_in_large_tiles, NUM_STEPS),
}


@pytest.mark.parametrize("kind", SOAKS)
def test_1000_routings_write_nowhere_else_leak_nothing_and_repeat_bit_for_bit(kind):
    told = run_in_pool(2, *SOAKS[kind], timeout_seconds=SECONDS)
    wrong = [f"rank {rank}: {line}" for rank, (lines, _) in enumerate(told) for line in lines]
    assert not wrong, f"{len(wrong)} are wrong:\n" + "\n".join(wrong[:40])
    assert min(num for _, num in told) > 10 * NUM_STEPS
