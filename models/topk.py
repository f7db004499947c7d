"""One rule for choosing the highest scores, so that every cut and every kernel chooses alike."""

from __future__ import annotations

from torch import Tensor


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k highest scores of the last axis, highest first.

    Equal scores go by index, smaller first. `torch.topk` promises no order among them, and scores
    of the indexer are often equal: its ReLU makes them exactly 0.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
