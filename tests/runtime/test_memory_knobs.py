"""Knobs that save memory, alone and in pairs, on the tiny model: the bits of a run without."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

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
# Orders under which rank 0 of two has enough in flight for something to move.
ORDERS = {
    "1f1b": ("pp.schedule=async_1f1b", "pp.warmup_step=[3, 1]"),
    "1f1b_w": ("pp.schedule=1f1b_w", "pp.warmup_step=[3, 1]"),
    "DualPipeV": ("pp.schedule=dualpipe_v",),
}
CASES = {
    "": ORDERS["1f1b"],
    "offload": (*OFFLOAD, *ORDERS["1f1b"]),
    "offload, paced": (*PACED, *ORDERS["1f1b_w"]),
    "offload, paced, V": (*PACED, *ORDERS["DualPipeV"]),
    "offload, every second": (*PACED, "pp.offload_every=2", *ORDERS["1f1b_w"]),
    "offload, recompute": (*PACED, *RECOMPUTED, *ORDERS["1f1b"]),
    "offload, recompute, V": (*OFFLOAD, *RECOMPUTED, *ORDERS["DualPipeV"]),
    # Signs alone, and with everything that goes with them: the second has the bits of the first.
    "sign": (*SIGNS, *ORDERS["1f1b"]),
    "sign, in backward, offload": (*SIGNS, *IN_BACKWARD, *PACED, *ORDERS["1f1b_w"]),
    "sign, in backward, V": (*SIGNS, *IN_BACKWARD, *ORDERS["DualPipeV"]),
    # In bf16 there are masters apart from the weights, and bits depend on the cut.
    "bf16": (*BF16, *ORDERS["1f1b"]),
    "bf16, masters": (*BF16, *MASTERS, *ORDERS["1f1b"]),
    "bf16, masters, offload": (*BF16, *MASTERS, *OFFLOAD, *ORDERS["1f1b_w"]),
    "bf16, sign": (*BF16, *SIGNS, *ORDERS["1f1b"]),
    "bf16, sign, masters, in backward": (
        *(*BF16, *SIGNS, *IN_BACKWARD, *MASTERS, *ORDERS["1f1b_w"]),
    ),
}
"""Name -> overrides. The first words of a name say which other case has the same bits."""


def a_step_of_each(
    rank: int, cases: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[list[float], str, int]]:
    """Per case what the step gave, a digest of the weights, and the pages of host memory."""
    from ppruntime.build import build_pipeline
    from ppruntime.config import load
    from ppruntime.data import open_data
    from ppruntime.ranks import Layout, Ranks, join, leave
    from ppruntime.trainer import Trainer

    torch.set_num_threads(1)
    ranks = join(Layout(2, 1, 1), use_cuda=False, timeout_seconds=30)
    found = {}
    for number, (name, overrides) in enumerate(cases.items()):
        # One start stands for many: each has keys of its own in the store.
        Ranks.world_store = lambda _, key, n=number: PrefixStore(  # type: ignore[method-assign]
            f"{n} {key}", _get_default_store()
        )
        config = load([CONFIG], [*SMALL, "pp.size=2", "train.num_micro_batches=5", *overrides])
        pipeline = build_pipeline(config, ranks)
        trainer, data = Trainer(config, ranks, pipeline), open_data(config)
        result = trainer.step(0, data)
        told = [result.loss, result.grad_norm, result.max_load]
        weights = hashlib.sha256()
        for tensor in pipeline.params.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            weights.update(local.detach().numpy().tobytes())
        found[name] = told, weights.hexdigest(), pipeline.host_pool.num_bytes
        dist.barrier()
        pipeline.transport.close()
    leave()
    return found


def test_knobs_alone_and_in_pairs_have_the_bits_of_a_run_without(run_ranks):
    for rank, found in enumerate(run_ranks(2, a_step_of_each, CASES, timeout_seconds=300)):
        assert found["sign"][1] != found[""][1]
        for name, (told, weights, host_bytes) in found.items():
            alone = found[", ".join(word for word in ("bf16", "sign") if word in name)]
            assert told == alone[0], (rank, name)
            if "V" not in name:  # which places units otherwise
                assert weights == alone[1], (rank, name)
            if "masters" in name:
                assert host_bytes > 0, name
            if rank == 0 and "offload" in name and "recompute" not in name:
                assert host_bytes > 0, name
