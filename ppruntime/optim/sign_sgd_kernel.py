# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""SignSGD's update in one pass over weights and gradient, with torch's bits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _sign_update(param_ptr, grad_ptr, N, kept, lr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    param = tl.load(param_ptr + at, mask=inside, other=0.0) * kept
    # As torch's sign: 0 for zeros and for what is no number.
    moved = param - tl.where(grad > 0, lr, tl.where(grad < 0, -lr, 0.0))
    tl.store(param_ptr + at, moved, mask=inside)


def sign_update(param: Tensor, grad: Tensor, *, lr: float, decay: float) -> None:
    """`sign_update_reference` on contiguous tensors of one shape; the parameter is fp32."""
    assert param.is_contiguous(), "the update goes along the memory"
    num = param.numel()
    if num:
        # Without fusion: a multiply-add would round once where torch rounds twice.
        _sign_update[(triton.cdiv(num, _BLOCK),)](
            param, grad.contiguous(), num, 1 - lr * decay, lr, _BLOCK, enable_fp_fusion=False
        )
