"""Sizes of the models that ship, as plain data. `dims.preset` turns a row into a `ModelDims`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_V41_FLASH: dict[str, object] = {
    "family": "v41",
    "num_layers": 40,
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_heads": 64,
    "head_dim": 512,
    "rope_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window": 128,
    "compress_ratios": (0, 0) + (2,) * 18 + (1,) * 20,
    "kv_sources": (2, 8, 14, 20),
    "index_sources": (2, 8, 14, 20, 24, 28, 32, 36),
    "candidate_source": 20,
    "candidate_blocks": 2048,
    "candidate_block_size": 8,
    "index_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "norm_eps": 1e-20,
    "num_experts": 384,
    "experts_per_token": 6,
    "expert_width": 2304,
    "engram_layers": (1, 14),
    "engram_heads": 8,
    "engram_head_dim": 256,
    "engram_bucket_floor": 16_000_000,
    "engram_compressed_vocab": 99092,
}

_V4_FLASH: dict[str, object] = {
    "family": "v4",
    "num_layers": 43,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_heads": 64,
    "head_dim": 512,
    "rope_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window": 128,
    "compress_ratios": (0, 0) + (4, 128) * 20 + (4,),
    "index_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "norm_eps": 1e-6,
    "num_experts": 256,
    "experts_per_token": 6,
    "expert_width": 2048,
    "num_hash_layers": 3,
}

_PROXY_SCHEDULE: dict[str, object] = {
    "num_layers": 8,
    "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1),
    "kv_sources": (2, 4),
    "index_sources": (2, 4, 6),
    "candidate_source": 4,
    "engram_layers": (1, 4),
}

_TINY: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_heads": 4,
    "head_dim": 64,
    "rope_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "window": 8,
    "index_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "yarn_original_length": 64,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_width": 48,
}

PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "tiny": _V41_FLASH
        | _PROXY_SCHEDULE
        | _TINY
        | {
            "candidate_blocks": 4,
            "candidate_block_size": 4,
            "engram_heads": 2,
            "engram_head_dim": 32,
            "engram_bucket_floor": 97,
            "engram_compressed_vocab": 256,
        },
        "tiny-v4": _V4_FLASH
        | _TINY
        | {"num_layers": 8, "compress_ratios": (0, 0, 4, 16, 4, 16, 4, 0), "hca_ratio": 16},
        "v41-proxy-8": _V41_FLASH
        | _PROXY_SCHEDULE
        | {"num_experts": 16, "engram_bucket_floor": 65536, "engram_compressed_vocab": 129280},
        "v4-proxy-8": _V4_FLASH
        | {"num_layers": 8, "compress_ratios": (0, 0, 4, 128, 4, 128, 4, 0)},
        "v41-flash": _V41_FLASH,
        "v4-flash": _V4_FLASH,
    }
)
"""Name -> fields of `ModelDims`. `v41-proxy-8` has 16 experts; ask for 64 or 384 by an override."""
