"""What `bench pipeline` makes of its cases: figures of their steps, and what is asked of ratios
within one run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ppruntime.launch.bars import Bar
from ppruntime.launch.pipeline_variants import without_pairs
from ppruntime.profiling import MeasuredStep, measured_hops, planned_step, split_times
from ppruntime.schedules.ops import Kind

Case = dict[str, Any]
"""One entry of the record's `cases`."""

_NO_SMS = ("copy_engine", "put")
_LOSS_BAR, _TIMELINE_BAR, _TORCH_BAR, _TORCH_LOSS_BAR, _SLOW_BAR = 1 / 3, 1.02, 1.0, 0.5, 0.9
_PAIRS_BAR = 1.0


def cycle_seconds(step: MeasuredStep) -> float:
    """Time of one micro-batch in the middle half of a step: between the ends of stage 0's
    backwards. The step's own mean where there are fewer than four micro-batches."""
    num = step.schedule.num_micro_batches
    if num < 4:
        return step.step_ns / 1e9 / num
    ends = sorted(
        m.end for row in step.rows for m in row if m.op.stage == 0 and m.op.kind in (Kind.B, Kind.I)
    )
    first, last = num // 4, num - 1 - num // 4
    return (ends[last] - ends[first]) / (last - first) / 1e9


def figures(
    steps: Sequence[MeasuredStep], walls: Sequence[float], host: Sequence[float]
) -> dict[str, Any]:
    """What a case's steps say; times in seconds, medians over the steps."""

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values)

    hops = [measured_hops(step) for step in steps]
    spans = [step.step_ns / 1e9 for step in steps]
    planned = [planned_step(step).makespan / 1e3 for step in steps]
    fed = [planned_step(s, h).makespan / 1e3 for s, h in zip(steps, hops, strict=True)]
    splits = [split_times(step) for step in steps]
    num_ranks = len(splits[0])
    busiest = middle([max(t.compute for t in split) / 1e9 for split in splits])
    span = middle(spans)
    return {
        "step_seconds": list(walls),
        "step_seconds_median": middle(walls),
        "span_seconds_median": span,
        "cycle_seconds": middle([cycle_seconds(step) for step in steps]),
        "host_seconds": middle(host),
        "hop_ms": [middle([float(getattr(h, way)) for h in hops]) for way in _WAYS],
        "planned_over_span": middle([p / s for p, s in zip(planned, spans, strict=True)]),
        "span_over_timeline": middle([s / f for s, f in zip(spans, fed, strict=True)]),
        "busiest_compute_seconds": busiest,
        "bubble_fraction": 1 - busiest / span if span else 0.0,
        "ranks": [
            {
                part: middle([getattr(split[r], part) / 1e9 for split in splits])
                for part in ("compute", "transfer", "peer", "idle")
            }
            for r in range(num_ranks)
        ],
    }


_WAYS = ("forward", "backward")


def bars(cases: Sequence[Case]) -> list[Bar]:
    """All that the cases allow to be said, in their order."""
    found: list[Bar] = []
    groups: dict[tuple[str, str], dict[str, Case]] = {}
    for case in cases:
        if "refused" not in case:
            transport, pairs = without_pairs(case["transport"])
            groups.setdefault((_where(case), pairs), {})[transport] = case
    for (where, pairs), of in groups.items():
        found += _bars_of(f"{where}{pairs}", of)
        if pairs and (apart := groups.get((where, ""))):
            found += _overlap_bars(f"{where}{pairs}", of, apart)
    return [*found, *_digest_bars(cases)]


def _where(case: Case) -> str:
    """Its order, its number of micro-batches and how many add weight gradients in one launch."""
    fused = case.get("fused_wgrads")
    more = "" if fused is None else f", n = {fused}"
    return f"{case['order']}, M = {case['num_micro_batches']}{more}"


