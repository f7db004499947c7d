"""What a model is, in numbers: sizes, its list of units, what crosses between them, counts, FLOPs.

Imports without torch, so a plan for the full model takes milliseconds.
Start at `unit_specs`: a model is that list, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import msgspec

from ppruntime.models.dims_rules import problems_of
from ppruntime.models.parameters import ParameterSpec, Part, parameter_specs
from ppruntime.models.presets import PRESETS


class ModelError(ValueError):
    """Sizes that make no model, or an unknown preset; the text says which and the remedy."""


class ModelDims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a DeepSeek-V4.1 or V4 model. In brackets: a field's name in the released config."""

    family: Literal["v41", "v4"]
    """The wiring: V4.1 (single-pass mHC, CSA2, Engram) or V4 (CSA, HCA, hash layers)."""
    num_layers: int
    """Layers; each is an attention half and a MoE half."""
    vocab_size: int
    """Token ids run from 0 to this, exclusive."""
    hidden_size: int
    """Model width D."""
    num_heads: int
    """Query heads; keys and values are one shared vector."""
    head_dim: int
    """Width of a head, and of a key."""
    rope_dim: int
    """The last channels of a head that are rotated [qk_rope_head_dim]."""
    q_lora_rank: int
    """Width of the query's low-rank bottleneck."""
    o_groups: int
    """Groups of heads that the first output projection keeps apart."""
    o_lora_rank: int
    """Output width of one such group."""
    window: int
    """Keys of the sliding window, the query's own included [sliding_window]."""
    compress_ratios: tuple[int, ...]
    """Per layer: tokens per compressed entry; 0 means sliding window only."""
    hca_ratio: int = 128
    """V4: layers with this ratio are HCA (all visible entries); other ratios above 0 are CSA."""
    kv_sources: tuple[int, ...] = ()
    """V4.1: layers that compress keys, for themselves and later layers [kv_source_layer_ids]."""
    index_sources: tuple[int, ...] = ()
    """V4.1: layers that select entries for themselves and the layers after them."""
    candidate_source: int | None = None
    """V4.1: the layer that picks candidate blocks for later index sources; None: no candidates."""
    candidate_blocks: int = 0
    """V4.1: blocks that the candidate source keeps per query [candidate_topk_blocks]."""
    candidate_block_size: int = 0
    """V4.1: consecutive compressed entries in a candidate block."""
    index_heads: int
    """Heads of the indexer [index_n_heads]."""
    index_head_dim: int
    """Width of an indexer head."""
    index_topk: int
    """Compressed entries that a query attends to."""
    rope_theta: float = 10000.0
    """RoPE base of layers with ratio 0; these have no YaRN."""
    compress_rope_theta: float = 160000.0
    """RoPE base of layers with a ratio above 0, for everything in them."""
    yarn_factor: float = 16.0
    """YaRN interpolation of those layers; 1 switches it off."""
    yarn_original_length: int = 65536
    """Sequence length from which YaRN's ramp is derived."""
    yarn_beta_fast: float = 32.0
    """Rotations within the original length above which a channel keeps its frequency."""
    yarn_beta_slow: float = 1.0
    """Rotations below which a channel is fully interpolated."""
    norm_eps: float
    """Epsilon of every RMSNorm, mHC's and Engram's included."""
    num_experts: int
    """Routed experts per layer [n_routed_experts]."""
    experts_per_token: int
    """Routed experts that a token goes to."""
    num_shared_experts: int = 1
    """Experts that every token goes to; their widths add up to one wider expert."""
    expert_width: int
    """Inner width of a routed and of a shared expert [moe_intermediate_size]."""
    routed_scale: float = 1.5
    """Factor on the normalised routing weights [routed_scaling_factor]."""
    swiglu_limit: float = 10.0
    """Clamp of the gate (above) and of the up projection (both sides) in every expert."""
    num_hash_layers: int = 0
    """V4: the first layers, whose experts follow from the token id."""
    num_streams: int = 4
    """Residual streams [hc_mult]; 1 unless residual_type is mhc."""
    sinkhorn_iters: int = 20
    """Row and column normalisations of the stream mixing matrix."""
    mhc_eps: float = 1e-6
    """Epsilon in mHC's coefficients [hc_eps]."""
    engram_layers: tuple[int, ...] = ()
    """V4.1: layers with an Engram before their attention half."""
    engram_max_order: int = 4
    """Longest n-gram that is looked up; the shortest is 2."""
    engram_heads: int = 0
    """Hash functions, each with a table of its own, per n-gram order."""
    engram_head_dim: int = 0
    """Width of a table row."""
    engram_bucket_floor: int = 0
    """Table sizes are the primes from here on [engram_vocab_size]."""
    engram_compressed_vocab: int = 0
    """Classes of the token map; equal to vocab_size: the map is the identity."""
    engram_pad_id: int = 2
    """Token that stands where an n-gram reaches before its document."""
    residual_type: Literal["mhc", "gated", "layerscale"] = "mhc"
    """How sublayers write to the residual. mhc: to several streams, which they mix. gated: to one,
    times mHC's post gate. layerscale: to one, times a gain a channel. Changes numerics."""
    quantize_cache: bool = False
    """V4.1: keys pass through the cache's FP8 and FP4 formats (changes numerics)."""
    balance_loss_weight: float = 1e-4
    """Weight of the sequence balance loss; 0: none (changes numerics)."""
    indexer_loss_weight: float = 0.0
    """Weight of the loss that teaches the indexer; 0: it stays as it is (changes numerics)."""
    force_balanced_routing: bool = False
    """For benchmarks: experts follow from the token's place, spread evenly (changes numerics)."""

    @property
    def compressed_layers(self) -> tuple[int, ...]:
        """Layers with compressed keys."""
        return tuple(i for i, ratio in enumerate(self.compress_ratios) if ratio > 0)

    @property
    def hands_on_mix(self) -> bool:
        """Whether a sublayer makes the weights with which the next one collapses the streams."""
        return self.family == "v41" and self.residual_type == "mhc"

    @property
    def indexer_learns(self) -> bool:
        """Whether the indexer has a loss, and so gradients."""
        return self.indexer_loss_weight > 0

    @property
    def num_slots(self) -> int:
        """Keys that one query of a compressed V4.1 layer can see: the width of a slot list."""
        return self.window + self.index_topk


