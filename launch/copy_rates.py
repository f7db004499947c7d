"""How fast copies between host and device are, alone and beside a matmul. For benches."""

from __future__ import annotations

import time

import torch

from ppruntime.host_memory import HostPool, Lane, pieces


def copy_rates(device: torch.device, *, num_bytes: int = 1 << 30) -> dict[str, float]:
    """GB/s of copies to the host, back, and both at once, alone and while a matmul runs; and how
    much longer the matmuls take beside them. Empty on the CPU."""
    if device.type != "cuda":
        return {}
    pool = HostPool(device)
    out, home = Lane(device), Lane(device)
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pages = [pool.take(num_bytes) for _ in buffers]
    a = torch.randn(8192, 8192, device=device).bfloat16()
    rates: dict[str, float] = {}

    def timed(outwards: bool, homewards: bool, num_products: int) -> tuple[float, float]:
        """Seconds until the copies and until the products are done."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        ends = []
        if outwards:
            ends.append(out.copy(pieces([buffers[0]], pages[0])))
        if homewards:
            ends.append(home.copy((p, b) for b, p in pieces([buffers[1]], pages[1])))
        for _ in range(num_products):
            _ = a @ a
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        for end in ends:
            assert end is not None, "copies on a device end later"
            end.synchronize()
        copied = time.perf_counter() - start
        done.synchronize()
        return copied, time.perf_counter() - start

    for _ in range(2):  # the first time warms up
        alone = timed(False, False, 60)[1]
        for beside, num_products in (("alone", 0), ("beside a matmul", 60)):
            rates[f"GB/s to the host, {beside}"] = num_bytes / timed(True, False, num_products)[0]
            rates[f"GB/s back, {beside}"] = num_bytes / timed(False, True, num_products)[0]
            both = timed(True, True, num_products)
            rates[f"GB/s both at once, each, {beside}"] = num_bytes / both[0]
    rates = {name: rate / 1e9 for name, rate in rates.items()}
    rates["matmuls beside both copies, % of alone"] = both[1] / alone * 100
    return rates
