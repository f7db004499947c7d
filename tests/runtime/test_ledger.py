"""The memory ledger: its rows, what a run measures, and what a rank that runs out is told."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from memory_knobs import BF16, SHALLOW, SIGNS
from memory_knobs import MASTERS as AWAY
from small_runs import CONFIG, SMALL, train

from ppruntime.config import Config, ConfigError, load
from ppruntime.ledger import (
    HEAD,
    SENT,
    UPDATE,
    WARM_UP,
    MeasuredMemory,
    check_text,
    ledger_text,
    predict,
)
from ppruntime.ledger_check import run_check_text
from ppruntime.memory import gradient_bytes
from ppruntime.memory_record import read_memory
from ppruntime.metrics import read_metrics
from ppruntime.models.head_bytes import head_workspace
from ppruntime.order import make_order
from ppruntime.plan import cut
from ppruntime.plan_report import boundary_of, report
from ppruntime.remedies import out_of_memory_text, remedies


def tiny(*overrides: str) -> Config:
    return load([CONFIG], [*SMALL, *overrides])


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_w", "zb_v"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_rows_are_the_plans_and_every_byte_is_in_one(schedule, mode):
    config = tiny("pp.size=2", f"pp.schedule={schedule}", f"ac.mode={mode}", "train.precision=bf16")
    for ledger, rank in zip(predict(config), report(config).ranks, strict=True):
        rows = dict(ledger.rows())
        assert rows["weights"] + rows["low-precision copies"] == rank.weight_bytes
        assert rows["masters"] + rows["optimizer"] == rank.optimizer_bytes
        assert rows["accumulators"] == rank.gradient_bytes
        assert rows["slots"] == rank.slot_bytes
        assert sum(rows.values()) == ledger.peak_bytes <= rank.total_bytes
        assert max(moment.activations for moment in ledger.moments) == rank.activation_bytes
        *ops, update = ledger.moments
        assert ops[-1].activations > 0, "the last backward reads what it frees"
        assert update.op == UPDATE
        assert ledger.through_the_step + update.total == rank.update_bytes
        assert ledger.peak in ledger.moments
    assert "activations in flight" in ledger_text(config)


def test_a_run_measures_what_stays_between_steps_and_check_puts_it_beside(tmp_path, run_ranks):
    run_dir = tmp_path / "run"
    overrides = ("train.steps=2", "train.precision=bf16", "pp.size=2", "train.seq_len=64")
    overrides += ("run.memory_timeline=true",)
    with pytest.raises(ConfigError, match="holds no run"):
        run_check_text(run_dir)
    assert [code for code, *_ in run_ranks(2, train, str(run_dir), overrides)] == [0, 0]
    first, step = read_metrics(run_dir / "metrics.jsonl")
    over_the_step = read_memory(run_dir / "memory.json")
    assert over_the_step.step == 2
    for ledger, found in zip(predict(tiny(*overrides)), step.memory, strict=True):
        assert found.resting_parameters == ledger.resting_parameters
        assert found.optimizer == ledger.optimizer
        assert first.memory[ledger.rank].peak_bytes is None, "a CPU counts where it is told to"
        ops = over_the_step.ranks[ledger.rank].ops
        assert found.peak_bytes == max(op.peak_bytes for op in ops)
        assert [op.op for op in ops if op.predicted_bytes] == [m.op for m in ledger.moments]
        for op in ops:
            if op.predicted_bytes and "F" in op.op:  # a backward has gradients under way besides
                assert op.predicted_bytes == pytest.approx(op.live_bytes, rel=0.01), op
            elif op.predicted_bytes:
                assert 0.9 * op.peak_bytes < op.predicted_bytes < 1.15 * op.peak_bytes, op
    assert (run_dir / "memory.svg").exists()
    text = run_check_text(run_dir)
    assert "step 2" in text
    assert text.count("+0.00%") == 4
    assert "rank 1: predicted peak" in text


@pytest.mark.parametrize("kernel", ["reference", "chunked", "triton"])
def test_the_heads_loss_has_a_row_of_its_own_on_the_last_rank_alone(kernel):
    config = tiny("pp.size=2", "train.precision=bf16", f"kernels.head={kernel}", "ac.mode=full")
    dims, tokens = config.model.dims, config.train.micro_batch_size * config.train.seq_len
    said = head_workspace(dims, tokens, "bfloat16", kernel)
    first, last = predict(config)
    assert {moment.head for moment in first.moments} == {0}
    in_op = {moment.op[:2]: moment.head for moment in last.moments if not moment.recompute}
    assert in_op["1F"] == said.forward >= 4 * tokens * dims.vocab_size
    assert in_op["up"] == 0, "the update is behind it"
    assert dict(last.rows())[HEAD] == last.peak.head
    most = max(moment.head + moment.recompute for moment in last.moments)
    assert most == max(said.most, report(config).ranks[1].recompute_bytes)
    assert HEAD in ledger_text(config)


MANY_EXPERTS = (
    *SHALLOW,
    "model.num_experts=32",
    "model.expert_width=64",
    "ac.mode=full",
    "train.precision=bf16",
    "train.num_micro_batches=4",
)
"""Two layers whose weights take far more than the activations of the few tokens."""


@dataclass(frozen=True)
class Peaks:
    """One rank's, in bytes: measured, and as the ledger has it."""

    op: str
    measured: int
    predicted: int
    update: tuple[int, int]
    """Measured and predicted, behind the last op."""
    warm_up: tuple[int, int]
    """Of all its stages, one after the other as a start on a GPU runs them."""


