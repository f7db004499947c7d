"""Digests of what a step computed on all ranks of a pipeline: two runs with one digest have one
result, to the bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ppruntime.messages import gather_bytes
from ppruntime.ranks import Ranks
from ppruntime.stage import Stage

_DIGEST_ELEMENTS = 1 << 24


def loss_digest(ranks: Ranks, stages: Mapping[int, Stage]) -> str:
    """Of the bits of all losses, in the order of the micro-batches' forwards."""
    mine = [loss for _, s in sorted(stages.items()) for loss in s.losses]
    bits = [int(loss.float().view(torch.int32)) for loss in mine]
    parts = gather_bytes(json.dumps(bits).encode(), ranks.pipeline_group)
    # Which rank has the losses depends on the placement.
    return hashlib.sha256(max(parts, key=len)).hexdigest()[:16]


def gradient_digest(ranks: Ranks, stages: Mapping[int, Stage]) -> tuple[str, float]:
    """A digest of the bits of all gradients of the pipeline and of where they lie, and their
    norm."""
    found, squares = [], torch.zeros((), dtype=torch.float64)
    for index in sorted(stages):
        for unit in stages[index].units:
            for name, param in unit.named_parameters():
                if param.grad is None:
                    continue
                grad: Any = param.grad
                grad = grad.to_local() if hasattr(grad, "to_local") else grad
                squares += float(torch.linalg.vector_norm(grad, dtype=torch.float32)) ** 2
                spec: Any = unit.spec
                found.append(f"{spec.name}.{name} {_bits_and_places(grad)}")
    parts = gather_bytes("\n".join(found).encode(), ranks.pipeline_group)
    lines = sorted(text for part in parts for text in part.decode().splitlines())
    dist.all_reduce(squares, group=ranks.pipeline_group)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16], float(squares) ** 0.5


def _bits_and_places(tensor: torch.Tensor) -> int:
    """The sum, modulo 2**64, of each element's bits times an odd number of its own."""
    bits = tensor.reshape(-1).contiguous().view(torch.int16)
    total = 0
    for start in range(0, len(bits), _DIGEST_ELEMENTS):
        part = bits[start : start + _DIGEST_ELEMENTS].to(torch.int64)
        places = torch.arange(start, start + len(part), device=tensor.device)
        total += int((part * (places * 0x9E3779B1 * 2 + 1)).sum())
    return total % (1 << 64)
