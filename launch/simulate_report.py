"""What `ppruntime simulate` prints: sentence, waterfall, time lost by cause, critical path, memory.

Every output has the GPU count, the tokens per step and the share that was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ppruntime.projection.pipeline import Parts
from ppruntime.projection.projector import Job, Number, Origin
from ppruntime.projection.simulate import CAUSES, Simulation, Surroundings
from ppruntime.projection.step_memory import SOURCE, WITHOUT
from ppruntime.schedules.ops import COMPUTE
from ppruntime.text_table import short, short_bytes, text_table


@dataclass(frozen=True, slots=True)
class Report:
    """All that text, JSON and page show."""

    job: Job
    inputs: Mapping[str, Number]
    parts: Parts
    around: Surroundings
    simulation: Simulation
    goodput: Mapping[str, Number]
    shares: Mapping[Origin, float]
    """Of the step, by origin of the times on its critical path; they add up to 1."""
    interval_s: tuple[float, float]
    """The step's shortest and longest."""
    facts: tuple[str, ...]
    """What the calibration is of, what the interval means."""

    @classmethod
    def of(
        cls,
        job: Job,
        inputs: Mapping[str, Number],
        parts: Parts,
        around: Surroundings,
        simulation: Simulation,
        goodput: Mapping[str, Number],
        interval_s: tuple[float, float],
        facts: tuple[str, ...],
    ) -> Report:
        shares = _shares(parts, around, simulation)
        return cls(job, inputs, parts, around, simulation, goodput, shares, interval_s, facts)

    @property
    def headline(self) -> str:
        """The sentence that nothing is shown without."""
        job, pace = self.job, self.simulation.pace
        schedule = self.parts.schedule
        return (
            f"{pace.days:,.1f} days for {short(job.total_tokens)} tokens on {job.num_gpus:,} GPUs "
            f"at {100 * pace.mfu:.2f} % MFU: steps of {pace.step_s:#.4g} s with "
            f"{short(job.global_batch_tokens)} tokens each ({schedule.name}, {schedule.num_ranks} "
            f"ranks x {schedule.num_micro_batches} micro-batches)"
        )

    @property
    def origins(self) -> str:
        return "of the step, " + ", ".join(
            f"{100 * share:.2f} % is {origin}" for origin, share in self.shares.items()
        )

    @property
    def interval(self) -> str:
        low, high = (self.job.at_step_s(step_s) for step_s in self.interval_s)
        return (
            f"interval: {low.days:,.1f} to {high.days:,.1f} days, {100 * high.mfu:.2f} to "
            f"{100 * low.mfu:.2f} % MFU, steps of {low.step_s:#.4g} to {high.step_s:#.4g} s"
        )

    @property
    def bubble_share(self) -> float:
        """Of the step: what the busiest rank waits in it."""
        step = self.simulation.step
        lost = step.lost[step.busiest]
        idle = sum(lost) - lost.noise - lost.interference
        return idle / self.simulation.pace.step_s

    @property
    def bubble(self) -> str:
        """`bubble_share` in words."""
        rank = self.simulation.step.busiest
        return (
            f"bubble: the busiest rank, {rank}, waits {100 * self.bubble_share:.2f} % of the step"
        )

    @property
    def conditions(self) -> list[str]:
        """What was assumed around the pipeline."""
        around, noise = self.around, self.around.noise
        slows = around.interference
        lines = [
            f"transfers slow compute by {100 * slows.one_way:.3g} % one way and "
            f"{100 * slows.both_ways:.3g} % both ways, {100 * slows.blocking:.3g} % stands still "
            f"({around.interference_origin}: {around.interference_source}); a rank's messages over "
            "one link leave one after another",
            f"jitter {100 * noise.jitter:.3g} %, stragglers {100 * noise.rank_spread:.3g} % in "
            f"groups of {noise.group}, stalls {100 * noise.stall_probability:.3g} % of ops x "
            f"{noise.stall:g} s, seed {noise.seed}, "
            f"{len(self.simulation.replica_s)} pipelines drawn",
        ]
        if around.reduce_s or around.gather_s:
            lines.append(
                f"data ranks: reduction {max(around.reduce_s, default=0):.3g} s of which "
                f"{self.simulation.step.exposed_reduce:.3g} s is exposed, gather "
                f"{max(around.gather_s, default=0):.3g} s ({around.data_origin}: "
                f"{around.data_source})"
            )
        else:
            lines.append(
                "data ranks: nothing said of their collectives beside --per-step-s, so no others "
                "are counted"
            )
        if around.ledgers:
            lines.append(f"bytes are modelled: {SOURCE}; without {WITHOUT}")
        return [*lines, *self.facts]