def _overlap_bars(where: str, of: dict[str, Case], apart: dict[str, Case]) -> Iterator[Bar]:
    """Cases whose pairs overlap over those that run their halves one after the other."""
    for name in of.keys() & apart.keys():
        for what, key in (("cycle", "cycle_seconds"), ("step", "step_seconds_median")):
            ratio = of[name][key] / apart[name][key]
            yield Bar.of(f"{where}, {name}: {what} over that of halves in turn", ratio, _PAIRS_BAR)


def _bars_of(where: str, of: dict[str, Case]) -> Iterator[Bar]:
    none = of.get("none")
    for name, case in of.items():
        if name == "torch":
            continue
        ratio = case["span_over_timeline"]
        yield Bar.of(f"{where}, {name}: step over timeline", ratio, _TIMELINE_BAR)
    lost = {
        name: case["cycle_seconds"] - none["cycle_seconds"]
        for name, case in of.items()
        if none is not None and name != "torch"
    }
    nccl = min((name for name in lost if name.split()[0] == "nccl"), key=len, default="")
    for name in _NO_SMS:
        if name in lost and lost.get(nccl, 0.0) > 0:
            what = f"{where}, {name}: of the cycle that {nccl} loses to transfers"
            yield Bar.of(what, lost[name] / lost[nccl], _LOSS_BAR)
    torchs = of.get("torch")
    for name, case in of.items():
        if torchs is None or name in ("torch", "none"):
            continue
        ours, theirs = case["step_seconds_median"], torchs["step_seconds_median"]
        yield Bar.of(f"{where}, {name}: step over torch's", ours / theirs, _TORCH_BAR)
        if none is not None and theirs > none["step_seconds_median"] and name in _NO_SMS:
            least = none["step_seconds_median"]
            what = f"{where}, {name}: exposed transfer over torch's"
            yield Bar.of(what, (ours - least) / (theirs - least), _TORCH_LOSS_BAR)
    slow = next((case for name, case in of.items() if name.endswith("CTAs")), None)
    for name in _NO_SMS:
        paced = of.get(f"{name} paced")
        if slow is not None and paced is not None:
            what = f"{where}, {name} paced: cycle over that of {slow['transport']}"
            yield Bar.of(what, paced["cycle_seconds"] / slow["cycle_seconds"], _SLOW_BAR)


def _digest_bars(cases: Sequence[Case]) -> Iterator[Bar]:
    """Cases of one M have one set of losses and gradients, whatever order, transport, number of
    micro-batches whose weight gradients are added at once, and step: no weight changes."""
    for num in sorted({case["num_micro_batches"] for case in cases}):
        for what in ("loss", "gradient"):
            digests = {
                case[key]
                for case in cases
                for key in (f"first_{what}_digest", f"{what}_digest")
                if case["num_micro_batches"] == num and case.get(key)
            }
            if digests:
                yield Bar.of(f"M = {num}: different sets of {what} bits", len(digests), 1)


def line(case: Case) -> str:
    """A case for people."""
    head = f"{case['order']:>12} {case['transport']:>30} M {case['num_micro_batches']:>3}"
    if case.get("fused_wgrads") is not None:
        head += f" n {case['fused_wgrads']}"
    if "refused" in case:
        return f"{head}  refused: {case['refused']}"
    text = f"{head}  step {case['step_seconds_median'] * 1e3:9.2f} ms"
    if "cycle_seconds" not in case:
        return text
    hops = "/".join(f"{ms:.2f}" for ms in case["hop_ms"])
    peaks = "/".join(f"{peak / 1e9:.2f}" for peak in case.get("peak_bytes", ()))
    if peaks:
        text += f"  peak {peaks} GB"
    return (
        f"{text}  cycle {case['cycle_seconds'] * 1e3:8.3f} ms  over timeline"
        f" {case['span_over_timeline']:.4f}  hops {hops} ms  bubble"
        f" {case['bubble_fraction']:.2%}  host {case['host_seconds'] * 1e3:.1f} ms"
        f"  gradients {case['gradient_digest']}"
    )
