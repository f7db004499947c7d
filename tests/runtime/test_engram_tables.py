"""Engram tables over ranks, read ahead, in host memory: against one process and plain lookups.

Bitwise wherever the same sums are taken; over ranks gradients are sums in another order, except
those of tables with one micro-batch a rank, which are the bits of one process.
"""

from __future__ import annotations

import pytest
import torch
from small_runs import CONFIG, found_in_checkpoint, train, trainer_of, whole

from ppruntime.config import load
from ppruntime.config.errors import ConfigError
from ppruntime.models.engram_hash import bucket_sizes
from ppruntime.plan_report import report

TWO_LAYERS = (
    "model.num_layers=2",
    "model.compress_ratios=[0, 1]",
    "model.kv_sources=[1]",
    "model.index_sources=[1]",
    "model.candidate_source=1",
    "model.engram_layers=[1]",
    "train.steps=2",
    "optim.min_lr=3e-3",
)
ONE = ("pp.size=1",)


def two_steps(rank: int, overrides: tuple[str, ...]):
    """Results of two steps, the first step's gradient of the table, all weights behind them."""
    import ppruntime.trainer as module

    with trainer_of((*TWO_LAYERS, *overrides)) as (trainer, data, _):
        norm, grads = module.global_norm, []

        def spied(params, *args, **options):
            (name,) = (n for n in params if n.endswith("engram.table"))
            if params[name].grad is not None:  # else it is applied already
                grads.append(whole(params[name].grad))
            return norm(params, *args, **options)

        module.global_norm = spied
        results = [trainer.step(index, data) for index in range(2)]
        module.global_norm = norm
        weights = {name: whole(param) for name, param in trainer.pipeline.params.items()}
        return results, grads[0] if grads else None, weights


def assert_same(found, expected):
    results, grad, weights = found
    others, other_grad, other_weights = expected
    assert results == others
    assert torch.equal(grad, other_grad)
    assert weights.keys() == other_weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, other_weights[name]), name


def plain_and_others(rank: int, base: tuple[str, ...], others: tuple[tuple[str, ...], ...]):
    """`two_steps` with lookups inside the forward and gradients in the table's own `.grad`, then as
    the runtime does it, with each of `others`."""
    import ppruntime.build as module

    class Nothing:
        def __init__(self, *_, **__): ...
        def begin(self, batches): ...
        def end(self): ...
        def before(self, ops):
            return {}

    built = module.place_tables, module.EngramLookups
    module.place_tables, module.EngramLookups = lambda *_: None, Nothing
    plain = two_steps(rank, base)
    module.place_tables, module.EngramLookups = built
    return plain, [two_steps(rank, (*base, *more)) for more in others]


def test_rows_by_routes_ahead_or_on_the_host_train_as_plain_lookups_do_bitwise(run_ranks):
    base = (*ONE, "train.num_micro_batches=2")
    others = ((), ("engram.lookups_ahead=1", "engram.tables=host"))
    for more in ((), ("train.precision=bf16", "ac.mode=full")):
        ((plain, found),) = run_ranks(1, plain_and_others, (*base, *more), others)
        for each in found:
            assert_same(each, plain)


# --- over ranks -----------------------------------------------------------------------------------

ALONE = (*ONE, "train.num_micro_batches=2")
SPREAD = (*ONE, "parallel.dp=2", "train.num_micro_batches=1")


@pytest.mark.parametrize("more", [(), ("ac.mode=full_moe", "ac.recompute_engram=true")], ids=str)
def test_a_table_over_two_ranks_gets_the_gradient_of_one_process_bitwise(more, run_ranks):
    ((alone, expected, _),) = run_ranks(1, two_steps, ALONE)
    for results, grad, _ in run_ranks(2, two_steps, (*SPREAD, *more)):
        assert torch.equal(grad, expected)
        for result, other in zip(results, alone, strict=True):
            assert result.loss == pytest.approx(other.loss, rel=1e-5)
        assert results[0].grad_norm == pytest.approx(alone[0].grad_norm, rel=1e-6)


@pytest.mark.long
def test_tables_that_move_in_the_backward_move_as_they_do_behind_it(run_ranks):
    signs = (*SPREAD, "optim.type=sign_sgd", "optim.clip_norm=default")
    behind = run_ranks(2, two_steps, signs)
    within = run_ranks(2, two_steps, (*signs, "optim.apply_in_backward=true"))
    for (results, _, weights), (others, _, other_weights) in zip(within, behind, strict=True):
        assert results == others
        assert all(torch.equal(weight, other_weights[n]) for n, weight in weights.items())


