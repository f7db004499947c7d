"""Products that run beside transfers in the bench of the transports, on a GPU of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_EXTENT = 8192
_GROUPED = (16, 1024, 4096, 5120)  # experts, rows of each, N, K


@dataclass(frozen=True, slots=True)
class Product:
    """A product over fixed operands. `run` enqueues it once on the current stream."""

    name: str
    run: Callable[[], object]
    flops: float


def bf16_matmul(device: Any) -> Product:
    """A square product that fills the GPU."""
    import torch

    a = torch.randn(_EXTENT, _EXTENT, device=device).to(torch.bfloat16)
    b = torch.randn(_EXTENT, _EXTENT, device=device).to(torch.bfloat16)
    out = torch.empty_like(a)
    return Product("bf16 matmul", lambda: torch.mm(a, b, out=out), 2.0 * _EXTENT**3)


def fp8_grouped(device: Any) -> Product:
    """torch's FP8 grouped GEMM with row scales, persistent. It is run once: raises RuntimeError,
    AttributeError or TypeError where it cannot."""
    import torch

    experts, rows, n, k = _GROUPED
    a = torch.randn(experts * rows, k, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(experts, n, k, device=device).to(torch.float8_e4m3fn)
    scale_a = torch.ones(experts * rows, device=device)
    scale_b = torch.ones(experts, n, device=device)
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * rows

    def run() -> object:
        return torch._scaled_grouped_mm(
            a,
            b.transpose(-2, -1),
            scale_a,
            scale_b,
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    run()
    torch.cuda.synchronize(device)
    return Product("FP8 grouped GEMM", run, 2.0 * experts * rows * n * k)
