"""`ppruntime schedule`: shows, compares, checks and searches orders of work. No torch, no GPU.

Mistakes of the user are ScheduleErrors, which the caller of `app` prints as they are.
"""

from __future__ import annotations

import json as json_text
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from ppruntime.schedules.costs import Costs, Hops
    from ppruntime.schedules.ops import Schedule
    from ppruntime.schedules.timeline import Timeline

app = App(name="schedule", help="Show, compare, check and search orders of work.")

Ranks: TypeAlias = Annotated[int, Parameter(help="Pipeline ranks.")]
MicroBatches: TypeAlias = Annotated[int, Parameter(help="Micro-batches a step.")]
StagesPerRank: TypeAlias = Annotated[
    int | None, Parameter(help="Stages a rank; 2 for interleaved and V orders, else 1.")
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
    int | None,
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
    int | None, Parameter(help="Columns of the picture; by default the terminal's.")
]


@app.command(name="list")
def list_orders(*, json: Json = False) -> int:
    """Names the orders, each with bubble and activations in flight."""
    from ppruntime.launch.schedule_report import table
    from ppruntime.schedules import NAMES
    from ppruntime.schedules.formulas import FORMULAS

    if json:
        print(json_text.dumps([{"name": name, **FORMULAS[name].as_dict()} for name in NAMES]))
        return 0
    header = ["name", "stages", "bubble", "chunks in flight", "what it is"]
    lines = []
    for name in NAMES:
        f = FORMULAS[name]
        lines.append([name, f.stages_per_rank, f.bubble, f.in_flight, f.what])
    print(table(header, lines, num_left=len(header)))
    print("\nP ranks (r from 0), V stages a rank, M micro-batches; F, I, W of a whole rank; c = 0.")
    return 0


@app.command
def show(
    order: str,
    /,
    *,
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    stages_per_rank: StagesPerRank = None,
    warmup_step: WarmupStep = None,
    stall_budget: StallBudget = None,
    memory_budget: MemoryBudget = None,
    costs: CostsText = "1,1,1",
    transfer: Transfer = "0",
    fuse_pairs: FusePairs = False,
    overlap_gain: Gain = 1.0,
    jitter: float = 0.0,
    seed: int = 0,
    lowered: Lowered = False,
    offload: Offload = None,
    paced: Paced = False,
    svg: Svg = None,
    csv: Csv = None,
    trace: Trace = None,
    width: Width = None,
    json: Json = False,
) -> int:
    """Draws one order in time and says where the time goes.

    Parameters
    ----------
    order
        A name from `schedule list`, or a .csv or .json file with an order.
    jitter
        Relative standard deviation of op times.
    seed
        Of the jitter.
    """
    from ppruntime.launch import schedule_report as report
    from ppruntime.schedules import draw, passes
    from ppruntime.schedules.grid import grid
    from ppruntime.schedules.ops import ScheduleError
    from ppruntime.schedules.timeline import simulate

    if _is_file(order):
        given = {
            "--stages-per-rank": stages_per_rank,
            "--warmup-step": warmup_step,
            "--stall-budget": stall_budget,
            "--memory-budget": memory_budget,
        }
        for flag, value in given.items():
            if value is not None:
                raise ScheduleError(f"{flag} has no effect on {order}, a file; leave it out")
        schedule = _read_legal(order)
    else:
        warmup = _warmup(order, ranks, warmup_step, stall_budget, memory_budget, costs, transfer)
        schedule = _make(order, ranks, micro_batches, stages_per_rank, warmup)
    if overlap_gain != 1.0 and not fuse_pairs:
        raise ScheduleError("--overlap-gain has an effect on fused pairs only; add --fuse-pairs")
    if offload is not None and not lowered:
        raise ScheduleError("--offload has an effect on the lowered order only; add --lowered")
    if paced and offload is None:
        raise ScheduleError("--paced has an effect on offloads only; add --offload 1")
    times, hops = _costs(costs, schedule), _hops(transfer)
    timeline = simulate(
        schedule,
        times,
        hops,
        fuse_pairs=fuse_pairs,
        overlap_gain=overlap_gain,
        jitter=jitter,
        seed=seed,
    )
    facts = f"F,I,W {costs}; transfer {transfer}; {report.summary(timeline)}"
    _write_pictures(timeline, facts, svg, csv, trace)
    if json:
        print(json_text.dumps(report.timeline_facts(timeline)))
        return 0
    print(_title(schedule))
    print(facts, end="\n\n")
    if lowered:
        if offload is not None:
            apart = passes.split_pairs(schedule)
            overlapped = 1 if paced else None
            schedule = passes.add_offload(apart, every=offload, overlapped=overlapped)
        print(grid(passes.add_frees(passes.add_transfers(schedule))))
        return 0
    print(draw.text_picture(timeline.rows, width or shutil.get_terminal_size((120, 40)).columns))
    print()
    print(report.rank_table(timeline))
    return 0


