"""A run holds no more after many steps than after some: tensors, memory, threads, files. Four steps
are looked at in `test_nonfinite`."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from holdings import Holdings, assert_no_more, holdings
from memory_knobs import ORDERS, PACED, RECOMPUTED, SHALLOW
from small_runs import CONFIG, SMALL


def holdings_of(
    rank: int, num_early: int, num_late: int
) -> tuple[Holdings, Holdings, tuple[int, int]]:
    """Of a rank that recomputes and offloads, after so many steps each; and the bytes of all that
    torch's operations made in the last steps, graphs included, that lived on behind the last step
    but one and behind the last."""
    from ppruntime.build import build_pipeline
    from ppruntime.config import load
    from ppruntime.data.batches import open_data
    from ppruntime.memory_watch import TensorCounter
    from ppruntime.ranks import Layout, join, leave
    from ppruntime.trainer import Trainer

    ranks = join(Layout(2, 1, 1), use_cuda=False, timeout_seconds=60)
    knobs = (*PACED, *RECOMPUTED, *ORDERS["1f1b"], "pp.size=2", "train.num_micro_batches=4")
    config = load([CONFIG], [*SMALL, *SHALLOW, *knobs, f"train.steps={num_late}"])
    pipeline = build_pipeline(config, ranks)
    trainer, data = Trainer(config, ranks, pipeline), open_data(config)
    counter = TensorCounter((), is_elsewhere=pipeline.host_pool.has)
    found, live = [], []
    with ExitStack() as stack:
        for done in range(1, num_late + 1):
            if done == num_late - 1:  # it slows a step down
                stack.enter_context(counter)
            trainer.step(done - 1, data)
            if done >= num_late - 1:
                live.append(counter.read()[0])
            if done in (num_early, num_late):
                found.append(holdings(pipeline.host_pool.num_bytes))
    torch.distributed.barrier()
    pipeline.transport.close()
    leave()
    return found[0], found[1], (live[0], live[1])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_200_steps_hold_no_more_than_40(run_ranks):
    outcomes = run_ranks(2, holdings_of, 40, 200, timeout_seconds=800)
    for rank, (early, late, live) in enumerate(outcomes):
        assert_no_more(early, late)
        assert rank > 0 or early.host_bytes > 0, "nothing was offloaded"
        # What is kept of the last batch differs by a few numbers from batch to batch.
        assert live[1] - live[0] < 4096, "a step leaves memory behind"
        # 160 steps that leave 64 kB each would be 10 MB.
        assert late.resident_bytes - early.resident_bytes < 10 << 20, (early, late)
