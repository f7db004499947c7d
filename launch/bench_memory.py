"""Bench of the knobs that save memory: `ppruntime bench memory --out FILE`.

Trains a model on one GPU (`one`), a pipeline of several (`ppN`) or several data ranks (`dpN`),
again and again, once a knob: step time of the slowest rank and every rank's peak of live tensors
beside those without (`off`) and beside the plan's. A row that does not fit by the plan is not
begun; one that fails says why, and the next goes on in new processes. First the copies themselves
are timed, one way and both ways at once, beside a matmul.

Starts a process per rank itself. The record is written after every row, and when the bench is told
to end. On the CPU, for a look at the bench itself, torch's operations are followed instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ppruntime.launch import cuda_environment

os.environ.update(cuda_environment.left_out())

from ppruntime.config import ConfigError
from ppruntime.launch.command_line import command_line
from ppruntime.launch.memory_bars import Row, bars, line, notes, plan_line
from ppruntime.launch.memory_cases import (
    H200_BYTES,
    KNOBS,
    Run,
    cases_of,
    layout_sizes,
    plan_of,
    refusal,
    runs_of,
)
from ppruntime.launch.memory_worker import Training, Workers, WorkersLost
from ppruntime.launch.records import end_in_order, write_record
from ppruntime.launch.run_files import add_run, files_and_overrides

_ROW_SECONDS = 150.0
"""Most that a row may take, with the compilation of its kernels."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rows; 1 if one of them failed, 2 where they cannot be run."""
    args = _parsed(arguments)
    try:
        runs = _runs(args)
    except ConfigError as error:
        print(f"bench memory: {error}", file=sys.stderr)
        return 2
    if args.plan:
        for run in runs:
            plan = plan_of(run.config)
            print(plan_line(_row(run, plan, refusal(plan, args.device_bytes))))
        return 0
    bench = _Bench(args, runs)
    if (missing := _missing_devices(args.device, bench.num_ranks)) is not None:
        print(f"bench memory: {missing}", file=sys.stderr)
        return 2
    try:
        bench.run()
    except WorkersLost as error:
        print(f"bench memory: {error}", file=sys.stderr)
        return 2
    finally:
        bench.end()
    return int(any(row["failure"] and not row["is_trial"] for row in bench.rows))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ppruntime bench memory", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add_run(parser, "launch/configs/v41-proxy-8.toml")
    add("--out", type=Path, default=Path("docs/bench/memory.json"), help="JSON file to write")
    add("--layouts", default="one", help="one, ppN, dpN, with commas; N GPUs are needed")
    add("--tokens", default="", help="of a micro-batch, with commas: only cases of these")
    add("--only", action="append", choices=list(KNOBS), help="knob, may be repeated; off always")
    add("--steps", type=int, help="timed steps of a row; default: the case's, 2 or 1")
    add("--limit-seconds", type=float, default=400.0, help="no row is begun after this")
    add("--try-refused", action="store_true", help="run `off` on one GPU where it cannot fit")
    add("--plan", action="store_true", help="print the rows with their plans, and run nothing")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--device-bytes", type=float, default=H200_BYTES, help="for --plan; a run asks the device")
    args = parser.parse_intermixed_args(arguments)
    args.files, args.overrides = files_and_overrides(args.run)
    args.files = args.files or [str(Path(__file__).parent / "configs" / "v41-proxy-8.toml")]
    return args


def _runs(args: argparse.Namespace) -> tuple[Run, ...]:
    """All rows in their order. Raises ConfigError before anything starts."""
    tokens = [int(number) for number in args.tokens.split(",") if number]
    cases = [case for name in args.layouts.split(",") for case in cases_of(name, tokens)]
    if not cases:
        raise ConfigError(f"no layout has a case of --tokens {args.tokens}; 8192, 16384 and 24576")
    return tuple(
        run
        for case in cases
        for run in runs_of(
            case, args.files, args.overrides, device=args.device, only=args.only or ()
        )
    )


def _missing_devices(device: str, num_ranks: int) -> str | None:
    """Why there are too few devices; None: there are enough."""
    if device != "cuda":
        return None
    import torch

    found = torch.cuda.device_count()
    if found >= num_ranks:
        return None
    return f"--layouts needs {num_ranks} GPUs, there are {found}; take others, or --plan alone"


def _row(run: Run, plan: dict[str, Any], refused: str) -> Row:
    return {
        "name": run.name,
        "case": run.case_name,
        "layout": run.case.layout,
        "seq_len": run.config.train.seq_len,
        "num_experts": run.config.model.dims.num_experts,
        "num_micro_batches": run.config.train.num_micro_batches,
        "in_flight": run.case.in_flight,
        "optimizer": run.config.optim.type,
        "knob": run.knob,
        "overrides": list(run.overrides),
        "is_exact": run.is_exact,
        "plan": plan,
        "refused": refused,
        "failure": "",
        "is_trial": False,
        "step_seconds": [],
        "losses": [],
        "grad_norms": [],
        "ranks": [],
    }


