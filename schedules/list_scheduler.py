"""Builds an order op by op in time: whatever is there and matters most runs next.

One pass takes a priority per op and gives a word per rank (see `problem`) with its times. It works
on a problem and on its time reversal alike; `search` goes back and forth between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ppruntime.schedules.problem import Problem

Table = list[list[float]]
"""`table[c][k]`: a number for the k-th op (from 0) of class c."""

_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Pass:
    """One order. `words[r]` are rank r's classes, first to last; `starts[c][k]` the times."""

    makespan: float
    words: tuple[tuple[int, ...], ...]
    starts: Table


class ListScheduler:
    """The passes over one problem. What does not depend on priorities is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        classes = problem.classes
        self._durations = [c.duration for c in classes]
        self._ranks = [c.rank for c in classes]
        self._num_inputs = [0] * len(classes)
        self._readers: list[list[tuple[int, float]]] = [[] for _ in classes]
        for edge in problem.edges:
            self._readers[edge.before].append((edge.after, edge.latency))
            self._num_inputs[edge.after] += 1
        self._of_rank = [
            [c for c, k in enumerate(classes) if k.rank == r] for r in range(problem.num_ranks)
        ]
        self._takes = [c.takes for c in classes]
        self._frees = [c.frees for c in classes]
        self._may_hold = [_NO_LIMIT] * len(classes)
        """Places that may be taken on the rank when the class takes one more."""
        self._after = list(range(len(classes)))
        """The taker of the rank that has to be ahead of the class; itself if there is none."""
        for rank, mine in enumerate(self._of_rank):
            self._order_takers(rank, [c for c in mine if classes[c].takes])

    def _order_takers(self, rank: int, takers: list[int]) -> None:
        """Keeps a rank from filling up with activations that wait for one that finds no place.

        The j-th taker of V, in the direction of time, leaves V - 1 - j places free and follows the
        one before it, micro-batch by micro-batch. So the oldest micro-batch can always go on: if it
        has not taken its j-th place, nobody has, and those before leave one free for it.
        """
        cap = self.problem.caps[rank]
        if cap is None:
            return
        for j, c in enumerate(takers):
            self._may_hold[c] = cap - len(takers) + j
            if j:
                self._after[c] = takers[j - 1]

    def run(self, priority: Table, patience: float) -> Pass | None:
        """One pass: of the ops that are there, each rank starts the one of highest priority.

        If one of higher priority is known to arrive within `patience` of the time that the chosen
        one takes, the rank waits for it. None if the caps let the order run dry (a cap below the
        number of stages on the rank).
        """
        durations, ranks, takes, frees = self._durations, self._ranks, self._takes, self._frees
        readers, of_rank = self._readers, self._of_rank
        may_hold, after = self._may_hold, self._after
        count = self.problem.num_micro_batches
        num_ranks = self.problem.num_ranks
        done = [0] * len(durations)
        missing = [[n] * count for n in self._num_inputs]
        ready = [[0.0] * count for _ in durations]
        starts = [[0.0] * count for _ in durations]
        held = [0] * num_ranks
        busy_until = [0.0] * num_ranks
        words: list[list[int]] = [[] for _ in range(num_ranks)]
        left = count * len(durations)
        makespan = 0.0
        wakes = [(0.0, rank) for rank in range(num_ranks)]
        heapify(wakes)
        while wakes:
            now, rank = heappop(wakes)
            if busy_until[rank] > now:
                continue
            holding = held[rank]
            chosen = coming = -1
            chosen_priority = coming_priority = 0.0
            arrival = float("inf")
            for c in of_rank[rank]:
                k = done[c]
                if k == count or missing[c][k]:
                    continue
                if takes[c] and (holding > may_hold[c] or (after[c] != c and done[after[c]] <= k)):
                    continue
                at = ready[c][k]
                if at <= now:
                    if chosen < 0 or priority[c][k] > chosen_priority:
                        chosen, chosen_priority = c, priority[c][k]
                elif at < arrival:
                    coming, coming_priority, arrival = c, priority[c][k], at
            if chosen < 0:
                if coming >= 0:
                    heappush(wakes, (arrival, rank))
                continue
            duration = durations[chosen]
            if (
                coming >= 0
                and coming_priority > chosen_priority
                and arrival < now + patience * duration
            ):
                heappush(wakes, (arrival, rank))
                continue
            k = done[chosen]
            done[chosen] = k + 1
            starts[chosen][k] = now
            end = busy_until[rank] = now + duration
            if end > makespan:
                makespan = end
            words[rank].append(chosen)
            left -= 1
            if takes[chosen]:
                held[rank] += 1
            if frees[chosen]:
                held[rank] -= 1
            heappush(wakes, (end, rank))
            for reader, latency in readers[chosen]:
                if end + latency > ready[reader][k]:
                    ready[reader][k] = end + latency
                missing[reader][k] -= 1
                other = ranks[reader]
                # a rank that is busy until later wakes then, and looks at all that has arrived
                if not missing[reader][k] and ready[reader][k] >= busy_until[other]:
                    heappush(wakes, (ready[reader][k], other))
        if left:
            return None
        return Pass(makespan, tuple(map(tuple, words)), starts)
