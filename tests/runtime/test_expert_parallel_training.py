"""Whole runs with experts over ranks: against one process, at other cuts, unbalanced, ended.

Bitwise over pp at one ep; over ep gradients are sums in another order, within a millionth.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from small_runs import found_in_checkpoint, train, trainer_of, whole

from ppruntime.compare import compare_metrics
from ppruntime.metrics import read_metrics
from ppruntime.run_dir import read_status

COMMON = (
    "train.steps=2",
    "train.balance_loss_weight=1e-2",
    "train.routing_bias_rate=1e-3",
    "train.eval_interval=2",
    "optim.min_lr=3e-3",
)
TWO_LAYERS = (
    "model.name=tiny-v4",
    "model.num_layers=2",
    "model.compress_ratios=[0, 4]",
    "model.num_hash_layers=0",
)
EP2 = ("pp.size=1", "parallel.ep=2", "train.num_micro_batches=2")


# --- against one process --------------------------------------------------------------------------


def first_gradients(rank: int, overrides: tuple[str, ...]):
    """What the first step gives, and the gradients that it clips, whole; of split layers the part
    of this rank with its first expert."""
    import ppruntime.trainer as module

    with trainer_of((*COMMON, *overrides)) as (trainer, data, ranks):
        found: dict[tuple[str, int], torch.Tensor] = {}
        norm = module.global_norm

        def spied(params, *args, **options):
            for name, param in params.items():
                if param.grad is not None:
                    split = name in trainer.pipeline.split
                    first = ranks.rank % ranks.layout.ep if split else 0
                    found[name, first] = whole(param.grad)
            return norm(params, *args, **options)

        module.global_norm = spied
        return trainer.step(0, data), found


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.ep=2", "pp.size=2", "pp.schedule=1f1b_w", "train.num_micro_batches=2"),
        # Experts over two, and each of their weights over two data ranks.
        ("parallel.ep=2", "parallel.dp=2", "pp.size=1", "train.num_micro_batches=1"),
    ],
    ids=["pp and ep", "dp and ep"],
)
def test_first_gradients_are_within_a_millionth_of_one_process(layout, run_ranks):
    [(alone, expected)] = run_ranks(1, first_gradients, ("pp.size=1", "train.num_micro_batches=4"))
    four = run_ranks(4, first_gradients, layout)
    gradients: dict[str, dict[int, torch.Tensor]] = {}
    for result, found in four:
        assert result.loss == pytest.approx(alone.loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(alone.grad_norm, rel=1e-6)
        assert result.balance_loss == pytest.approx(alone.balance_loss, rel=1e-6)
        assert result.max_loads == alone.max_loads
        for (name, first), grad in found.items():
            gradients.setdefault(name, {})[first] = grad
    assert gradients.keys() == {name for name, _ in expected}
    for (name, _), grad in expected.items():
        parts = [part for _, part in sorted(gradients[name].items())]
        assert len(parts) == (2 if ".moe.experts." in name else 1)
        error = (torch.cat(parts) - grad).norm() / grad.norm().clamp_min(1e-30)
        assert error < 1e-6, (name, float(error))


# --- over cuts, and saved at one layout and loaded at another -------------------------------------


def state(rank: int, path: str, overrides: tuple[str, ...], save_to: str | None):
    return found_in_checkpoint(path, (*COMMON, *overrides), save_to)


@pytest.mark.long
def test_a_pipeline_of_expert_groups_is_one_groups_run_and_loads_at_any_layout_bitwise(
    tmp_path, run_ranks
):
    one, four = tmp_path / "one", tmp_path / "pipeline"
    cut = ("pp.size=2", "pp.schedule=1f1b_w", "ac.mode=full")
    for num_ranks, run_dir, more in ((2, one, ()), (4, four, cut)):
        told = run_ranks(num_ranks, train, str(run_dir), (*COMMON, *EP2, *more))
        assert [code for code, _, _ in told] == [0] * num_ranks, told
    assert compare_metrics(four / "metrics.jsonl", one / "metrics.jsonl").equal
    loads = [step.max_loads for step in read_metrics(four / "metrics.jsonl")]
    assert [len(of_step) for of_step in loads] == [8, 8]
    assert all(1 <= load <= 4 for of_step in loads for load in of_step)

    written, again = four / "ckpt" / "step-00000002", tmp_path / "again"
    [alone] = run_ranks(1, state, str(written), ("pp.size=1",), str(again))
    both = ("pp.size=1", "parallel.ep=2", "parallel.dp=2")
    layouts = ((2, EP2, written), (4, both, again / written.name))
    for num_ranks, overrides, path in layouts:
        for found in run_ranks(num_ranks, state, str(path), overrides, None):
            assert found.keys() == alone.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, alone[name]), name
    names = [name for name in alone if "experts.down" in name]
    assert len(names) == 8 * 4, "weights, two moments and a step count"


# --- real routing ---------------------------------------------------------------------------------


def train_unbalanced(rank: int, overrides: tuple[str, ...]):
    """Two steps in which every token goes to expert 0; tokens that each rank's experts got."""
    from ppruntime.models.all_to_all import AllToAll

    received: list[list[int]] = []
    routes_of = AllToAll.routes

    def noted(*args):
        routes = routes_of(*args)
        received.append(routes.rows_per_expert)
        return routes

    AllToAll.routes = noted
    with trainer_of((*COMMON, *overrides)) as (trainer, data, _):
        for name, buffer in trainer.pipeline.buffers.items():
            if name.endswith("router.bias"):
                buffer[0] = 1e4
        received.clear()  # of the start-up
        results = [trainer.step(index, data) for index in range(2)]
        of_first = [sum(rows[:: len(rows) // 2]) for rows in received]
        return results, [sum(rows) for rows in received], of_first


@pytest.mark.parametrize(
    ("experts", "per_token", "load"),
    [(8, 1, 8.0), (40, 2, 20.0)],
    ids=["all to one expert", "twenty times the mean"],
)
def test_unbalanced_runs_finish_lose_no_token_and_say_how_bad_it_is(
    experts, per_token, load, run_ranks
):
    experts_of = (f"model.num_experts={experts}", f"model.experts_per_token={per_token}")
    sizes = (*TWO_LAYERS, *experts_of)
    spread, alone = (*EP2, *sizes), ("pp.size=1", "train.num_micro_batches=4", *sizes)
    (results, rows, of_first), (_, others, _) = run_ranks(2, train_unbalanced, spread)
    [(expected, _, _)] = run_ranks(1, train_unbalanced, alone)
    tokens = 2 * 16  # of both ranks in a micro-batch
    assert len(rows) == len(others) == 2 * 2 * 2, "steps, micro-batches, layers"
    assert [a + b for a, b in zip(rows, others, strict=True)] == [tokens * per_token] * len(rows)
    assert of_first == [tokens] * len(rows)
    if per_token == 1:
        assert not any(others), "a rank without tokens got some"
    for result, other in zip(results, expected, strict=True):
        assert result.max_loads == (load,) * 2
        assert result.loss == pytest.approx(other.loss, rel=1e-5)


# --- rows on their way ----------------------------------------------------------------------------


@pytest.mark.long
def test_weight_gradients_after_the_combine_change_no_step_and_fp8_rows_change_all_a_little(
    tmp_path, run_ranks
):
    wide = (*COMMON, *TWO_LAYERS, *EP2, "model.hidden_size=128", "ac.mode=full")
    runs = {
        "plain": (),
        "after": ("moe.dispatch.weight_grads_after_combine=true",),
        "FP8": ("moe.dispatch.fp8=true", "moe.dispatch.fp8_grad=true"),
    }
    for name, more in runs.items():
        told = run_ranks(2, train, str(tmp_path / name), (*wide, *more))
        assert [code for code, _, _ in told] == [0, 0], told
    path = {name: tmp_path / name / "metrics.jsonl" for name in runs}
    assert compare_metrics(path["after"], path["plain"]).equal
    for step, other in zip(read_metrics(path["FP8"]), read_metrics(path["plain"]), strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-2)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=0.05)
        assert step.grad_norm != other.grad_norm


@pytest.mark.long
def test_stages_that_exchange_rows_by_themselves_train_as_those_that_share(tmp_path, run_ranks):
    wide = (*COMMON, "parallel.ep=2", "pp.size=1", "pp.schedule=dualpipe_v")
    runs = {"shared": (), "apart": ("pp.overlap_pairs=true",)}
    for name, more in runs.items():
        told = run_ranks(2, train, str(tmp_path / name), (*wide, *more))
        assert [code for code, _, _ in told] == [0, 0], told
        assert ("halves of a pair run one after the other" in told[0][1]) == (name == "apart")
    paths = [tmp_path / name / "metrics.jsonl" for name in runs]
    assert compare_metrics(*paths).equal


def train_by_tokens(rank: int, run_dir: str, overrides: tuple[str, ...]):
    """A run with deep_ep's dispatcher, in two parts, on the readable buffer."""
    import ppruntime.build as module
    from ppruntime.experts.exchange import ProcessExchange
    from ppruntime.models.dispatch import WireOptions
    from ppruntime.models.token_buffer import ExchangeBuffer
    from ppruntime.models.token_dispatch import TokenDispatcher
    from ppruntime.ranks import open_expert_group

    def opened(config, ranks, stages, *, timeout_seconds, gemm_sms):
        group = open_expert_group(ranks, timeout_seconds=timeout_seconds)
        buffer = ExchangeBuffer(ProcessExchange.of(group))
        return dict.fromkeys(stages, TokenDispatcher(buffer, WireOptions(), num_chunks=2))

    module.open_dispatchers = opened
    return train(rank, run_dir, overrides)


@pytest.mark.long
def test_tokens_sent_once_train_as_rows_do_and_a_recompute_changes_no_bit(tmp_path, run_ranks):
    two = (*COMMON, *TWO_LAYERS, *EP2)
    runs = {
        "rows": (train, ()),
        "tokens": (train_by_tokens, ()),
        "recomputed": (train_by_tokens, ("ac.mode=full",)),
        "all-again": (train_by_tokens, ("ac.mode=full_moe",)),
        "saved": (train_by_tokens, ("ac.mode=selective", 'ac.save=["experts"]')),
        "deferred": (train_by_tokens, ("pp.schedule=1f1b_w",)),
    }
    for name, (run, more) in runs.items():
        told = run_ranks(2, run, str(tmp_path / name), (*two, *more))
        assert [code for code, _, _ in told] == [0, 0], told
    path = {name: tmp_path / name / "metrics.jsonl" for name in runs}
    for name in ("recomputed", "all-again", "saved", "deferred"):
        assert compare_metrics(path[name], path["tokens"]).equal, name
    for step, other in zip(read_metrics(path["tokens"]), read_metrics(path["rows"]), strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        assert step.max_loads == other.max_loads


# --- faults ---------------------------------------------------------------------------------------

LIMIT_SECONDS = 14


def train_with_a_bad_peer(rank: int, run_dir: str, how: str):
    from ppruntime.experts.exchange import ProcessExchange

    begin, calls = ProcessExchange.begin, []

    def sometimes(*args):
        calls.append(1)
        if rank == 3 and len(calls) == 16:  # in the second step
            if how == "is lost":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1.2 * LIMIT_SECONDS)
        return begin(*args)

    ProcessExchange.begin = sometimes
    timeout = f"pp.timeout_seconds={LIMIT_SECONDS if how == 'is late' else 60}"
    more = (timeout, "checkpoint.interval=1", "train.steps=4", "pp.size=2")
    return train(rank, run_dir, (*COMMON, *TWO_LAYERS, *EP2, *more))


@pytest.mark.long
@pytest.mark.parametrize("how", ["is lost", "is late"])
def test_a_peer_that_is_lost_or_late_ends_all_with_its_rank_and_group(how, tmp_path, rank_outcomes):
    run_dir = tmp_path / "run"
    outcomes = rank_outcomes(4, train_with_a_bad_peer, str(run_dir), how, timeout_seconds=120)
    living = outcomes[:3]
    assert [outcome.error_text for outcome in living] == [None] * 3
    assert [outcome.value[0] for outcome in living] == [10] * 3
    told = living[0].value[2]
    group = "rank 3 of the expert group of ranks [2, 3] did not take part in exchanging"
    status = read_status(run_dir)
    assert status is not None
    assert status.last_checkpoint == "step-00000001"
    if how == "is lost":  # whichever is seen first
        assert group in told or "rank 3 is lost" in told
        assert status.culprit_rank == 3
    else:
        assert group in told