def peaks_of(rank: int, cases: dict[str, tuple[str, ...]]) -> dict[str, Peaks]:
    """Of a rank's second step, and of a warm-up before the first one."""
    from ppruntime.build import build_pipeline, warm_up_stage
    from ppruntime.connect import make_outline
    from ppruntime.data.batches import open_data
    from ppruntime.memory_meter import MemoryMeter
    from ppruntime.memory_watch import TensorCounter
    from ppruntime.ranks import Layout, join, leave
    from ppruntime.schedules.counts import backward_kinds
    from ppruntime.trainer import Trainer

    found, joined = {}, None
    for number, (name, overrides) in enumerate(cases.items()):
        config = tiny(*overrides)
        layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
        if joined is None:
            joined = join(layout, use_cuda=False, timeout_seconds=60)
        ranks = replace(joined, store_prefix=f"{number} ")
        pipeline = build_pipeline(config, ranks)
        outline, shape = make_outline(config), (config.train.micro_batch_size, config.train.seq_len)
        with TensorCounter([*pipeline.params.values(), *pipeline.buffers.values()]) as counter:
            counter.begin()
            for index, stage in pipeline.stages.items():
                kinds = backward_kinds(outline.order.computations, index)
                received = outline.received(index)
                batch, seq_len = shape
                warm_up_stage(stage, received, ranks, backwards=kinds, batch=batch, seq_len=seq_len)
            warm_up = counter.read()[1]
        trainer, data = Trainer(config, ranks, pipeline), open_data(config)
        trainer.step(0, data)
        watch = MemoryMeter(trainer, rank=ranks.pp_rank, device=ranks.device).watch()
        with watch:
            trainer.step(1, data, watch)
        ledger, ops = predict(config)[ranks.pp_rank], {op.op: op for op in watch.ops}
        most = max(ops.values(), key=lambda op: op.peak_bytes)
        lasting, update = ledger.through_the_step, ledger.moments[-1]
        found[name] = Peaks(
            most.op,
            most.peak_bytes,
            ledger.peak_bytes,
            (ops[UPDATE].peak_bytes, lasting + update.total),
            (warm_up, max(lasting + moment.total for moment in (update, *ledger.start))),
        )
        torch.distributed.barrier()
        pipeline.transport.close()
    leave()
    return found


