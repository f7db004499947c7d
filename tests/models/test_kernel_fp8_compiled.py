"""The FP8 kernels as Hopper code: tensor-core products, wide accesses, nothing spilled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.compiles]  # each kernel at V4.1's widths: 20 s
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
    from offline_compile import Compiled, captured

    from ppruntime.models.kernels import grouped_gemm, moe_layout, quantize, swiglu
    from ppruntime.models.kernels.grouped_gemm import WeightGradOperands
    from ppruntime.models.kernels.quantize import Quantized, columns_like, pool_rows_like

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    experts, hidden, width, tokens, per_token = 48, 5120, 2304, 8192, 6
    rows = moe_layout.most_rows(tokens * per_token, experts)
    sizes = ((rows,), (tokens, per_token), (rows // 128,), (experts + 1,), (experts,))
    layout = moe_layout.Layout(*(meta(*size, dtype=torch.int32) for size in sizes))
    x, weight_NK = meta(tokens, hidden), meta(tokens, per_token, dtype=torch.float32)
    weights = Quantized(
        meta(experts, 2 * width, hidden, dtype=torch.float8_e4m3fn),
        meta(experts, 2 * width // 128, hidden // 128, dtype=torch.float32),
    )
    # Programs that fill a multiprocessor, and of how many micro-batches each has the products.
    stays: list[tuple[int, Compiled]] = []
    with captured() as products:
        grouped_gemm.grouped_gemm(pool_rows_like(x, rows, hidden), weights, layout)
        with captured() as one:
            rows_in = pool_rows_like(x, rows, hidden)
            grouped_gemm.grouped_gemm(rows_in, weights, layout, tile=grouped_gemm.HOPPER_TILE)
        stays += [(1, kernel) for kernel in one]
        for left, right in ((False, False), (False, True), (True, False), (True, True)):
            operands = WeightGradOperands(
                columns_like(x, rows, 2 * width, tile_scales=left),
                columns_like(x, rows, hidden, tile_scales=right),
                layout,
            )
            accumulator = meta(experts, 2 * width, hidden, dtype=torch.float32)
            grouped_gemm.grouped_weight_grad(accumulator, [operands, operands])
            tile = grouped_gemm.HOPPER_WEIGHT_GRAD_TILE
            for count in (1, 2, grouped_gemm.MOST_MICRO_BATCHES):
                with captured() as one:
                    grouped_gemm.grouped_weight_grad(accumulator, [operands] * count, tile=tile)
                stays += [(count, kernel) for kernel in one]
    with captured() as passes:
        x8 = quantize.quantize_rows(x, power_of_two=True)
        moe_layout.gather_rows(x8.data, layout, x8.scale)
        moe_layout.gather_sum(meta(rows, hidden), layout, dtype=torch.bfloat16)
        for source, with_rows in ((x, True), (x8, False)):
            for routed in (quantize.TRITON_ROUTED, quantize.HOPPER_ROUTED):
                for dense in (False, True):
                    quantize.quantize_routed(
                        source, layout, with_rows=with_rows, power_of_two=True, tile=routed,
                        dense=dense,
                    )  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):
            quantize.quantize_blocks(meta(experts, hidden, width, dtype=dtype), transposed=True)
        quantize.transpose_blocks(weights)
        swiglu.swiglu(meta(rows, 2 * width), weight_NK, layout, 10.0, power_of_two=False)
        swiglu.weight_grads = lambda dot_GP, layout: None  # what follows is torch
        for backward in (swiglu.TRITON_BACKWARD, swiglu.HOPPER_BACKWARD):
            swiglu.swiglu_backward(
                meta(rows, 2 * width), meta(rows, width), weight_NK, layout, 10.0,
                power_of_two=False, tile=backward,
            )  # fmt: skip
    for count, kernel in stays:
        print(kernel)
        assert kernel.product_loops == 2 * count, kernel  # of two warpgroups
        assert kernel.spills_in_loops == 0, kernel
        assert kernel.spills <= 2, kernel  # Triton 3.6, scales by column, one micro-batch
        assert kernel.matrix_instructions > 0, kernel
        assert kernel.registers <= 168, kernel  # of 384 threads, before they share them out anew
        assert kernel.shared_bytes <= 227 * 1024, kernel
    for kernel in (*products, *passes):
        print(kernel)
        # The weight gradient has fewer registers than it would take: docs/bench/moe-experts.json
        # has it faster so, with Triton 3.6 and its 74 spills. The SwiGLU's results fill three
        # quarters of all there are; 38 instructions of 2,100 move others away and back.
        allowed = {
            "_grouped_weight_grad": 150,
            "swiglu_backward_kernel": 60,
            "_swiglu_backward": 8,  # Triton 3.7.1; 3.6: none
            "quantize_routed_kernel": 12,  # the same: 80 registers for three programs
        }.get(kernel.name, 0)
        assert kernel.spills <= allowed, kernel
        assert kernel.narrow_accesses == 0, kernel
    by_name = {kernel.name: kernel for kernel in passes}
    assert by_name["quantize_routed_kernel"].registers <= 80  # three programs of 8 warps
    assert by_name["swiglu_backward_kernel"].shared_bytes <= 227 * 1024
    for kernel in products:
        assert kernel.matrix_instructions > 0, kernel
        assert kernel.shared_bytes <= 113 * 1024, kernel  # two programs on a multiprocessor


if __name__ == "__main__":
    _compile_all()
