# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""Roundings on the device that give the same bits compiled and interpreted.

Triton's interpreter, in which the CPU tests run, converts fp32 to E4M3 and bf16 inexactly: it loses
carries and truncates. There the value is rounded beforehand to one that the format holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def reciprocal(x):
    """1/x, rounded correctly: `1.0 / x` would be an approximation."""
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def to_e4m3(x):
    """fp32 to E4M3, to nearest, ties to even, saturating."""
    if INTERPRETED:
        # The interpreter's own conversion loses carries and truncates small values: give it values
        # that E4M3 holds exactly.
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        normal = bits.to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) >= 0.015625, normal, (x + 24576.0) - 24576.0)
    return x.to(tl.float8e4nv)


@triton.jit
def to_bf16(x):
    """fp32 to bf16, to nearest, ties to even."""
    if INTERPRETED:  # which truncates
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)
