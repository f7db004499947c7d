"""What the head's loss allocates beside what it keeps: counted while it runs, against the sizes."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from ppruntime.memory_watch import TensorCounter
from ppruntime.models.dims import preset
from ppruntime.models.head import chunked_loss, whole_loss
from ppruntime.models.head_bytes import HeadWorkspace, head_workspace
from ppruntime.models.kernels.head import fused_loss
from ppruntime.models.linear import Linear, WeightGradQueue, set_queue

CHUNK, BLOCK = 16, 96
LOSSES = {"reference": whole_loss, "chunked": chunked_loss, "triton": fused_loss}


class Counted:
    """Live bytes and the most of them, of a CPU's tensors or by CUDA's allocator."""

    def __init__(self, device: str, standing: list[Tensor]) -> None:
        self._of_cpu = TensorCounter(standing) if device == "cpu" else None

    def begin(self) -> int:
        """Live bytes now."""
        if self._of_cpu is not None:
            self._of_cpu.begin()
            return self._of_cpu.read()[0]
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def most(self) -> int:
        """Since `begin`."""
        if self._of_cpu is not None:
            return self._of_cpu.read()[1]
        return torch.cuda.max_memory_allocated()

    def __enter__(self) -> Counted:
        if self._of_cpu is not None:
            self._of_cpu.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._of_cpu is not None:
            self._of_cpu.__exit__(*error)


def measured(kernel: str, device: str, dims, tokens: int, dtype: torch.dtype) -> HeadWorkspace:
    """Of a backward that makes the weight's sum, then of one whose two gradients come apart."""
    projection = Linear(
        dims.hidden_size, dims.vocab_size, dtype=dtype, device=device, fp32_output=True
    )
    with torch.no_grad():
        projection.weight.normal_(generator=torch.Generator(device).manual_seed(0))
    queue = WeightGradQueue()
    set_queue(projection, queue)
    labels = torch.randint(dims.vocab_size, (1, tokens), device=device)
    hidden = torch.randn(1, tokens, dims.hidden_size, device=device, dtype=dtype)
    hidden.requires_grad_()
    options = {} if kernel == "reference" else {"chunk_tokens": CHUNK if device == "cpu" else 2048}
    kept = saved_by_loss(kernel, dims, tokens, dtype)
    with Counted(device, [projection.weight, hidden, labels]) as count:
        found = []
        for deferring in (False, False, True):
            queue.deferring = deferring
            before = count.begin()
            loss = LOSSES[kernel](hidden, projection, labels, **options)
            forward = count.most() - before - kept
            before = count.begin()
            loss.backward()
            back = count.most() - before
            del loss
            hidden.grad = None
            before, weight = count.begin(), 0
            for task in queue.pop():
                task()
                weight = count.most() - before
            found.append((forward, back, weight))
    (_, first, _), (_, back, _), (forward, input_grad, weight) = found
    sums = 4 * dims.hidden_size * dims.vocab_size  # made in the first backward
    return HeadWorkspace(forward, input_grad, weight, back, first - sums)


def saved_by_loss(kernel: str, dims, tokens: int, dtype: torch.dtype) -> int:
    """What stays for the backward, as `activation_bytes` counts it."""
    logits = tokens * dims.vocab_size
    return {"reference": 4 * logits, "chunked": 4 * tokens, "triton": dtype.itemsize * logits}[
        kernel
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", LOSSES)
def test_the_ledgers_row_is_what_a_cpu_allocates(kernel, dtype, monkeypatch):
    for place in ("head_bytes.CHUNK_TOKENS", "head_bytes.VOCAB_BLOCK", "kernels.head.VOCAB_BLOCK"):
        monkeypatch.setattr(f"ppruntime.models.{place}", CHUNK if "CHUNK" in place else BLOCK)
    dims = replace(preset("tiny"), hidden_size=64, vocab_size=320)
    found = measured(kernel, "cpu", dims, 72, getattr(torch, dtype))
    said = head_workspace(dims, 72, dtype, kernel, widens=dtype == "bfloat16")
    for name in ("forward", "input_grad", "weight_grad", "backward"):
        assert getattr(said, name) == pytest.approx(getattr(found, name), rel=0.06), (name, found)
    # What it has in common with others, before there is a sum, may be the most.
    assert found.first_backward <= 1.06 * said.first_backward <= 1.06 * said.backward


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["chunked", "triton"])
def test_the_ledgers_row_is_what_a_gpu_allocates_at_full_width(kernel):
    dims = preset("v41-flash")
    found = measured(kernel, "cuda", dims, 8192, torch.bfloat16)
    said = head_workspace(dims, 8192, "bfloat16", kernel)
    print(kernel, found, said)
    for name in ("forward", "input_grad", "weight_grad", "backward"):
        assert getattr(said, name) == pytest.approx(getattr(found, name), rel=0.06), (name, found)
