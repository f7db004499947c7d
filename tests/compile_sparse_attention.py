"""Compiles the Gluon sparse attention for sm_90, without a GPU; prints what came out, as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from ppruntime.models.kernels import sparse_attention_hopper
from ppruntime.models.kernels.sparse_attention import HOPPER_TILES

TYPES = {
    **dict.fromkeys(("dout_ptr", "q_ptr", "keys_ptr", "out_ptr", "dq_ptr"), "*bf16"),
    **dict.fromkeys(("sink_ptr", "cos_ptr", "sin_ptr", "lse_ptr", "dsink_ptr"), "*fp32"),
    **dict.fromkeys(("num_queries", "num_keys", "num_slots"), "i32"),
    **dict.fromkeys(("scale", "scale_log2"), "fp32"),
    "slots_ptr": "*i32",
}
SHAPE = {"H": 64, "K": 512, "P": 32, "BLOCK": HOPPER_TILES.block, "ALL_SLOTS": 1024}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """The kernel for a Hopper; pointers are multiples of 16."""
    places = {name: i for i, name in enumerate(kernel.arg_names)}
    source = GluonASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in places},
        constexprs={(places[n],): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for n, i in places.items() if n.endswith("_ptr")},
    )
    options = {"num_warps": HOPPER_TILES.num_warps, "num_stages": HOPPER_TILES.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def figures(kernel: Any) -> dict[str, Any]:
    """What the test looks at: memory and counts of instructions."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    copies = re.findall(r"(cp\.async\.c[ag])\S* \[[^]]*\], \[[^]]*\], 0x(\w+)", ptx)
    return {
        "shared_bytes": kernel.metadata.shared,
        "local_bytes": int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)[1]),
        "wgmma": Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", ptx)),
        "copies": Counter(f"{kind} {int(size, 16)}" for kind, size in copies),
    }


def main() -> None:
    forward = sparse_attention_hopper.forward_kernel
    backward = sparse_attention_hopper.backward_kernel
    fp32 = {**TYPES, "sums_ptr": "*fp32"}
    fixed = {**TYPES, "sums_ptr": "*i64", "unit_ptr": "*fp32"}
    kernels = {
        "forward": compiled(forward, TYPES, SHAPE),
        "backward": compiled(backward, fp32, {**SHAPE, "unit_ptr": None}),
        "backward, deterministic": compiled(backward, fixed, SHAPE),
    }
    print(json.dumps({name: figures(kernel) for name, kernel in kernels.items()}))


if __name__ == "__main__":
    main()
