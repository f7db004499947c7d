"""Our V4 beside the one in transformers: same weights, then loss, logits and every gradient.

Run by `run.sh hf`. With --write-golden it writes the other side's values to `tests/golden/`, where
the ordinary tests read them. Exits with 1 if a bound of the project's conventions is missed.

transformers has no packed documents in this model, so it sees each document by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
import torch
import transformers
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from v4_cases import CASES, GOLDEN, Case, Golden
from whole_model import mean_loss, named_grads, run_to_logits

from ppruntime.models.carry import IGNORED_LABEL, MicroBatch
from ppruntime.models.dims import ModelDims, Role, attention_role
from ppruntime.models.topk import top_k

LOGITS_BOUND = 1e-5
"""Largest ||ours - theirs|| / ||theirs|| of loss and logits."""
GRADS_BOUND = 1e-4
"""The same for the gradient of each parameter."""

_LAYER_TYPES = {
    Role.SWA: "sliding_attention",
    Role.CSA: "compressed_sparse_attention",
    Role.HCA: "heavily_compressed_attention",
}
_UNIT_NAMES = {
    "attn": {
        "mhc.projection.weight": ["attn_hc.fn"],
        "mhc.base": ["attn_hc.base"],
        "mhc.scale": ["attn_hc.scale"],
        "norm.weight": ["input_layernorm.weight"],
        "attention.q_a.weight": ["self_attn.q_a_proj.weight"],
        "attention.q_norm.weight": ["self_attn.q_a_norm.weight"],
        "attention.q_b.weight": ["self_attn.q_b_proj.weight"],
        "attention.kv.weight": ["self_attn.kv_proj.weight"],
        "attention.kv_norm.weight": ["self_attn.kv_norm.weight"],
        "attention.sink": ["self_attn.sinks"],
        "attention.o_a.weight": ["self_attn.o_a_proj.weight"],
        "attention.o_b.weight": ["self_attn.o_b_proj.weight"],
        "attention.compressor.value.weight": ["self_attn.compressor.kv_proj.weight"],
        "attention.compressor.gate.weight": ["self_attn.compressor.gate_proj.weight"],
        "attention.compressor.position_bias": ["self_attn.compressor.position_bias"],
        "attention.compressor.norm.weight": ["self_attn.compressor.kv_norm.weight"],
        "attention.indexer.query.weight": ["self_attn.compressor.indexer.q_b_proj.weight"],
        "attention.indexer.head_weights.weight": [
            "self_attn.compressor.indexer.scorer.weights_proj.weight"
        ],
        "attention.indexer.compressor.value.weight": [
            "self_attn.compressor.indexer.kv_proj.weight"
        ],
        "attention.indexer.compressor.gate.weight": [
            "self_attn.compressor.indexer.gate_proj.weight"
        ],
        "attention.indexer.compressor.position_bias": [
            "self_attn.compressor.indexer.position_bias"
        ],
        "attention.indexer.compressor.norm.weight": ["self_attn.compressor.indexer.kv_norm.weight"],
    },
    "moe": {
        "mhc.projection.weight": ["ffn_hc.fn"],
        "mhc.base": ["ffn_hc.base"],
        "mhc.scale": ["ffn_hc.scale"],
        "norm.weight": ["post_attention_layernorm.weight"],
        "moe.router.gate.weight": ["mlp.gate.weight"],
        "moe.router.bias": ["mlp.gate.e_score_correction_bias"],
        "moe.router.experts_of_token": ["mlp.gate.tid2eid"],
        "moe.experts.gate_up.weight": ["mlp.experts.gate_up_proj"],
        "moe.experts.down.weight": ["mlp.experts.down_proj"],
        "moe.shared.gate_up.weight": [
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.up_proj.weight",
        ],
        "moe.shared.down.weight": ["mlp.shared_experts.down_proj.weight"],
    },
}
_END_NAMES = {
    "embed.weight": ["model.embed_tokens.weight"],
    "head.collapse.projection.weight": ["model.hc_head.hc_fn"],
    "head.collapse.base": ["model.hc_head.hc_base"],
    "head.collapse.scale": ["model.hc_head.hc_scale"],
    "head.norm.weight": ["model.norm.weight"],
    "head.projection.weight": ["lm_head.weight"],
}


def their_names(name: str) -> list[str]:
    """Their parameters that together are ours, joined along the first axis."""
    if name in _END_NAMES:
        return _END_NAMES[name]
    _, layer, half, rest = name.split(".", 3)
    return [f"model.layers.{layer}.{theirs}" for theirs in _UNIT_NAMES[half][rest]]


def their_config(dims: ModelDims) -> DeepseekV4Config:
    """Our sizes in their words."""
    ratios = {_LAYER_TYPES[Role.HCA]: dims.hca_ratio}
    layer_types: list[str] = []
    for layer, ratio in enumerate(dims.compress_ratios):
        role = attention_role(dims, layer)
        layer_types.append(_LAYER_TYPES[role])
        if role is Role.CSA:
            assert ratios.setdefault(_LAYER_TYPES[role], ratio) == ratio, "one CSA ratio only"
    yarn = {
        "rope_type": "yarn",
        "factor": dims.yarn_factor,
        "original_max_position_embeddings": dims.yarn_original_length,
        "beta_fast": dims.yarn_beta_fast,
        "beta_slow": dims.yarn_beta_slow,
    }
    num_hash = dims.num_hash_layers
    config = DeepseekV4Config(
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        moe_intermediate_size=dims.expert_width,
        num_hidden_layers=dims.num_layers,
        num_attention_heads=dims.num_heads,
        head_dim=dims.head_dim,
        partial_rotary_factor=dims.rope_dim / dims.head_dim,
        q_lora_rank=dims.q_lora_rank,
        num_experts_per_tok=dims.experts_per_token,
        n_routed_experts=dims.num_experts,
        routed_scaling_factor=dims.routed_scale,
        rope_theta=dims.rope_theta,
        compress_rope_theta=dims.compress_rope_theta,
        rope_parameters=yarn if dims.yarn_factor != 1 else None,
        layer_types=layer_types,
        compress_rates=ratios | {t: 4 for t in _LAYER_TYPES.values() if t not in ratios},
        mlp_layer_types=["hash_moe"] * num_hash + ["moe"] * (dims.num_layers - num_hash),
        hc_mult=dims.num_streams,
        hc_sinkhorn_iters=dims.sinkhorn_iters,
        hc_eps=dims.mhc_eps,
        swiglu_limit=dims.swiglu_limit,
        sliding_window=dims.window,
        o_groups=dims.o_groups,
        o_lora_rank=dims.o_lora_rank,
        index_n_heads=dims.index_heads,
        index_head_dim=dims.index_head_dim,
        index_topk=dims.index_topk,
        rms_norm_eps=dims.norm_eps,
        use_cache=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert config.qk_rope_head_dim == dims.rope_dim, "the rotary width did not survive"
    return config


def their_model(dims: ModelDims, units: Sequence[nn.Module]) -> DeepseekV4ForCausalLM:
    """Their model with our weights; every one of their tensors is filled from ours."""
    model = DeepseekV4ForCausalLM(their_config(dims)).float().eval()
    state = model.state_dict()
    filled: dict[str, Tensor] = {}
    for unit in units:
        for name, ours in unit.state_dict().items():
            theirs = their_names(f"{unit.spec.name}.{name}")
            for key, piece in zip(theirs, ours.chunk(len(theirs)), strict=True):
                filled[key] = piece.reshape(state[key].shape)
    model.load_state_dict(filled, strict=True)
    return model


def our_topk(scores: Tensor, k: int, dim: int = -1, **_: object) -> torch.return_types.topk:
    """topk by our rule: of equal scores the one with the smaller index."""
    assert dim == -1, "their model ranks along the last axis"
    picks = top_k(scores, k)
    return torch.return_types.topk((scores.gather(-1, picks), picks))


def run_theirs(
    model: DeepseekV4ForCausalLM, case: Case, batch: MicroBatch
) -> tuple[Tensor, Tensor]:
    """Mean loss and logits of their side, document by document; gradients add up in `.grad`."""
    num_labels = (batch.labels != IGNORED_LABEL).sum()
    losses: list[Tensor] = []
    rows: list[Tensor] = []
    with patch.object(torch, "topk", our_topk), patch.object(Tensor, "topk", our_topk):
        for ids_T, lengths in zip(batch.ids, case.rows, strict=True):
            parts: list[Tensor] = []
            for ids in ids_T.split(lengths):
                out = model(input_ids=ids[None], labels=ids[None], num_items_in_batch=num_labels)
                out.loss.backward()
                losses.append(out.loss.detach())
                parts.append(out.logits[0].detach())
            rows.append(torch.cat(parts))
    return torch.stack(losses).sum(), torch.stack(rows)


def their_grads(
    model: DeepseekV4ForCausalLM, units: Sequence[nn.Module]
) -> dict[str, Tensor | None]:
    """Their gradients by our names, in our shapes; every one of theirs has a place."""
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    grads: dict[str, Tensor | None] = {}
    for unit in units:
        for name, parameter in unit.named_parameters():
            full_name = f"{unit.spec.name}.{name}"
            pieces = [theirs.pop(key) for key in their_names(full_name)]
            found = [piece for piece in pieces if piece is not None]
            grads[full_name] = torch.cat(found).view_as(parameter) if found else None
    assert not theirs, f"ours has no counterpart of {sorted(theirs)}"
    return grads


def distance(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||; 0 where both are all zeros."""
    difference = (ours - theirs).norm()
    return float(difference / theirs.norm()) if difference else 0.0