@app.command
def compare(
    *orders: str,
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    stages_per_rank: StagesPerRank = None,
    costs: CostsText = "1,1,1",
    transfer: Transfer = "0",
    fuse_pairs: FusePairs = False,
    overlap_gain: Gain = 1.0,
    json: Json = False,
) -> int:
    """Sets orders side by side at the same costs: bubbles, memory, transfers, stall.

    The stall is what a micro-batch of a long step takes beyond the busiest rank's work on it.

    Parameters
    ----------
    orders
        Names from `schedule list`, or files; none: every order.
    stages_per_rank
        For orders that take any number of stages (interleaved).
    """
    from ppruntime.launch import schedule_report as report
    from ppruntime.schedules import NAMES
    from ppruntime.schedules.timeline import simulate

    lines, objects = [], []
    for order in orders or NAMES:

        def timed(num_micro_batches: int, order: str = order) -> Timeline:
            any_stages = order.startswith("interleaved")
            schedule = (
                _read_legal(order)
                if _is_file(order)
                else _make(
                    order, ranks, num_micro_batches, stages_per_rank if any_stages else None, None
                )
            )
            return simulate(
                schedule,
                _costs(costs, schedule),
                _hops(transfer),
                fuse_pairs=fuse_pairs,
                overlap_gain=overlap_gain,
            )

        timeline = timed(micro_batches)
        stall = None if _is_file(order) else _stall(timed, ranks)
        facts = report.timeline_facts(timeline)
        objects.append({**facts, "stall_per_micro_batch": stall})
        lines.append(
            [
                timeline.schedule.name,
                f"{timeline.makespan:.6g}",
                f"{timeline.makespan_bubble:.6g}",
                f"{timeline.span_bubble:.6g}",
                f"{timeline.bubble_fraction:.1%}",
                "-" if stall is None else f"{stall:.3g}",
                report.short_list(timeline.peak_in_flight),
                str(facts["transfers"]),
                str(facts["slots"]),
            ]
        )
    if json:
        print(json_text.dumps(objects))
        return 0
    header = [
        "order",
        "makespan",
        "bubble",
        "span bubble",
        "share",
        "stall/mb",
        "peak in flight",
        "transfers",
        "slots",
    ]
    print(report.table(header, lines))
    return 0


@app.command
def search(
    *,
    ranks: Ranks = 4,
    micro_batches: MicroBatches = 8,
    stages_per_rank: int = 1,
    costs: CostsText = "1,1,1",
    transfer: Transfer = "0",
    memory_cap: MemoryCap = None,
    seed: int = 0,
    effort: int | None = None,
    svg: Svg = None,
    csv: Csv = None,
    trace: Trace = None,
    width: Width = None,
    json: Json = False,
) -> int:
    """Looks for the fastest order at these costs, never a slower one than the best known by name.

    Parameters
    ----------
    seed
        Of the random choices; same seed, same order.
    effort
        Ops placed over all tries; the default takes a few seconds.
    """
    from ppruntime.launch import schedule_report as report
    from ppruntime.schedules import draw, placement
    from ppruntime.schedules import search as searching
    from ppruntime.schedules.costs import parse_costs

    _positive("--ranks", ranks)
    _positive("--micro-batches", micro_batches)
    _positive("--stages-per-rank", stages_per_rank)
    cap = None if memory_cap is None else _numbers("--memory-cap", memory_cap)
    result = searching.search(
        parse_costs(costs, placement.loop(ranks, stages_per_rank)),
        _hops(transfer),
        cap[0] if cap is not None and len(cap) == 1 else cap,
        num_ranks=ranks,
        num_micro_batches=micro_batches,
        stages_per_rank=stages_per_rank,
        seed=seed,
        effort=searching.DEFAULT_EFFORT if effort is None else effort,
    )
    verdict = (
        f"at most {max(result.gap, 0):.2%} above the best possible: no order is under "
        f"{result.lower_bound:.6g}"
    )
    facts = f"F,I,W {costs}; transfer {transfer}; {report.summary(result.timeline)}"
    _write_pictures(result.timeline, f"{facts}; {verdict}", svg, csv, trace)
    if json:
        print(json_text.dumps(report.search_facts(result)))
        return 0
    print(_title(result.schedule))
    print(facts)
    print(verdict)
    print(
        f"best known by name within the cap: {result.handmade}, {result.handmade_makespan:.6g}"
        if result.handmade_makespan is not None
        else "no order known by name fits the cap"
    )
    print()
    print(
        draw.text_picture(
            result.timeline.rows, width or shutil.get_terminal_size((120, 40)).columns
        )
    )
    print()
    print(report.rank_table(result.timeline))
    return 0


