"""The fused MoE layer's kernels as Hopper code: tensor-core products, 16-byte copies, no spills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.compiles]
TESTS = Path(__file__).parent.parent


def test_kernels_compile_for_hopper_without_spills():
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)


def _compile_all():
    import torch
    from offline_compile import captured

    from ppruntime.models.kernels import (
        mega_moe,
        mega_moe_counts,
        mega_moe_gemm,
        mega_moe_swiglu,
    )
    from ppruntime.models.kernels.grouped_gemm import HOPPER_TILE
    from ppruntime.models.kernels.moe_layout import Layout
    from ppruntime.models.kernels.quantize import Quantized, pool_rows_like

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def ints(*shape):
        return meta(*shape, dtype=torch.int32)

    ranks, here, hidden, width, pairs = 8, 48, 5120, 2304, 8192 * 6
    rows = 52_224
    peers = mega_moe.Peers(meta(ranks, dtype=torch.int64), ints(1), 3, 10**10)
    plan = (ints(here + 1), ints(here), ints(ranks * here), ints(ranks * here), ints(rows // 128))
    layout = Layout(ints(rows), ints(rows, 1), plan[4], plan[0], plan[1])
    homes = mega_moe_gemm.Homes(ints(rows), peers, 10**8, pairs)
    offsets = {"rows_offset": 10**7, "scales_offset": 10**6, "per_token": 6, "most_pairs": pairs}
    x = meta(rows, hidden)
    with captured() as passes:
        mega_moe.meet(peers, 0, 7)
        mega_moe_counts.tell(peers, ints(ranks * here), rows, told_offset=512)
        words = ranks * (ranks * here + 2)
        mega_moe_counts.plan(peers, ints(words), ranks * here, rows)
        mega_moe.find_rows(peers, plan, order_offset=512, weights_offset=10**6, most_pairs=pairs)
        for fp8 in (False, True):
            pool = mega_moe.empty_pool(ints(rows), hidden, fp8=fp8)
            mega_moe.pull_rows(peers, ints(rows), plan[0], pool, num_sms=20, **offsets)
        pool, both = (
            mega_moe.empty_pool(ints(rows), hidden, fp8=False),
            pool_rows_like(x, rows, hidden),
        )
        mega_moe.pull_rows(peers, ints(rows), plan[0], pool, num_sms=20, quantized=both, **offsets)
        mega_moe.push_values(
            peers, ints(rows), meta(rows, dtype=torch.float32), offset=10**6, most_pairs=pairs
        )
        z, weight = meta(rows, 2 * width), meta(rows, dtype=torch.float32)
        mega_moe_swiglu.swiglu_bf16(z, weight, ints(rows), 10.0)
        mega_moe_swiglu.swiglu_bf16_backward(z, meta(rows, width), weight, ints(rows), 10.0)
    ready = mega_moe_gemm.Ready(ints(rows // 128), peers)
    helpers = mega_moe_gemm.Helpers(ints(1), 20, None)
    stays = []  # programs that fill a multiprocessor
    with captured() as products:
        for fp8 in (True, False):
            for outs, ins in ((2 * width, hidden), (hidden, width)):
                x = meta(rows, ins)
                weights = meta(here, outs, ins)
                if fp8:
                    weights = Quantized(
                        meta(here, outs, ins, dtype=torch.float8_e4m3fn),
                        meta(here, outs // 128, ins // 128, dtype=torch.float32),
                    )
                    x = pool_rows_like(x, rows, ins)
                waits = {"homes": homes}
                if ins == hidden:
                    waits = {"ready": ready, "helpers": helpers}
                mega_moe_gemm.mega_gemm(x, weights, layout, gemm_sms=112, **waits)
                if fp8:
                    with captured() as one:
                        mega_moe_gemm.mega_gemm(
                            x, weights, layout, gemm_sms=112, tile=HOPPER_TILE, **waits
                        )
                    stays += one
        for waits in ({"ready": ready, "helpers": helpers}, {"homes": homes}):
            mega_moe_gemm.mega_gemm(
                meta(rows, hidden), meta(here, hidden, width), layout,
                turned=True, gemm_sms=112, **waits,
            )  # fmt: skip
    for kernel in (*passes, *products, *stays):
        print(kernel)
    assert len(stays) >= 2
    for kernel in stays:
        assert kernel.product_loops == 2, kernel  # of two warpgroups
        assert kernel.spills == 0, kernel
        assert kernel.narrow_accesses == 0, kernel
        assert kernel.wide_accesses >= 32, kernel
        assert kernel.shared_bytes <= 227 * 1024, kernel
    for kernel in (*passes, *products):
        assert kernel.spills == 0, kernel
        assert kernel.narrow_accesses == 0, kernel
        if kernel.name.startswith("_pull"):
            assert kernel.wide_accesses >= 16, kernel  # all loads of a part before its stores
    for kernel in products:
        assert kernel.matrix_instructions > 0, kernel
    assert sum(kernel.wide_accesses > 0 for kernel in products) == 3  # those that send rows home


if __name__ == "__main__":
    _compile_all()