def json_text(report: Report) -> str:
    """One object. Times in seconds, shares 0 to 1, `mfu` in percent, `memory` per rank as pairs of
    a time and the bytes held from then on."""
    step, pace, job = report.simulation.step, report.simulation.pace, report.job
    low, high = (job.at_step_s(step_s) for step_s in report.interval_s)
    found: dict[str, object] = {
        "days": pace.days,
        "step_s": pace.step_s,
        "mfu": 100 * pace.mfu,
        "gpus": job.num_gpus,
        "global_batch_tokens": job.global_batch_tokens,
        "interval": {
            "days": [low.days, high.days],
            "step_s": [low.step_s, high.step_s],
            "mfu": [100 * high.mfu, 100 * low.mfu],
        },
        "bubble_share": report.bubble_share,
        "shares": {str(origin): share for origin, share in report.shares.items()},
        "order": report.parts.schedule.name,
        "num_micro_batches": report.parts.schedule.num_micro_batches,
        "conditions": report.conditions,
        "waterfall": [
            {"name": r.name, "step_s": r.step_s, "mfu": 100 * r.mfu}
            for r in report.simulation.rungs
        ],
        "ranks": [
            {
                "rank": rank,
                "work_s": work,
                **{f"{c}_s": v for c, v in zip(CAUSES, lost, strict=True)},
            }
            for rank, (work, lost) in enumerate(zip(step.work, step.lost, strict=True))
        ],
        "critical_path_s": report.simulation.path_s,
        "critical_path_compute_by_stage_s": list(report.simulation.path_by_stage_s),
        "critical_path": [
            {
                "op": str(leg.op),
                "rank": leg.rank,
                "start_s": leg.start,
                "finish_s": leg.finish,
                "cause": leg.cause,
            }
            for leg in step.critical_path
        ],
        "replica_step_s": list(report.simulation.replica_s),
        "exposed_reduce_s": step.exposed_reduce,
        "peak_bytes": list(report.simulation.peak_bytes) if report.around.ledgers else None,
        "memory": [[list(point) for point in points] for points in report.simulation.memory]
        if report.around.ledgers
        else None,
        "goodput": {name: number.value for name, number in report.goodput.items()},
        "inputs": {
            name: {"value": n.value, "unit": n.unit, "origin": str(n.origin), "source": n.source}
            for name, n in report.inputs.items()
        },
    }
    return json.dumps(found, indent=2)


def text(report: Report) -> str:
    """The report for a terminal."""
    step, simulation = report.simulation.step, report.simulation
    lines = [report.headline, report.origins, report.interval, *report.conditions]
    if "goodput_days" in report.goodput:
        lines.append(
            f"with failures: {report.goodput['goodput_days'].value:,.1f} days, "
            f"{report.goodput['goodput'].value:.2f} % of the time is useful"
        )
    rows = [(r.name, f"{r.step_s:#.4g}", f"{100 * r.mfu:.2f}") for r in simulation.rungs]
    lines += ["", *text_table(("one thing after another", "step s", "MFU %"), rows, left=_FIRST)]
    nothing = 1e-9 * step.makespan  # of times that are differences, rounding is left over
    ranks: list[tuple[str, ...]] = [
        (str(rank), f"{work:#.4g}", *(f"{v:#.4g}" if abs(v) > nothing else "0" for v in lost))
        for rank, (work, lost) in enumerate(zip(step.work, step.lost, strict=True))
    ]
    headings: tuple[str, ...] = ("rank", "work", *CAUSES)
    if report.around.ledgers:
        headings += ("peak",)
        ranks = [(*r, short_bytes(b)) for r, b in zip(ranks, simulation.peak_bytes, strict=True)]
    lines += [
        "",
        report.bubble,
        "",
        "seconds per rank, pipeline alone",
        *text_table(headings, ranks),
    ]
    total = sum(simulation.path_s.values()) or 1.0
    parts = ", ".join(
        f"{cause} {100 * seconds / total:.1f} %" for cause, seconds in simulation.path_s.items()
    )
    by_stage = simulation.path_by_stage_s
    most = sorted(range(len(by_stage)), key=lambda s: -by_stage[s])[:3]
    stages = ", ".join(f"stage {s} {100 * by_stage[s] / total:.1f} %" for s in most)
    lines += ["", f"critical path, {total:#.4g} s: {parts}; compute most on {stages}"]
    return "\n".join(lines)


_FIRST = "one thing after another"


def _shares(parts: Parts, around: Surroundings, simulation: Simulation) -> dict[Origin, float]:
    """By origin of the times on the critical path. What interference and noise add to an op is of
    their origin."""
    step = simulation.step
    seconds = dict.fromkeys(Origin, 0.0)
    for leg in step.critical_path:
        took = leg.finish - leg.start
        if leg.op.kind not in COMPUTE:
            hop = leg.op.stage if leg.op.kind.value == "SEND_F" else leg.op.stage - 1
            is_hop = leg.cause == "transfer"
            seconds[parts.hops[hop].origin if is_hop else Origin.ASSUMED] += took
            continue
        stage = parts.stages[leg.op.stage]
        cost = stage.seconds(leg.op.kind)
        for piece in stage.pieces:
            seconds[piece.origin] += min(took, cost) * (
                piece.seconds(leg.op.kind) / cost if cost else 0.0
            )
        if took > cost:
            seconds[around.interference_origin if not _noisy(around) else Origin.ASSUMED] += (
                took - cost
            )
    for once in parts.per_step:
        seconds[Origin(once.origin)] += once.seconds
    seconds[around.data_origin] += step.exposed_reduce + max(around.gather_s, default=0.0)
    covered = sum(seconds.values())
    seconds[Origin.MODELLED] += max(0.0, step.seconds - covered)
    total = sum(seconds.values()) or 1.0
    return {origin: time / total for origin, time in seconds.items()}


def _noisy(around: Surroundings) -> bool:
    return not around.noise.is_none
