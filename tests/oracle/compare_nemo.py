"""Our V4.1 beside the one in nemo-automodel: same weights, then loss, logits and every gradient.

Run by `run.sh nemo`. With --write-golden it writes the other side's values to `tests/golden/`, for
the ordinary tests to read; with --seed N it takes other weights and tokens. Exits with 1 if a
bound of the project's conventions is missed.

Beside the worst gradient stands how far each side is from our model in fp64. Both sides round in
fp32, so where they are equally far from it, the distance between them is rounding too: an Engram
gate is the root of a product that may be near 0, where its slope has no bound, and a value that
goes through the cache's few bits may fall on either side of a boundary.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention as their_attention
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import (
    DeepseekV41ForCausalLM,
)
from nemo_cases import CASES, GOLDEN, Case, Golden
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast
from whole_model import byte_symbols, copy_units, named_grads, run_to_logits

from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import ModelDims, counts
from ppruntime.models.engram_hash import bucket_sizes
from ppruntime.models.topk import top_k
from ppruntime.models.units import Unit

_HALF_NAMES = {
    "mhc.projection.weight": "{half}_hc.fn",
    "mhc.base": "{half}_hc.base",
    "mhc.scale": "{half}_hc.scale",
    "norm.weight": "{half}_norm.weight",
}
_NAMES = {
    "attention.q_a.weight": "attn.wq_a.weight",
    "attention.q_norm.weight": "attn.q_norm.weight",
    "attention.q_b.weight": "attn.wq_b.weight",
    "attention.kv.weight": "attn.wkv.weight",
    "attention.kv_norm.weight": "attn.kv_norm.weight",
    "attention.sink": "attn.sinks_param.weight",
    "attention.o_a.weight": "attn.wo_a.weight",
    "attention.o_b.weight": "attn.wo_b.weight",
    "attention.compressor.value.weight": "attn.compressor.wkv.weight",
    "attention.compressor.gate.weight": "attn.compressor.wgate.weight",
    "attention.compressor.norm.weight": "attn.compressor.norm.weight",
    "attention.indexer.query.weight": "attn.indexer.wq_b.weight",
    "attention.indexer.head_weights.weight": "attn.indexer.weights_proj.weight",
    "attention.indexer.key.weight": "attn.indexer.wk.weight",
    "attention.indexer.key_norm.weight": "attn.indexer.k_norm.weight",
    "engram.table": "engram.embed.weight",
    "engram.projection.weight": "engram.wkv.weight",
    "engram.query": "engram.q_weight",
    "engram.key": "engram.k_weight",
    "moe.router.gate.weight": "ffn.gate.weight",
    "moe.router.bias": "ffn.gate.e_score_correction_bias",
    "moe.experts.gate_up.weight": "ffn.experts.gate_and_up_projs",
    "moe.experts.down.weight": "ffn.experts.down_projs",
    "moe.shared.gate_up.weight": "ffn.shared_experts.gate_proj.weight + up_proj.weight",
    "moe.shared.down.weight": "ffn.shared_experts.down_proj.weight",
}
_END_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.projection.weight": "lm_head.weight",
}


def their_name(name: str) -> str:
    """Their name of our parameter or buffer; `A + B` where they keep two in place of our one."""
    if name in _END_NAMES:
        return _END_NAMES[name]
    _, layer, half, rest = name.split(".", 3)
    if rest in _HALF_NAMES:
        theirs = _HALF_NAMES[rest].format(half={"attn": "attn", "moe": "ffn"}[half])
    else:
        theirs = _NAMES[rest]
    return f"model.layers.{layer}.{theirs}"


def as_theirs(name: str, ours: Tensor) -> Tensor:
    """Our value in their layout: experts are used as x @ W there, groups lie below each other."""
    if ".experts." in name:
        return ours.transpose(1, 2)
    return ours.flatten(0, 1) if name.endswith("o_a.weight") else ours


def pieces(name: str, ours: Tensor) -> list[tuple[str, Tensor]]:
    """Their names and values of what is one parameter or buffer on our side."""
    theirs, value = their_name(name), as_theirs(name, ours)
    if " + " not in theirs:
        return [(theirs, value)]
    first, second = theirs.split(" + ")
    parent = first.rsplit(".", 2)[0]
    gate, up = value.chunk(2)
    return [(first, gate), (f"{parent}.{second}", up)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level vocabulary of the 256 bytes, in order."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def their_model(dims: ModelDims) -> nn.Module:
    yarn = {
        "rope_type": "yarn",
        "factor": dims.yarn_factor,
        "original_max_position_embeddings": dims.yarn_original_length,
        "beta_fast": dims.yarn_beta_fast,
        "beta_slow": dims.yarn_beta_slow,
    }
    text = dict(
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        moe_intermediate_size=dims.expert_width,
        num_hidden_layers=dims.num_layers,
        num_attention_heads=dims.num_heads,
        head_dim=dims.head_dim,
        qk_rope_head_dim=dims.rope_dim,
        q_lora_rank=dims.q_lora_rank,
        o_lora_rank=dims.o_lora_rank,
        o_groups=dims.o_groups,
        swiglu_limit=dims.swiglu_limit,
        rms_norm_eps=dims.norm_eps,
        rope_theta=dims.rope_theta,
        compress_rope_theta=dims.compress_rope_theta,
        rope_scaling=yarn,
        n_routed_experts=dims.num_experts,
        num_experts_per_tok=dims.experts_per_token,
        routed_scaling_factor=dims.routed_scale,
        sliding_window=dims.window,
        compress_ratios=list(dims.compress_ratios),
        kv_source_layer_ids=list(dims.kv_sources),
        index_source_layer_ids=list(dims.index_sources),
        index_n_heads=dims.index_heads,
        index_head_dim=dims.index_head_dim,
        index_topk=dims.index_topk,
        candidate_source_layer_id=-1 if dims.candidate_source is None else dims.candidate_source,
        candidate_topk_blocks=dims.candidate_blocks,
        candidate_block_size=dims.candidate_block_size,
        hc_mult=dims.num_streams,
        hc_sinkhorn_iters=dims.sinkhorn_iters,
        hc_eps=dims.mhc_eps,
        engram_layer_ids=list(dims.engram_layers),
        engram_num_embeddings=[sum(sizes) for sizes in bucket_sizes(dims)],
        engram_max_ngram_size=dims.engram_max_order,
        engram_vocab_size=dims.engram_bucket_floor,
        engram_n_heads=dims.engram_heads,
        engram_head_dim=dims.engram_head_dim,
        engram_pad_token_id=dims.engram_pad_id,
        engram_compressed_vocab_size=dims.engram_compressed_vocab,
        num_nextn_predict_layers=0,
        dtype="float32",
    )
    config = DeepseekV41Config(
        text_config=text, vision_config={"num_hidden_layers": 0}, dtype="float32"
    )
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch"
    )
    return DeepseekV41ForCausalLM(config, backend=backend, tokenizer=byte_tokenizer())


def load(theirs: nn.Module, units: list[Unit]) -> None:
    """Copies our parameters and routing biases to their model; every one of theirs is set."""
    targets = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    unset = {name for name, _ in theirs.named_parameters()}
    with torch.no_grad():
        for unit in units:
            tensors = dict(unit.named_parameters())
            tensors |= {n: b for n, b in unit.named_buffers() if n.endswith("router.bias")}
            for local, ours in tensors.items():
                for name, value in pieces(f"{unit.spec.name}.{local}", ours):
                    assert targets[name].shape == value.shape, (name, value.shape)
                    targets[name].copy_(value)
                    unset.discard(name)
    assert not unset, f"parameters of theirs without a value: {sorted(unset)}"


def stable_topk(x: Tensor, k: int, dim: int = -1, **_: bool) -> torch.return_types.topk:
    """torch.topk with our rule for ties."""
    assert dim in (-1, x.dim() - 1)
    indices = top_k(x, k)
    return torch.return_types.topk((x.gather(-1, indices), indices))


def run_theirs(case: Case, theirs: nn.Module) -> tuple[Tensor, Tensor]:
    """Loss and logits of their model, with gradients left in its parameters."""
    batch = case.batch()
    num_documents = max(map(len, case.rows))
    lengths = [[*row, *[0] * (num_documents - len(row))] for row in case.rows]
    packed = {"seq_lens": torch.tensor(lengths)} if num_documents > 1 else {}
    quantize = their_attention.quantize_cache if case.dims.quantize_cache else lambda x, **_: x
    with (
        patch.object(Tensor, "topk", stable_topk),
        patch.object(torch, "topk", stable_topk),
        patch.object(their_attention, "quantize_cache", quantize),
    ):
        logits = theirs(batch.ids, **packed).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    return loss.detach(), logits.detach()


def distance(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||, in fp64."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm())


def run_ours(units: list[Unit], batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits, and gradients by their names."""
    logits = run_to_logits(units, batch)
    loss = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    grads = [piece for name, grad in named_grads(units).items() for piece in pieces(name, grad)]
    return loss.detach(), logits.detach(), dict(grads)


