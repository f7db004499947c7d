"""Which sizes attention's kernels take, and how much its reference does at once. Pure, so that a
config is refused before torch loads."""

from __future__ import annotations

from enum import Enum

from ppruntime.models.dims import ModelDims


class AttentionOp(Enum):
    """The operations of attention for which there is a choice; the value is the config's key."""

    ATTENTION = "attention"
    INDEXER = "indexer"
    ROPE = "rope"
    GROUPED_OUTPUT = "grouped_output"
    NORM = "norm"
    COMPRESSOR = "compressor"


class Backend(Enum):
    """Who computes an operation."""

    REFERENCE = "reference"
    """Plain PyTorch, anywhere: the yardstick."""
    TRITON = "triton"
    """Own kernels."""
    LIBRARY = "library"
    """Others' kernels: an optional package, or BLAS called another way."""


BACKENDS: dict[AttentionOp, tuple[Backend, ...]] = {
    AttentionOp.ATTENTION: (Backend.LIBRARY, Backend.TRITON, Backend.REFERENCE),
    AttentionOp.INDEXER: (Backend.TRITON, Backend.LIBRARY, Backend.REFERENCE),
    AttentionOp.ROPE: (Backend.TRITON, Backend.REFERENCE),
    AttentionOp.GROUPED_OUTPUT: (Backend.LIBRARY, Backend.REFERENCE),
    AttentionOp.NORM: (Backend.TRITON, Backend.REFERENCE),
    AttentionOp.COMPRESSOR: (Backend.LIBRARY, Backend.REFERENCE),
}
"""What there is, the fastest first (attention measured on an H200, see docs/measurements.md; the
indexer's own kernels are not yet, and hold fewer scores)."""


_MOST_PICKS = 2048
_MAX_GATHERED = 1 << 26
"""Elements of keys that the reference of sparse attention gathers at once (256 MiB in fp32)."""


def queries_at_once(batch: int, slots: int, width: int) -> int:
    """Queries of each of `batch` sequences that the reference of sparse attention does at once, if
    each lists `slots` keys of `width` channels; a sequence may have fewer."""
    return max(1, _MAX_GATHERED // max(1, batch * slots * width))


def misfit(op: AttentionOp, backend: Backend, dims: ModelDims) -> str | None:
    """Which of the model's sizes the backend does not take, as a clause; None if it takes all."""
    if backend is Backend.REFERENCE:
        return None
    heads, width = dims.num_heads, dims.head_dim
    match op, backend:
        case AttentionOp.ATTENTION, Backend.LIBRARY if (heads, width) != (64, 512):
            return f"the packages take 64 heads of 512 channels, the model has {heads} of {width}"
        case AttentionOp.ATTENTION, Backend.TRITON if not (
            _is_power_of_two(heads, 16) and _is_power_of_two(width, 32)
        ):
            return (
                "the kernels take powers of two from 16 heads and 32 channels, the model has "
                f"{heads} heads of {width}"
            )
        case AttentionOp.ATTENTION, _ if 2 * dims.rope_dim > width:
            return (
                f"the kernels turn at most half of a head's {width} channels, the model "
                f"{dims.rope_dim}"
            )
        case AttentionOp.ATTENTION, _ if not _is_power_of_two(dims.rope_dim // 2, 1):
            return f"the kernels turn a power of two of channels, the model {dims.rope_dim}"
        case AttentionOp.INDEXER, Backend.LIBRARY if not (
            dims.index_heads in (16, 32, 64)
            and dims.index_head_dim == 128
            and dims.index_topk <= _MOST_PICKS
        ):
            return (
                f"the package takes 16, 32 or 64 index heads of 128 channels and {_MOST_PICKS} "
                f"picks at most, the model has {dims.index_heads} of {dims.index_head_dim} and "
                f"{dims.index_topk}"
            )
        case AttentionOp.INDEXER, Backend.TRITON if not _is_power_of_two(dims.index_head_dim, 16):
            return (
                "the kernel takes index heads of a power of two from 16 channels, the model's have "
                f"{dims.index_head_dim}"
            )
        case AttentionOp.ROPE, Backend.TRITON if not _is_power_of_two(dims.rope_dim // 2, 1):
            return f"the kernel turns a power of two of channels, the model {dims.rope_dim}"
    return None


def _is_power_of_two(number: int, least: int) -> bool:
    return number >= least and number & (number - 1) == 0
