"""The size of the fused MoE layer's arena. Pure, without torch: plan and ledger read it."""

from __future__ import annotations

from ppruntime.config.keys import Config
from ppruntime.models.mega_moe_rules import ArenaShape


def arena_shape(config: Config) -> ArenaShape:
    """For the micro-batches of the config."""
    dims, train = config.model.dims, config.train
    return ArenaShape(
        most_tokens=train.micro_batch_size * train.seq_len,
        per_token=dims.experts_per_token,
        num_experts=dims.num_experts,
        hidden=dims.hidden_size,
    )


def arena_bytes(config: Config) -> int:
    """Device memory of one rank's arenas, outside torch's allocator: one serves all its layers, or
    where pairs overlap those of a stage. 0 with another dispatcher."""
    if config.moe.dispatch.type != "mega_moe":
        return 0
    return arena_shape(config).num_bytes * (config.pp.num_chunks if config.pp.overlap_pairs else 1)