class _Bench:
    """All rows, in as few processes as failures allow."""

    def __init__(self, args: argparse.Namespace, runs: Sequence[Run]) -> None:
        self.args, self.runs = args, runs
        self.start = time.monotonic()
        self.num_ranks = max(run.num_ranks for run in runs)
        self.rows: list[Row] = []
        self.copies: dict[str, float] = {}
        self.not_run: list[str] = []
        self.machine: dict[str, Any] = {}
        self._workers: Workers | None = None
        self._complete = False

    def run(self) -> None:
        """Copies, then every row that fits, then `off` where it cannot fit, if that is wanted."""
        use_cuda = self.args.device == "cuda"
        self.machine = self._started(use_cuda).machine
        if use_cuda:
            self.copies = self._started(use_cuda).copies(_ROW_SECONDS)
            for name, rate in self.copies.items():
                print(f"{name}: {rate:.1f}", flush=True)
        trials = []
        for number, run in enumerate(self.runs):
            row = _row(run, plan := plan_of(run.config), self._refusal(plan))
            self.rows.append(row)
            if row["refused"] and run.num_ranks == 1 and run.knob == "off":
                trials.append((number, run, row))
            if not row["refused"]:
                self._measure(number, run, row, use_cuda)
            self._told(row)
        if self.args.try_refused:
            for number, run, row in trials:
                if self._is_late():
                    self.not_run.append(f"{row['name']}, to see it fail")
                    continue
                row["is_trial"], row["refused"] = True, ""
                self._measure(len(self.runs) + number, run, row, use_cuda)
                self._told(row)
        self._complete = True

    def end(self) -> None:
        """Ends the processes; the record has what was measured."""
        if self._workers is not None:
            self._workers.end()
        self._write()
        if self.rows:
            print(*bars(self.rows, self.copies), *self._notes(), sep="\n", flush=True)

    def _started(self, use_cuda: bool) -> Workers:
        if self._workers is None:
            self._workers = Workers(self.num_ranks, use_cuda=use_cuda)
        return self._workers

    def _refusal(self, plan: dict[str, Any]) -> str:
        """Rows that cannot fit are not begun: on all ranks alike, as nobody hears of them."""
        num_bytes = self.machine["device_bytes"]
        return refusal(plan, num_bytes) if num_bytes else ""

    def _is_late(self) -> bool:
        limit: float = self.args.limit_seconds
        return time.monotonic() - self.start > limit

    def _measure(self, number: int, run: Run, row: Row, use_cuda: bool) -> None:
        if self._is_late():
            row["refused"] = f"not run: the limit was over, {self.args.limit_seconds:g} s"
            self.not_run.append(row["name"])
            return
        pp, dp = layout_sizes(run.case.layout)
        training = Training(
            run.name,
            number,
            pp,
            dp,
            tuple(self.args.files),
            run.overrides,
            self.args.steps or run.case.num_steps,
            draw_on_device=use_cuda,  # what a CPU takes for a billion weights is ten seconds
        )
        begin = time.monotonic()
        try:
            found = self._started(use_cuda).train(training, _ROW_SECONDS)
        except WorkersLost as error:
            self._workers = None
            row["failure"] = str(error)
            return
        finally:
            row["seconds"] = round(time.monotonic() - begin, 1)
        row["ranks"] = found
        # A rank's own clock stops when its part is done: the step is over with the last one's.
        every = zip(*(rank.pop("seconds") for rank in found), strict=True)
        row["step_seconds"] = [max(seconds) for seconds in every][1:]
        row["losses"], row["grad_norms"] = found[0]["losses"], found[0]["grad_norms"]
        for rank in found:
            alike = rank.pop("losses"), rank.pop("grad_norms")
            assert alike == (row["losses"], row["grad_norms"]), "ranks tell different losses"

    def _told(self, row: Row) -> None:
        print(line(row, self.rows), flush=True)
        self._write()  # a bench that is cut short leaves what it has

    def _notes(self) -> Iterator[str]:
        yield from notes(self.rows)
        if self.not_run:
            yield f"not run, as the limit was over: {'; '.join(self.not_run)}"

    def _write(self) -> None:
        if not self.machine:
            return
        record = {
            "command": command_line("memory"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.machine["device"],
            "device_bytes": self.machine["device_bytes"],
            "versions": self.machine["versions"],
            "seconds": round(time.monotonic() - self.start, 1),
            "complete": self._complete and not self.not_run,
            "model": self.runs[0].config.model.name,
            "notes": list(self._notes()),
            "copies": self.copies,
            "bars": [asdict(bar) for bar in bars(self.rows, self.copies)],
            "rows": self.rows,
        }
        write_record(self.args.out, record)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
