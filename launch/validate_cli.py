"""`ppruntime validate`: predictions, written before each run, and what came out."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ppruntime.launch.outputs import check_output
from ppruntime.launch.records import write_record
from ppruntime.launch.whole_numbers import MaybeWholes, Whole
from ppruntime.projection.projector import ProjectionError
from ppruntime.typed_command import typed
from ppruntime.validate import Ledger, Verdict, exact_cases, predictions_beside


def validate(
    *,
    only: list[Literal["v0", "v1", "v2"]] | None = None,
    ranks: MaybeWholes = None,
    op_ms: float = 25.0,
    latency_ms: float = 8.0,
    micro_batches: Whole = 24,
    steps: Whole = 3,
    out: Path = Path("docs/bench/validation.json"),
    predictions: Path | None = None,
) -> int:
    """Holds the simulator against closed forms (v0), real sleeping pipelines (v1), and emulated
    halves against whole pipelines (v2). Needs a quiet machine, no GPU. Gives 1 if a bar is missed.

    Parameters
    ----------
    only
        Rung to run, may be repeated; by default all.
    ranks
        Pipeline ranks of v1, may be repeated; by default 4 and 8. v2 takes the last.
    op_ms
        Milliseconds of a forward on the fastest rank.
    latency_ms
        Injected latency of a transfer.
    micro_batches
        Of the predicted steps; the calibration takes 8.
    steps
        Steps of each run; the median counts.
    out
        JSON file to write.
    predictions
        File that gets each prediction, a JSON line, before its run; by default beside `out`.
    """
    sizes = tuple(ranks) if ranks else (4, 8)
    if (
        min(op_ms, steps) <= 0
        or latency_ms < 0
        or any(size < 2 or size % 2 for size in sizes)
        or micro_batches < 3 * max(sizes)
    ):
        raise ProjectionError(
            f"--ranks {', '.join(map(str, sizes))}, --op-ms {op_ms:g}, --latency-ms {latency_ms:g},"
            f" --micro-batches {micro_batches}, --steps {steps}; ranks are even, micro-batches at"
            " least three times as many, times above 0"
        )
    predictions = predictions or predictions_beside(out)
    check_output("--out", out, makes_folder=True)
    check_output("--predictions", predictions, makes_folder=True)
    rungs = tuple(only) if only else ("v0", "v1", "v2")
    start, load = time.monotonic(), os.getloadavg()
    ledger = Ledger(predictions)
    verdicts: list[Verdict] = []
    if "v0" in rungs:
        verdicts += exact_cases()
        worst = max(verdicts, key=lambda verdict: abs(verdict.error))
        print(f"{len(verdicts)} cases of v0, the worst:\n{worst}", flush=True)
    for verdict in _rig(rungs, sizes, op_ms, latency_ms, micro_batches, steps, ledger):
        verdicts.append(verdict)
        print(verdict, flush=True)
    print(f"{time.monotonic() - start:.0f} s")
    record = {
        "command": typed(),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": _versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": {"before": load, "after": os.getloadavg()},
        "seconds": time.monotonic() - start,
        "predictions": predictions.name,
        "cases": [verdict.record() for verdict in verdicts],
    }
    write_record(out, record)
    return int(not all(verdict.met for verdict in verdicts))


def _rig(
    rungs: tuple[str, ...],
    sizes: tuple[int, ...],
    op_ms: float,
    latency_ms: float,
    micro_batches: int,
    steps: int,
    ledger: Ledger,
) -> Iterator[Verdict]:
    from ppruntime.launch.validate_rig import Rig, half_emulated, real_pipelines

    rig = Rig(op_ms=op_ms, latency_ms=latency_ms, micro_batches=micro_batches, steps=steps)
    if "v1" in rungs:
        for size in sizes:
            yield from real_pipelines(rig, size, ledger)
    if "v2" in rungs:
        for order in ("1f1b", "1f1b_w"):
            yield from half_emulated(rig, sizes[-1], order, ledger)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"torch": version("torch"), "python": platform.python_version()}
