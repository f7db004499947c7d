"""Every parameter of every kind of unit: name, shape, what it counts as. No torch.

The modules are built from sizes, not from this list; a test compares the two name by name on the
meta device, so that a plan and a model cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import TYPE_CHECKING

from ppruntime.models.engram_hash import bucket_sizes

if TYPE_CHECKING:
    from ppruntime.models.dims import ModelDims


class Part(Enum):
    """What a parameter counts as."""

    MATRIX = auto()
    """Every token multiplies with all of it."""
    EXPERTS = auto()
    """A token multiplies with experts_per_token of its num_experts slices."""
    LOOKUP = auto()
    """The embedding: a token reads one row."""
    VECTOR = auto()
    """Norm weights, sinks, mHC offsets and scales, position biases."""
    ENGRAM_TABLE = auto()
    """Engram rows that are looked up."""
    ENGRAM_MATRIX = auto()
    """Engram's projection: every token multiplies with all of it."""
    ENGRAM_VECTOR = auto()
    """Engram's gate weights."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter."""

    name: str
    """Name inside its unit."""
    shape: tuple[int, ...]
    part: Part
    fp32: bool = False
    """Stays fp32 in a bf16 model."""
    frozen: bool = False
    """Gets no gradient: an indexer's without a loss, as nothing differentiable reads its picks."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def active(self, dims: ModelDims) -> int:
        """Entries that one token multiplies with."""
        if self.part in (Part.MATRIX, Part.ENGRAM_MATRIX):
            return self.numel
        if self.part is Part.EXPERTS:
            return self.numel // dims.num_experts * dims.experts_per_token
        return 0


def parameter_specs(
    dims: ModelDims, kind: str, role: str, layer: int | None
) -> tuple[ParameterSpec, ...]:
    """Parameters of the unit with this kind and role at `layer`, in the module's order."""
    match kind:
        case "embed":
            shape = (dims.vocab_size, dims.hidden_size)
            return (ParameterSpec("weight", shape, Part.LOOKUP),)
        case "head":
            return tuple(_head(dims))
        case "moe":
            return tuple(_moe(dims))
        case _:
            assert layer is not None
            return tuple(_attention_half(dims, role, layer))


def _matrix(name: str, num_out: int, num_in: int, **flags: bool) -> ParameterSpec:
    return ParameterSpec(f"{name}.weight", (num_out, num_in), Part.MATRIX, **flags)


def _norm(name: str, width: int, **flags: bool) -> ParameterSpec:
    return ParameterSpec(f"{name}.weight", (width,), Part.VECTOR, **flags)


def _residual(dims: ModelDims) -> Iterable[ParameterSpec]:
    if dims.residual_type == "gated":
        yield _matrix("gated.projection", 1, dims.hidden_size, fp32=True)
        yield ParameterSpec("gated.base", (1,), Part.VECTOR, fp32=True)
        yield ParameterSpec("gated.scale", (1,), Part.VECTOR, fp32=True)
        return
    if dims.residual_type == "layerscale":
        yield ParameterSpec("layerscale.scale", (dims.hidden_size,), Part.VECTOR, fp32=True)
        return
    streams = dims.num_streams
    coefficients = 2 * streams + streams * streams
    yield _matrix("mhc.projection", coefficients, streams * dims.hidden_size, fp32=True)
    yield ParameterSpec("mhc.base", (coefficients,), Part.VECTOR, fp32=True)
    yield ParameterSpec("mhc.scale", (3,), Part.VECTOR, fp32=True)


def _head(dims: ModelDims) -> Iterable[ParameterSpec]:
    if dims.family == "v4" and dims.residual_type == "mhc":
        width = dims.num_streams * dims.hidden_size
        yield _matrix("collapse.projection", dims.num_streams, width, fp32=True)
        yield ParameterSpec("collapse.base", (dims.num_streams,), Part.VECTOR, fp32=True)
        yield ParameterSpec("collapse.scale", (1,), Part.VECTOR, fp32=True)
    yield _norm("norm", dims.hidden_size)
    yield _matrix("projection", dims.vocab_size, dims.hidden_size)


def _moe(dims: ModelDims) -> Iterable[ParameterSpec]:
    experts, width, hidden = dims.num_experts, dims.expert_width, dims.hidden_size
    shared = dims.num_shared_experts * width
    yield from _residual(dims)
    yield _norm("norm", hidden)
    yield _matrix("moe.router.gate", experts, hidden, fp32=True)
    yield ParameterSpec("moe.experts.gate_up.weight", (experts, 2 * width, hidden), Part.EXPERTS)
    yield ParameterSpec("moe.experts.down.weight", (experts, hidden, width), Part.EXPERTS)
    yield _matrix("moe.shared.gate_up", 2 * shared, hidden)
    yield _matrix("moe.shared.down", hidden, shared)


