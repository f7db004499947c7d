"""Op times of measured steps, and what is read off them: what emulations and real runs share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import TypeAlias

import msgspec
import torch

from ppruntime.clocks import OpTimes
from ppruntime.messages import gather_bytes
from ppruntime.models.carry import DIFFERENTIABLE
from ppruntime.profiling import align_clocks
from ppruntime.projection.calibration import (
    LEAST_SAMPLES,
    StagePeak,
    StageTimes,
    TransferTimes,
    median_and_p95,
)
from ppruntime.ranks import Ranks
from ppruntime.schedules.ops import parse_op
from ppruntime.transports.base import Boundary

Times: TypeAlias = list[OpTimes[int]]
"""One rank's ops of one step."""


def gather_times(times: Times, ranks: Ranks) -> list[Times]:
    """All pipeline ranks' op times, on the first one's clock, by rank. A collective."""
    offset = align_clocks(ranks.pipeline_group).ns
    mine = [OpTimes(t.op, t.start - offset, t.ready - offset, t.end - offset) for t in times]
    parts = gather_bytes(msgspec.json.encode(mine), ranks.pipeline_group)
    return [msgspec.json.decode(part, type=list[OpTimes[int]]) for part in parts]


def gather_peaks(
    ranks: Ranks, stage: int, source: str, *, outside_bytes: int = 0
) -> tuple[StagePeak, ...]:
    """What torch's allocator has counted on every pipeline rank, this one's for its `stage`, since
    its peaks were reset, and `outside_bytes` beside it. A collective; for GPUs."""
    mine = StagePeak(
        stage=stage,
        allocated_bytes=torch.cuda.max_memory_allocated() + outside_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved() + outside_bytes,
        origin="measured",
        source=source,
    )
    parts = gather_bytes(msgspec.json.encode(mine), ranks.pipeline_group)
    return tuple(msgspec.json.decode(part, type=StagePeak) for part in parts)


def stage_times(stage: int, steps: Sequence[Times], window: range, source: str) -> StageTimes:
    """A stage's row from its op times, those of the micro-batches in `window`. A whole backward
    counts half as I and half as W, which the source says."""
    seconds = _seconds_by_kind(stage, steps, window)
    forward = median_and_p95(seconds["F"])
    is_whole = False
    if seconds["I"]:
        input_grad = median_and_p95(seconds["I"])
        weight_grad = median_and_p95(seconds["W"]) if seconds["W"] else (0.0, 0.0)
    else:
        whole = median_and_p95(seconds["B"])
        input_grad = weight_grad = (whole[0] / 2, whole[1] / 2)
        source += "; whole backwards, half counted as input and half as weight gradient"
        is_whole = True
    samples = min(len(found) for found in seconds.values() if found)
    return StageTimes(
        stage=stage,
        forward_s=forward[0],
        input_grad_s=input_grad[0],
        weight_grad_s=weight_grad[0],
        forward_p95_s=forward[1],
        input_grad_p95_s=input_grad[1],
        weight_grad_p95_s=weight_grad[1],
        origin="measured",
        source=source,
        samples=samples,
        whole_backwards=is_whole,
    )


def mean_seconds(stage: int, steps: Sequence[Times], window: range) -> tuple[float, float, float]:
    """Means of a stage's F, I and W over the micro-batches in `window`; a whole backward counts
    half as I and half as W."""
    seconds = _seconds_by_kind(stage, steps, window)
    half = fmean(seconds["B"]) / 2 if seconds["B"] else 0.0
    return (
        fmean(seconds["F"]),
        fmean(seconds["I"]) if seconds["I"] else half,
        fmean(seconds["W"]) if seconds["W"] else half if not seconds["I"] else 0.0,
    )


def _seconds_by_kind(
    stage: int, steps: Sequence[Times], window: range
) -> defaultdict[str, list[float]]:
    """What each op took, waits left out, by F, B, I and W."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for times in steps:
        for t in times:
            op = parse_op(t.op)
            if op.stage == stage and op.micro_batch in window and op.kind.value in "FBIW":
                seconds[op.kind.value].append((t.end - t.ready) / 1e9)
    return seconds


def cycle_seconds(steps: Sequence[Times], window: range) -> float:
    """Mean seconds between the ends of two micro-batches' backwards in the window."""
    spans = []
    for times in steps:
        ends = [
            t.end
            for t in times
            if (op := parse_op(t.op)).kind.value in "BI" and op.micro_batch in window
        ]
        spans.append((max(ends) - min(ends)) / 1e9 / max(1, len(ends) - 1))
    return fmean(spans)


def waited_for(
    present: range,
    boundaries: Sequence[Boundary],
    all_times: Sequence[Sequence[Times]],
    transport: str,
    source: str,
) -> tuple[TransferTimes, ...]:
    """Rows of the messages between `present` stages that their receivers waited for, by bytes: from
    the send's start until it was there. `all_times`: of each step those of each rank.

    How many these are shows in the run only: under 100 of a size are an assumed row, which says so,
    and no reason to refuse the run's other rows.
    """
    by_bytes: defaultdict[int, list[float]] = defaultdict(list)
    for times in all_times:
        sent = {t.op: t.start for row in times for t in row}
        for row in times:
            for t in row:
                op = parse_op(t.op)
                forward = op.kind.value == "F"
                if op.kind.value not in "FBI":
                    continue
                source_stage = op.stage - 1 if forward else op.stage + 1
                name = f"{source_stage}{'SEND_F' if forward else 'SEND_B'}{op.micro_batch}"
                moment = sent.get(name)
                if moment is None or t.start >= moment or source_stage not in present:
                    continue
                channel_bytes = _bytes(boundaries[min(op.stage, source_stage)], forward)
                by_bytes[channel_bytes].append((t.ready - moment) / 1e9)
    rows = []
    for num_bytes, seconds in sorted(by_bytes.items()):
        median, p95 = median_and_p95(seconds)
        enough = len(seconds) >= LEAST_SAMPLES
        rows.append(
            TransferTimes(
                link=transport,
                num_bytes=num_bytes,
                seconds=median,
                p95_s=p95,
                origin="measured" if enough else "assumed",
                source=f"{source}, those that were waited for"
                + ("" if enough else f"; {len(seconds)} samples only"),
                samples=len(seconds),
            )
        )
    return tuple(rows)


def _bytes(boundary: Boundary, forward: bool) -> int:
    return sum(t.num_bytes for t in boundary.tensors if forward or t.name in DIFFERENTIABLE)
