"""Rows, checks and the JSON of the MoE benches."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ppruntime.launch.command_line import command_line
from ppruntime.launch.moe_floor import Work
from ppruntime.launch.records import write_record


@dataclass(slots=True)
class Row:
    """One timed thing: every repetition in milliseconds, and the work it did."""

    shape: str
    phase: str
    variant: str
    flops: float
    num_bytes: float
    milliseconds: list[float] = field(default_factory=list)
    floor_ms: float = 0.0
    """The least that it can take, see `moe_floor`; 0: nobody said."""
    micro_batches: int = 1
    """That it does at once."""

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.milliseconds)

    @property
    def ratio_to_floor(self) -> float | None:
        return self.median / self.floor_ms if self.floor_ms else None

    def record(self) -> dict[str, object]:
        median = self.median
        return {
            **asdict(self),
            "median_ms": median,
            "lowest_ms": min(self.milliseconds),
            "tflops": self.flops / median / 1e9,
            "gb_per_second": self.num_bytes / median / 1e6,
            "ratio_to_floor": self.ratio_to_floor,
        }

    def __str__(self) -> str:
        median = self.median
        rates = f"{self.flops / median / 1e9:7.0f} TFLOP/s" if self.flops else " " * 15
        if self.num_bytes:
            rates += f" {self.num_bytes / median / 1e6:6.0f} GB/s"
        if (ratio := self.ratio_to_floor) is not None:
            rates += f" {ratio:6.2f} x floor"
        return (
            f"{self.shape:8} {self.phase:14} {self.variant:34} {median:8.3f} ms"
            f" (from {min(self.milliseconds):7.3f}) {rates}"
        )


class Recorder:
    """Times variants in turn, notes what is checked, and writes both."""

    def __init__(self, repetitions: int, *, speaks: bool = True) -> None:
        self.repetitions, self.speaks = repetitions, speaks
        self.rows: list[Row] = []
        self.checks: list[dict[str, object]] = []
        self.failed_checks: list[str] = []
        self.notes: list[str] = []

    def time(
        self,
        shape: str,
        phase: str,
        variants: dict[str, Callable[[], object]],
        *,
        flops: float = 0.0,
        num_bytes: float = 0.0,
        repetitions: int | None = None,
    ) -> None:
        """Times the variants in turn, again and again. `num_bytes`: of memory."""
        import torch

        from ppruntime.gpu_clock import Clock

        floor_ms = Work(flops, num_bytes).floor_ms()
        rows = [Row(shape, phase, name, flops, num_bytes, floor_ms=floor_ms) for name in variants]
        clock = Clock(torch.device("cuda"))
        for repetition in range(-2, repetitions or self.repetitions):
            for row, run in zip(rows, variants.values(), strict=True):
                milliseconds = clock(run)
                if repetition >= 0:
                    row.milliseconds.append(milliseconds)
        for row in rows:
            print(line(row, rows), flush=True)
        self.rows += rows

    def check(self, name: str, value: float, bound: float) -> None:
        """A number that has to stay below its bound."""
        passed = value <= bound
        self.checks.append({"check": name, "value": value, "bound": bound, "passed": passed})
        if self.speaks:
            verdict = "ok" if passed else "FAILED"
            print(f"{verdict:6} {name}: {value:.3g} (bound {bound:g})", flush=True)
        if not passed:
            self.failed_checks.append(name)

    def write(self, out: Path, seconds: float, **more: object) -> None:
        """The record; `more` goes into it as well."""
        import torch
        import triton

        record = {
            "command": command_line("moe"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "seconds": seconds,
            **more,
            "complete": bool(self.rows) and not sys.exc_info()[0],
            "notes": self.notes,
            "checks": self.checks,
            "rows": [row.record() | gains(row, self.rows) for row in self.rows],
        }
        write_record(out, record)
        for note in self.notes:
            print(note)
        failed = self.failed_checks or "none"
        print(f"{seconds:.0f} s; failed checks: {failed}; {out}", flush=True)


YARDSTICKS = {"bf16": ("bf16 yardstick", "bf16 torch")}
YARDSTICKS |= {"library": ("deep_gemm + deep_ep, FP8 rows", "deep_gemm")}
"""Variants that others are compared with: over ranks and on one GPU."""


def gains(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """How many times as long as `row` each yardstick takes for the same, per micro-batch; where
    phases are done together, for all of them. None that has no rows for it."""
    found: dict[str, float] = {}
    for key, names in YARDSTICKS.items():
        for name in names:
            theirs = {
                other.phase: other.median / other.micro_batches
                for other in rows
                if other.shape == row.shape and _plain(other.variant) == name
            }
            parts = row.phase.split(" + ")
            wanted = [row.phase] if row.phase in theirs else parts
            if all(part in theirs for part in wanted):
                own = row.median / row.micro_batches
                found[f"gain_over_{key}"] = sum(theirs[part] for part in wanted) / own
    return found


def _plain(variant: str) -> str:
    """Without how many micro-batches a layer had."""
    return variant.partition(" (")[0]


def line(row: Row, rows: Sequence[Row]) -> str:
    """A row for people, with its gains over those of `rows` that are yardsticks."""
    found = gains(row, rows)
    return f"{row}" + "".join(
        f"  {found[f'gain_over_{key}']:.2f} x {key}"
        for key in YARDSTICKS
        if f"gain_over_{key}" in found
    )


def num_sms() -> int:
    """Multiprocessors of the first GPU."""
    import torch

    return torch.cuda.get_device_properties(0).multi_processor_count


def distance(a: Any, b: Any) -> float:
    """Relative distance of a from b, in fp64."""
    return float((a.double() - b.double()).norm() / b.double().norm())