class UnitKind(StrEnum):
    """What a unit is."""

    EMBED = "embed"
    ATTENTION = "attention"
    MOE = "moe"
    HEAD = "head"


class Role(StrEnum):
    """What an attention half does about compressed keys, or how a MoE half routes."""

    NONE = ""
    """Embedding, head."""
    SWA = "swa"
    """Sliding window only."""
    FULL = "full"
    """V4.1: compresses keys and selects entries."""
    REINDEX = "reindex"
    """V4.1: selects anew among the keys of the latest FULL layer."""
    REUSE = "reuse"
    """V4.1: takes keys and selection from earlier layers."""
    CSA = "csa"
    """V4: own compressed keys, own selection."""
    HCA = "hca"
    """V4: own heavily compressed keys, all of them."""
    ROUTED = "routed"
    """MoE: experts by score."""
    HASH = "hash"
    """MoE, V4: experts by token id."""


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit of the model. Parameter names are `name + "." + name in the unit`."""

    name: str
    """`embed`, `layers.3.attn`, `layers.3.moe`, `head`."""
    kind: UnitKind
    role: Role
    layer: int | None
    """None for embedding and head."""
    layers: float
    """0.5 for half a layer, 0 for embedding and head; the unit of `layers_per_stage`."""
    reads: frozenset[str]
    """Carry fields that it reads."""
    writes: frozenset[str]
    """Carry fields that it makes anew."""
    live_after: tuple[str, ...]
    """Carry fields that it passes on, in CROSSING order: later units read them as they are then."""
    parameters: int
    """Backbone parameters: all but Engram's; routing-bias buffers are not counted."""
    engram_parameters: int
    """Engram tables, projections and gate weights."""
    active_matmul_parameters: int
    """Matrix entries that one token multiplies with: 2 FLOPs each forward, 6 in training."""


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """FLOPs of one unit's forward, per token."""

    matmul: float
    """Products with parameters. A backward costs twice as much."""
    attention: float
    """Query-key and probability-value products, over the slots a kernel works through."""
    index_scores: float
    """Indexer scores, at the mean number of visible entries; no backward while it is frozen."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of a model."""

    parameters: int
    """Backbone: all but Engram's; routing-bias buffers are not counted."""
    engram_parameters: int
    """Engram tables, projections and gate weights."""
    engram_table_parameters: int
    """Engram tables alone."""
    active_matmul_parameters: int
    flops_per_token: int
    """6 x active: forward and backward, attention scores not counted (the MFU convention)."""


CROSSING = (
    *("streams", "mix", "kv", "index_keys", "slots", "candidates"),
    "trained_index_keys",
)
"""Carry fields that may cross a stage boundary, in order; the same as `carry.CROSSING`."""


