"""The Sinkhorn-balanced update of tables with a row a token: embedding, head, Engram's.

Source: the V4.1 report, algorithm 1. Momentum is an average here, not Muon's sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ppruntime.optim.muon import UPDATE_RMS

NUM_NORMALISATIONS = 11
"""Odd ones of rows, even ones of columns: rows have the last word."""
ROW_THRESHOLD = 1e-3
"""Rows whose norm is at most this share of the mean one stay where they are."""

_EPS = 1e-20
_NUMBERS_PER_PIECE = 1 << 22
"""Numbers that are in fp64 at a time: 32 MiB."""


def sinkhorn_step_(
    weight: Tensor,
    momentum: Tensor,
    grad: Tensor | None,
    *,
    num_rows: int,
    lr: float,
    beta: float,
    add_up: Callable[[Tensor], None],
) -> None:
    """Updates these rows [m, n] of a table of `num_rows` rows and their momentum, in place.

    M <- beta M + (1 - beta) G; N = beta M + (1 - beta) G, its faint rows as zeros, is normalised
    along rows and columns in turn; W <- W - 0.18 lr sqrt(n) N. None as `grad` is zeros.

    `add_up` sums an fp64 tensor over the ranks that have the other rows, in place: it is called
    once with a scalar and five times with [n], wherever the rows lie and however many there are.
    The normalised matrix is diag(r) N diag(c): only r and c are kept, in fp64, and N is made again
    in each of seven passes, some rows at a time. So what the result owes to the cut over ranks is
    below fp32's rounding, nearly always.
    """
    pieces = list(_pieces(*weight.shape))
    for rows in pieces:
        _average_(momentum[rows], grad, rows, beta)

    def entries(rows: slice) -> Tensor:
        """N of some rows, in fp64."""
        return _average_(momentum[rows].clone(), grad, rows, beta).double()

    width = weight.shape[1]
    norms = weight.new_zeros(weight.shape[0], dtype=torch.float64)
    for rows in pieces:
        norms[rows] = torch.linalg.vector_norm(entries(rows), dim=1)
    total = norms.sum()
    add_up(total)
    r = (norms > ROW_THRESHOLD * total / num_rows).double()
    c = weight.new_ones(width, dtype=torch.float64)
    for _ in range(NUM_NORMALISATIONS // 2):
        sums = torch.zeros_like(c)
        for rows in pieces:
            squares = entries(rows).square_()
            r[rows] = _balanced(r[rows], squares @ c.square())
            sums += r[rows].square() @ squares
        add_up(sums)
        c = _balanced(c, sums)
    step = UPDATE_RMS * lr * math.sqrt(width)
    for rows in pieces:
        n = entries(rows)
        r[rows] = _balanced(r[rows], n.square() @ c.square())
        weight[rows].sub_((n * (step * r[rows]).unsqueeze(1) * c).to(weight.dtype))


def _balanced(factors: Tensor, sums: Tensor) -> Tensor:
    """Factors of rows that, with these, have squares of f^2 times `sums`, after a normalisation."""
    return factors / (factors * sums.sqrt() + _EPS)


def _average_(average: Tensor, grad: Tensor | None, rows: slice, beta: float) -> Tensor:
    average.mul_(beta)
    return average if grad is None else average.add_(grad[rows] * (1 - beta))


def _pieces(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _NUMBERS_PER_PIECE // width)
    return (slice(start, start + step) for start in range(0, num_rows, step))
