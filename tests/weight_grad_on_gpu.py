"""The Gluon weight gradient on a GPU against the Triton kernel, as a process of its own: a kernel
that hangs would take a test's process with it.

Prints a line per case and ends with 1 if one differs.
"""

from __future__ import annotations

import sys

import torch

from ppruntime.models.kernels import moe_layout
from ppruntime.models.kernels.grouped_gemm import (
    HOPPER_WEIGHT_GRAD_TILE,
    WEIGHT_GRAD_TILE,
    WeightGradOperands,
    grouped_weight_grad,
)
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


def operands(routing, widths, tiles):
    layout = moe_layout.expert_layout(routing.cuda().int().contiguous(), EXPERTS)
    blocks, found = layout.num_rows // 128, []
    for width, tile_scales in zip(widths, tiles, strict=True):
        data = torch.randn(blocks, width, 128, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.rand(blocks, width // 128 if tile_scales else width, device="cuda")
        found.append(Quantized(data, scales * 0.02 + 0.001))
    return WeightGradOperands(*found, layout)


def main() -> int:
    generator = torch.Generator().manual_seed(0)
    routings = [
        torch.randint(0, 5, (3000, 1), generator=generator),  # two experts without rows
        torch.zeros(1, 1, dtype=torch.int64),
        torch.randint(-1, 7, (900, 2), generator=generator),
        torch.full((5000, 1), 6),
    ]
    wrong = 0
    for widths, tiles in CASES:
        batches = [operands(routing, widths, tiles) for routing in routings]
        start = torch.randn(EXPERTS, *widths, device="cuda")
        for num in (1, 4):
            triton, gluon, apart, few = (start.clone() for _ in range(4))
            grouped_weight_grad(triton, batches[:num], tile=WEIGHT_GRAD_TILE)
            grouped_weight_grad(gluon, batches[:num], tile=HOPPER_WEIGHT_GRAD_TILE)
            grouped_weight_grad(few, batches[:num], tile=HOPPER_WEIGHT_GRAD_TILE, gemm_sms=5)
            for batch in batches[:num]:
                grouped_weight_grad(apart, [batch], tile=HOPPER_WEIGHT_GRAD_TILE)
            far = ((gluon - triton).abs().max() / triton.abs().max()).item()
            found = {
                "far from Triton's": far > 1e-6,
                "not as launched apart": not torch.equal(gluon, apart),
                "not as on 5 multiprocessors": not torch.equal(gluon, few),
            }
            faults = [text for text, is_so in found.items() if is_so]
            print(widths, tiles, num, f"{far:.1e}", *faults, flush=True)
            wrong += bool(faults)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
