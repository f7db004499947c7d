"""Lower bounds on a step: no order on this placement and within these caps can be faster.

Five closed forms (`work`, `turn`, `path`, `memory`, `first_gradient`) and one computed bound
(`packing`) that contains most of what they say and more:

1. *Heads.* For the k-th op of each class, a time before which it cannot start. Three arguments:
   its inputs (k-th op of the class before, plus latency); its memory (the k-th forward on a rank
   with cap A waits for as many frees as the cap forces, see `_Memory.frees_needed`); its rank (the
   ops that must have run there before it, one after another: whatever t is, those of them that
   cannot start before t end no earlier than t plus their durations).
2. *Tails.* The same on the reversed problem: time that must pass after the k-th op has ended.
3. *One rank.* With heads and tails fixed and ops allowed to be interrupted, the best order of a
   rank is known: always run, of what is there, the op with the longest tail (Jackson's rule). Its
   length is a bound, because a real rank does no better and the other ranks are only asked for
   heads and tails. The largest over ranks counts.

The heads are true for every order because they are about the k-th start of a class, not about
micro-batch k (see `problem`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.problem import Problem, problem_of

Table = list[list[float]]
"""`table[c][k]`: a time for the k-th op (from 0) of class c."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Bounds on the makespan, in the costs' unit. `makespan` is the largest of them."""

    work: float
    """A rank's own work, and the way of the first micro-batch to it (LB1)."""
    turn: float
    """A rank's forwards and input gradients, the way to it and the last gradient's way on (LB2)."""
    path: float
    """One micro-batch through all stages and back (LB3)."""
    memory: float
    """Each activation lives at least its round trip, and only so many may be alive (LB4)."""
    first_gradient: float
    """Until a gradient reaches a rank it can only run as many forwards as fit (LB5)."""
    packing: float
    """Heads, tails and the work of one rank together; see the module's text."""

    @property
    def makespan(self) -> float:
        return max(self.work, self.turn, self.path, self.memory, self.first_gradient, self.packing)


def lower_bound(
    costs: Costs,
    hops: Hops,
    stage_to_rank: Sequence[int],
    num_micro_batches: int,
    caps: Sequence[int] | None = None,
    *,
    split_backward: bool = True,
    tables: tuple[Table, Table] | None = None,
) -> LowerBound:
    """What no order can beat. `caps`: chunk activations that a rank may hold, None for no limit.

    With `split_backward` the bound holds for every order, whole backwards included; without, only
    for orders that never split one, and is tighter. `tables` are the heads of the problem and of
    its reversal, from a caller who has them already.
    """
    problem = problem_of(
        costs, hops, stage_to_rank, num_micro_batches, caps, split_backward=split_backward
    )
    if not split_backward:  # a whole backward: its W is part of what the stage below waits for
        both = tuple(i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True))
        costs = Costs(costs.forward, both, (0.0,) * costs.num_stages)
    head, reversed_head = tables or (heads(problem), heads(problem.reversed()))
    return LowerBound(
        *_closed_forms(costs, hops, stage_to_rank, num_micro_batches, problem.caps),
        packing=packing(problem, head, reversed_head),
    )


def _closed_forms(
    costs: Costs,
    hops: Hops,
    stage_to_rank: Sequence[int],
    num_micro_batches: int,
    caps: Sequence[int | None],
) -> tuple[float, float, float, float, float]:
    """LB1 to LB5, each the largest over ranks."""
    stages = range(costs.num_stages)
    up, down = hops.per_stage_hop(stage_to_rank)
    before = [0.0] * costs.num_stages  # earliest start of a forward of the stage
    after = [
        costs.weight_grad[0]
    ] * costs.num_stages  # from the end of its I to the end of the step
    for s in stages[1:]:
        before[s] = before[s - 1] + costs.forward[s - 1] + up[s - 1]
        after[s] = after[s - 1] + costs.input_grad[s - 1] + down[s - 1]
    turned = before[-1] + costs.forward[-1]
    back = [turned] * costs.num_stages  # earliest start of an I of the stage
    for s in reversed(stages[:-1]):
        back[s] = back[s + 1] + costs.input_grad[s + 1] + down[s]
    path = max(back[s] + costs.input_grad[s] + costs.weight_grad[s] for s in stages)
    work = turn = memory = first_gradient = 0.0
    for rank in range(max(stage_to_rank) + 1):
        mine = [s for s in stages if stage_to_rank[s] == rank]
        head = min(before[s] for s in mine)
        all_work = num_micro_batches * sum(costs.work(s) for s in mine)
        no_weights = num_micro_batches * sum(costs.forward[s] + costs.input_grad[s] for s in mine)
        work = max(work, head + all_work)
        turn = max(turn, head + no_weights + min(after[s] for s in mine))
        cap = caps[rank]
        if cap is None:
            continue
        lives = sum(back[s] - before[s] + costs.input_grad[s] + costs.weight_grad[s] for s in mine)
        memory = max(memory, head + num_micro_batches * lives / cap)
        forwards = cap * max(costs.forward[s] for s in mine)
        first_gradient = max(first_gradient, min(back[s] for s in mine) + all_work - forwards)
    return work, turn, path, memory, first_gradient