def shares(rank: int):
    """Bytes of the table here, whether it was ever whole, and how often ranks met in a step."""
    from ppruntime.engram_tables import engrams_of
    from ppruntime.experts.exchange import ProcessExchange

    begin, told = ProcessExchange.begin, []

    def noted(self, outgoing, incoming, what):
        told.append((what, sum(map(len, outgoing))))
        return begin(self, outgoing, incoming, what)

    ahead = (*ONE, "parallel.ep=2", "train.num_micro_batches=3", "pp.schedule=1f1b_w")
    ahead += ("engram.lookups_ahead=2",)
    with trainer_of((*TWO_LAYERS, *ahead)) as (trainer, data, _):
        ProcessExchange.begin = noted
        trainer.step(0, data)
        ProcessExchange.begin = begin
        ((_, table),) = [p for p in trainer.pipeline.params.items() if p[0].endswith("table")]
        (engram,) = engrams_of(unit for _, unit in trainer.pipeline.units)
        rows = [
            len(engram.hash(b.ids, b.positions).unique())
            for b in (data.micro_batch(0, m, rank) for m in range(3))
        ]
        return table.to_local().shape, engram.num_rows, told, rows


def test_with_experts_over_ranks_tables_are_too_and_each_row_travels_once(run_ranks):
    for rank, (shape, num_rows, told, rows) in enumerate(run_ranks(2, shares)):
        share = -(-num_rows // 2)
        assert shape[0] == (share if rank == 0 else num_rows - share)
        met = [(what, count) for what, count in told if "Engram" in what]
        assert [what for what, _ in met] == [
            "counts of Engram rows",
            "numbers of Engram rows",
            *["Engram rows"] * 3,
            *["gradients of Engram rows"] * 3,
        ], "all lookups come before the first backward"
        assert met[1][1] == sum(rows)
        assert [count for _, count in met[5:]] == rows


def saved(rank: int, path: str, overrides: tuple[str, ...], save_to: str | None):
    found = found_in_checkpoint(path, (*TWO_LAYERS, *overrides), save_to)
    return {name: tensor for name, tensor in found.items() if "engram.table" in name}


def test_tables_and_their_moments_are_saved_at_one_degree_and_loaded_at_others(tmp_path, run_ranks):
    run_dir, again = tmp_path / "run", tmp_path / "again"
    two = (*TWO_LAYERS, *SPREAD, "engram.tables=host")
    told = run_ranks(2, train, str(run_dir), two)
    assert [code for code, _, _ in told] == [0, 0], told
    written = run_dir / "ckpt" / "step-00000002"
    (alone,) = run_ranks(1, saved, str(written), ALONE, str(again))
    assert len(alone) == 4, "rows, two moments and a step count"
    three = (*ONE, "parallel.dp=3", "train.num_micro_batches=1")
    for found in run_ranks(3, saved, str(again / written.name), three, None):
        assert found.keys() == alone.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, alone[name]), name


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ("engram.lookups_ahead=8", "engram.lookups_ahead = 8 is as many forwards as a step has"),
        ("model.name=tiny-v4 engram.tables=host", "has no effect: the model has no Engram"),
        ("model.name=tiny-v4 engram.lookups_ahead=1", "has no effect: the model has no Engram"),
        ("model.name=tiny-v4 kernels.engram=triton", "has no effect: the model has no Engram"),
        ("run.device=cpu kernels.engram=triton", 'does not run with run.device = "cpu"'),
        ("kernels.engram=library", "kernels.engram"),
    ],
)
def test_what_has_no_effect_or_cannot_run_is_refused(overrides, text):
    with pytest.raises(ConfigError, match=text):
        load([CONFIG], overrides.split())


def test_what_tables_take_stands_in_the_plan_where_they_lie():
    """Rows, gradients and moments leave the device; the row numbers of the step stay."""
    here, away = (
        report(load([CONFIG], ["parallel.dp=2", f"engram.tables={where}"]))
        for where in ("device", "host")
    )
    dims, fp32 = load([CONFIG], []).model.dims, 4
    for mine, other in zip(here.stages, away.stages, strict=True):
        layers = [i for i, n in enumerate(dims.engram_layers) if f"layers.{n}.attn" in mine.units]
        rows = sum(-(-sum(bucket_sizes(dims)[i]) // 2) for i in layers)
        table = fp32 * rows * dims.engram_head_dim
        assert mine.total_bytes - other.total_bytes == 4 * table
        assert other.host_bytes - mine.host_bytes == 4 * table
    assert sum(stage.host_bytes for stage in away.stages)
    ahead = report(load([CONFIG], ["engram.lookups_ahead=2"])).stages
    once = report(load([CONFIG], [])).stages
    tokens, columns = 2 * 64, 3 * dims.engram_heads
    more = {a.slot_bytes - b.slot_bytes for a, b in zip(ahead, once, strict=True)}
    assert more == {0, 2 * tokens * columns * dims.engram_head_dim * fp32}
