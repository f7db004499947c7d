"""The models room: V4.1 and V4 as a list of half-layer units. No pipeline, no rank.

Start at `dims.unit_specs` (the list, in numbers, no torch), then `units.build_unit` (one entry as a
module), `carry.Carry` (what passes from unit to unit).

numbers     dims, dims_rules, parameters, presets, engram_hash, activation_bytes, expert_bytes and
            head_bytes (without torch), save_points (what a recompute may keep), product_ops (which
            op makes which product), update_rules (how Muon's recipe updates each parameter)
contracts   carry, linear (weight gradients that can wait), init
documents   packed documents: starts, groups, visible entries; used wherever attention looks back
attention   attention (V4.1), attention_v4, compressor_v4, indexer, selection (top-k of its scores),
            index_loss (what teaches an indexer), sparse_attention, rope, quantize;
            attention_kernels (the record of operations that a run chooses), kernel_limits (sizes
            that kernels take; without torch)
residual    residual (what a unit calls), mhc, mhc_v4 (the head's collapse), single_stream (one in
            place of mHC's)
engram      engram (hash, lookup, gate), engram_rows (a table that lies over ranks or is read
            ahead), engram_kernels (the record of operations that a run chooses)
experts     moe, router, experts, expert_rows, expert_products; moe_kernels (the record of
            operations that a run chooses); fp8_experts (over kernels/),
            fp8_expert_rules (their bytes) and row_slices (what 32 bits reach; both without torch),
            weight_copies (made once an update);
            dispatch (the interface: to the experts wherever they are), all_to_all, fp8_wire (rows
            on the way), token_dispatch (over token_buffer and token_experts), mega_moe (fused:
            over mega_moe_passes, forward and backward of a rank, mega_moe_arena, the memory that
            ranks share, mega_moe_plan, where rows go, and mega_moe_rules, sizes without torch)
linears     fp8_linear (dense ones and the shared expert, over kernels/), fp8_linear_rules
            (which ones; without torch)
small       norm, topk (one rule for ties), precision (where bf16 models compute in fp32),
            keep_inputs (ops with a name, local recomputation), gemm_sms (multiprocessors that
            products may occupy; without torch)
ends        units (embedding, head, assembly of all), head (the loss, whole or in chunks)
kernels/    faster versions, each beside its naive reference
"""
