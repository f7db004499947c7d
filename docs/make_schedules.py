"""Writes the tables of docs/schedules.md and docs/bench/schedule_search.json.

From the repository's root: PYTHONPATH=. python docs/make_schedules.py
The search takes a few minutes; everything but the seconds comes out the same on any machine.
"""

from __future__ import annotations

import json
import platform
import random
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.counts import num_transfers
from ppruntime.schedules.formulas import FORMULAS
from ppruntime.schedules.progress import slots_needed
from ppruntime.schedules.search import DEFAULT_EFFORT, search
from ppruntime.schedules.timeline import Timeline, simulate

DOCS = Path(__file__).parent
PAGE = DOCS / "schedules.md"
RESULTS = DOCS / "bench" / "schedule_search.json"


@dataclass(frozen=True, slots=True)
class Case:
    """One search. `spread`: stage costs vary by that share, drawn from `costs_seed`."""

    ranks: int
    micro_batches: int
    stages_per_rank: int
    memory_cap: float
    transfer: float
    costs: tuple[float, float, float]
    spread: float = 0.0
    costs_seed: int = 0

    def stage_costs(self) -> Costs:
        """F, I, W of each stage: the rank's, split evenly, times the stage's own factor."""
        rng = random.Random(self.costs_seed)
        factors = [
            (1 + rng.uniform(-self.spread, self.spread)) / self.stages_per_rank
            for _ in range(self.ranks * self.stages_per_rank)
        ]
        return Costs(*(tuple(time * factor for factor in factors) for time in self.costs))


def cases() -> Iterator[Case]:
    """The fixed list: the sizes and costs that the targets name, then tighter and looser memory."""
    kinds = (((1.0, 1.0, 1.0), 0.0), ((1.0, 1.0, 1.0), 0.15), ((1.0, 1.5, 0.5), 0.0))
    for ranks, micro_batches in ((4, 8), (8, 32), (16, 16), (16, 64)):
        for stages in (1, 2):
            for transfer in (0.0, 0.09):
                for costs, spread in kinds:
                    yield Case(ranks, micro_batches, stages, 1.25, transfer, costs, spread)
    for cap in (0.75, 1.0, 1.5):
        for stages in (1, 2):
            for costs, spread in kinds:
                yield Case(8, 32, stages, cap, 0.09, costs, spread)
    for stages in (1, 2):
        for costs, spread in kinds:
            yield Case(8, 32, stages, 1.25, 0.5, costs, spread)


def run(case: Case) -> dict[str, Any]:
    begin = time.process_time()
    result = search(
        case.stage_costs(),
        Hops.both(case.transfer),
        case.memory_cap,
        num_ranks=case.ranks,
        num_micro_batches=case.micro_batches,
        stages_per_rank=case.stages_per_rank,
    )
    return {
        **asdict(case),
        "makespan": result.makespan,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "handmade": result.handmade,
        "handmade_makespan": result.handmade_makespan,
        "cpu_seconds": round(time.process_time() - begin, 1),
    }


def formulas_table() -> str:
    rows = [
        "| order | stages a rank | bubble | span bubble | in flight on rank r | transfers | slots |"
    ]
    rows.append("|---|---|---|---|---|---|---|")
    for name in NAMES:
        f = FORMULAS[name]
        cells = (f.stages_per_rank, f.bubble, f.span_bubble, f.in_flight, f.transfers, f.slots)
        rows.append(f"| `{name}`: {f.what} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def numbers_table(ranks: int = 8, micro_batches: int = 32) -> str:
    rows = [
        "| order | bubble, 1/1/1 | 1/1.5/0.5 | 1/1/1, c = 0.1 | peak, rank 0 and last | slots |"
    ]
    rows.append("|---|---|---|---|---|---|")
    for name in NAMES:
        schedule = make(name, ranks, micro_batches)

        def timed(costs: tuple[float, float, float], transfer: float = 0.0) -> Timeline:
            even = Costs.even(*costs, schedule.stage_to_rank)  # noqa: B023 (called in this turn)
            return simulate(schedule, even, Hops.both(transfer))  # noqa: B023

        equal, unequal = timed((1, 1, 1)), timed((1, 1.5, 0.5))
        bubbles = (
            f"{equal.makespan_bubble:g} / {equal.span_bubble:g}",
            f"{unequal.makespan_bubble:g} / {unequal.span_bubble:g}",
            f"{timed((1, 1, 1), 0.1).makespan_bubble:.2f}",
        )
        peaks = f"{equal.peak_in_flight[0]}, {equal.peak_in_flight[-1]}"
        counts = f"{peaks} | {slots_needed(schedule)}"
        rows.append(f"| `{name}` ({num_transfers(schedule)}) | {' | '.join(bubbles)} | {counts} |")
    return "\n".join(rows)


def search_table(results: list[dict[str, Any]]) -> str:
    header = "P x M", "V", "cap", "c", "F/I/W", "makespan", "bound", "gap", "best by name", "ahead"
    rows = [_row(*header, "CPU s"), _row(*["---"] * 11)]
    for r in results:
        costs = "/".join(f"{time:g}" for time in r["costs"])
        if r["spread"]:
            costs += f" ±{r['spread']:.0%}"
        named = r["handmade_makespan"]
        rows.append(
            _row(
                f"{r['ranks']} x {r['micro_batches']}",
                r["stages_per_rank"],
                r["memory_cap"],
                r["transfer"],
                costs,
                f"{r['makespan']:.2f}",
                f"{r['lower_bound']:.2f}",
                f"{max(r['gap'], 0):.2%}",
                r["handmade"] or "none fits",
                f"{1 - r['makespan'] / named:.1%}" if named else "",
                r["cpu_seconds"],
            )
        )
    return "\n".join(rows)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def replace_block(page: str, name: str, text: str) -> str:
    """The page with what stands between the marks of block `name` replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{PAGE} has no block {name}; add {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def main() -> None:
    results = []
    for case in cases():
        results.append(run(case))
        print(case, f"{results[-1]['gap']:.2%}", flush=True)
    RESULTS.write_text(
        json.dumps(
            {
                "command": "PYTHONPATH=. python docs/make_schedules.py",
                "device": f"one core of {platform.machine()}, no accelerator",
                "versions": {"python": platform.python_version()},
                "date": datetime.now(UTC).date().isoformat(),
                "effort": DEFAULT_EFFORT,
                "cases": results,
            },
            indent=1,
        )
        + "\n"
    )
    page = PAGE.read_text()
    page = replace_block(page, "formulas", formulas_table())
    page = replace_block(page, "numbers", numbers_table())
    page = replace_block(page, "search", search_table(results))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