def compare(case: Case) -> tuple[bool, Golden]:
    """Prints what differs and by how much. Whether all bounds hold, and the other side's values."""
    units, batch = case.units(), case.batch()
    model = their_model(case.dims, units)
    their_loss, their_logits = run_theirs(model, case, batch)
    theirs = {name: grad for name, grad in their_grads(model, units).items() if grad is not None}
    with torch.no_grad():
        logits_distance = distance(run_to_logits(units, batch), their_logits)
    loss = mean_loss(units, batch)
    loss.backward()
    ours = named_grads(units)
    assert ours.keys() == theirs.keys(), f"one side only: {sorted(ours.keys() ^ theirs.keys())}"
    grads = {name: distance(grad, theirs[name]) for name, grad in ours.items()}
    worst = max(grads, key=grads.__getitem__)
    good = (
        distance(loss.detach(), their_loss) <= LOGITS_BOUND
        and logits_distance <= LOGITS_BOUND
        and grads[worst] <= GRADS_BOUND
    )
    print(
        f"{case.name}: loss {loss.item():.7f} ours, {their_loss.item():.7f} theirs;"
        f" logits {logits_distance:.1e} (bound {LOGITS_BOUND:.0e});"
        f" {len(grads)} gradients, worst {grads[worst]:.1e} (bound {GRADS_BOUND:.0e}) at {worst}"
        f"{'' if good else '  MISSED'}"
    )
    golden = Golden(
        loss=their_loss.item(),
        logits=their_logits[-1, -1, :8].tolist(),
        logits_norm=their_logits.norm().item(),
        grad_norms={name: grad.norm().item() for name, grad in theirs.items()},
    )
    return good, golden


def main() -> int:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"V4 beside transformers {transformers.__version__}")
    results = {case.name: compare(case) for case in CASES}
    if "--write-golden" in sys.argv[1:]:
        golden = {name: values for name, (_, values) in results.items()}
        text = msgspec.json.format(msgspec.json.encode(golden), indent=1)
        GOLDEN.write_bytes(text + b"\n")
        print(f"wrote {GOLDEN}")
    return 0 if all(good for good, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