def preset(name: str) -> ModelDims:
    """Sizes of a shipped model. Change some with `changed`. Raises ModelError."""
    if name not in PRESETS:
        raise ModelError(f"there is no model {name!r}; there are {', '.join(PRESETS)}")
    return msgspec.convert(PRESETS[name], ModelDims)


def changed(dims: ModelDims, **fields: Any) -> ModelDims:
    """The dims with other values in some fields. A residual type that has one stream brings
    `num_streams` = 1, unless that is given too."""
    if fields.get("residual_type", "mhc") != "mhc":
        fields.setdefault("num_streams", 1)
    return msgspec.structs.replace(dims, **fields)


def attention_role(dims: ModelDims, layer: int) -> Role:
    """What the attention half of `layer` does about compressed keys."""
    ratio = dims.compress_ratios[layer]
    if ratio == 0:
        return Role.SWA
    if dims.family == "v4":
        return Role.HCA if ratio == dims.hca_ratio else Role.CSA
    if layer in dims.kv_sources:
        return Role.FULL
    return Role.REINDEX if layer in dims.index_sources else Role.REUSE


def validate(dims: ModelDims) -> list[str]:
    """Problems that keep these sizes from being a model, one sentence each; empty if none."""
    return problems_of(dims)


def unit_specs(dims: ModelDims) -> tuple[UnitSpec, ...]:
    """The model: embedding, then an attention and a MoE half per layer, then the head."""
    drafts = [_draft(dims, UnitKind.EMBED, None)]
    for layer in range(dims.num_layers):
        drafts += [_draft(dims, UnitKind.ATTENTION, layer), _draft(dims, UnitKind.MOE, layer)]
    drafts.append(_draft(dims, UnitKind.HEAD, None))
    live = live_after(drafts)
    return tuple(
        replace(draft, live_after=fields) for draft, fields in zip(drafts, live, strict=True)
    )


def live_after(specs: Sequence[UnitSpec]) -> tuple[tuple[str, ...], ...]:
    """Carry fields alive after each unit: a later unit reads them before any writes them anew."""
    live: set[str] = set()
    result: list[tuple[str, ...]] = []
    for spec in reversed(specs):
        result.append(tuple(field for field in CROSSING if field in live))
        live = (live - spec.writes) | spec.reads
    return tuple(reversed(result))


def carry_shape(
    dims: ModelDims,
    field: str,
    batch: int,
    seq_len: int,
    *,
    after: UnitSpec,
    dtype: str = "bfloat16",
) -> tuple[tuple[int, ...], str]:
    """Shape and dtype name of a Carry field as it leaves the unit `after`.

    `dtype` is the compute dtype. Candidates that cannot exclude anything at this length are there
    with no elements.
    """
    entries = seq_len // _ratio_in_force(dims, after) if field in _COMPRESSED else 0
    match field:
        case "streams":
            return (batch, seq_len, dims.num_streams, dims.hidden_size), dtype
        case "mix":
            return (batch, seq_len, dims.num_streams), "float32"
        case "kv":
            return (batch, entries, dims.head_dim), dtype
        case "index_keys" | "trained_index_keys":
            return (batch, entries, dims.index_head_dim), dtype
        case "slots":
            return (batch, seq_len, dims.num_slots), "int32"
        case "candidates":
            return (batch, seq_len, num_candidate_blocks(dims, entries)), "bool"
        case _:
            raise ModelError(f"{field!r} never crosses; these may: {', '.join(CROSSING)}")


def num_candidate_blocks(dims: ModelDims, num_entries: int) -> int:
    """Width of the candidate mask over `num_entries` entries; 0 where every block would be kept."""
    blocks = -(-num_entries // dims.candidate_block_size)
    return blocks if blocks > dims.candidate_blocks else 0


def boundary_bytes(
    dims: ModelDims, after: UnitSpec, batch: int, seq_len: int, *, dtype: str = "bfloat16"
) -> int:
    """Bytes of one micro-batch that cross forward when the stage ends with the unit `after`."""
    total = 0
    for field in after.live_after:
        shape, name = carry_shape(dims, field, batch, seq_len, after=after, dtype=dtype)
        size = DTYPE_BYTES[name]
        for extent in shape:
            size *= extent
        total += size
    return total


DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "bool": 1}
"""Size of an element by torch's name of its dtype."""


def unit_parameters(dims: ModelDims, spec: UnitSpec) -> tuple[ParameterSpec, ...]:
    """Every parameter of a unit, names as in the unit's module."""
    return parameter_specs(dims, spec.kind, spec.role, spec.layer)


