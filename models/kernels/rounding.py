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
def reciprocal_of_scale(x):
    """`reciprocal`, to the bit, of what a scale can be: from 1e-13 to 1e36, or infinite.

    Without the branch for numbers beyond, of which a thread has one per channel: the approximation
    and one step of Newton's are what the division does, too, where no exponent is in danger.
    """
    if INTERPRETED:
        return reciprocal(x)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 rough, minus, error, close;
        .reg .pred large;
        rcp.approx.ftz.f32 rough, $1;
        neg.f32 minus, $1;
        fma.rn.f32 error, minus, rough, 0f3F800000;
        fma.rn.f32 close, rough, error, rough;
        setp.gt.f32 large, $1, 0f7E800000;
        selp.f32 $0, rough, close, large;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)).

    Compiled, the bits of that expression in half its instructions: whatever exp flushes to zero
    vanishes beside the 1, and a quarter of the sum is in nobody's danger of a reciprocal that is
    flushed.
    """
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 power, quarter, four;
        mul.rn.f32 power, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 power, power;
        fma.rn.f32 quarter, power, 0f3E800000, 0f3E800000;
        rcp.approx.ftz.f32 four, quarter;
        mul.rn.f32 $0, four, 0f3E800000;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


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
def to_e4m3_by_fours(x):
    """`to_e4m3`, for values that are then turned: a thread's values leave a word of four each.

    Triton's own cast leaves pairs in 16 bits. Where their bytes are taken apart, to turn a tile,
    and go into words too, ptxas 12.8 reads registers before the pairs are there: of fp32 weights a
    quarter of the turned bytes were of addresses or whatever else lay in those.
    """
    if INTERPRETED:
        return to_e4m3(x)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [x],
        dtype=tl.float8e4nv,
        is_pure=True,
        pack=4,
    )


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
