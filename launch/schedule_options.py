"""What the commands of `ppruntime schedule` take: their options' types, and what the texts mean.

Texts that mean nothing are ScheduleErrors with the option's name. The library is loaded when a text
is read, so `--help` shows at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter

from ppruntime.launch.whole_numbers import MaybeWhole, Whole

if TYPE_CHECKING:
    from ppruntime.schedules.costs import Costs, Hops
    from ppruntime.schedules.ops import Schedule

Ranks: TypeAlias = Annotated[Whole, Parameter(help="Pipeline ranks.")]
MicroBatches: TypeAlias = Annotated[Whole, Parameter(help="Micro-batches a step.")]
StagesPerRank: TypeAlias = Annotated[
    MaybeWhole, Parameter(help="Stages a rank; 2 for interleaved and V orders, else 1.")
]
CostsText: TypeAlias = Annotated[
    str,
    Parameter(
        name="--costs",
        help="F,I,W: times of forward, input and weight gradient per rank and micro-batch, split "
        "evenly over the rank's stages; or one triple per stage, separated by ';'.",
    ),
]
Transfer: TypeAlias = Annotated[
    str, Parameter(help="One-way latency between ranks; or one per stage hop, separated by ','.")
]
FusePairs: TypeAlias = Annotated[
    bool, Parameter(negative="", help="Fused pairs (dualpipe_v) wait for both their inputs.")
]
Gain: TypeAlias = Annotated[
    float, Parameter(help="Time of a fused pair over that of its halves one after the other.")
]
WarmupStep: TypeAlias = Annotated[
    str | None,
    Parameter(
        help="async_1f1b and 1f1b_w: s, rank r runs s (ranks - 1 - r) forwards before its first "
        "backward; or these numbers, separated by ','."
    ),
]
StallBudget: TypeAlias = Annotated[
    str | None,
    Parameter(
        help="Plan the smallest such numbers with which a micro-batch takes at most this much "
        "longer than the busiest rank's work on it, such as 1%."
    ),
]
MemoryBudget: TypeAlias = Annotated[
    str | None,
    Parameter(
        help="Plan the fastest such numbers with at most this many activations on a rank; or one "
        "limit a rank, separated by ','."
    ),
]
MemoryCap: TypeAlias = Annotated[
    str | None,
    Parameter(
        help="A multiple of 1F1B's peak (as many whole-rank activations as ranks), for every rank; "
        "or whole-rank activations per rank, separated by ','; not given: no cap."
    ),
]
Lowered: TypeAlias = Annotated[
    bool,
    Parameter(
        negative="",
        help="Show the order with sends, receives and frees, one line a step, not its times.",
    ),
]
Offload: TypeAlias = Annotated[
    MaybeWhole,
    Parameter(
        help="With --lowered: every how many-th micro-batch's activations move to the host and "
        "back; not given: none."
    ),
]
Paced: TypeAlias = Annotated[
    bool, Parameter(negative="", help="With --offload: forwards of the warm-up wait for copies.")
]
Json: TypeAlias = Annotated[bool, Parameter(negative="", help="Print one JSON object.")]
Svg: TypeAlias = Annotated[Path | None, Parameter(help="Write the picture here.")]
Csv: TypeAlias = Annotated[Path | None, Parameter(help="Write the order here, a row a rank.")]
Trace: TypeAlias = Annotated[
    Path | None,
    Parameter(help="Write a Chrome trace (Perfetto) here; a unit of time is a millisecond."),
]
Width: TypeAlias = Annotated[
    MaybeWhole, Parameter(help="Columns of the picture; by default the terminal's.")
]


def is_file(order: str) -> bool:
    """Whether an order is given as a file, not by name."""
    return order.endswith((".csv", ".json"))


def read_order(file: str) -> Schedule:
    """The order in a file, legal or not."""
    from ppruntime.schedules import formats
    from ppruntime.schedules.ops import ScheduleError

    try:
        return formats.read(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{file} cannot be read: {error}") from error


def read_legal(file: str) -> Schedule:
    """An order from a file that may be timed: whole, and free of deadlock."""
    from ppruntime.schedules.check import check as check_order

    schedule = read_order(file)
    check_order(schedule, ascending=False)
    return schedule


def named_order(
    name: str,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int | None,
    warmup: int | tuple[int, ...] | None,
) -> Schedule:
    """The order of that name."""
    from ppruntime.schedules import make

    return make(name, ranks, micro_batches, stages_per_rank=stages_per_rank, warmup_step=warmup)


def planned_warmup(
    name: str,
    ranks: int,
    step: str | None,
    stall_budget: str | None,
    memory_budget: str | None,
    costs: str,
    transfer: str,
) -> int | tuple[int, ...] | None:
    """The warm-up that was asked for, or that the planner finds for a budget."""
    from ppruntime.schedules import placement
    from ppruntime.schedules.costs import parse_costs
    from ppruntime.schedules.ops import ScheduleError
    from ppruntime.schedules.plan_warmup import plan_warmup

    if sum(value is not None for value in (step, stall_budget, memory_budget)) > 1:
        raise ScheduleError("--warmup-step, --stall-budget and --memory-budget exclude one another")
    if step is not None:
        numbers = integers_of("--warmup-step", step)
        return numbers[0] if len(numbers) == 1 and "," not in step else numbers
    if stall_budget is None and memory_budget is None:
        return None
    if name not in ("async_1f1b", "1f1b_w"):
        raise ScheduleError(f"{name} has no warm-up to plan; a budget is for async_1f1b or 1f1b_w")
    at_least_one("--ranks", ranks)
    memory = None if memory_budget is None else integers_of("--memory-budget", memory_budget)
    return plan_warmup(
        parse_costs(costs, placement.loop(ranks)),
        hops_of(transfer),
        stall_budget=None if stall_budget is None else share_of("--stall-budget", stall_budget),
        memory_budget=memory[0] if memory is not None and len(memory) == 1 else memory,
        defer_weight_grads=name == "1f1b_w",
    ).warmup


def costs_of(text: str, schedule: Schedule) -> Costs:
    """--costs, for the schedule's stages."""
    from ppruntime.schedules.costs import parse_costs

    return parse_costs(text, schedule.stage_to_rank)


def hops_of(text: str) -> Hops:
    """--transfer."""
    from ppruntime.schedules.costs import Hops

    numbers = numbers_of("--transfer", text)
    return Hops.both(numbers[0] if len(numbers) == 1 else numbers)


def numbers_of(flag: str, text: str) -> tuple[float, ...]:
    """Numbers, separated by commas."""
    from ppruntime.schedules.ops import ScheduleError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(
            f"{flag} {text!r} is not a number, or numbers separated by ','"
        ) from None


def integers_of(flag: str, text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    from ppruntime.schedules.ops import ScheduleError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(
            f"{flag} {text!r} is not a whole number, or such separated by ','"
        ) from None


def share_of(flag: str, text: str) -> float:
    """`1%` or `0.01`."""
    if text.endswith("%"):
        return numbers_of(flag, text[:-1])[0] / 100
    return numbers_of(flag, text)[0]


def at_least_one(flag: str, value: int) -> None:
    """Raises ScheduleError for a count below 1."""
    from ppruntime.schedules.ops import ScheduleError

    if value < 1:
        raise ScheduleError(f"{flag} is {value}; it is 1 at least")
