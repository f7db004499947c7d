"""The FP8 linears' kernels as Hopper code, at the query projection's widths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.compiles]  # about 10 s
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

    from ppruntime.models.kernels import grouped_gemm, quantize
    from ppruntime.models.kernels.fp8_linear_backends import dense_layout
    from ppruntime.models.kernels.fp8_linear_cast import quantize_turned
    from ppruntime.models.kernels.grouped_gemm import WeightGradOperands
    from ppruntime.models.kernels.quantize import Quantized

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, heads, head_width, num_pairs, latent = 8192, 64, 512, 32, 1280
    outs, layout = heads * head_width, dense_layout(tokens, torch.device("cpu"))
    layout = type(layout)(*(t.to("meta") for t in layout))
    angles = meta(tokens, num_pairs, dtype=torch.float32)
    with captured() as passes:
        rows, inputs = quantize.quantize_routed(
            meta(tokens, latent), layout, with_rows=True, power_of_two=False
        )
        _, grads = quantize_turned(meta(tokens, outs), angles, angles, head_width=head_width)
        quantize_turned(meta(tokens, outs), angles, angles, head_width=head_width, dense=True)
    with captured() as products:
        weights = Quantized(
            meta(1, outs, latent, dtype=torch.float8_e4m3fn),
            meta(1, outs // 128, latent // 128, dtype=torch.float32),
        )
        grouped_gemm.grouped_gemm(rows, weights, layout)
        accumulator = meta(1, outs, latent, dtype=torch.float32)
        grouped_gemm.grouped_weight_grad(accumulator, [WeightGradOperands(grads, inputs, layout)])
    for kernel in (*passes, *products):
        print(kernel)
        assert kernel.spills <= (150 if kernel.name == "_grouped_weight_grad" else 0), kernel
        assert kernel.narrow_accesses == 0, kernel
    for kernel in products:
        assert kernel.matrix_instructions > 0, kernel
        assert kernel.shared_bytes <= 113 * 1024, kernel  # two programs on a multiprocessor


if __name__ == "__main__":
    _compile_all()
