"""Rules that the sizes of a model have to keep. `dims.validate` is the way in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppruntime.models.dims import ModelDims

_AT_LEAST_ONE = (
    *("num_layers", "vocab_size", "hidden_size", "num_heads", "head_dim", "rope_dim"),
    *("q_lora_rank", "o_groups", "o_lora_rank", "window", "index_heads", "index_head_dim"),
    *("index_topk", "yarn_factor", "yarn_original_length", "num_experts", "experts_per_token"),
    *("num_shared_experts", "expert_width", "num_streams", "sinkhorn_iters"),
)


def problems_of(dims: ModelDims) -> list[str]:
    """What is wrong with the sizes, one sentence each, with the values and what would be right."""
    problems = _size_problems(dims)
    if len(dims.compress_ratios) != dims.num_layers:
        return [
            *problems,
            f"compress_ratios has {len(dims.compress_ratios)} entries for {dims.num_layers} layers;"
            " write one per layer, 0 for sliding window only",
        ]
    return problems + (_v41_problems(dims) if dims.family == "v41" else _v4_problems(dims))


def _size_problems(dims: ModelDims) -> list[str]:
    problems = [
        f"{name} is {getattr(dims, name)}; it has to be at least 1"
        for name in _AT_LEAST_ONE
        if getattr(dims, name) < 1
    ]
    if dims.rope_dim % 2 or dims.rope_dim > min(dims.head_dim, dims.index_head_dim):
        problems.append(
            f"rope_dim is {dims.rope_dim}; it has to be even and no larger than head_dim"
            f" {dims.head_dim} and index_head_dim {dims.index_head_dim}"
        )
    if dims.o_groups > 0 and dims.num_heads % dims.o_groups:
        problems.append(f"o_groups {dims.o_groups} does not divide num_heads {dims.num_heads}")
    if dims.experts_per_token > dims.num_experts:
        problems.append(
            f"experts_per_token is {dims.experts_per_token}, but num_experts is {dims.num_experts}"
        )
    if dims.norm_eps <= 0 or dims.mhc_eps <= 0:
        problems.append(f"norm_eps {dims.norm_eps} and mhc_eps {dims.mhc_eps} have to be above 0")
    if dims.residual_type != "mhc" and dims.num_streams != 1:
        problems.append(
            f"num_streams is {dims.num_streams}; residual_type {dims.residual_type} has 1"
        )
    problems += [
        f"{name} is {weight}; it cannot be below 0"
        for name in ("balance_loss_weight", "indexer_loss_weight")
        if (weight := getattr(dims, name)) < 0
    ]
    return problems


def _v41_problems(dims: ModelDims) -> list[str]:
    if dims.num_hash_layers:
        return [f"num_hash_layers is {dims.num_hash_layers}; only family v4 has hash layers"]
    return _layer_list_problems(dims) or _source_problems(dims) + _candidate_problems(
        dims
    ) + _engram_problems(dims)


def _layer_list_problems(dims: ModelDims) -> list[str]:
    lists = {
        "kv_sources": dims.kv_sources,
        "index_sources": dims.index_sources,
        "engram_layers": dims.engram_layers,
    }
    return [
        f"{name} {list(ids)} has to be ascending layer numbers below {dims.num_layers}"
        for name, ids in lists.items()
        if not set(ids) <= set(range(dims.num_layers)) or list(ids) != sorted(set(ids))
    ]


def _source_problems(dims: ModelDims) -> list[str]:
    sources = {*dims.kv_sources, *dims.index_sources}
    problems = [
        f"layer {layer} is a source, but its compress_ratio is 0"
        for layer in sorted(sources - {*dims.compressed_layers})
    ]
    problems += [
        f"layer {layer} is in kv_sources; it has to be in index_sources too"
        for layer in sorted({*dims.kv_sources} - {*dims.index_sources})
    ]
    for layer in dims.compressed_layers:
        source = max((i for i in dims.kv_sources if i <= layer), default=None)
        if source is None:
            problems.append(f"layer {layer} has no kv source at or before it; add one")
        elif dims.compress_ratios[source] != dims.compress_ratios[layer]:
            problems.append(
                f"layer {layer} has compress_ratio {dims.compress_ratios[layer]}, its kv source"
                f" {source} has {dims.compress_ratios[source]}; they have to be equal"
            )
    return problems


def _candidate_problems(dims: ModelDims) -> list[str]:
    source = dims.candidate_source
    if source is None:
        return []
    problems: list[str] = []
    if source not in dims.kv_sources:
        problems.append(
            f"candidate_source {source} has to be one of kv_sources {list(dims.kv_sources)}"
        )
    if any(layer > source for layer in dims.kv_sources):
        problems.append(
            f"kv_sources {list(dims.kv_sources)} go on after candidate_source {source}; its blocks"
            " are blocks of its own keys, so it has to be the last"
        )
    if dims.candidate_blocks < 1 or dims.candidate_block_size < 1:
        problems.append(
            f"candidate_blocks {dims.candidate_blocks} and candidate_block_size"
            f" {dims.candidate_block_size} have to be at least 1 with a candidate_source"
        )
    return problems


def _engram_problems(dims: ModelDims) -> list[str]:
    if not dims.engram_layers:
        return []
    problems = [
        f"{name} is {getattr(dims, name)}; with engram_layers it has to be at least {least}"
        for name, least in (
            ("engram_max_order", 2),
            ("engram_heads", 1),
            ("engram_head_dim", 1),
            ("engram_bucket_floor", 2),
            ("engram_compressed_vocab", 1),
        )
        if getattr(dims, name) < least
    ]
    if not 0 <= dims.engram_pad_id < dims.vocab_size:
        problems.append(
            f"engram_pad_id {dims.engram_pad_id} is not a token id below {dims.vocab_size}"
        )
    if dims.engram_compressed_vocab > dims.vocab_size:
        problems.append(
            f"engram_compressed_vocab {dims.engram_compressed_vocab} is above vocab_size"
            f" {dims.vocab_size}"
        )
    return problems


def _v4_problems(dims: ModelDims) -> list[str]:
    problems = [
        f"{name} is {getattr(dims, name)!r}; only family v41 has it"
        for name, without in (
            ("kv_sources", ()),
            ("index_sources", ()),
            ("candidate_source", None),
            ("engram_layers", ()),
            ("quantize_cache", False),
        )
        if getattr(dims, name) != without
    ]
    if not 0 <= dims.num_hash_layers <= dims.num_layers:
        problems.append(
            f"num_hash_layers is {dims.num_hash_layers}; it has to be 0 to {dims.num_layers}"
        )
    return problems
