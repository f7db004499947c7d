"""The Gluon products and weight gradients on a GPU against the Triton kernels, as a process of its
own: a kernel that hangs would take a test's process with it.

Prints a line per case and ends with 1 if one differs.
"""

from __future__ import annotations

import sys

import torch

from ppruntime.models.kernels import moe_layout
from ppruntime.models.kernels.grouped_gemm import (
    FORWARD_TILE,
    HOPPER_TILE,
    HOPPER_WEIGHT_GRAD_TILE,
    WEIGHT_GRAD_TILE,
    WeightGradOperands,
    grouped_gemm,
    grouped_weight_grad,
)
from ppruntime.models.kernels.mega_moe import PARTS, Peers
from ppruntime.models.kernels.mega_moe_gemm import Helpers, Homes, Ready, mega_gemm
from ppruntime.models.kernels.quantize import Quantized

EXPERTS = 7
CASES = [
    ((256, 512), (False, False)),
    ((384, 640), (False, False)),
    ((384, 512), (False, False)),
    ((384, 512), (False, True)),
    ((256, 384), (True, False)),
    ((4608, 5120), (False, True)),
]

PRODUCTS = [(512, 256), (384, 512), (640, 128), (4608, 5120)]


def operands(routing, widths, tiles):
    layout = moe_layout.expert_layout(routing.cuda().int().contiguous(), EXPERTS)
    blocks, found = layout.num_rows // 128, []
    for width, tile_scales in zip(widths, tiles, strict=True):
        data = torch.randn(blocks, width, 128, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.rand(blocks, width // 128 if tile_scales else width, device="cuda")
        found.append(Quantized(data, scales * 0.02 + 0.001))
    return WeightGradOperands(*found, layout)


def routings():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 5, (3000, 1), generator=generator),  # two experts without rows
        torch.zeros(1, 1, dtype=torch.int64),
        torch.randint(-1, 7, (900, 2), generator=generator),
        torch.full((5000, 1), 6),
    ]


def say(case, faults) -> bool:
    found = [text for text, is_so in faults.items() if is_so]
    print(*case, *(found or ["good"]), flush=True)
    return bool(found)


def products() -> int:
    wrong = 0
    for outs, ins in PRODUCTS:
        for routing in routings():
            layout = moe_layout.expert_layout(routing.cuda().int().contiguous(), EXPERTS)
            rows = layout.num_rows

            def fp8(*shape, scales):
                data = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
                return Quantized(data, torch.rand(scales, device="cuda") * 0.02 + 0.001)

            x = fp8(rows, ins, scales=(ins // 128, rows))
            weights = fp8(EXPERTS, outs, ins, scales=(EXPERTS, outs // 128, ins // 128))
            live = layout.pair_P >= 0
            expected = grouped_gemm(x, weights, layout, tile=FORWARD_TILE)[live]
            got = grouped_gemm(x, weights, layout, tile=HOPPER_TILE)[live]
            few = grouped_gemm(x, weights, layout, tile=HOPPER_TILE, gemm_sms=5)[live]
            # To the places of two ranks, half of the rows to each.
            pairs = max(rows, 1)
            arenas = torch.full((2, pairs, outs), -1, dtype=torch.bfloat16, device="cuda")
            bases = torch.tensor([arena.data_ptr() for arena in arenas], device="cuda")
            peers = Peers(bases, torch.zeros(1, dtype=torch.int32, device="cuda"), 0, 10**9)
            place = torch.arange(rows, device="cuda")
            home = torch.where(live, place + (place % 2) * pairs, -1).to(torch.int32)
            mega_gemm(x, weights, layout, homes=Homes(home, peers, 0, pairs), tile=HOPPER_TILE)
            sent = arenas.view(-1, outs)[home[live].long()]
            # Of rows whose flags come late, with helpers that draw.
            flags = torch.zeros(rows // 128, dtype=torch.int32, device="cuda")
            ticket, stream = torch.zeros_like(flags[:1]), torch.cuda.Stream()
            torch.cuda._sleep(1)  # loaded before others wait for what follows it
            flags.fill_(0)
            torch.cuda.synchronize()
            drawn = mega_gemm(
                x, weights, layout, ready=Ready(flags, peers), tile=HOPPER_TILE, gemm_sms=100,
                helpers=Helpers(ticket, 20, stream),
            )  # fmt: skip
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(1_000_000)
                flags.fill_(PARTS)
            torch.cuda.synchronize()
            faults = {
                "not Triton's": not torch.equal(got, expected),
                "not as on 5 multiprocessors": not torch.equal(few, expected),
                "not as sent home": not torch.equal(sent, expected),
                "sent elsewhere": int((arenas != -1).any(2).sum()) > int(live.sum()),
                "not as waited for and drawn": not torch.equal(drawn[live], expected),
                "an error": peers.error.item() != 0,
            }
            wrong += say(("product", outs, ins, rows), faults)
    return wrong


def weight_grads() -> int:
    wrong = 0
    for widths, tiles in CASES:
        batches = [operands(routing, widths, tiles) for routing in routings()]
        start = torch.randn(EXPERTS, *widths, device="cuda")
        for num in (1, 4):
            triton, gluon, apart, few = (start.clone() for _ in range(4))
            grouped_weight_grad(triton, batches[:num], tile=WEIGHT_GRAD_TILE)
            grouped_weight_grad(gluon, batches[:num], tile=HOPPER_WEIGHT_GRAD_TILE)
            grouped_weight_grad(few, batches[:num], tile=HOPPER_WEIGHT_GRAD_TILE, gemm_sms=5)
            for batch in batches[:num]:
                grouped_weight_grad(apart, [batch], tile=HOPPER_WEIGHT_GRAD_TILE)
            far = ((gluon - triton).abs().max() / triton.abs().max()).item()
            faults = {
                f"{far:.1e} from Triton's": far > 1e-6,
                "not as launched apart": not torch.equal(gluon, apart),
                "not as on 5 multiprocessors": not torch.equal(gluon, few),
            }
            wrong += say(("weight gradient", widths, tiles, num), faults)
    return wrong


if __name__ == "__main__":
    sys.exit(int(weight_grads() + products() > 0))
