"""`ppruntime schedule`: shows, compares, checks and searches orders of work. No torch, no GPU.

Mistakes of the user are ScheduleErrors, which the caller of `app` prints as they are.
"""

from __future__ import annotations

import json as json_text
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from ppruntime.launch.percent import Percent
from ppruntime.launch.schedule_options import (
    CostsText,
    Csv,
    FusePairs,
    Gain,
    Json,
    Lowered,
    MemoryBudget,
    MemoryCap,
    MicroBatches,
    Offload,
    Paced,
    Ranks,
    StagesPerRank,
    StallBudget,
    Svg,
    Trace,
    Transfer,
    WarmupStep,
    Width,
    at_least_one,
    costs_of,
    hops_of,
    is_file,
    named_order,
    numbers_of,
    planned_warmup,
    read_legal,
    read_order,
)
from ppruntime.launch.whole_numbers import MaybeWhole, Whole

if TYPE_CHECKING:
    from ppruntime.schedules.ops import Schedule
    from ppruntime.schedules.timeline import Timeline

app = App(name="schedule", help="Show, compare, check and search orders of work.")


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
    jitter: Percent = 0.0,
    seed: Whole = 0,
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
        Relative standard deviation of op times, in percent; under 1 write such as 0.5%.
    seed
        Of the jitter.
    """
    from ppruntime.launch import schedule_report as report
    from ppruntime.schedules import draw, passes
    from ppruntime.schedules.grid import grid
    from ppruntime.schedules.ops import ScheduleError
    from ppruntime.schedules.timeline import simulate

    if is_file(order):
        given = {
            "--stages-per-rank": stages_per_rank,
            "--warmup-step": warmup_step,
            "--stall-budget": stall_budget,
            "--memory-budget": memory_budget,
        }
        for flag, value in given.items():
            if value is not None:
                raise ScheduleError(f"{flag} has no effect on {order}, a file; leave it out")
        schedule = read_legal(order)
    else:
        warmup = planned_warmup(
            order, ranks, warmup_step, stall_budget, memory_budget, costs, transfer
        )
        schedule = named_order(order, ranks, micro_batches, stages_per_rank, warmup)
    if overlap_gain != 1.0 and not fuse_pairs:
        raise ScheduleError("--overlap-gain has an effect on fused pairs only; add --fuse-pairs")
    if offload is not None and not lowered:
        raise ScheduleError("--offload has an effect on the lowered order only; add --lowered")
    if paced and offload is None:
        raise ScheduleError("--paced has an effect on offloads only; add --offload 1")
    times, hops = costs_of(costs, schedule), hops_of(transfer)
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
            overlapped = offload if paced else None
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
                read_legal(order)
                if is_file(order)
                else named_order(
                    order, ranks, num_micro_batches, stages_per_rank if any_stages else None, None
                )
            )
            return simulate(
                schedule,
                costs_of(costs, schedule),
                hops_of(transfer),
                fuse_pairs=fuse_pairs,
                overlap_gain=overlap_gain,
            )

        timeline = timed(micro_batches)
        stall = None if is_file(order) else _stall(timed, ranks)
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
    stages_per_rank: Whole = 1,
    costs: CostsText = "1,1,1",
    transfer: Transfer = "0",
    memory_cap: MemoryCap = None,
    seed: Whole = 0,
    effort: MaybeWhole = None,
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

    at_least_one("--ranks", ranks)
    at_least_one("--micro-batches", micro_batches)
    at_least_one("--stages-per-rank", stages_per_rank)
    cap = None if memory_cap is None else numbers_of("--memory-cap", memory_cap)
    result = searching.search(
        parse_costs(costs, placement.loop(ranks, stages_per_rank)),
        hops_of(transfer),
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
def check(file: str, /, *, slots: MaybeWhole = None, json: Json = False) -> int:
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

    schedule = read_order(file)
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


def _stall(timed: Callable[[int], Timeline], ranks: int) -> float:
    """Time per micro-batch beyond the busiest rank's work, between two longer steps."""
    short, long = 4 * ranks, 6 * ranks
    first, second = timed(short), timed(long)
    beyond = second.makespan_bubble - first.makespan_bubble
    return max(0.0, beyond) / (long - short)


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
