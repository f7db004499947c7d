"""What ops cost: seconds (or any unit) per stage, latency per hop, bytes per activation.

Every record is per stage, so that unequal stages are the normal case; `Costs.even` spreads one
triple per rank over the rank's chunks. Units are the caller's: a timeline is in the costs' unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from ppruntime.schedules.ops import Kind, Op, ScheduleError

Latency: TypeAlias = float | Sequence[float] | Mapping[tuple[int, int], float]
"""One-way latency of a boundary in one direction: one number for every hop, one per stage hop
(entry s lies between stages s and s + 1), or one per pair of ranks (source, destination)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of F, I and W of each stage for one micro-batch. B takes I + W, or `backward` where that
    is given: a measured step's own whole backwards, which ran beside other work than I and W.

    `by_turn`: costs of micro-batches 0, n, 2n .., of 1, n + 1 .., and so on, where they differ in a
    cycle of n and the record's own are the means: where weight gradients of n micro-batches are
    added at once, every n-th has those of all.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    by_turn: tuple[Costs, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for turn in self.by_turn:
            if turn.num_stages != self.num_stages:
                raise ScheduleError(
                    f"costs by turn are for {turn.num_stages} stages, their means for "
                    f"{self.num_stages}; give all per stage"
                )
        lengths = {len(self.forward), len(self.input_grad), len(self.weight_grad)}
        if self.backward is not None and len(self.backward) not in lengths:
            raise ScheduleError(
                f"costs name {len(self.backward)} backwards and {len(self.forward)} forwards; give "
                "one of each per stage"
            )
        if len(lengths) != 1:
            raise ScheduleError(
                f"costs name {len(self.forward)} forwards, {len(self.input_grad)} input gradients "
                f"and {len(self.weight_grad)} weight gradients; give one of each per stage"
            )
        for times in (self.forward, self.input_grad, self.weight_grad, self.backward or ()):
            for stage, time in enumerate(times):
                if not 0 <= time < float("inf"):
                    raise ScheduleError(f"stage {stage} costs {time}; costs are finite and >= 0")

    @classmethod
    def even(
        cls, forward: float, input_grad: float, weight_grad: float, stage_to_rank: Sequence[int]
    ) -> Costs:
        """Costs of whole ranks per micro-batch, split evenly over each rank's chunks."""
        chunks = [list(stage_to_rank).count(rank) for rank in stage_to_rank]
        return cls(
            tuple(forward / n for n in chunks),
            tuple(input_grad / n for n in chunks),
            tuple(weight_grad / n for n in chunks),
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def of(self, op: Op) -> float:
        """Time of one op; what is not compute takes none."""
        if self.by_turn:
            return self.by_turn[op.micro_batch % len(self.by_turn)].of(op)
        if op.kind is Kind.F:
            return self.forward[op.stage]
        if op.kind is Kind.I:
            return self.input_grad[op.stage]
        if op.kind is Kind.W:
            return self.weight_grad[op.stage]
        if op.kind is Kind.B:
            if self.backward is not None:
                return self.backward[op.stage]
            return self.input_grad[op.stage] + self.weight_grad[op.stage]
        return 0.0

    def work(self, stage: int) -> float:
        """Time that one micro-batch takes on `stage`, forward and backward."""
        return self.forward[stage] + self.input_grad[stage] + self.weight_grad[stage]

    def work_per_rank(self, stage_to_rank: Sequence[int]) -> tuple[float, ...]:
        """Time that one micro-batch takes on each rank, all its chunks together."""
        totals = [0.0] * (max(stage_to_rank) + 1)
        for stage, rank in enumerate(stage_to_rank):
            totals[rank] += self.work(stage)
        return tuple(totals)


@dataclass(frozen=True, slots=True)
class Hops:
    """Latency of a stage's output (`forward`) and of a gradient (`backward`) between two ranks.

    Stages on one rank hand over in no time. A mapping has to name each pair of ranks that the
    placement uses, as (source, destination); a gradient of the hop 0 -> 1 goes (1, 0).
    """

    forward: Latency = 0.0
    backward: Latency = 0.0

    @classmethod
    def both(cls, latency: Latency) -> Hops:
        """The same one-way latency in both directions (of a mapping: as the mapping says)."""
        return cls(latency, latency)

    def per_stage_hop(
        self, stage_to_rank: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(forward, backward) latencies: entry s for s -> s + 1, and for s + 1 -> s."""
        pairs = list(pairwise(stage_to_rank))
        return (
            _resolve(self.forward, pairs, "forward"),
            _resolve(self.backward, [(b, a) for a, b in pairs], "backward"),
        )


def _resolve(latency: Latency, pairs: list[tuple[int, int]], what: str) -> tuple[float, ...]:
    """Latency of each stage hop, given as (source rank, destination rank)."""
    if isinstance(latency, Mapping):
        missing = [pair for pair in pairs if pair[0] != pair[1] and pair not in latency]
        if missing:
            raise ScheduleError(
                f"no {what} latency is given for ranks {missing[0][0]} -> {missing[0][1]}; "
                "name every pair of ranks that hands over"
            )
        values = [latency.get(pair, 0.0) for pair in pairs]
    elif isinstance(latency, Sequence):
        if len(latency) != len(pairs):
            raise ScheduleError(
                f"{len(latency)} {what} latencies for {len(pairs)} stage hops; "
                "give one per hop or one number"
            )
        values = list(latency)
    else:
        values = [latency] * len(pairs)
    for (source, destination), value in zip(pairs, values, strict=True):
        if not 0 <= value < float("inf"):
            raise ScheduleError(
                f"{what} latency {value} between ranks {source} and {destination}; "
                "latencies are finite and >= 0"
            )
    return tuple(0.0 if a == b else v for (a, b), v in zip(pairs, values, strict=True))


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes that one micro-batch keeps on a stage, and what a rank holds throughout.

    `activation[s]` from F until B (or I); `weight_grad_operands[s]` from I until W, in place of the
    activation; `base[r]`, if given, is rank r's constant share (weights, gradients, optimiser).
    """

    activation: tuple[float, ...]
    weight_grad_operands: tuple[float, ...]
    base: tuple[float, ...] = ()


def parse_costs(text: str, stage_to_rank: Sequence[int]) -> Costs:
    """`F,I,W` per rank and micro-batch, split evenly over the rank's chunks; or one triple per
    stage, `;`-separated. Raises ScheduleError with the text and the form that works."""
    triples = []
    for part in text.strip().strip(";").split(";"):
        try:
            numbers = [float(number) for number in part.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 3:
            raise ScheduleError(
                f"costs {part.strip()!r} are not three numbers; write F,I,W such as 1,1,1"
            )
        triples.append(numbers)
    num_stages = len(stage_to_rank)
    if len(triples) == 1:
        return Costs.even(triples[0][0], triples[0][1], triples[0][2], stage_to_rank)
    if len(triples) != num_stages:
        raise ScheduleError(
            f"costs name {len(triples)} stages, the schedule has {num_stages}; "
            f"give one triple, or {num_stages} separated by ';'"
        )
    forward, input_grad, weight_grad = zip(*triples, strict=True)
    return Costs(forward, input_grad, weight_grad)
