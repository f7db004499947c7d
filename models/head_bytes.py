"""What the head's loss allocates beside what it keeps for its backward. Pure; no torch.

Letters: N tokens of a micro-batch, C of a chunk, D width, V vocabulary, R rows of a block of the
weight gradient. What stays from forward to backward is in `activation_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppruntime.models.dims import DTYPE_BYTES, ModelDims

CHUNK_TOKENS = 2048
"""Tokens whose logits exist at once: 1.06 GB at V4.1's vocabulary, and rows enough for a product at
full speed."""
VOCAB_BLOCK = 42240
"""Rows of the weight gradient that are in fp32 at once, beside its sum: for V4.1 6,600 tiles of 128
by 256, fifty to each multiprocessor of an H200. The vocabulary takes 154 such rounds, with 16,384
rows it takes 158; no more memory than a chunk's logits in the forward."""
_FP32 = 4


@dataclass(frozen=True, slots=True)
class HeadWorkspace:
    """The most bytes that are there beside what is kept, weights and their fp32 sums."""

    forward: int = 0
    input_grad: int = 0
    """With the gradient that it gives."""
    weight_grad: int = 0
    """Added to a sum that is there, by itself."""
    backward: int = 0
    """Both gradients, added to a sum that is there."""
    first_backward: int = 0
    """Where the weight's product is the sum."""

    def in_op(self, kind: str) -> int:
        """In an op of the order by its letter: F, B, I or W; 0 in all others."""
        ops = {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}
        return ops.get(kind, 0)

    @property
    def most(self) -> int:
        return max(self.forward, self.backward)


def head_workspace(
    dims: ModelDims, num_tokens: int, dtype: str, kernel: str, *, widens: bool = False
) -> HeadWorkspace:
    """Of the loss `kernel`, "auto" apart, for a micro-batch of `num_tokens`; `dtype`: float32 or
    bfloat16. `widens`: products of bf16 take fp32 copies of both operands, as on a CPU."""
    run = _Run(dims, num_tokens, DTYPE_BYTES[dtype], widens)
    return {"reference": _whole, "chunked": _chunked, "triton": _fused}[kernel](run)


class _Run:
    """Sizes of a call."""

    def __init__(self, dims: ModelDims, num_tokens: int, item: int, widens: bool) -> None:
        self.tokens, self.item, self.widens = num_tokens, item, widens
        self.width, self.vocab = dims.hidden_size, dims.vocab_size
        self.chunk, self.rows = min(CHUNK_TOKENS, num_tokens), min(VOCAB_BLOCK, dims.vocab_size)
        self.low = item if item < _FP32 else 0  # of a copy in the compute dtype, if that is another
        self.grad_x = item * num_tokens * self.width

    def product(self, rows: int, inner: int, columns: int) -> int:
        """fp32 [rows, columns], and the operands' copies."""
        copies = self.widens * inner * (rows + columns)
        return _FP32 * (rows * columns + copies)

    def autograds_sum(self) -> int:
        """An fp32 weight's gradient is made apart and added by autograd; a bf16 one's never is."""
        return 0 if self.low else _FP32 * self.vocab * self.width


def _whole(run: _Run) -> HeadWorkspace:
    """All logits at once. The logarithmic probabilities are kept; beside them lie the logits in the
    forward, in the backward the gradients of both."""
    logits = _FP32 * run.tokens * run.vocab
    forward = max(logits, run.product(run.tokens, run.width, run.vocab) - logits)
    copies = run.widens * _FP32 * run.tokens * (run.vocab + run.width)
    back, weight = 2 * logits, copies + run.autograds_sum()
    return HeadWorkspace(forward, back, weight, max(back, weight), back)


def _chunked(run: _Run) -> HeadWorkspace:
    """One chunk's logits; in the backward they become their gradient, then one in the compute
    dtype."""
    logits = run.product(run.chunk, run.width, run.vocab)
    low = run.low * run.chunk * run.vocab
    back = max(logits, _FP32 * run.chunk * run.vocab + low)
    copies = run.widens * _FP32 * run.chunk * (run.vocab + run.width)
    weight = max(back, low + copies) + run.autograds_sum()
    return HeadWorkspace(
        logits, run.grad_x + back, weight, run.grad_x + weight, run.grad_x + max(back, low + copies)
    )


def _fused(run: _Run) -> HeadWorkspace:
    """One chunk's logits; products with the gradient that is kept, the weight's a block of rows at
    a time."""
    logits = run.product(run.chunk, run.width, run.vocab)
    rounded = _FP32 * run.tokens * run.width + run.grad_x
    back = max(run.product(run.tokens, run.vocab, run.width), rounded)
    block = run.product(run.rows, run.tokens, run.width)
    weight = block + run.autograds_sum()
    # A bf16 weight's first product is made whole, as the sum.
    first = run.widens * _FP32 * run.tokens * (run.vocab + run.width) if run.low else block
    return HeadWorkspace(
        logits, back, weight, max(back, run.grad_x + weight), max(back, run.grad_x + first)
    )