ONE = ("pp.size=1", "pp.layers_per_stage=default", *MANY_EXPERTS)


@pytest.mark.parametrize(
    ("num_ranks", "base"),
    [
        (1, ONE),
        (2, (*MANY_EXPERTS, "pp.size=2")),
        pytest.param(2, (*ONE, "parallel.dp=2"), marks=pytest.mark.long),
        pytest.param(2, (*ONE, "parallel.ep=2"), marks=pytest.mark.long),
    ],
    ids=["one", "pp2", "dp2", "ep2"],
)
def test_the_update_is_planned_where_it_takes_more_than_any_op(num_ranks, base, run_ranks):
    cases = {
        "masters": (*base, *SIGNS, *AWAY),
        "in backward": (*base, *SIGNS, *AWAY, "optim.apply_in_backward=true"),
        "muon": (*base, *AWAY, "optim.type=muon"),
    }
    for found in run_ranks(num_ranks, peaks_of, cases):
        for name, peaks in found.items():
            assert peaks.update[1] == pytest.approx(peaks.update[0], rel=0.01), name
            assert peaks.predicted == pytest.approx(peaks.measured, rel=0.03), (name, peaks)
            assert peaks.warm_up[0] < 1.03 * peaks.predicted, (name, peaks)
        if "parallel.ep=2" not in base:  # half of the experts: too few to be most
            assert found["masters"].op == found["muon"].op == UPDATE
            assert found["in backward"].measured < found["masters"].measured


def test_masters_that_are_there_in_a_first_backward_lie_beside_few_of_its_sums(run_ranks):
    """A rank with one micro-batch in flight has its masters until its second forward."""
    base = ("pp.size=2", "train.precision=bf16", "train.num_micro_batches=4", *SIGNS, *AWAY)
    for found in run_ranks(2, peaks_of, {"kept": base, "again": (*base, "ac.mode=full")}):
        for name, peaks in found.items():
            assert peaks.predicted == pytest.approx(peaks.measured, rel=0.03), (name, peaks)


WIDE = ("pp.size=2", "train.seq_len=64", "train.num_micro_batches=5")
DUALPIPE_V = (*WIDE, "pp.schedule=dualpipe_v")
LAYOUTS = {
    "1f1b": (*WIDE, *BF16),
    "interleaved": (*WIDE, *BF16, "pp.schedule=interleaved_1f1b"),
    "V": (*DUALPIPE_V, *BF16),
    "V in fp32": DUALPIPE_V,
    "V, pairs": (*DUALPIPE_V, *BF16, "pp.overlap_pairs=true"),
    "V, uneven": (*DUALPIPE_V, *BF16, "pp.layers_per_stage=[2.5, 1.5, 2.5, 1.5]"),
    "V, long": (*DUALPIPE_V, *BF16, "train.seq_len=128"),
    "V, two sequences": (*DUALPIPE_V, *BF16, "train.seq_len=32", "train.micro_batch_size=2"),
    "V, recomputed": (*DUALPIPE_V, *BF16, "ac.mode=full"),
    "V of V4": (*DUALPIPE_V, *BF16, "model.name=tiny-v4"),
    "zb_v": (*WIDE, *BF16, "pp.schedule=zb_v"),
    "zb_v, recomputed": (*WIDE, *BF16, "pp.schedule=zb_v", "ac.mode=full"),
    "zb_v, saved": (
        *(*WIDE, *BF16, "pp.schedule=zb_v", "ac.mode=selective"),
        'ac.save=["projections"]',
    ),
    "v_half": (*WIDE, *BF16, "pp.schedule=v_half"),
    "v_min": (*WIDE, *BF16, "pp.schedule=v_min"),
    "zb_h2 of V4, all again": (
        *(*WIDE, *BF16, "pp.schedule=zb_h2", "ac.mode=full_moe"),
        "model.name=tiny-v4",
    ),
}