@app.command
def check(file: str, /, *, slots: int | None = None, json: Json = False) -> int:
    """Checks an order in a file: complete, in order, free of deadlock.

    Parameters
    ----------
    file
        A .csv (a row a rank, cells as torch writes them) or .json file.
    slots
        Receive buffers per channel that the order has to do with.
    """
    from ppruntime.launch import schedule_report as report
    from ppruntime.schedules.check import check as check_order
    from ppruntime.schedules.counts import peak_in_flight

    schedule = _read(file)
    check_order(schedule, slots=slots)
    facts = {
        "legal": True,
        "peak_in_flight": list(peak_in_flight(schedule)),
        **report.order_facts(schedule),
    }
    if json:
        print(json_text.dumps(facts))
        return 0
    print(
        f"{file} is a legal order: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_micro_batches} micro-batches; peak in flight "
        f"{report.short_list(peak_in_flight(schedule))}; {facts['transfers']} transfers; "
        f"slots per channel {facts['slots']}; digest {facts['digest']}"
    )
    return 0


def _title(schedule: Schedule) -> str:
    stages = schedule.num_stages
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {stages} stages, "
        f"{schedule.num_micro_batches} micro-batches"
    )


def _is_file(order: str) -> bool:
    return order.endswith((".csv", ".json"))


def _read(file: str) -> Schedule:
    from ppruntime.schedules import formats
    from ppruntime.schedules.ops import ScheduleError

    try:
        return formats.read(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{file} cannot be read: {error}") from error


def _read_legal(file: str) -> Schedule:
    """An order from a file that may be timed: whole, and free of deadlock."""
    from ppruntime.schedules.check import check as check_order

    schedule = _read(file)
    check_order(schedule, ascending=False)
    return schedule


def _make(
    name: str,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int | None,
    warmup: int | tuple[int, ...] | None,
) -> Schedule:
    from ppruntime.schedules import make

    return make(name, ranks, micro_batches, stages_per_rank=stages_per_rank, warmup_step=warmup)


def _warmup(
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
        numbers = _integers("--warmup-step", step)
        return numbers[0] if len(numbers) == 1 and "," not in step else numbers
    if stall_budget is None and memory_budget is None:
        return None
    if name not in ("async_1f1b", "1f1b_w"):
        raise ScheduleError(f"{name} has no warm-up to plan; a budget is for async_1f1b or 1f1b_w")
    _positive("--ranks", ranks)
    memory = None if memory_budget is None else _integers("--memory-budget", memory_budget)
    return plan_warmup(
        parse_costs(costs, placement.loop(ranks)),
        _hops(transfer),
        stall_budget=None if stall_budget is None else _share("--stall-budget", stall_budget),
        memory_budget=memory[0] if memory is not None and len(memory) == 1 else memory,
        defer_weight_grads=name == "1f1b_w",
    ).warmup


def _stall(timed: Callable[[int], Timeline], ranks: int) -> float:
    """Time per micro-batch beyond the busiest rank's work, between two longer steps."""
    short, long = 4 * ranks, 6 * ranks
    first, second = timed(short), timed(long)
    beyond = second.makespan_bubble - first.makespan_bubble
    return max(0.0, beyond) / (long - short)


def _costs(text: str, schedule: Schedule) -> Costs:
    from ppruntime.schedules.costs import parse_costs

    return parse_costs(text, schedule.stage_to_rank)


def _hops(text: str) -> Hops:
    from ppruntime.schedules.costs import Hops

    numbers = _numbers("--transfer", text)
    return Hops.both(numbers[0] if len(numbers) == 1 else numbers)


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    from ppruntime.schedules.ops import ScheduleError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(
            f"{flag} {text!r} is not a number, or numbers separated by ','"
        ) from None


def _integers(flag: str, text: str) -> tuple[int, ...]:
    from ppruntime.schedules.ops import ScheduleError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(
            f"{flag} {text!r} is not a whole number, or such separated by ','"
        ) from None


def _share(flag: str, text: str) -> float:
    """`1%` or `0.01`."""
    if text.endswith("%"):
        return _numbers(flag, text[:-1])[0] / 100
    return _numbers(flag, text)[0]


def _positive(flag: str, value: int) -> None:
    from ppruntime.schedules.ops import ScheduleError

    if value < 1:
        raise ScheduleError(f"{flag} is {value}; it is 1 at least")


def _write_pictures(
    timeline: Timeline, facts: str, svg: Path | None, csv: Path | None, trace: Path | None
) -> None:
    from ppruntime.schedules import draw, formats
    from ppruntime.schedules.ops import ScheduleError

    panel = draw.Panel(_title(timeline.schedule), facts, timeline.rows)
    writers: list[tuple[Path | None, Callable[[], str]]] = [
        (svg, lambda: draw.svg([panel])),
        (csv, lambda: formats.to_csv(timeline.schedule)),
        (
            trace,
            lambda: draw.chrome_trace(timeline.rows, timeline.transfers, seconds_per_unit=1e-3),
        ),
    ]
    for path, text in writers:
        if path is not None:
            try:
                path.write_text(text(), encoding="utf-8")
            except OSError as error:
                raise ScheduleError(f"{path} cannot be written: {error}") from error
