"""The output head: logits and the summed cross-entropy."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ppruntime.models.carry import IGNORED_LABEL


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """fp32 scalar: -log softmax(logits)[label], summed over labels that are not IGNORED_LABEL.

    A sum, not a mean: the trainer divides by the valid labels of the whole step, so that the loss
    and its gradient do not depend on how tokens fall into micro-batches.
    """
    return functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