def heads(problem: Problem) -> Table:
    """Times before which the k-th op of each class cannot start, in any order."""
    classes = problem.classes
    durations = [c.duration for c in classes]
    inputs: list[list[tuple[int, float]]] = [[] for _ in classes]
    ancestors: list[set[int]] = [set() for _ in classes]
    for edge in problem.edges:
        inputs[edge.after].append((edge.before, edge.latency))
    for c in range(len(classes)):
        for before, _ in inputs[c]:
            ancestors[c] |= ancestors[before] | {before}
    local = [
        [a for a in ancestors[c] if classes[a].rank == classes[c].rank] for c in range(len(classes))
    ]
    memory = [
        _Memory(c, problem, ancestors) if classes[c].takes else None for c in range(len(classes))
    ]
    table: Table = [[] for _ in classes]
    for k in range(problem.num_micro_batches):
        for c, limit in enumerate(memory):
            head = max((table[b][k] + durations[b] + lag for b, lag in inputs[c]), default=0.0)
            done = dict.fromkeys(local[c], k + 1)  # ops that have run on this rank before
            done[c] = k
            for free, count in limit.frees_needed(k) if limit else ():
                head = max(head, table[free][count - 1] + durations[free])
                for a in (free, *local[free]):
                    done[a] = max(done.get(a, 0), count)
            table[c].append(max(head, _after_all(done, table, durations)))
    return table


def _after_all(done: dict[int, int], table: Table, durations: Sequence[float]) -> float:
    """The earliest end of the first `done[a]` ops of each class a, run one after another: for every
    t, t plus the durations of those that cannot start before t. Tried are the times before which a
    class cannot start at all; others gave the same bounds on random problems."""
    runs = [(table[a], count, durations[a]) for a, count in done.items() if count]
    latest = 0.0
    for threshold in {starts[0] for starts, _, _ in runs}:
        end = threshold
        for starts, count, duration in runs:
            end += duration * (count - bisect_left(starts, threshold, 0, count))
        latest = max(latest, end)
    return latest


class _Memory:
    """What the cap of a rank says about one of the classes that take a place there."""

    def __init__(self, taker: int, problem: Problem, ancestors: Sequence[set[int]]) -> None:
        classes = problem.classes
        rank = classes[taker].rank
        here = [c for c, k in enumerate(classes) if k.rank == rank]
        freer = {classes[c].stage: c for c in here if classes[c].frees}
        self.taker = taker
        self.cap = problem.caps[rank]
        self.pairs = [(c, freer[classes[c].stage]) for c in here if classes[c].takes]
        self.upstream = {c for c, _ in self.pairs if c in ancestors[taker]}
        self.returning = {c for c, free in self.pairs if taker in ancestors[free]}

    def frees_needed(self, k: int) -> list[tuple[int, int]]:
        """(freeing class, how many of it must have ended) before the k-th op of the taker starts.

        At that moment k ops of the taker and at least k + 1 of each taker upstream of it on this
        rank have started; at most cap - 1 places are taken. A micro-batch upstream of the taker
        whose free depends on the taker holds a place: at most k such frees have ended.
        """
        if self.cap is None:
            return []
        taken = {
            c: k if c == self.taker else (k + 1 if c in self.upstream else 0) for c, _ in self.pairs
        }
        held = {c: 1 if c in self.upstream and c in self.returning else 0 for c, _ in self.pairs}
        needed = []
        for c, free in self.pairs:
            others = sum(held.values()) - held[c]
            count = taken[c] + others - (self.cap - 1)
            if count > 0:
                needed.append((free, count))
        return needed


def packing(problem: Problem, head: Table, reversed_head: Table) -> float:
    """The largest over ranks of Jackson's preemptive one-machine bound. `reversed_head` are the
    heads of the reversed problem: the tails."""
    last_class, last_op = len(problem.classes) - 1, problem.num_micro_batches - 1
    best = 0.0
    for rank in range(problem.num_ranks):
        mine = [(c, k) for c, k in enumerate(problem.classes) if k.rank == rank]
        jobs = [
            (head[c][k], cls.duration, reversed_head[last_class - c][last_op - k])
            for c, cls in mine
            for k in range(problem.num_micro_batches)
        ]
        best = max(best, _one_machine(jobs))
    return best


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Makespan of jobs (head, duration, tail) on one machine, interruptions allowed: at each moment
    the job with the longest tail runs, which is optimal (Jackson 1955, Carlier 1982)."""
    jobs.sort()
    waiting: list[list[float]] = []
    now = makespan = 0.0
    i = 0
    while i < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[i][0])
        while i < len(jobs) and jobs[i][0] <= now:
            heappush(waiting, [-jobs[i][2], jobs[i][1]])
            i += 1
        job = waiting[0]
        next_head = jobs[i][0] if i < len(jobs) else float("inf")
        if now + job[1] <= next_head:
            now += job[1]
            makespan = max(makespan, now - job[0])
            heappop(waiting)
        else:
            job[1] -= next_head - now
            now = next_head
    return makespan
