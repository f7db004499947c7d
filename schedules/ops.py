"""What one rank does: ops, their text form, and a schedule as data.

Letters (torch's; the zero-bubble papers write B for our I):
F forward, I gradient for the input, W gradient for the weights, B = I + W the whole backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class ScheduleError(ValueError):
    """An order, a placement or a request for one is wrong: what, where, and the remedy."""


class Kind(Enum):
    """Kinds of op. The value is the op's text between stage and micro-batch."""

    F = "F"
    """Forward of one stage for one micro-batch."""
    B = "B"
    """Whole backward, I and W at once."""
    I = "I"  # noqa: E741 (the field's letter)
    """Gradient for the stage's input; weight gradients are left to W."""
    W = "W"
    """Gradient for the stage's weights."""
    SEND_F = "SEND_F"
    """The stage sends its output to the next stage."""
    RECV_F = "RECV_F"
    """The stage posts the receive of its input from the previous stage."""
    SEND_B = "SEND_B"
    """The stage sends its input's gradient to the previous stage."""
    RECV_B = "RECV_B"
    """The stage posts the receive of its output's gradient from the next stage."""
    FREE_F = "FREE_F"
    """The slot that holds the stage's input may be overwritten."""
    FREE_B = "FREE_B"
    """The slot that holds the stage's output gradient may be overwritten."""
    OFFLOAD = "OFFLOAD"
    """Starts moving the micro-batch's saved activations to the host."""
    OFFLOADED = "OFFLOADED"
    """What OFFLOAD moves has left: what follows waits for the copy, and its memory is free."""
    RELOAD = "RELOAD"
    """Starts bringing them back."""

    # By identity, as enums compare. Enum's own hashes the name, in Python: 2x on sets of ops.
    __hash__ = object.__hash__


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})

_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_TEXT = re.compile(rf"(\d+)({_KINDS})(\d+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Op:
    """One thing a rank does: `stage` over the whole pipeline, what, and for which micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that a rank may overlap. Each half waits for its own input only,
    unless whoever runs it fuses the pair; text as torch writes it: `(0F8;7B0)OVERLAP_F_B`."""

    forward: Op
    backward: Op

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step: TypeAlias = Op | Pair
"""One entry of a rank's order."""


def ops_of(step: Step) -> tuple[Op, ...]:
    """The ops of an entry, in the order in which they run when they are not fused."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


def parse_op(text: str) -> Op:
    """`2F0` -> Op. Raises ScheduleError with the text."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        kinds = ", ".join(k.value for k in Kind)
        raise ScheduleError(
            f"{text!r} is not an op; write STAGE KIND MICRO_BATCH without blanks, such as 2F0"
            f" (kinds: {kinds})"
        )
    return Op(int(match[1]), Kind(match[2]), int(match[3]))


def parse_step(text: str) -> Step:
    """`2F0` or `(0F8;7B0)OVERLAP_F_B` -> Op or Pair. Raises ScheduleError with the text."""
    match = _PAIR.fullmatch(text.strip())
    return Pair(parse_op(match[1]), parse_op(match[2])) if match else parse_op(text)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The whole pipeline's order of ops: every rank holds, checks and hashes all of it.

    `stage_to_rank[s]` is the rank of stage s; `orders[r]` what rank r does, first to last.
    """

    name: str
    num_micro_batches: int
    stage_to_rank: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.stage_to_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, ascending: its chunks 0, 1, ..."""
        return tuple(s for s, r in enumerate(self.stage_to_rank) if r == rank)

    def kinds(self) -> frozenset[Kind]:
        """The kinds of op that occur."""
        return frozenset(op.kind for order in self.orders for step in order for op in ops_of(step))

    def ops(self, rank: int) -> Iterator[Op]:
        """The ops of one rank with pairs taken apart, in order."""
        for step in self.orders[rank]:
            yield from ops_of(step)