def _attention_half(dims: ModelDims, role: str, layer: int) -> Iterable[ParameterSpec]:
    if layer in dims.engram_layers:
        yield from _engram(dims, layer)
    yield from _residual(dims)
    yield _norm("norm", dims.hidden_size)
    yield from _attention(dims)
    ratio = dims.compress_ratios[layer]
    if role == "full":
        yield from _compressor_v41(dims, ratio)
    if role in ("full", "reindex"):
        yield from _indexer_v41(dims, with_keys=role == "full")
    if role in ("csa", "hca"):
        yield from _compressor_v4(dims, "attention.compressor", dims.head_dim, ratio, role == "csa")
    if role == "csa":
        yield from _indexer_v4(dims, ratio)


def _attention(dims: ModelDims) -> Iterable[ParameterSpec]:
    hidden, heads, head_dim = dims.hidden_size, dims.num_heads, dims.head_dim
    per_group = heads // dims.o_groups * head_dim
    yield _matrix("attention.q_a", dims.q_lora_rank, hidden)
    yield _norm("attention.q_norm", dims.q_lora_rank)
    yield _matrix("attention.q_b", heads * head_dim, dims.q_lora_rank)
    yield _matrix("attention.kv", head_dim, hidden)
    yield _norm("attention.kv_norm", head_dim)
    yield ParameterSpec("attention.sink", (heads,), Part.VECTOR, fp32=True)
    groups = (dims.o_groups, dims.o_lora_rank, per_group)
    yield ParameterSpec("attention.o_a.weight", groups, Part.MATRIX)
    yield _matrix("attention.o_b", hidden, dims.o_groups * dims.o_lora_rank)


def _compressor_v41(dims: ModelDims, ratio: int) -> Iterable[ParameterSpec]:
    pools = ratio > 1
    yield _matrix("attention.compressor.value", dims.head_dim, dims.hidden_size, fp32=pools)
    if pools:
        yield _matrix("attention.compressor.gate", dims.head_dim, dims.hidden_size, fp32=True)
    yield _norm("attention.compressor.norm", dims.head_dim)


def _indexer_v41(dims: ModelDims, *, with_keys: bool) -> Iterable[ParameterSpec]:
    name, frozen = "attention.indexer", not dims.indexer_learns
    width = dims.index_heads * dims.index_head_dim
    yield _matrix(f"{name}.query", width, dims.q_lora_rank, frozen=frozen)
    yield _matrix(f"{name}.head_weights", dims.index_heads, dims.hidden_size, frozen=frozen)
    if with_keys:
        yield _matrix(f"{name}.key", dims.index_head_dim, dims.head_dim, frozen=frozen)
        yield _norm(f"{name}.key_norm", dims.index_head_dim, frozen=frozen)


def _compressor_v4(
    dims: ModelDims, name: str, width: int, ratio: int, overlaps: bool, **flags: bool
) -> Iterable[ParameterSpec]:
    channels = 2 * width if overlaps else width
    yield _matrix(f"{name}.value", channels, dims.hidden_size, fp32=True, **flags)
    yield _matrix(f"{name}.gate", channels, dims.hidden_size, fp32=True, **flags)
    yield ParameterSpec(f"{name}.position_bias", (ratio, channels), Part.VECTOR, fp32=True, **flags)
    yield _norm(f"{name}.norm", width, **flags)


def _indexer_v4(dims: ModelDims, ratio: int) -> Iterable[ParameterSpec]:
    name, frozen = "attention.indexer", not dims.indexer_learns
    width = dims.index_heads * dims.index_head_dim
    yield _matrix(f"{name}.query", width, dims.q_lora_rank, frozen=frozen)
    yield _matrix(f"{name}.head_weights", dims.index_heads, dims.hidden_size, frozen=frozen)
    yield from _compressor_v4(
        dims, f"{name}.compressor", dims.index_head_dim, ratio, overlaps=True, frozen=frozen
    )


def _engram(dims: ModelDims, layer: int) -> Iterable[ParameterSpec]:
    hidden, streams = dims.hidden_size, dims.num_streams
    sizes = bucket_sizes(dims)[dims.engram_layers.index(layer)]
    columns = (dims.engram_max_order - 1) * dims.engram_heads
    width = columns * dims.engram_head_dim
    yield ParameterSpec("engram.table", (sum(sizes), dims.engram_head_dim), Part.ENGRAM_TABLE)
    out = (streams + 1) * hidden
    yield ParameterSpec("engram.projection.weight", (out, width), Part.ENGRAM_MATRIX)
    yield ParameterSpec("engram.query", (streams, hidden), Part.ENGRAM_VECTOR)
    yield ParameterSpec("engram.key", (streams, hidden), Part.ENGRAM_VECTOR)