QUICK = ("V", "V, pairs", "zb_v, recomputed", "v_min")


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in LAYOUTS if name not in QUICK], marks=pytest.mark.long)],
    ids=len,
)
def test_peaks_are_planned_within_two_percent_where_activations_are_most(names, run_ranks):
    """They lie in a backward: beside all activations it has the workspace of sparse attention's.
    Split ones hold what put-off weight gradients read."""
    cases = {name: LAYOUTS[name] for name in names}
    for found in run_ranks(2, peaks_of, cases, timeout_seconds=300):
        for name, peaks in found.items():
            assert peaks.op[1] in "BI", name
            assert peaks.predicted == pytest.approx(peaks.measured, rel=0.02), (name, peaks)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_w", "dualpipe_v", "interleaved_1f1b"])
def test_a_warm_up_counts_as_a_step_does_and_no_config_for_a_cpu_has_one(schedule):
    base = ("pp.size=2", f"pp.schedule={schedule}", *AWAY, *BF16)
    config, on_cpu = tiny(*base), tiny(*base, "run.device=cpu")
    ledgers = zip(predict(config), predict(on_cpu), report(config).ranks, strict=True)
    for ledger, without, rank in ledgers:
        assert [moment.op for moment in ledger.start] == [WARM_UP] * len(rank.stages)
        assert without == replace(ledger, start=())
        assert ledger.peak.op != WARM_UP, "a step has all that a warm-up has, and slots"
        for moment in ledger.start:
            alone = replace(ledger, moments=(), start=(moment,))
            assert alone.peak is moment
            assert sum(num_bytes for _, num_bytes in alone.rows()) == alone.peak_bytes
            rows = dict(alone.rows())
            assert rows["masters"] == ledger.masters > 0, "none has left"
            assert rows["optimizer"] == rows["slots"] == 0, "made after it"
            assert min(rows.values()) >= 0


def test_slack_stands_apart_from_live_bytes():
    config = tiny("pp.size=1", "pp.layers_per_stage=default")
    (ledger,) = predict(config)
    peak = round(ledger.peak_bytes / 1.02)
    measured = MeasuredMemory(
        0, ledger.resting_parameters, ledger.optimizer, peak, peak + 3 * 2**20
    )
    rows = check_text(config, [measured]).splitlines()
    (live,) = (row for row in rows if "peak of live tensors" in row)
    (slack,) = (row for row in rows if "allocator slack" in row)
    assert live.endswith("+2.00%")
    assert slack.split()[-1] == slack.split()[-4] == "-"
    assert "not measured" not in "".join(rows)
    unknown = MeasuredMemory(0, ledger.resting_parameters, ledger.optimizer, None, None)
    assert "not measured" in check_text(config, [unknown])


def test_remedies_fit_and_the_cheapest_comes_first():
    config = tiny("pp.size=2", "train.micro_batch_size=2")
    peak = predict(config)[0].peak_bytes
    found = remedies(config, 0, 0.95 * peak)
    assert len(found) >= 2
    for remedy in found:
        other = tiny("pp.size=2", "train.micro_batch_size=2", *remedy.change.split(" "))
        assert predict(other)[0].peak_bytes == remedy.peak_bytes <= 0.95 * peak
    costs = [remedy.cost for remedy in found]
    assert costs == sorted(costs)
    assert "no ac.mode and no offload make it fit" in out_of_memory_text(config, 0, 1000)


def test_a_remedy_for_a_list_of_one_s_own_takes_the_list_away():
    own = ("pp.size=2", "ac.mode=selective", 'ac.save=["projections", "attention"]')
    config = tiny(*own)
    changes = [r.change for r in remedies(config, 0, 0.99 * predict(config)[0].peak_bytes)]
    (full_moe,) = (change for change in changes if "ac.mode=full_moe" in change)
    assert full_moe == "ac.mode=full_moe ac.save=default"
    tiny(*own, *full_moe.split(" "))


ENOUGH_IN_FLIGHT = ("pp.size=4", "train.num_micro_batches=8", "train.precision=bf16")


