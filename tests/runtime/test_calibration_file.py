"""Calibration files: what two runs' times give together, and weights on which none is timed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from ppruntime.config import load
from ppruntime.projection.calibrate import refuse_zero_weights
from ppruntime.projection.calibration import UnitTimes
from ppruntime.projection.calibration_file import (
    calibration_of,
    merged,
    slowdown_row,
    write_calibration,
)
from ppruntime.projection.projector import ProjectionError
from ppruntime.ranks import Layout, join, leave

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny.toml"


def unit_times(unit, seconds, **changes):
    given = {
        "unit": unit,
        "ac_mode": "none",
        "forward_s": seconds,
        "input_grad_s": seconds,
        "weight_grad_s": seconds,
        "origin": "measured",
        "source": "a clock",
        "samples": 100,
    }
    return UnitTimes(**(given | changes))


def calibrated(transport, units=(), slowdowns=()):
    config = load([TINY], ["train.seq_len=8"])
    rows = {"units": units, "slowdowns": slowdowns}
    return calibration_of(config, few_samples=False, transport=transport, **rows)


def test_what_a_transport_does_to_compute_is_the_difference_of_two_files(tmp_path):
    idle = calibrated("idle", [unit_times("embed", 1.0), unit_times("head", 3.0)])
    beside = calibrated("put", [unit_times("head", 3.3), unit_times("moe.routed", 9.0)])
    row = slowdown_row(idle, beside)
    assert (row.transport, row.origin, row.samples) == ("put", "measured", 100)
    assert row.both_ways == row.one_way == pytest.approx(0.1)
    again = slowdown_row(idle, calibrated("put", [unit_times("head", 2.9)]))
    assert again.both_ways == 0, "compute gets no faster beside a transfer"
    other = msgspec.structs.replace(row, transport="nccl")
    path = tmp_path / "idle.json"
    for new in (idle, *(calibrated("idle", slowdowns=[each]) for each in (row, other, again))):
        write_calibration(merged(path, new), path)
    known = merged(path, calibrated("idle"))
    assert known.slowdowns == (other, again)
    assert len(known.units) == 2


def test_a_file_names_every_command_that_gave_rows(tmp_path):
    path = tmp_path / "known.json"
    for command, unit in (("one", "embed"), ("two", "head"), ("one", "moe.routed")):
        new = calibrated("idle", [unit_times(unit, 1.0)])
        write_calibration(merged(path, msgspec.structs.replace(new, command=command)), path)
    assert merged(path, msgspec.structs.replace(new, command="two")).command == "one; two"


def test_a_file_takes_no_rows_of_other_sizes_or_another_precision(tmp_path):
    path = tmp_path / "c.json"
    write_calibration(calibrated("idle", [unit_times("head", 1.0)]), path)
    for override, complaint in (
        ("model.num_experts=16", "is of tiny as it is, this run of tiny with model.num_experts"),
        ("train.precision=bf16", "is of precision fp32, this run of bf16; write to another file"),
    ):
        config = load([TINY], ["train.seq_len=8", override])
        with pytest.raises(ProjectionError, match=complaint):
            merged(path, calibration_of(config, few_samples=False, transport="idle"))


@pytest.mark.parametrize(
    ("idle", "beside", "complaint"),
    [
        ({"device": "H200"}, {}, "is of device H200, the one beside them of"),
        ({}, {"seq_len": 9}, "is of seq_len 8, the one beside them of 9"),
        ({}, {"sizes": {"num_experts": "8"}}, "is of sizes {}, the one beside them of"),
        ({"transport": "nccl"}, {}, "timed with nccl and with put in flight"),
        ({}, {"units": ()}, "no unit and ac.mode in common"),
    ],
)
def test_files_that_do_not_go_together_say_so(idle, beside, complaint):
    one = msgspec.structs.replace(calibrated("idle", [unit_times("head", 1.0)]), **idle)
    other = msgspec.structs.replace(calibrated("put", [unit_times("head", 1.0)]), **beside)
    with pytest.raises(ProjectionError, match=complaint):
        slowdown_row(one, other)


class Units(torch.nn.Module):
    """A matrix of two rows, the second of which lies on the second data rank, and a gain of 1."""

    def __init__(self, rows, mesh):
        super().__init__()
        matrix = torch.tensor(rows)[:, None].expand(2, 3).contiguous()
        self.weight = torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)]))
        self.gain = torch.nn.Parameter(torch.ones(3))


def _refusals(rank, pp, dp, rows_of_stages):
    ranks = join(Layout(pp, dp, 1), use_cuda=False, timeout_seconds=60)
    stage = SimpleNamespace(units=Units(rows_of_stages[ranks.pp_rank], ranks.data_mesh))
    try:
        refuse_zero_weights(stage, f"stage {ranks.pp_rank}", ranks)
    except ProjectionError as error:
        return str(error)
    finally:
        leave()


@pytest.mark.parametrize(
    ("sizes", "rows", "refused"),
    [
        ((1, 1), [[0.0, 1.0]], None),
        ((1, 1), [[0.0, 0.0]], "stage 0"),
        ((1, 2), [[0.0, 1.0]], None),
        ((1, 2), [[0.0, 0.0]], "stage 0"),
        ((2, 1), [[1.0, 1.0], [0.0, 0.0]], "stage 1"),
    ],
)
def test_zero_weights_are_refused_on_all_ranks_alike_and_zero_shards_are_not(
    sizes, rows, refused, run_ranks
):
    pp, dp = sizes
    told = run_ranks(pp * dp, _refusals, pp, dp, rows)
    assert len(set(told)) == 1
    assert told[0] is None if refused is None else f"weights of {refused} are zeros" in told[0]
