"""Pairs whose halves run at once: a lane for each stage, and what waits for what.

A lane is a stream. Outside pairs a step's computations follow each other as the order says,
whichever lanes they are on; the halves of a pair wait for all that came before it and for nothing
of each other, and what follows waits for both. So an op still waits for no more than the order with
its pairs taken apart lets it: whatever proves that order to end and its slots to be free when they
are needed holds here too, except where a proof has a backward's end say that the forward in front
of it has ended (`credits` is told of the pairs).

The host hands a pair's backward over first. A forward may make the host wait, for how many rows
come to the experts here; it would keep the backward from starting, which makes the host wait for
nothing unless it computes the experts again. Where that is so the forward's start waits for the
backward's input: `order.make_order` has the order checked as if every pair waited for both inputs.

Memory: a caching allocator gives what the host lets go of to the next one who asks on the lane that
asked for it, at once, whatever other lanes have still to read of it. Here that is safe:

- all that reads a stage's own memory runs on its lane, or holds it until it is past;
- a lane asks for memory in computations and moves alone, and these wait for all lanes, so for
  everyone who read what was let go of before. Only the forward of a pair, which is handed over
  behind its backward, waits for less: for it nothing may be let go of meanwhile that both lanes
  have read. That is a message between the two stages: it stays until its FREE, which stands behind
  both halves.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from ppruntime.schedules.ops import COMPUTE, Kind, Op, Pair, ScheduleError

Half: TypeAlias = Literal["forward", "backward"]
"""Of a pair."""

_JOINING = COMPUTE | {Kind.OFFLOAD, Kind.OFFLOADED, Kind.RELOAD}
"""What may ask for memory, or reads what other lanes made; sends follow what they send."""
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


class LaneOp(NamedTuple):
    """An op of one rank, in the order in which the host hands them over; its stage's lane runs
    it."""

    op: Op
    joins: tuple[int, ...] = ()
    """Stages whose lanes wait, before this op, for all that any lane was given so far."""
    half: Half | None = None
    """Which half of a pair it belongs to; None: it runs alone."""


def lane_program(ops: Sequence[Op], pairs: Iterable[Pair]) -> tuple[LaneOp, ...]:
    """What one rank's lanes are given, in order, for a lowered order's `ops` of it.

    `pairs` are those of the computations; others than this rank's are passed over. Raises
    ScheduleError where a pair's halves are of one stage, or where computations stand between them.
    """
    backward_of = {pair.forward: pair.backward for pair in pairs}
    position = {op: i for i, op in enumerate(ops)}
    program: list[LaneOp] = []
    i = 0
    while i < len(ops):
        op = ops[i]
        backward = backward_of.get(op)
        if backward is None:
            program.append(LaneOp(op, (op.stage,) if op.kind in _JOINING else ()))
            i += 1
            continue
        middle = position.get(backward, -1)
        _check_pair(ops, op, backward, i, middle)
        end = middle + 1
        while end < len(ops) and ops[end].kind in _SENDS:
            end += 1
        first, *others = [*_of(_RECEIVES, ops[i:middle]), *ops[middle:end]]
        program.append(LaneOp(first, (backward.stage, op.stage), "backward"))
        program += [LaneOp(other, (), "backward") for other in others]
        program += [LaneOp(op, (), "forward")]
        program += [LaneOp(other, (), "forward") for other in _of(_SENDS, ops[i:middle])]
        i = end
    return tuple(program)


def _of(kinds: Container[Kind], ops: Iterable[Op]) -> list[Op]:
    return [op for op in ops if op.kind in kinds]


def _check_pair(ops: Sequence[Op], forward: Op, backward: Op, i: int, middle: int) -> None:
    pair = Pair(forward, backward)
    if forward.stage == backward.stage:
        raise ScheduleError(
            f"{pair}: both halves are of stage {forward.stage}, which has one lane; pair a forward"
            " with a backward of another stage"
        )
    if middle < i:
        raise ScheduleError(f"{pair}: {backward} is not behind {forward}; put it there")
    if between := [op for op in ops[i + 1 : middle] if op.kind not in (*_SENDS, *_RECEIVES)]:
        raise ScheduleError(
            f"{pair}: between the halves stands {between[0]}; only transfers may, move it"
        )