def test_offload_is_among_the_remedies_and_really_fits():
    base = (*ENOUGH_IN_FLIGHT, "train.seq_len=64")
    config = tiny(*base)
    peak = predict(config)[0].peak_bytes
    found = remedies(config, 0, 0.95 * peak)
    changes = {remedy.change for remedy in found}
    assert "pp.activation_offload=true pp.offload_paced=true" in changes
    assert any(change.startswith("ac.mode=") for change in changes)
    moved = next(r for r in found if "pp.offload_paced" in r.change)
    assert moved.cost == 0
    assert "hidden at 45 GB/s unless a device does more than" in moved.text
    assert predict(tiny(*base, *moved.change.split(" ")))[0].peak_bytes == moved.peak_bytes
    # One that recomputes and one that copies, so that a person can choose.
    text = out_of_memory_text(config, 0, None)
    assert "ac.mode=" in text
    assert "offload" in text


def test_masters_help_where_they_are_most_and_two_knobs_where_one_is_not_enough():
    config = tiny(*ENOUGH_IN_FLIGHT, "ac.mode=full_moe", "train.seq_len=32")
    peak = predict(config)[0].peak_bytes
    single = remedies(config, 0, 0.995 * peak)
    assert {"pp.offload_masters=true"} <= {r.change for r in single}
    least = min(r.peak_bytes for r in single)
    pairs = remedies(config, 0, least - 1)
    assert pairs
    for remedy in pairs:
        assert len({word.split("=")[0] for word in remedy.change.split(" ")}) > 1
        other = tiny(*ENOUGH_IN_FLIGHT, "train.seq_len=32", *_set(remedy.change, "full_moe"))
        assert predict(other)[0].peak_bytes == remedy.peak_bytes < least


def _set(change: str, mode: str) -> list[str]:
    words = change.split(" ")
    return words if "ac.mode" in change else [f"ac.mode={mode}", *words]


def test_what_a_rule_refuses_is_no_remedy():
    config = tiny("pp.size=2", "train.num_micro_batches=1")  # fp32: weights are their own masters
    changes = " ".join(remedy.change for remedy in remedies(config, 0, 1e18))
    assert "ac.mode=" in changes
    assert "offload_masters" not in changes


def _runs_out(rank: int, run_dir: str) -> list[str]:
    from ppruntime.session import run
    from ppruntime.stage import Stage

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory, says the test")

    Stage.backward = fails  # type: ignore[method-assign,assignment]
    overrides = [*SMALL, f"run.dir={run_dir}", "pp.size=1", "pp.layers_per_stage=default"]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            run(load([CONFIG], overrides))
        except torch.OutOfMemoryError as error:
            return error.__notes__
    return []


def test_a_rank_that_runs_out_says_in_which_op_with_its_ledger_and_what_would_fit(
    tmp_path: Path, run_ranks
):
    (notes,) = run_ranks(1, _runs_out, str(tmp_path / "run"))
    text = "\n".join(notes)
    assert "rank 0 was in 0B0" in text
    assert "rank 0 was in step 1" in text
    assert "predicted for rank 0: weights" in text
    assert "ac.mode=" in text
    assert text.count("by FLOPs") == 2


def test_a_transport_of_gpus_holds_a_message_a_channel_where_it_was_made():
    base = ("pp.size=2", *BF16)
    config, auto = tiny(*base, "pp.transport=copy_engine"), tiny(*base)
    order = make_order(config)
    first, _ = cut(
        config.model.dims,
        order.lowered.stage_to_rank,
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )
    sent = [dict(ledger.rows())[SENT] for ledger in predict(config)]
    assert sent == [boundary_of(config, first), gradient_bytes(config, first.after)]
    assert min(sent) > 0
    for ledger, known in zip(predict(auto), predict(config), strict=True):
        assert dict(ledger.rows())[SENT] == 0
        assert known.peak_bytes - ledger.peak_bytes == known.sent
        assert known.moments[-1].total + known.sent == ledger.moments[-1].total
