"""The fused MoE layer in a run: where it is refused, and what a plan says of its memory."""

from dataclasses import replace

import torch
from small_runs import CONFIG, trainer_of

from ppruntime.config import load
from ppruntime.experts.arena_bytes import arena_bytes, arena_shape
from ppruntime.experts.dispatch import unavailable_reason
from ppruntime.ledger import predict
from ppruntime.models.mega_moe_rules import MeetingError, PoolOverflow
from ppruntime.plan_report import report
from ppruntime.reporting import exit_code
from ppruntime.run_dir import ExitCode

FUSED = (
    "pp.size=2",
    "model.name=v41-flash",
    "parallel.ep=8",
    "train.precision=bf16",
    "moe.dispatch.type=mega_moe",
)

SHARED = "pp.pair_gemm_sms=[66, 66]"


def config_of(*overrides):
    return load([CONFIG], [*FUSED, *overrides])


def test_a_rank_without_a_gpu_is_told_what_runs_there():
    reason = unavailable_reason(config_of(), torch.device("cpu"))
    assert reason == (
        'moe.dispatch.type = "mega_moe": ranks read and write each other\'s GPU memory, and this '
        'rank runs on cpu; use "torch", which runs everywhere'
    )


def test_plan_and_ledger_count_one_arena_a_rank():
    fused = config_of("train.seq_len=8192")
    plain = load([CONFIG], [*FUSED[:-1], "train.seq_len=8192"])
    size = arena_bytes(fused)
    tokens = fused.train.micro_batch_size * 8192
    assert size == arena_shape(fused).num_bytes > 2 * 7 * tokens * 5120
    assert arena_bytes(plain) == 0
    for one, other in zip(report(fused).ranks, report(plain).ranks, strict=True):
        assert one.slot_bytes - other.slot_bytes == size
        # Its experts are in FP8 and keep less.
        kept = one.activation_bytes - other.activation_bytes
        assert one.total_bytes - other.total_bytes == size + kept
    for one, other in zip(predict(fused), predict(plain), strict=True):
        assert one.slots - other.slots == size


def test_where_pairs_overlap_each_stage_of_a_rank_has_an_arena():
    order = ("pp.schedule=dualpipe_v", "train.seq_len=8192")
    one, each = config_of(*order), config_of(*order, "pp.overlap_pairs=true", SHARED)
    assert arena_bytes(each) == 2 * arena_bytes(one)
    for ledger, other in zip(predict(each), predict(one), strict=True):
        assert ledger.slots - other.slots == arena_bytes(one)


def test_a_missed_meeting_and_an_overflow_are_told_without_a_traceback():
    assert exit_code(MeetingError("late")) is ExitCode.RANK_DIED
    assert exit_code(PoolOverflow("full")) is ExitCode.OUT_OF_MEMORY


class Late:
    """A dispatcher whose device has given up a wait."""

    outside_bytes = 0

    def check(self):
        raise MeetingError("rank 0 waited too long for rank 1")


def what_a_late_peer_ends(rank: int):
    """What uses numbers of a forward in which a wait was given up."""
    ended = []
    with trainer_of(("pp.size=1",)) as (trainer, data, _):
        trainer.pipeline = replace(trainer.pipeline, dispatchers=(Late(),))
        for name, run in (
            ("step", lambda: trainer.step(0, data)),
            ("evaluation", lambda: trainer.evaluate(data, 1)),
        ):
            try:
                run()
            except MeetingError:
                ended.append(name)
    return ended


def test_neither_a_step_nor_an_evaluation_uses_what_came_of_a_missed_meeting(run_ranks):
    """The last evaluation of a run has no forward behind it that would tell."""
    assert run_ranks(1, what_a_late_peer_ends) == [["step", "evaluation"]]
