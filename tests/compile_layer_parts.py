"""Compiles kernels of norms, the shared expert's SwiGLU, the head, mHC and one stream in its place
for sm_90, without a GPU, at V4.1's width; with --all at V4's too.

Prints what came out, as JSON. Needs Triton imported without TRITON_INTERPRET: run it in a process
of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
from offline_compile import Compiled, captured

from ppruntime.models.kernels import head, mhc, norm, routing, shared_swiglu, single_stream

NUM_TOKENS, NUM_STREAMS = 8192, 4


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_head(vocab: int) -> list[Compiled]:
    logits = meta(2048, vocab, dtype=torch.float32)
    labels = meta(2048, dtype=torch.int64)
    with captured() as found:
        head._softmax_grad._init_fn(logits, labels, meta(2048, vocab))
    return found


def compile_mhc(width: int, own_mix: bool) -> list[Compiled]:
    fp32 = torch.float32
    num_coefficients = 2 * NUM_STREAMS + NUM_STREAMS**2
    streams, y = meta(NUM_TOKENS, NUM_STREAMS, width), meta(NUM_TOKENS, width)
    mix = meta(NUM_TOKENS, NUM_STREAMS, dtype=fp32)
    weight = meta(num_coefficients, NUM_STREAMS * width, dtype=fp32)
    base, scale = meta(num_coefficients, dtype=fp32), meta(3, dtype=fp32)
    gain, constants = meta(width), (1e-20, 1e-6, 20)
    with captured() as found:
        x, z, projected, inverse, pre, post, comb = mhc._read._init_fn(
            streams, None if own_mix else mix, weight, base, scale, gain, *constants
        )
        mhc._write._init_fn(streams, y, post, comb)
        _, _, dpost, dcomb = mhc._write_backward._init_fn(streams, streams, y, post, comb)
        mhc._read_backward._init_fn(
            x, streams, pre, dpost, dcomb, streams, mix, weight, base, scale, gain, z,
            projected, inverse, comb, *constants, own_mix, True,
        )  # fmt: skip
        mhc._weight_grad._init_fn(meta(NUM_TOKENS, 2 * num_coefficients), streams)
    return found


def compile_one_stream(width: int, gated: bool) -> list[Compiled]:
    fp32 = torch.float32
    stream, gain = meta(NUM_TOKENS, width), meta(width)
    weights = (meta(1, width, dtype=fp32), meta(1, dtype=fp32), meta(1, dtype=fp32))
    of_gate = weights if gated else (None, None, None)
    with captured() as found:
        x, inverse, projected, gate = single_stream._read._init_fn(stream, gain, *of_gate, 1e-20)
        factor = gate if gated else meta(width, dtype=fp32)
        single_stream._write._init_fn(stream, x, factor, gated)
        single_stream._write_backward._init_fn(stream, x, factor, gated)
        to_gate = (projected, gate) if gated else (None, None)
        single_stream._read_backward._init_fn(x, stream, stream, gain, inverse, *of_gate, *to_gate)
    return found


def compile_norm(width: int) -> list[Compiled]:
    x, gain = meta(NUM_TOKENS, width), meta(width)
    with captured() as found:
        _, inverse = norm._norm._init_fn(x, gain, 1e-20)
        norm._norm_backward._init_fn(x, x, gain, inverse)
    return found


def compile_swiglu(width: int) -> list[Compiled]:
    """The shared expert's activation and its backward."""
    z = meta(NUM_TOKENS, 2 * width)
    with captured() as found:
        h = shared_swiglu._forward._init_fn(z, 10.0)
        shared_swiglu._backward._init_fn(h, z, 10.0)
    return found


def compile_routing(num_experts: int, per_token: int, are_given: bool) -> list[Compiled]:
    """What follows the router's product, and its backward."""
    fp32 = torch.float32
    logits, bias = meta(NUM_TOKENS, num_experts, dtype=fp32), meta(num_experts, dtype=fp32)
    picks = meta(NUM_TOKENS, per_token, dtype=torch.int64)
    given = (None, picks) if are_given else (bias, None)
    with captured() as found:
        _, weights, scores = routing._route._init_fn(logits, *given, per_token, 2.5)
        if not are_given:
            routing._route_backward._init_fn(weights, scores, logits, scores, picks, 2.5)
            shares = routing._mean_shares._init_fn(scores, 2)
            routing._mean_shares_backward._init_fn(shares, scores)
    return found


def main() -> None:
    kernels = {
        "norm 1280": compile_norm(1280),
        "swiglu 2304": compile_swiglu(2304),
        "routing": compile_routing(384, 6, are_given=False),
        "routing, given": compile_routing(384, 6, are_given=True),
        "head": compile_head(129_280),
        "mhc 5120": compile_mhc(5120, own_mix=False),
        "gated 5120": compile_one_stream(5120, gated=True),
        "layerscale 5120": compile_one_stream(5120, gated=False),
    }
    if "--all" in sys.argv:
        kernels["mhc 4096, own mix"] = compile_mhc(4096, own_mix=True)
    found = {
        f"{place}: {kernel.name}": asdict(kernel) for place, of in kernels.items() for kernel in of
    }
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
