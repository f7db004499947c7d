"""Predictions that are written down before what they are of runs, and what came out. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.longest_path import longest_path
from ppruntime.schedules.machine import Link, Machine
from ppruntime.schedules.simulator import simulate_machine
from ppruntime.schedules.timeline import simulate

EXACT = 1e-9


@dataclass(frozen=True, slots=True)
class Verdict:
    """One prediction and what was measured."""

    rung: str
    """v0, v1, v2, v3."""
    case: str
    what: str
    """What is predicted, with its unit: step s, cycle s, peak bytes."""
    predicted: float
    measured: float
    limit: float | None
    """The largest |error| that passes; None: for the record only."""
    prediction: str
    """Digest of the line that was written before the run."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def met(self) -> bool:
        return self.limit is None or abs(self.error) <= self.limit

    def record(self) -> dict[str, object]:
        return asdict(self) | {"error": self.error, "met": self.met}

    def __str__(self) -> str:
        bar = "for the record" if self.limit is None else f"at most {100 * self.limit:.3g} %"
        state = "met   " if self.met else "MISSED"
        return (
            f"{state} {self.rung} {self.case}: {self.what} predicted {self.predicted:.6g}, measured"
            f" {self.measured:.6g}, {100 * self.error:+.2f} % ({bar})"
        )


class Ledger:
    """A file of predictions, one JSON line each, appended and flushed to disk before the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def predict(self, rung: str, case: str, values: Mapping[str, float], rests_on: str) -> str:
        """Writes a line and gives its digest."""
        line = json.dumps(
            {
                "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "rung": rung,
                "case": case,
                "rests_on": rests_on,
                "predicted": dict(values),
            }
        )
        with self.path.open("a") as file:
            file.write(f"{line}\n")
        return hashlib.sha256(line.encode()).hexdigest()[:16]


def predictions_beside(record: Path) -> Path:
    """Where a record's predictions are, if nothing else is said: another record's stay as they
    were."""
    return record.with_name(f"{record.stem}-predictions.jsonl")


def exact_cases() -> list[Verdict]:
    """V0: timeline and event simulator against an independent longest path, on every order with
    unequal stages, and against closed forms on equal ones."""
    verdicts = []

    def add(case: str, predicted: float, truth: float) -> None:
        verdicts.append(Verdict("v0", case, "makespan", predicted, truth, EXACT, "deterministic"))

    for name in NAMES:
        for num_ranks, num_micro_batches in ((2, 5), (4, 12), (8, 24)):
            schedule = make(name, num_ranks, num_micro_batches)
            costs = _unequal(schedule.num_stages)
            latencies = tuple(0.05 + 0.03 * (s % 4) for s in range(schedule.num_stages - 1))
            hops = Hops(latencies, latencies)
            truth = longest_path(schedule, costs, hops)
            case = f"{name}, {num_ranks} ranks, {num_micro_batches} micro-batches"
            add(f"timeline, {case}", simulate(schedule, costs, hops).makespan, truth)
            nothing = (0.0,) * len(latencies)
            machine = Machine(
                costs=costs,
                links=tuple(Link(f"hop {i}", c) for i, c in enumerate(latencies)),
                forward_bytes=nothing,
                backward_bytes=nothing,
            )
            add(f"simulator, {case}", simulate_machine(schedule, machine).makespan, truth)
    f, i, w = 1.0, 1.5, 0.75
    for name in ("gpipe", "1f1b", "async_1f1b"):
        schedule = make(name, 8, 32)
        costs = Costs((f,) * 8, (i,) * 8, (w,) * 8)
        add(
            f"(M + P - 1)(F + B), {name}",
            simulate(schedule, costs).makespan,
            (32 + 7) * (f + i + w),
        )
    return verdicts


def _unequal(num_stages: int) -> Costs:
    """Times that share no common measure."""

    def times(base: float) -> tuple[float, ...]:
        return tuple(base + (0.37 * (s + 1) * base) % 0.29 for s in range(num_stages))

    return Costs(times(0.31), times(0.47), times(0.23))
