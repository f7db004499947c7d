"""DeepSeek's Muon recipe in fp64, written out parameter by parameter: what tests compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ppruntime.models.update_rules import Update, UpdateRule


def newton_schulz(matrix: Tensor) -> Tensor:
    """Ten steps on one matrix."""
    x = matrix.double()
    y = x.T if x.shape[0] > x.shape[1] else x
    y = y / y.norm()
    for step in range(10):
        a, b, c = (3.4445, -4.7750, 2.0315) if step < 8 else (2.0, -1.5, 0.5)
        s = y @ y.T
        y = a * y + b * s @ y + c * s @ s @ y
    return y.T if x.shape[0] > x.shape[1] else y


def balanced(n: Tensor) -> Tensor:
    """The V4.1 report's algorithm 1 from N on."""
    n = n.double()
    norms = n.norm(dim=1)
    u = torch.where((norms > 1e-3 * norms.mean()).unsqueeze(1), n, 0.0)
    for step in range(1, 12):
        u = u / (u.norm(dim=step % 2, keepdim=True) + 1e-20)
    return math.sqrt(n.shape[1]) * u


def trained(
    weight: Tensor,
    grads: Sequence[Tensor],
    rule: UpdateRule,
    lrs: Sequence[float],
    *,
    decay: float = 0.1,
    eps: float = 1e-8,
) -> Tensor:
    """The weight behind a step with each gradient and learning rate; betas 0.9 and 0.95, momentum
    0.95."""
    w = weight.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step, (grad, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        g = grad.double()
        if rule.decays:
            w = w * (1 - lr * decay)
        if rule.update is Update.ADAMW:
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            w = w - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + eps)
        elif rule.update is Update.SINKHORN:
            m = 0.95 * m + 0.05 * g
            w = w - 0.18 * lr * rule.lr_factor * balanced(0.95 * m + 0.05 * g)
        else:
            m = 0.95 * m + g
            n = (0.95 * m + g).view(-1, *w.shape[-2:])
            u = torch.zeros_like(n)
            for matrix, out in zip(n, u, strict=True):
                start = 0
                for height in rule.heights:
                    rows = slice(start, start := start + height)
                    if matrix[rows].any():
                        scale = 0.18 * math.sqrt(max(height, w.shape[-1]))
                        out[rows] = scale * newton_schulz(matrix[rows])
            w = w - lr * u.view(w.shape)
    return w
