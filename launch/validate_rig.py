"""Rungs V1 and V2 of the validation: sleeping stages in processes, predicted and then run.

V1 predicts steps of other orders and another number of micro-batches from op times that one short
step gave. V2 predicts the whole pipeline's step from two emulations of a half each, in which the
other half is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from ppruntime.launch.host_ranks import run_on_ranks
from ppruntime.schedules import make
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import Schedule
from ppruntime.schedules.timeline import simulate
from ppruntime.validate import Ledger, Verdict

if TYPE_CHECKING:  # the ranks load torch
    from ppruntime.sleep_rig import RigStep

STEP_LIMIT, EMULATION_LIMIT = 0.03, 0.05
_LIMIT_SECONDS = 120.0
_FACTORS = (1.0, 1.3, 1.1, 1.2)
"""On the op times of ranks, in turn."""


@dataclass(frozen=True, slots=True)
class Rig:
    """How large the rungs are."""

    op_ms: float = 25.0
    """F and I of the fastest rank; W takes four fifths."""
    latency_ms: float = 8.0
    calibration_micro_batches: int = 8
    micro_batches: int = 24
    steps: int = 3
    orders: tuple[str, ...] = ("1f1b", "async_1f1b", "1f1b_w", "zb_h1")

    def costs(self, num_ranks: int) -> Costs:
        ranks = [self.op_ms / 1e3 * _FACTORS[r % len(_FACTORS)] for r in range(num_ranks)]
        return Costs(tuple(ranks), tuple(ranks), tuple(0.8 * seconds for seconds in ranks))


def real_pipelines(rig: Rig, num_ranks: int, ledger: Ledger) -> Iterator[Verdict]:
    """V1 on so many ranks. What counts is the prediction from mean op times: a sleep never ends
    early, so medians leave out what late ones add to a step. That from medians is for the
    record."""
    calibration = make("1f1b_w", num_ranks, rig.calibration_micro_batches)
    runs = _run(rig, [calibration], rig.steps)[0]
    schedules = [make(order, num_ranks, rig.micro_batches) for order in rig.orders]
    predicted: list[dict[str, float]] = [{} for _ in schedules]
    for what, average in (("step s", fmean), ("step s by median op times", median)):
        costs, hop = _measured(calibration, runs, average)
        for values, schedule in zip(predicted, schedules, strict=True):
            values[what] = simulate(schedule, costs, Hops.both(hop)).makespan
    cases = [f"{s.name}, {num_ranks} ranks, M {s.num_micro_batches}" for s in schedules]
    rests_on = (
        f"op times and median hop of {rig.steps} steps of {calibration.name} with M "
        f"{rig.calibration_micro_batches}"
    )
    digests = [
        ledger.predict("v1", case, values, rests_on)
        for case, values in zip(cases, predicted, strict=True)
    ]
    steps = _run(rig, schedules, rig.steps)
    for case, values, digest, run in zip(cases, predicted, digests, steps, strict=True):
        for what, step_s in values.items():
            limit = STEP_LIMIT if what == "step s" else None
            yield Verdict("v1", case, what, step_s, _median_step(run), limit, digest)


def half_emulated(rig: Rig, num_ranks: int, order: str, ledger: Ledger) -> Iterator[Verdict]:
    """V2: emulates each half of a pipeline, the other one replayed at its nominal costs, then
    predicts and runs the whole."""
    schedule = make(order, num_ranks, rig.micro_batches)
    half = num_ranks // 2
    measured: list[Costs] = []
    hops, cycles = [], []
    for present in (range(half), range(half, num_ranks)):
        runs = list(
            run_on_ranks(
                half, emulated_ranks, rig, schedule, present, timeout_seconds=_LIMIT_SECONDS
            )
        )
        costs, hop = _measured(schedule, runs)
        measured.append(costs)
        hops.append(hop)
        cycles.append(_cycle(schedule, present, runs))
    costs = Costs(
        *(
            getattr(measured[0], kind)[:half] + getattr(measured[1], kind)[half:]
            for kind in ("forward", "input_grad", "weight_grad")
        )
    )
    hop = median(hops)
    step_s = simulate(schedule, costs, Hops.both(hop)).makespan
    by_cycle = cycles[0] * (rig.micro_batches + num_ranks - 1)
    case = f"{order}, {num_ranks} ranks, M {rig.micro_batches}"
    values = {"step s": step_s, "step s by the first half's cycle x (M + P - 1)": by_cycle}
    digest = ledger.predict(
        "v2", case, values, f"both halves emulated, {rig.steps} steps each; hop {1e3 * hop:.3f} ms"
    )
    real = _median_step(_run(rig, [schedule], rig.steps)[0])
    for what, predicted in values.items():
        limit = EMULATION_LIMIT if what == "step s" else None
        yield Verdict("v2", case, what, predicted, real, limit, digest)


def _run(rig: Rig, schedules: Sequence[Schedule], steps: int) -> list[list[Sequence[RigStep]]]:
    """Per schedule its steps, each with one entry per rank."""
    runs: list[list[Sequence[RigStep]]] = [[] for _ in schedules]
    values = run_on_ranks(
        schedules[0].num_ranks, rig_ranks, rig, schedules, timeout_seconds=_LIMIT_SECONDS
    )
    for number, step in enumerate(values):
        runs[number // steps].append(step)
    return runs


def _measured(
    schedule: Schedule,
    steps: Sequence[Sequence[RigStep]],
    average: Callable[[Sequence[float]], float] = median,
) -> tuple[Costs, float]:
    """Averages of op times per stage, and the median hop, in seconds."""
    from ppruntime.sleep_rig import average_costs, median_hop_seconds

    times = [t for step in steps for rank in step for t in rank.times]
    hops = [hop for step in steps if (hop := median_hop_seconds(schedule, step)) is not None]
    costs = average_costs(schedule.num_stages, times, average)
    return costs, median(hops) if hops else 0.0


def _median_step(steps: Sequence[Sequence[RigStep]]) -> float:
    from ppruntime.sleep_rig import step_seconds

    return median(step_seconds(step) for step in steps)


def _cycle(schedule: Schedule, present: range, steps: Sequence[Sequence[RigStep]]) -> float:
    """Seconds a micro-batch in the steady part, on the slowest present stage."""
    from ppruntime.schedules.counts import peak_in_flight
    from ppruntime.schedules.ops import parse_op

    held = peak_in_flight(schedule)
    slowest = 0.0
    for place, rank in enumerate(present):
        window = range(held[rank], schedule.num_micro_batches - held[rank])
        spans = []
        for step in steps:
            ends = [
                t.end
                for t in step[place].times
                if (op := parse_op(t.op)).kind.value in "BI" and op.micro_batch in window
            ]
            spans.append((max(ends) - min(ends)) / 1e9 / (len(ends) - 1))
        slowest = max(slowest, median(spans))
    return slowest


# --- on the ranks --------------------------------------------------------------------------------


def rig_ranks(rank: int, rig: Rig, schedules: Sequence[Schedule]) -> Iterator[RigStep]:
    """One rank of whole pipelines."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    from ppruntime.sleep_rig import SleepRig

    for number, schedule in enumerate(schedules):
        real = SleepRig(schedule, PrefixStore(str(number), _get_default_store()))
        for _ in range(rig.steps):
            yield real.step(rig.costs(schedule.num_ranks), rig.latency_ms / 1e3)
        real.close()


def emulated_ranks(rank: int, rig: Rig, schedule: Schedule, present: range) -> Iterator[RigStep]:
    """One rank of those that are `present` of a pipeline."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    from ppruntime.sleep_rig import SleepRig

    costs, latency = rig.costs(schedule.num_ranks), rig.latency_ms / 1e3
    store = PrefixStore("emulated", _get_default_store())
    emulated = SleepRig(schedule, store, present=present)
    for _ in range(rig.steps):
        yield emulated.step(costs, latency)
    emulated.close()
