"""The fused MoE layer's kernels as Hopper code: tensor-core products, 16-byte copies, no spills;
what says that rows are there comes after them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
CHECKS = ("code", "order")


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_compile_for_hopper_without_spills_and_with_flags_in_order(check):
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    run = subprocess.run(
        [sys.executable, __file__, check],
        env=environment, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)


EVENTS = {
    "acquire": r"(?:ld|atom)\S*\.acquire\S*",
    "release": r"\S+\.release\.\S+",
    "fence": r"fence\.proxy\.async\.global",
    "barrier": r"bar(?:\.warp)?\.sync",
    "copy": r"cp\.async\.bulk\.tensor\S+shared::cta\.global\S*",
    "store": r"st\.global\S*",
    "load": r"ld\.global\S*",
}


def events(ptx):
    """What the order of memory depends on, from top to bottom: (kind, instruction)."""
    pattern = "|".join(f"(?P<{kind}>{text})" for kind, text in EVENTS.items())
    return [(m.lastgroup, m[0]) for m in re.finditer(rf"(?<![\w.])(?:{pattern})", ptx)]


def out_of_order(ptx):
    """What may be seen before what it stands for: a sentence each."""
    wrong, stored, acquired = [], [], False
    for kind, text in events(ptx):
        if kind in ("load", "store") and ".nc" in text:
            wrong.append(f"{text} takes no part in any order")
        if kind == "store":
            stored = ["fence", "barrier"]
        elif stored and kind == stored[0]:
            stored = stored[1:]
        if kind == "release" and stored:
            wrong.append(f"{text} with no {' and '.join(stored)} since the last store")
        if kind == "acquire":
            acquired = True
        if kind == "fence":
            acquired = False
        if kind == "copy" and acquired:
            wrong.append(f"{text} with no fence since the flag was seen")
    return wrong


PULLS = """
    @%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
    fence.proxy.async.global; mov.u32 %r5, 0;
    bar.sync 	0;
    @%p2 atom.global.gpu.release.add.u32 %r6, [ %rd2 + 0 ], 1;
"""
MULTIPLIES = """
    @%p1 ld.global.gpu.acquire.b32 %r1, [ %rd1 + 0 ];
    fence.proxy.async.global; mov.u32 %r2, 0;
    @%p2 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd2];
"""


def test_flags_that_say_too_much_are_found():
    assert out_of_order(PULLS) == out_of_order(MULTIPLIES) == []
    for text, line in ((PULLS, 2), (PULLS, 3), (MULTIPLIES, 2)):
        without = [part for i, part in enumerate(text.splitlines()) if i != line]
        assert len(out_of_order("\n".join(without))) == 1, text.splitlines()[line]
    swapped = PULLS.splitlines()
    swapped[1], swapped[2] = swapped[2], swapped[1]
    assert len(out_of_order("\n".join(swapped))) == 1
    assert len(out_of_order("ld.global.nc.b32 %r1, [%rd1];")) == 1


def _check_order(ranks, passes, products):
    """Of kernels that are compiled: `ranks` meet; rows are brought, and multiplied when they are
    there."""
    waiting = 0
    for kernel in (*passes, *products):
        assert not out_of_order(kernel.ptx), (kernel.name, out_of_order(kernel.ptx))
        found = events(kernel.ptx)
        releases = [text for kind, text in found if kind == "release"]
        acquires = [text for kind, text in found if kind == "acquire"]
        scope = ".sys" if kernel.name == "_meet" else ".gpu"
        assert all(scope in text for text in (*releases, *acquires)), kernel.name
        if kernel.name == "_meet":
            assert len(releases) == ranks
            assert len(acquires) >= ranks
        elif kernel.name.startswith("_pull"):
            assert releases
            assert not acquires
        else:
            assert not releases
            assert not acquires or kernel in products, kernel.name
        waiting += bool(acquires) and kernel in products
    return waiting


def _compile_all(check):
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
    if check == "order":
        # L1 in FP8, by either kernel, and in bf16; gradients by W2 turned; each with its helpers.
        waiting = _check_order(ranks, passes, (*products, *stays))
        assert waiting == 8, waiting
        return
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
    _compile_all(sys.argv[1])
