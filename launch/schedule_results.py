"""What was measured of an order: steps on the rig against the timeline, and against torch's. Pure.

All times are in milliseconds where the name says so, else in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.ops import Kind, Schedule
from ppruntime.schedules.timeline import simulate

if TYPE_CHECKING:
    from ppruntime.launch.torch_rig import TorchStep
    from ppruntime.sleep_rig import RigStep


@dataclass(frozen=True, slots=True)
class Case:
    """What an order is measured under."""

    order: str
    latency_ms: float
    unequal: bool
    """Stages of different cost, and F, I and W too."""


@dataclass(frozen=True, slots=True)
class RigResult:
    """Steps of one case, beside the timeline's for the same order."""

    case: Case
    steps_ms: tuple[float, ...]
    predicted_ms: float
    """The timeline fed with the steps' own median op times and the injected latency."""
    nominal_ms: float
    """The timeline fed with the times that the stages were told to sleep."""
    hop_ms: float | None
    """How long a message really was under way: above the injected latency, the transport's own and
    waking up, which the timeline does not know. None where no op waited for one."""

    @classmethod
    def of(
        cls, case: Case, schedule: Schedule, costs: Costs, steps: Sequence[Sequence[RigStep]]
    ) -> RigResult:
        """From steps with one entry per rank each; `costs`, in seconds, are the nominal ones."""
        from ppruntime.sleep_rig import median_costs, median_hop_seconds, step_seconds

        times = (t for ranks in steps for step in ranks for t in step.times)
        hops = Hops.both(case.latency_ms / 1e3)
        measured = median_costs(schedule.num_stages, times)
        hops_of_steps = [median_hop_seconds(schedule, ranks) for ranks in steps]
        waited = [hop for hop in hops_of_steps if hop is not None]
        return cls(
            case,
            tuple(step_seconds(ranks) * 1e3 for ranks in steps),
            simulate(schedule, measured, hops).makespan * 1e3,
            simulate(schedule, costs, hops).makespan * 1e3,
            median(waited) * 1e3 if waited else None,
        )

    @property
    def error(self) -> float:
        """The median step's excess over the prediction, as a share of it."""
        return median(self.steps_ms) / self.predicted_ms - 1

    @property
    def nominal_error(self) -> float:
        return median(self.steps_ms) / self.nominal_ms - 1

    def record(self) -> dict[str, object]:
        numbers = {"error": self.error, "nominal_error": self.nominal_error}
        return {**asdict(self), "step_ms": median(self.steps_ms), **numbers}

    def __str__(self) -> str:
        costs = "unequal" if self.case.unequal else "equal"
        hop = "" if self.hop_ms is None else f" (hop {self.hop_ms:5.2f})"
        half_spread = (max(self.steps_ms) - min(self.steps_ms)) / 2
        return (
            f"rig   {self.case.order:16} {costs:7} {self.case.latency_ms:4g} ms{hop}"
            f" step {median(self.steps_ms):7.1f} +-{half_spread:5.1f} ms"
            f"  timeline {self.predicted_ms:7.1f} ({self.error:+7.2%})"
            f"  nominal {self.nominal_ms:7.1f} ({self.nominal_error:+7.2%})"
        )


@dataclass(frozen=True, slots=True)
class TorchResult:
    """Steps of ours and of torch's, taken in turn, of one order without injected latency."""

    order: str
    ours_ms: tuple[float, ...]
    torch_ms: tuple[float, ...]
    work_ms: float
    """What the busiest rank sleeps in a step: neither can be faster."""

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        costs: Costs,
        pairs: Sequence[tuple[Sequence[RigStep], Sequence[TorchStep]]],
    ) -> TorchResult:
        """From pairs of steps with one entry per rank each. Raises unless torch's ranks did all
        the work that ours did."""
        for _, theirs in pairs:
            for rank, step in enumerate(theirs):
                expected = len(schedule.stages_of(rank)) * schedule.num_micro_batches
                for kind in (Kind.F, Kind.I, Kind.W):
                    assert step.slept.get(kind) == expected, (
                        f"torch's rank {rank} of {schedule.name} did {kind.value}"
                        f" {step.slept.get(kind)} times, not {expected}"
                    )
        work = max(costs.work_per_rank(schedule.stage_to_rank)) * schedule.num_micro_batches
        return cls(
            schedule.name,
            tuple(_seconds(ours) * 1e3 for ours, _ in pairs),
            tuple(_seconds(theirs) * 1e3 for _, theirs in pairs),
            work * 1e3,
        )

    @property
    def ratio(self) -> float:
        """Our median step over torch's."""
        return median(self.ours_ms) / median(self.torch_ms)

    @property
    def bubble_ratio(self) -> float:
        """The same without the work: the time in which the busiest rank does none."""
        return (median(self.ours_ms) - self.work_ms) / (median(self.torch_ms) - self.work_ms)

    def record(self) -> dict[str, object]:
        numbers = {"ratio": self.ratio, "bubble_ratio": self.bubble_ratio}
        return {**asdict(self), **numbers}

    def __str__(self) -> str:
        return (
            f"torch {self.order:16} ours {median(self.ours_ms):7.1f} ms"
            f" ({min(self.ours_ms):.1f} to {max(self.ours_ms):.1f}),"
            f" torch {median(self.torch_ms):7.1f} ms"
            f" ({min(self.torch_ms):.1f} to {max(self.torch_ms):.1f}):"
            f" ours / torch {self.ratio:.4f}, of the bubble {self.bubble_ratio:.3f}"
        )


def _seconds(steps: Sequence[RigStep] | Sequence[TorchStep]) -> float:
    return max(step.end for step in steps) - min(step.start for step in steps)