def compare(case: Case) -> tuple[bool, Golden]:
    """Prints one case's distances; whether they are within bounds, and their side's numbers."""
    units, batch = case.units(), case.batch()
    loss, logits, grads = run_ours(units, batch)
    _, _, fp64_grads = run_ours(copy_units(case.dims, units, torch.float64), batch)
    theirs = their_model(case.dims)
    load(theirs, units)
    their_loss, their_logits = run_theirs(case, theirs)
    their_grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert set(grads) == set(their_grads), "not the same parameters have gradients"
    distances = {name: distance(grad, their_grads[name]) for name, grad in grads.items()}
    worst = max(distances, key=distances.__getitem__)
    logits_distance = distance(logits, their_logits)
    good = logits_distance <= case.logits_bound and distances[worst] <= case.grads_bound
    print(
        f"{case.name}{'' if good else ' MISSED'}: loss {loss.item():.7f}, theirs"
        f" {their_loss.item():.7f}; logits {logits_distance:.1e} (bound {case.logits_bound:.0e});"
        f" {len(grads)} gradients, worst {distances[worst]:.1e} (bound {case.grads_bound:.0e}) at"
        f" {worst}, from fp64: ours {distance(grads[worst], fp64_grads[worst]):.1e}, theirs"
        f" {distance(their_grads[worst], fp64_grads[worst]):.1e}",
        flush=True,
    )
    golden = Golden(
        parameters=sum(p.numel() for p in theirs.parameters()),
        loss=their_loss.item(),
        logits=their_logits[-1, -1, :8].tolist(),
        logits_norm=their_logits.double().norm().item(),
        grad_norms={
            name: float(sum(their_grads[n].double().square().sum() for n, _ in pieces(name, g)))
            ** 0.5
            for name, g in named_grads(units).items()
        },
    )
    totals = counts(case.dims)
    assert golden.parameters == totals.parameters + totals.engram_parameters
    return good, golden


def main() -> int:
    torch.set_num_threads(1)
    cases = CASES
    if "--seed" in sys.argv:
        seed = int(sys.argv[sys.argv.index("--seed") + 1])
        cases = tuple(replace(case, seed=seed) for case in CASES)
    outcomes = {case.name: compare(case) for case in cases}
    if "--write-golden" in sys.argv:
        golden = {name: outcome[1].__dict__ for name, outcome in outcomes.items()}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
        print(f"wrote {GOLDEN.name}")
    return 0 if all(good for good, _ in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
