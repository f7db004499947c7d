"""Compiles Engram's kernels for sm_90, without a GPU, at V4.1's width.

Prints what came out, as JSON. Needs Triton imported without TRITON_INTERPRET: run it in a process
of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
from offline_compile import captured

from ppruntime.models.kernels import engram

NUM_TOKENS, NUM_STREAMS, WIDTH, ROW_WIDTH = 8192, 4, 5120, 256


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def main() -> None:
    streams = meta(NUM_TOKENS, NUM_STREAMS, WIDTH)
    projected = meta(NUM_TOKENS, (NUM_STREAMS + 1) * WIDTH)
    weight, masked = meta(NUM_STREAMS, WIDTH), meta(NUM_TOKENS, dtype=torch.bool)
    rows, table = meta(1024, dtype=torch.int32), meta(4096, ROW_WIDTH, dtype=torch.float32)
    order, ends = meta(4096, dtype=torch.int64), meta(1024, dtype=torch.int32)
    with captured() as found:
        _, stats = engram._gate._init_fn(streams, projected, weight, weight, masked, 1e-20)
        engram._gate_backward._init_fn(streams, streams, projected, weight, weight, masked, stats)
        engram._sum_rows._init_fn(meta(4096, ROW_WIDTH), meta(4096, dtype=torch.int32), order, ends)
        found_rows = engram.gather_from_host(table, rows, torch.bfloat16)
        engram.add_on_host(table, rows, found_rows.float())
    json.dump({kernel.name: asdict(kernel) for kernel in found}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
