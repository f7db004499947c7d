"""Looks for the fastest order under a memory cap, from the handmade ones on.

Method: forward-backward improvement, known from project scheduling. An order is rebuilt backwards
in time, from the last op to the first, the ops that ended last first; the result is rebuilt
forwards, the ops that started first first; and so on. Each pass closes gaps that the one before
left, and memory caps hold in both directions alike. It starts from every handmade order and from
the tails of the lower bound, then from noisy copies of the best orders found, until the bound is
reached or the effort is spent.

Source of the method: Li and Willis, An iterative scheduling technique for resource-constrained
project scheduling (1992).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from ppruntime.schedules import NAMES, make, placement
from ppruntime.schedules.bounds import heads, lower_bound
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.list_scheduler import ListScheduler, Pass, Table
from ppruntime.schedules.ops import Kind, Op, Schedule, ScheduleError
from ppruntime.schedules.problem import Problem, problem_of
from ppruntime.schedules.timeline import Timeline, simulate

DEFAULT_EFFORT = 1_000_000
"""Ops placed in all passes together: about 5 s on one core."""
_MAX_ELITE = 6
_SAME = 1e-9
"""Makespans this close, relatively, are one."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The fastest order found, and how far from a proven bound it is at most."""

    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    """No order with as many stages a rank (in a loop, or two in a V) is faster within the cap."""
    handmade: str | None
    """The fastest handmade order within the cap; None if none fits."""
    handmade_makespan: float | None

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def gap(self) -> float:
        """At most this share above the best possible."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound else 0.0


def caps_of(
    memory_cap: float | Sequence[float] | None, num_ranks: int, stages_per_rank: int
) -> tuple[int, ...] | None:
    """A cap in words of whole ranks -> chunk activations per rank; None: no cap.

    A number is a multiple of 1F1B's peak on rank 0 (`num_ranks` whole-rank activations), for every
    rank; a list gives whole-rank activations per rank. Raises ScheduleError if a rank could not
    even hold one micro-batch.
    """
    if memory_cap is None:
        return None
    if isinstance(memory_cap, Sequence):
        units = list(memory_cap)
        if len(units) != num_ranks:
            raise ScheduleError(
                f"the memory cap names {len(units)} ranks of {num_ranks}; "
                "give one number, or one a rank"
            )
    else:
        units = [memory_cap * num_ranks] * num_ranks
    caps = []
    for rank, unit in enumerate(units):
        if not abs(unit) < float("inf"):
            raise ScheduleError(f"the memory cap of rank {rank} is {unit}; leave it out for no cap")
        caps.append(floor(unit * stages_per_rank + 1e-9))
        if caps[rank] < stages_per_rank:
            raise ScheduleError(
                f"the memory cap gives rank {rank} {unit:g} whole-rank activations; "
                "a step needs 1 at least"
            )
    return tuple(caps)


def search(
    costs: Costs,
    hops: Hops,
    memory_cap: float | Sequence[float] | None,
    *,
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int = 1,
    seed: int = 0,
    effort: int = DEFAULT_EFFORT,
) -> SearchResult:
    """The fastest order found for these costs (one entry per stage) and latencies, within
    `memory_cap` (see `caps_of`).

    Stages go round the ranks in a loop, and for two stages a rank in a V as well. Never slower than
    the fastest handmade order that fits the cap; the same for the same arguments. `effort` limits
    the ops placed over all tries.
    """
    if costs.num_stages != num_ranks * stages_per_rank:
        raise ScheduleError(
            f"costs are for {costs.num_stages} stages, {num_ranks} ranks with {stages_per_rank} "
            f"each have {num_ranks * stages_per_rank}; give one triple per stage"
        )
    caps = caps_of(memory_cap, num_ranks, stages_per_rank)
    placements = [placement.loop(num_ranks, stages_per_rank)]
    if stages_per_rank == 2 and num_ranks > 1:
        placements.append(placement.v_shape(num_ranks))
    hunts = [_Hunt(costs, hops, p, num_micro_batches, caps) for p in placements]
    bound = min(hunt.bound for hunt in hunts)
    rivals: list[Timeline] = []
    for schedule in _handmade(num_ranks, num_micro_batches, stages_per_rank):
        timeline = simulate(schedule, costs, hops)
        if caps is None or all(
            p <= cap for p, cap in zip(timeline.peak_in_flight, caps, strict=True)
        ):
            rivals.append(timeline)
        for hunt in hunts:
            if hunt.stage_to_rank == schedule.stage_to_rank:
                hunt.seeds.append(hunt.starts_of(timeline))
    rival = min(rivals, key=lambda t: t.makespan, default=None)
    for hunt in hunts:
        hunt.run(random.Random(seed), effort // len(hunts), bound)
    found = [simulate(h.schedule(), costs, hops) for h in hunts if h.best is not None]
    timelines = found + ([rival] if rival else [])
    if not timelines:
        raise ScheduleError("no order was found within the memory cap; raise it")
    best = min(timelines, key=lambda t: t.makespan)
    return SearchResult(
        best.schedule,
        best,
        bound,
        rival.schedule.name if rival else None,
        rival.makespan if rival else None,
    )


def _handmade(num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> list[Schedule]:
    """The orders with so many stages a rank."""
    interleaved = ("interleaved_1f1b", "interleaved_zb1p")
    names = [name for name in NAMES if stages_per_rank > 1 or name not in interleaved]
    orders = [
        make(
            name,
            num_ranks,
            num_micro_batches,
            stages_per_rank=stages_per_rank if name in interleaved else None,
        )
        for name in names
    ]
    return [order for order in orders if order.num_stages == num_ranks * stages_per_rank]


class _Hunt:
    """The search on one placement."""

    def __init__(
        self,
        costs: Costs,
        hops: Hops,
        stage_to_rank: tuple[int, ...],
        num_micro_batches: int,
        caps: tuple[int, ...] | None,
    ) -> None:
        self.stage_to_rank = stage_to_rank
        self.num_micro_batches = num_micro_batches
        self.problem = problem_of(costs, hops, stage_to_rank, num_micro_batches, caps)
        reverse = self.problem.reversed()
        self.heads, self.tails = heads(self.problem), heads(reverse)
        self.bound = lower_bound(
            costs, hops, stage_to_rank, num_micro_batches, caps, tables=(self.heads, self.tails)
        ).makespan
        self.seeds: list[Table] = []
        self.elite: list[Pass] = []
        """The best different passes, fastest first, all in forward time."""
        self.schedulers = (ListScheduler(self.problem), ListScheduler(reverse))
        self.num_ops = len(self.problem.classes) * num_micro_batches
        self.left = 0

    @property
    def best(self) -> Pass | None:
        return self.elite[0] if self.elite else None

    def run(self, rng: random.Random, effort: int, bound: float) -> None:
        """Improves every seed a little, then noisy copies of the best, until `effort` is spent."""
        self.left = effort
        self._improve(_negated(self.heads), 0.0, 6)
        for patience in (0.5, 0.95, 0.25):
            for seed in self.seeds:
                if self._is_done(bound):
                    return
                self._improve(_negated(seed), patience, 8)
        scale = max(c.duration for c in self.problem.classes)
        while not self._is_done(bound) and self.elite:
            model = rng.choice(self.elite).starts
            noise = scale * rng.choice((0.2, 0.5, 1.0, 2.0, 4.0))
            shifts = [rng.uniform(-noise, noise) for _ in model]
            priority = [
                [-start + shift for start in starts]
                for starts, shift in zip(model, shifts, strict=True)
            ]
            self._improve(priority, rng.choice((0.0, 0.3, 0.5, 0.6, 0.8, 0.95)), 8)

    def _is_done(self, bound: float) -> bool:
        reached = self.best is not None and self.best.makespan <= bound * (1 + _SAME)
        return self.left <= 0 or reached

    def _improve(self, priority: Table, patience: float, most: int) -> None:
        """Forward and backward passes in turn, until two in a row gain nothing."""
        fastest = float("inf")
        useless = 0
        for i in range(most):
            self.left -= self.num_ops
            made = self.schedulers[i % 2].run(priority, patience)
            if made is None:
                return
            self._keep(made if i % 2 == 0 else self._mirrored(made))
            useless = 0 if made.makespan < fastest * (1 - _SAME) else useless + 1
            fastest = min(fastest, made.makespan)
            if useless == 2 or self.left <= 0:
                return
            priority = _ends(made, self.schedulers[i % 2].problem)

    def _keep(self, made: Pass) -> None:
        if any(
            abs(made.makespan - other.makespan) <= _SAME * made.makespan for other in self.elite
        ):
            return
        self.elite = sorted([*self.elite, made], key=lambda p: p.makespan)[:_MAX_ELITE]

    def _mirrored(self, made: Pass) -> Pass:
        """A pass of the reversed problem in forward time."""
        last = len(self.problem.classes) - 1
        durations = [c.duration for c in self.problem.classes]
        starts = [
            [made.makespan - start - durations[c] for start in reversed(made.starts[last - c])]
            for c in range(last + 1)
        ]
        words = tuple(tuple(last - c for c in reversed(word)) for word in made.words)
        return Pass(made.makespan, words, starts)

    def starts_of(self, timeline: Timeline) -> Table:
        """When the k-th op of each class starts in a timeline; a B is an I and a W."""
        index = {(c.stage, c.kind): i for i, c in enumerate(self.problem.classes)}
        starts: Table = [[] for _ in self.problem.classes]
        for op, _, start, _ in (timed for row in timeline.rows for timed in row):
            if op.kind is Kind.B:
                own = index[op.stage, Kind.I]
                starts[own].append(start)
                starts[index[op.stage, Kind.W]].append(start + self.problem.classes[own].duration)
            else:
                starts[index[op.stage, op.kind]].append(start)
        return [sorted(times) for times in starts]

    def schedule(self) -> Schedule:
        """The best order, with micro-batches numbered as each class runs them."""
        assert self.best is not None, "nothing was found"
        orders = []
        for word in self.best.words:
            done = [0] * len(self.problem.classes)
            order = []
            for c in word:
                cls = self.problem.classes[c]
                order.append(Op(cls.stage, cls.kind, done[c]))
                done[c] += 1
            orders.append(tuple(order))
        return Schedule("search", self.num_micro_batches, self.stage_to_rank, tuple(orders))


def _negated(table: Table) -> Table:
    """Start times as priorities: the earlier, the higher."""
    return [[-time for time in times] for times in table]


def _ends(made: Pass, problem: Problem) -> Table:
    """Priorities for the other direction: what ended last comes first."""
    last = len(problem.classes) - 1
    return [
        [start + problem.classes[last - c].duration for start in reversed(made.starts[last - c])]
        for c in range(last + 1)
    ]
