"""`ppruntime bench schedules`: orders measured on sleeping stages, against the timeline and torch.

Three parts: `rig` runs every order in real processes and compares the step with the timeline's;
`torch` runs the orders that torch.distributed.pipelining has too, ours and torch's in turn;
`executor` measures what the executor itself costs. No GPU, and two cores carry it.
"""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Literal, TypeAlias

from ppruntime.launch.records import write_record
from ppruntime.launch.schedule_results import Case, RigResult, TorchResult
from ppruntime.schedules import NAMES, make
from ppruntime.schedules.costs import Costs
from ppruntime.schedules.ops import Schedule, ScheduleError

if TYPE_CHECKING:  # loaded by the ranks; the parent needs no torch for asking what is wanted
    from ppruntime.launch.executor_cost import ExecutorCost
    from ppruntime.launch.torch_rig import TorchStep
    from ppruntime.sleep_rig import RigStep

Part: TypeAlias = Literal["rig", "torch", "executor"]
PARTS: tuple[Part, ...] = ("rig", "torch", "executor")

ERROR_BAR = 0.03
"""The measured step is within 3 % of the timeline's."""
RATIO_BAR = 1.0
"""No slower than torch."""
EXECUTOR_BAR_US = 40.0

_UNEQUAL_RANKS = (1.0, 1.3, 1.1, 1.2)
_UNEQUAL_KINDS = (1.0, 1.25, 1.0)
"""Factors on an op's time: by rank, in turn, and for F, I, W. None makes an op shorter."""
_UNEQUAL_LATENCY_MS = 15.0
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured. A chunk's F, I and W take `op_ms` each, so B takes twice that."""

    only: tuple[Part, ...] = PARTS
    orders: tuple[str, ...] = NAMES
    ranks: int = 4
    micro_batches: int = 16
    op_ms: float = 20.0
    latencies_ms: tuple[float, ...] = (0.0, 5.0, 15.0, 30.0)
    steps: int = 3
    torch_steps: int = 7
    out: Path | None = Path("docs/bench/schedules.json")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.orders if name not in NAMES]:
            raise ScheduleError(
                f"there is no order {unknown[0]!r}; the orders are {', '.join(NAMES)}"
            )
        if min(self.ranks - 1, self.micro_batches, self.steps, self.torch_steps) < 1:
            raise ScheduleError(
                f"ranks = {self.ranks}, micro_batches = {self.micro_batches}, steps = {self.steps},"
                f" torch_steps = {self.torch_steps}; the least are 2, 1, 1 and 1"
            )
        if min(self.op_ms, *self.latencies_ms) < 0:
            raise ScheduleError(
                f"op_ms = {self.op_ms}, latencies_ms = {self.latencies_ms}; times are 0 or more"
            )

    @property
    def command(self) -> str:
        """The command line that asks for this; defaults left out."""
        words = ["ppruntime", "bench", "schedules"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values = value if isinstance(value, tuple) else (value,)
                for each in values:
                    words += [f"--{field.name.replace('_', '-')}", str(each)]
        return shlex.join(words)

    def cases(self, order: str) -> tuple[Case, ...]:
        """What an order is measured under on the rig."""
        equal = tuple(Case(order, latency, unequal=False) for latency in self.latencies_ms)
        return (*equal, Case(order, _UNEQUAL_LATENCY_MS, unequal=True))

    def schedule(self, order: str) -> Schedule:
        return make(order, self.ranks, self.micro_batches)

    def costs(self, schedule: Schedule, *, unequal: bool) -> Costs:
        """Seconds per stage."""
        rank_factors = _UNEQUAL_RANKS if unequal else (1.0,)
        kind_factors = _UNEQUAL_KINDS if unequal else (1.0, 1.0, 1.0)
        stages = [
            self.op_ms / 1e3 * rank_factors[rank % len(rank_factors)]
            for rank in schedule.stage_to_rank
        ]
        forward, input_grad, weight_grad = (
            tuple(seconds * factor for seconds in stages) for factor in kind_factors
        )
        return Costs(forward, input_grad, weight_grad)


def run(options: Options) -> int:
    """Measures, prints a line a case, writes the JSON. Gives 1 if a bar is missed, else 0."""
    print(f"{options.command}\n{_device()}; load {os.getloadavg()[0]:.1f}", flush=True)
    start, load = time.monotonic(), os.getloadavg()
    rig_results: list[RigResult] = []
    torch_results: list[TorchResult] = []
    cost: ExecutorCost | None = None
    if "executor" in options.only:
        cost = _executor_part()
    if {"rig", "torch"} & set(options.only):
        for result in _measure(options):
            print(result, flush=True)
            if isinstance(result, RigResult):
                rig_results.append(result)
            else:
                torch_results.append(result)
    bars = _bars(rig_results, torch_results, cost)
    for bar in bars:
        print(bar)
    print(f"{time.monotonic() - start:.0f} s")
    if options.out is not None:
        record = {
            "command": options.command,
            "device": _device(),
            "versions": _versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load_average": {"before": load, "after": os.getloadavg()},
            "rig": [result.record() for result in rig_results],
            "torch": [result.record() for result in torch_results],
            "executor": None if cost is None else asdict(cost),
            "bars": [asdict(bar) | {"met": bar.met} for bar in bars],
        }
        write_record(options.out, record)
    return int(not all(bar.met for bar in bars))


@dataclass(frozen=True, slots=True)
class Bar:
    """The worst of what was measured, and what it may be."""

    what: str
    worst: float
    limit: float

    @property
    def met(self) -> bool:
        return self.worst <= self.limit

    def __str__(self) -> str:
        return (
            f"{'met   ' if self.met else 'MISSED'}  {self.what}: {self.worst:.4g}, at most"
            f" {self.limit:g}"
        )


def _bars(
    rig_results: Sequence[RigResult],
    torch_results: Sequence[TorchResult],
    cost: ExecutorCost | None,
) -> list[Bar]:
    bars = []
    if rig_results:
        worst = max(abs(result.error) for result in rig_results)
        bars.append(Bar("step against the timeline, worst relative error", worst, ERROR_BAR))
    if torch_results:
        ratios = [result.ratio for result in torch_results]
        print(f"ours / torch, geometric mean: {geometric_mean(ratios):.4f}")
        bars.append(Bar("step, ours / torch, worst", max(ratios), RATIO_BAR))
    if cost is not None:
        bars.append(Bar("executor, us per op", cost.us_per_op, EXECUTOR_BAR_US))
    return bars


# --- in this process -----------------------------------------------------------------------------


def _executor_part() -> ExecutorCost:
    from ppruntime.launch.executor_cost import executor_cost

    cost = executor_cost()
    print(
        f"executor {cost.us_per_op:.1f} us per op ({cost.us_per_computation:.1f} us per"
        f" computation with its transfers), {cost.plain_calls_per_op:.0f} plain Python calls",
        flush=True,
    )
    return cost


def _measure(options: Options) -> Iterator[RigResult | TorchResult]:
    """Runs the rig and torch on the ranks; gives a result when all its steps are there."""
    from ppruntime.launch.host_ranks import run_on_ranks

    steps: dict[Case, list[Sequence[RigStep]]] = {}
    pairs: dict[str, list[tuple[Sequence[RigStep], Sequence[TorchStep]]]] = {}
    for values in run_on_ranks(options.ranks, rank_main, options, timeout_seconds=_LIMIT_SECONDS):
        case = values[0][0]
        schedule = options.schedule(case.order)
        if len(values[0]) == 2:
            steps.setdefault(case, []).append([step for _, step in values])
            if len(steps[case]) == options.steps:
                costs = options.costs(schedule, unequal=case.unequal)
                yield RigResult.of(case, schedule, costs, steps.pop(case))
        else:
            pair = [ours for _, ours, _ in values], [theirs for _, _, theirs in values]
            pairs.setdefault(case.order, []).append(pair)
            if len(pairs[case.order]) == options.torch_steps:
                costs = options.costs(schedule, unequal=False)
                yield TorchResult.of(schedule, costs, pairs.pop(case.order))


def _device() -> str:
    model = platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        names = [
            line for line in cpu_info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0].partition(": ")[2] if names else model
    return f"{model}, {os.cpu_count()} cores"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from ppruntime import __version__

    return {
        "ppruntime": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


# --- on the ranks --------------------------------------------------------------------------------


def rank_main(
    rank: int, options: Options
) -> Iterator[tuple[Case, RigStep] | tuple[Case, RigStep, TorchStep]]:
    """One rank's steps: of all cases of an order in turn, then ours and torch's in turn."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    from ppruntime.launch.torch_rig import TORCH_CLASSES, TorchRig
    from ppruntime.sleep_rig import SleepRig

    for order in options.orders:
        against_torch = "torch" in options.only and order in TORCH_CLASSES
        if not against_torch and "rig" not in options.only:
            continue
        schedule = options.schedule(order)
        rig = SleepRig(schedule, PrefixStore(order, _get_default_store()))
        if "rig" in options.only:
            for _ in range(options.steps):
                for case in options.cases(order):
                    costs = options.costs(schedule, unequal=case.unequal)
                    yield case, rig.step(costs, case.latency_ms / 1e3)
        if against_torch:
            theirs, case = TorchRig(schedule), Case(order, 0.0, unequal=False)
            costs = options.costs(schedule, unequal=False)
            for _ in range(options.torch_steps):
                yield case, rig.step(costs, 0.0), theirs.step(costs)
        rig.close()
