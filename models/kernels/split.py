# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""fp32 numbers as sums of a few lower ones, for products on tensor cores: in one launch, where
plain PyTorch takes two to three a part.

    x = x1 + x2 + ...     x1 the nearest to x, x2 to x - x1, ...

Bitwise the plain form's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.rounding import to_bf16

_BLOCK = 1024


def split_parts(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[count, ...] in `dtype`, bf16 or fp32: parts of x, which is fp32, largest first; their sum is
    x but for what is below the last. For the inside of ops."""
    parts = _outputs(x, count, dtype)
    if x.numel():
        _split_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
            x.contiguous(), parts, x.numel(), count, _BLOCK, num_warps=4
        )
    return parts


@torch.library.custom_op("ppruntime::split", mutates_args=())
def split(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`split_parts` as an op. No gradient of its own."""
    return split_parts(x, count, dtype)


def _outputs(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(count, *x.shape, dtype=dtype)


@split.register_fake
def _(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return _outputs(x, count, dtype)


@triton.jit
def _split_kernel(x_ptr, parts_ptr, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    store_split(parts_ptr + places, tl.load(x_ptr + places, mask=places < size), size,
                places < size, COUNT)  # fmt: skip


@triton.jit
def store_split(ptr, x, distance, mask, COUNT: tl.constexpr):
    """x as the sum of COUNT numbers of the pointer's type, `distance` apart, largest first."""
    for n in tl.static_range(COUNT):
        part = to_bf16(x) if ptr.dtype.element_ty == tl.bfloat16 else x
        tl.store(ptr + n * distance, part, mask=mask)
        x -= part.to(tl.float32)
