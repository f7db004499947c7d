"""What passes from unit to unit, and what a micro-batch is.

Shape letters: B sequences, T tokens of a sequence, S residual streams, D model width,
C compressed entries, K key width, W window plus selected slots, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

IGNORED_LABEL = -100
"""A label with this value gives no loss and no gradient."""


class MicroBatch(NamedTuple):
    """Token data of one micro-batch; the same on every stage, read from the data by each rank."""

    ids: Tensor
    """[B, T] int64 token ids."""
    labels: Tensor
    """[B, T] int64 next tokens; IGNORED_LABEL where masked, and at a document's last token."""
    positions: Tensor
    """[B, T] int64, from 0 in each document: t - positions[t] is where t's document starts."""
    masked: Tensor | None = None
    """[B, T] bool: padding and image tokens, which no Engram reads; None where there are none."""


class Carry(NamedTuple):
    """The state between two units. A field that is None is not alive there.

    A named tuple, so that autograd, checkpointing and FSDP find the tensors inside.
    The fields of `CROSSING` may cross a stage boundary; others stay on the stage that made them.
    """

    streams: Tensor | None = None
    """x_BTSD residual streams, in the compute dtype; needs gradient."""
    mix: Tensor | None = None
    """a_BTS fp32, V4.1: weights with which the next sublayer collapses the streams; needs gradient,
    except after the embedding, where it is constant."""
    kv: Tensor | None = None
    """kv_BCK compressed keys = values, rotated; needs gradient, summed over all consumers."""
    index_keys: Tensor | None = None
    """ik_BCI keys of a frozen indexer; no gradient."""
    slots: Tensor | None = None
    """slots_BTW int32: rows of [own keys of the T tokens, then kv] that a query sees; -1 is empty.
    The window comes first, then the selected entries."""
    candidates: Tensor | None = None
    """[B, T, blocks] bool: blocks of the document's entries that Reindex layers may choose from; no
    gradient; no blocks where none could be excluded."""
    trained_index_keys: Tensor | None = None
    """ik_BCI keys of an indexer that learns, in the others' place; needs gradient, summed over all
    layers that score with them."""
    loss: Tensor | None = None
    """fp32 scalar from the head: cross-entropy summed over the valid labels."""
    balance_loss: Tensor | None = None
    """fp32 scalar: sequence balance losses of the MoE units run so far on this stage, weighted and
    summed over sequences; None if their weight is 0."""
    index_loss: Tensor | None = None
    """fp32 scalar: losses of the indexers run so far on this stage, weighted and summed over
    sequences; None if their weight is 0."""
    loads: tuple[Tensor, ...] = ()
    """tokens_E int64 per MoE unit run so far on this stage: tokens that each expert received."""

    def changed(self, **fields: Any) -> Carry:
        """The same with other values of some fields, as `_replace`: of that torch 2.11's compiler
        makes an empty tuple."""
        return Carry(**{**dict(zip(self._fields, self, strict=True)), **fields})


CROSSING = (
    *("streams", "mix", "kv", "index_keys", "slots", "candidates"),
    "trained_index_keys",
)
"""Fields that may cross a stage boundary, in the order in which they do."""

DIFFERENTIABLE = ("streams", "mix", "kv", "trained_index_keys")
"""Crossing fields whose gradient is sent back by whoever received them."""