def counts(dims: ModelDims) -> Counts:
    """Totals over all units."""
    specs = unit_specs(dims)
    active = sum(spec.active_matmul_parameters for spec in specs)
    tables = sum(
        parameter.numel
        for spec in specs
        for parameter in unit_parameters(dims, spec)
        if parameter.part is Part.ENGRAM_TABLE
    )
    return Counts(
        parameters=sum(spec.parameters for spec in specs),
        engram_parameters=sum(spec.engram_parameters for spec in specs),
        engram_table_parameters=tables,
        active_matmul_parameters=active,
        flops_per_token=6 * active,
    )


def forward_flops_per_token(dims: ModelDims, spec: UnitSpec, seq_len: int) -> ForwardFlops:
    """FLOPs of a unit's forward per token, for documents of `seq_len` tokens."""
    matmul = 2.0 * spec.active_matmul_parameters
    if spec.kind is not UnitKind.ATTENTION:
        return ForwardFlops(matmul, 0.0, 0.0)
    assert spec.layer is not None
    ratio = dims.compress_ratios[spec.layer]
    slots = float(min(dims.window, seq_len))
    if spec.role is Role.HCA:
        slots += seq_len / (2 * ratio)
    elif spec.role is not Role.SWA:
        slots += min(dims.index_topk, seq_len // ratio)
    selects = spec.role in (Role.FULL, Role.REINDEX, Role.CSA)
    visible = seq_len / (2 * ratio) if selects else 0.0
    return ForwardFlops(
        matmul,
        attention=4.0 * dims.num_heads * dims.head_dim * slots,
        index_scores=2.0 * dims.index_heads * dims.index_head_dim * visible,
    )


_COMPRESSED = ("kv", "index_keys", "candidates", "trained_index_keys")


def _ratio_in_force(dims: ModelDims, after: UnitSpec) -> int:
    """Ratio of the compressed keys that are alive after a unit."""
    assert after.layer is not None, f"no compressed keys leave {after.name}"
    return dims.compress_ratios[max(i for i in dims.kv_sources if i <= after.layer)]


def _draft(dims: ModelDims, kind: UnitKind, layer: int | None) -> UnitSpec:
    """A unit's spec without `live_after`."""
    role = Role.NONE
    residual = frozenset({"streams", "mix"} if dims.hands_on_mix else {"streams"})
    reads, writes, name = residual, residual, str(kind)
    if kind is UnitKind.EMBED:
        reads = frozenset()
    elif kind is UnitKind.HEAD:
        writes = frozenset()
    elif kind is UnitKind.MOE:
        assert layer is not None
        role = Role.HASH if layer < dims.num_hash_layers else Role.ROUTED
        name = f"layers.{layer}.moe"
    else:
        assert layer is not None
        role = attention_role(dims, layer)
        name = f"layers.{layer}.attn"
        shared_reads, shared_writes = _shared_keys(dims, role, layer)
        reads, writes = reads | shared_reads, writes | shared_writes
    parameters = parameter_specs(dims, kind, role, layer)
    engram = (Part.ENGRAM_TABLE, Part.ENGRAM_MATRIX, Part.ENGRAM_VECTOR)
    return UnitSpec(
        name=name,
        kind=kind,
        role=role,
        layer=layer,
        layers=0.0 if layer is None else 0.5,
        reads=reads,
        writes=writes,
        live_after=(),
        parameters=sum(p.numel for p in parameters if p.part not in engram),
        engram_parameters=sum(p.numel for p in parameters if p.part in engram),
        active_matmul_parameters=sum(p.active(dims) for p in parameters),
    )


def _shared_keys(dims: ModelDims, role: Role, layer: int) -> tuple[frozenset[str], frozenset[str]]:
    """What an attention half reads and writes of the keys that V4.1 layers share."""
    index_keys = "trained_index_keys" if dims.indexer_learns else "index_keys"
    if role is Role.FULL:
        made = {"kv", index_keys, "slots"}
        return frozenset(), frozenset(
            made | ({"candidates"} if layer == dims.candidate_source else set())
        )
    if role is Role.REINDEX:
        restricted = dims.candidate_source is not None and layer > dims.candidate_source
        read = {"kv", index_keys} | ({"candidates"} if restricted else set())
        return frozenset(read), frozenset({"slots"})
    if role is Role.REUSE:
        return frozenset({"kv", "slots"}), frozenset()
    return frozenset(), frozenset()
