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


@triton.jit
def e4m3_pair(x0, x1):
    """Two fp32 tensors to int32: their E4M3 values in the two low bytes, x0's in the lowest."""
    if INTERPRETED:
        low = to_e4m3(x0).to(tl.uint8, bitcast=True).to(tl.int32)
        return low | to_e4m3(x1).to(tl.uint8, bitcast=True).to(tl.int32) << 8
    # By hand, since it is two instructions, and since ptxas 12.8 makes wrong code where values of
    # a pair are taken apart and shifted: it read the stack pointer in the place of some.
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 pair;
        cvt.rn.satfinite.e4m3x2.f32 pair, $2, $1;
        cvt.u32.u16 $0, pair;
        }""",
        "=r,r,r",
        [x0, x1],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def e4m3_words(x0, x1, x2, x3):
    """Four fp32 tensors to int32 words of their E4M3 values, x0's in the lowest byte."""
    return e4m3_pair(x0, x1) | e4m3_pair(x2, x3) << 16
