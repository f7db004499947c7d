"""The Gluon products and weight gradients on a GPU against the Triton kernels, as a process of its
own: a kernel that hangs would take a test's process with it.

    python tests/hopper_products_on_gpu.py [SHARE OF]    all cases, or one share of so many

Prints a line per case and ends with 1 if one differs. Most of the time kernels compile, so shares
run side by side.
"""

from __future__ import annotations

import sys

import torch

from ppruntime.models.kernels import grouped_gemm as of_experts
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
    ((384, 640), (False, False)),  # in tiles of 128 columns
    ((384, 512), (False, True)),
    ((512, 384), (True, False)),  # turned
    ((640, 384), (True, False)),  # turned, in tiles of 128
    ((256, 512), (True, True)),
    ((4608, 5120), (False, True)),
    ((5120, 2304), (False, False)),
    ((5120, 2304), (True, False)),
]
"""Widths of both sides, and whether their scales are tiles."""

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


def products(shapes) -> int:
    wrong = 0
    for outs, ins in shapes:
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


def added(start, batches, tile=HOPPER_WEIGHT_GRAD_TILE, by_tma=None, **options):
    """The sums on top of `start`; by TMA or not, if that is said, whatever is faster."""
    accumulator, rule = start.clone(), of_experts.adds_by_tma
    if by_tma is not None:
        of_experts.adds_by_tma = lambda *_: by_tma
    grouped_weight_grad(accumulator, batches, tile=tile, **options)
    of_experts.adds_by_tma = rule
    return accumulator


def weight_grads(cases) -> int:
    wrong = 0
    for widths, tiles in cases:
        batches = [operands(routing, widths, tiles) for routing in routings()]
        start = torch.randn(EXPERTS, *widths, device="cuda")
        apart = start
        for num in (1, 2, 3, 4):
            apart = added(apart, [batches[num - 1]])
            if num == 3:
                continue
            triton = added(start, batches[:num], WEIGHT_GRAD_TILE)
            faults = {"not as launched apart": not torch.equal(apart, triton)}
            for by_tma, way in ((False, "from registers"), (True, "by TMA")):
                # Again and again: TMA adds in its own time.
                for sms in (None, 5, None, None, None):
                    got = added(start, batches[:num], by_tma=by_tma, gemm_sms=sms)
                    far = ((got - triton).abs().max() / triton.abs().max()).item()
                    fault = f"{way} on {sms or 'all'} multiprocessors {far:.1e} from Triton's"
                    faults[fault] = not torch.equal(got, triton)
            wrong += say(("weight gradient", widths, tiles, num), faults)
    return wrong


if __name__ == "__main__":
    share, of = map(int, sys.argv[1:]) if sys.argv[1:] else (0, 1)
    sys.exit(int(weight_grads(CASES[share::of]) + products(PRODUCTS[share::of]) > 0))
