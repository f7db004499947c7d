"""Runs of the tiny model with the knobs that save memory, many in one start of its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import combinations
from random import Random

import torch
import torch.distributed as dist
from small_runs import CONFIG, SMALL
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.tensor import DTensor

OFFLOAD = ("pp.activation_offload=true",)
PACED = (*OFFLOAD, "pp.offload_paced=true")
RECOMPUTED = ("ac.mode=full",)
SIGNS = ("optim.type=sign_sgd", "optim.clip_norm=default", "optim.lr=1e-3")
BF16 = ("train.precision=bf16",)
MASTERS = ("pp.offload_masters=true",)
IN_BACKWARD = ("optim.apply_in_backward=true",)
SHALLOW = (
    "model.num_layers=2",
    "model.compress_ratios=[1, 1]",
    "model.kv_sources=[0]",
    "model.index_sources=[0]",
    "model.candidate_source=0",
    "model.engram_layers=[1]",
    "model.sinkhorn_iters=2",
)
"""Two layers, Engram in one: a quarter of the tiny model's time."""
# Orders under which rank 0 of two has enough in flight for something to move.
ORDERS = {
    "1f1b": ("pp.schedule=async_1f1b", "pp.warmup_step=[3, 1]"),
    "1f1b_w": ("pp.schedule=1f1b_w", "pp.warmup_step=[3, 1]"),
    "DualPipeV": ("pp.schedule=dualpipe_v",),
}


KNOBS = {
    "offload": OFFLOAD,
    "paced": PACED,
    "every second": (*PACED, "pp.offload_every=2"),
    "full": RECOMPUTED,
    "full_moe": ("ac.mode=full_moe",),
    "matmul": ("ac.mode=matmul",),
    "ops": ("ac.mode=selective", 'ac.save=["mm", "sparse_attention", "expert_linear"]'),
    "masters": MASTERS,
    "deferred": ORDERS["1f1b_w"],
    "in backward": IN_BACKWARD,
}
"""By name; knobs of one family exclude each other."""
_FAMILIES = (("offload", "paced", "every second"), ("full", "full_moe", "matmul", "ops"))


def pairs_of_knobs(seed: int, number: int) -> list[tuple[str, str]]:
    """So many pairs, in which each knob is at least once if there is room."""
    fits = [
        pair
        for pair in combinations(KNOBS, 2)
        if not any(set(pair) <= set(family) for family in _FAMILIES)
    ]
    Random(seed).shuffle(fits)
    chosen: list[tuple[str, str]] = []
    for name in KNOBS:
        if not any(name in pair for pair in chosen):
            chosen.append(next(p for p in fits if name in p))
    return list(dict.fromkeys([*chosen, *fits]))[:number]


def a_step_of_each(
    rank: int,
    cases: Mapping[str, tuple[str, ...]],
    pp_size: int = 2,
    use_cuda: bool = False,
    dp: int = 1,
    ep: int = 1,
) -> dict[str, tuple[list[float], str, int]]:
    """Per case what the step gave, a digest of the weights, and the pages of host memory."""
    from ppruntime.build import build_pipeline
    from ppruntime.config import load
    from ppruntime.data.batches import open_data
    from ppruntime.ranks import Layout, Ranks, join, leave
    from ppruntime.trainer import Trainer

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(use_cuda, warn_only=True)
    ranks = join(Layout(pp_size, dp, ep), use_cuda=use_cuda, timeout_seconds=30)
    found = {}
    for number, (name, overrides) in enumerate(cases.items()):
        # One start stands for many: each has keys of its own in the store.
        Ranks.world_store = lambda _, key, n=number: PrefixStore(  # type: ignore[method-assign]
            f"{n} {key}", _get_default_store()
        )
        sizes = (f"pp.size={pp_size}", f"parallel.dp={dp}", f"parallel.ep={ep}")
        base = (*SMALL, *sizes, "train.num_micro_batches=5")
        config = load([CONFIG], [*base, *overrides])
        pipeline = build_pipeline(config, ranks)
        trainer, data = Trainer(config, ranks, pipeline), open_data(config)
        result = trainer.step(0, data)
        told = [result.loss, result.grad_norm, result.max_load]
        weights = hashlib.sha256()
        for tensor in pipeline.params.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            weights.update(local.detach().cpu().numpy().tobytes())
        found[name] = told, weights.hexdigest(), pipeline.host_pool.num_bytes
        dist.barrier()
        pipeline.transport.close()
    leave()
    return found
