"""Faster versions of the models' operations, each beside its readable reference.

sparse_attention    attention to listed keys, forward and backward; reference:
                    models/sparse_attention.py. Kernels: sparse_attention_kernels in Triton, any
                    shape; sparse_attention_hopper in Gluon, the models' full width on a Hopper
                    sparse_attention_library: the same op by FlashMLA and cuDNN's frontend
rest of attention   indexer (scores and top-k; reference: models/selection.py; indexer_library: the
                    same by cuDNN's frontend), rope (alone and with a projection), grouped_output
                    (products without copies), norm, wide_linear (fp32 weights by bf16
                    products); attention_backends says which of them computes
FP8 experts         quantize (1 x 128 and 128 x 128 scales; rounding: exact, also interpreted),
                    moe_layout (rows by expert and back), swiglu, grouped_gemm, deep_gemm (the
                    package behind the same calls), moe_reference (the recipe in torch),
                    expert_backends (which of them computes); used by models/fp8_experts.py.
                    In Gluon: quantize_hopper and swiglu_hopper, the passes that turn rows, and
                    grouped_gemm_hopper, weight gradients
fused MoE           mega_moe (meetings, flags, rows from and to other ranks' memory),
                    mega_moe_counts (numbers of rows to all ranks, and the plan made of them),
                    mega_moe_gemm (products that wait for rows and send them home), FP8 and bf16,
                    mega_moe_gemm_hopper (in Gluon, FP8, those of grouped_gemm too),
                    mega_moe_swiglu (bf16); used by models/mega_moe_passes.py
around experts      shared_swiglu (in the compute dtype; reference: models/experts.py), wide_linear
                    for routers, routing (what follows their product; reference: models/router.py);
                    models/moe_kernels.py chooses
FP8 linears         the same kernels with one group, and fp8_linear_cast (a rotated projection's
                    gradient); fp8_linear_backends says who multiplies; used by
                    models/fp8_linear.py
head                the loss and the logits' gradient, chunk by chunk; references: models/head.py
engram              gate and sum in one pass, sums of row gradients, rows in host memory (kernels in
                    engram_kernels); reference and choice: models/engram_kernels.py
single_stream       one residual stream around a sublayer in mHC's place; reference:
                    models/single_stream.py
mhc                 what stands around a sublayer on the residual streams, two passes each way
                    (kernels in mhc_kernels); reference: models/mhc.py, chosen by models/residual.py
split               fp32 as a sum of lower numbers, for wide_linear and mhc

Every operation is a registered `torch.library` op named `ppruntime::...`, so that activation
checkpointing can save it by name and a compiled graph holds it as one node. Nothing here is
imported unless it is chosen; ask `unavailable_reason` first. Kernels run on CPU tensors too when
TRITON_INTERPRET=1 was set before they were imported: slowly, for tests.
"""

from __future__ import annotations

import importlib.util
import os

import torch

KINDS = ("triton",)
"""What a kernel may be built on, besides plain PyTorch."""


def unavailable_reason(kind: str) -> str | None:
    """One sentence that says why kernels of `kind` cannot run here, or None if they can.

    Raises ValueError for a kind that is none of KINDS.
    """
    if kind not in KINDS:
        raise ValueError(f"no kernels of kind {kind!r}; there are: {', '.join(KINDS)}")
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'triton>=3.6,<4'"
    if is_interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device; TRITON_INTERPRET=1 runs the kernels slowly on the CPU"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"the kernels need compute capability 9.0 or higher, this device has {major}.{minor}"
    return None


def hopper_reason(asked: str, remedy: str) -> str | None:
    """Why what was `asked` for, a key and its value, cannot run on this device if it runs on Hopper
    alone, which no interpreter plays; None if it can. `remedy`, own kernels, is named where those
    run."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return None
    reason = f"{asked} needs a Hopper GPU (sm_90)"
    return reason if unavailable_reason("triton") is not None else f"{reason}; {remedy}"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
