"""Bench of the transports on two GPUs: `python3 -m ppruntime.launch.bench_transports --out FILE`.

One run measures every kind in turn, again and again, so that ratios hold although machines differ:
GB/s per size, one way and both ways at once; latency; how much a matmul beside it slows down. The
raw peer copy (each process copies to the other's GPU by itself) is the ceiling. Starts its two
ranks itself; a kind that cannot be used is reported with its reason and left out. Writes JSON, also
of a run that broke off.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ppruntime.launch.command_line import command_line
from ppruntime.launch.products import Product, bf16_matmul, fp8_grouped
from ppruntime.launch.records import end_in_order, write_record
from ppruntime.launch.transport_record import RAW, SIZES_BYTES, Row, bars, library_versions

FEW_CTAS = 4
LIMIT_SECONDS = 110.0
NUM_MATMULS = 16
NUM_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """One line of the tables: a transport and its options."""

    name: str
    transport: str
    options: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--nccl-library", help="a libnccl.so.2 of 2.30 or newer, for put")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--worker", nargs=2, type=int, metavar=("RANK", "PORT"))
    arguments = parser.parse_args()
    if arguments.worker:
        rank, port = arguments.worker
        return _Worker(rank, port, arguments).run()
    return _run_ranks(arguments)


def _run_ranks(arguments: argparse.Namespace) -> int:
    """Starts the two ranks and waits for them, at most LIMIT_SECONDS."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "ppruntime.launch.bench_transports", *sys.argv[1:]]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    ranks = [
        subprocess.Popen([*command, "--worker", str(rank), str(store.port)], env=environment)
        for rank in range(2)
    ]
    deadline = time.monotonic() + LIMIT_SECONDS
    codes = []
    for rank, process in enumerate(ranks):
        try:
            codes.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            print(f"rank {rank} is not done after {LIMIT_SECONDS:g} s; its stacks:", flush=True)
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            process.kill()
            codes.append(process.wait())
    print(f"exit codes {codes}; results in {arguments.out}", flush=True)
    return int(any(codes))


class _Worker:
    """One rank of the bench. Both do the same calls in the same order."""

    def __init__(self, rank: int, port: int, arguments: argparse.Namespace) -> None:
        import torch
        from torch._C._distributed_c10d import TCPStore

        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self.start = time.monotonic()
        self.rank, self.out, self.num_repetitions = rank, arguments.out, arguments.repetitions
        self.store = TCPStore("127.0.0.1", port, is_master=False)
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.compute = torch.cuda.current_stream(self.device)
        self.mover = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.num_meetings = 0
        self.rows: dict[tuple[str, str, int], Row] = {}
        self.notes: list[str] = []
        self.transports: dict[str, Any] = {}
        self.nccl_library: str | None = arguments.nccl_library
        put_options = {"nccl_library": self.nccl_library} if self.nccl_library else {}
        self.kinds = [
            Kind("nccl", "nccl"),
            Kind(f"nccl {FEW_CTAS} CTAs", "nccl", {"transport_ctas": FEW_CTAS}),
            Kind("copy_engine", "copy_engine"),
            Kind("put", "put", put_options),
        ]

    def run(self) -> int:
        complete = False
        try:
            self._open_all()
            self._measure_sizes()
            self._measure_latency(0, num=100)
            self._measure_latency(len(SIZES_BYTES) - 1, num=10)
            self._write(complete=False)  # what there is, should the rest hang
            self._measure_slowdown(bf16_matmul(self.device))
            grouped = self._grouped()
            if grouped is not None:
                self._measure_slowdown(grouped)
            complete = True
        finally:
            self._write(complete)
            for name, bar in bars([[row.record() for row in self.rows.values()]]).items():
                self._say(f"{name}: {bar:.3f}")
        for name, transport in self.transports.items():
            self._say(f"closing {name}")
            transport.close()
        return 0

    # Set-up

    def _open_all(self) -> None:
        from ppruntime.transports import open_transport
        from ppruntime.transports.base import TransportError

        self._say(f"device {self.device}, opening")
        for kind in self.kinds:
            begin = time.monotonic()
            failed = ""
            try:
                self.transports[kind.name] = open_transport(
                    kind.transport,
                    self._channels(),
                    self.rank,
                    device=self.device,
                    timeout_seconds=25,
                    store=self.store,
                    **kind.options,
                )
            except TransportError as error:
                failed = str(error)
            if any(self._swap(failed)):
                self.transports.pop(kind.name, None)
                self.notes.append(f"{kind.name} was left out: {failed or 'the other rank failed'}")
                self._say(self.notes[-1])
                continue
            found = self.transports[kind.name].start_up
            self._say(
                f"{kind.name} opened in {time.monotonic() - begin:.2f} s, of it start-up test"
                f" {found.seconds:.2f} s"
            )

    def _channels(self) -> list[Any]:
        """Two per size, forward with an even id and backward with an odd one."""
        import torch

        from ppruntime.transports.base import Boundary, Channel, TensorSpec

        channels = []
        for i, size in enumerate(SIZES_BYTES):
            boundary = Boundary((TensorSpec("x", (size // 2,), torch.bfloat16),))
            channels += [
                Channel(2 * i, "forward", 0, 1, 2 * i, 2 * i + 1, boundary, 2),
                Channel(2 * i + 1, "backward", 1, 0, 2 * i + 1, 2 * i, boundary, 2),
            ]
        return channels

    # Transfers

    def _measure_sizes(self) -> None:
        import torch

        for index, size in enumerate(SIZES_BYTES):
            source = torch.randn(size // 2, device=self.device).to(torch.bfloat16)
            target = torch.empty_like(source, device=torch.device("cuda", 1 - self.rank))
            num = max(8, min(200, int(2e9 / size)))
            for repetition in range(self.num_repetitions + 1):
                for metric, senders in (("one way", (0,)), ("both ways", (0, 1))):
                    for name, transport in self.transports.items():
                        rate = self._stream(transport, index, source, num, senders)
                        self._add(metric, name, size, "GB/s", rate, repetition)
                    rate = self._raw(source, target, num, senders)
                    self._add(metric, RAW, size, "GB/s", rate, repetition)
                # What put's staging costs: the same copy with both ends on this GPU.
                rate = self._raw(source, torch.empty_like(source), num, (0, 1))
                self._add("copy inside a GPU", RAW, size, "GB/s", rate, repetition)
            self._print(size)

    def _stream(
        self, transport: Any, index: int, source: Any, num: int, senders: Sequence[int]
    ) -> float | None:
        """GB/s into this rank while the senders send `num` messages each; None if none comes."""
        self._meet()
        first, last = self._timers()
        self._enqueue(transport, index, source, num, senders, first, last)
        transport.step_end()
        self.mover.synchronize()
        if 1 - self.rank not in senders:
            return None
        return float(source.nbytes * (num - 1) / (first.elapsed_time(last) * 1e-3) / 1e9)

    def _enqueue(
        self,
        transport: Any,
        index: int,
        source: Any,
        num: int,
        senders: Sequence[int],
        first: Any,
        last: Any,
    ) -> None:
        import torch

        channels = self._channels()[2 * index : 2 * index + 2]
        outgoing, incoming = channels[self.rank], channels[1 - self.rank]
        with torch.cuda.stream(self.mover):
            for m in range(num):
                if self.rank in senders:
                    transport.send(outgoing, m, (source,))
                if 1 - self.rank in senders:
                    transport.post(incoming, m)
                    transport.take(incoming, m)
                    (first if m == 0 else last).record(self.mover)
                    transport.release(incoming, m)

    def _raw(self, source: Any, target: Any, num: int, senders: Sequence[int]) -> float | None:
        """GB/s of plain copies out of this rank, from and to fixed memory."""
        import torch

        self._meet()
        if self.rank not in senders:
            return None
        first, last = self._timers()
        with torch.cuda.stream(self.mover):
            target.copy_(source, non_blocking=True)
            first.record(self.mover)
            for _ in range(num):
                target.copy_(source, non_blocking=True)
            last.record(self.mover)
        self.mover.synchronize()
        return float(source.nbytes * num / (first.elapsed_time(last) * 1e-3) / 1e9)

    def _measure_latency(self, index: int, num: int) -> None:
        """Ping-pong: one way, from the send to where the reader goes on, nothing else under way."""
        import torch

        size = SIZES_BYTES[index]
        channels = self._channels()[2 * index : 2 * index + 2]
        outgoing, incoming = channels[self.rank], channels[1 - self.rank]
        for repetition in range(self.num_repetitions + 1):
            for name, transport in self.transports.items():
                source = torch.zeros(size // 2, dtype=torch.bfloat16, device=self.device)
                self._meet()
                first, last = self._timers()
                with torch.cuda.stream(self.mover):
                    first.record(self.mover)
                    for m in range(num):
                        if self.rank == 0:
                            transport.send(outgoing, m, (source,))
                        transport.post(incoming, m)
                        transport.take(incoming, m)
                        transport.release(incoming, m)
                        if self.rank == 1:
                            transport.send(outgoing, m, (source,))
                    last.record(self.mover)
                transport.step_end()
                self.mover.synchronize()
                microseconds = first.elapsed_time(last) * 1e3 / num / 2
                value = microseconds if self.rank == 0 else None
                self._add("latency", name, size, "us", value, repetition)
        self._print(size, only="latency")

    # Compute beside transfers

    def _grouped(self) -> Product | None:
        """None where one of the two ranks cannot run it."""
        failed, product = "", None
        try:
            product = fp8_grouped(self.device)
        except (RuntimeError, AttributeError, TypeError) as error:
            failed = f"{type(error).__name__}: {error}"
        if any(self._swap(failed)):
            self.notes.append(f"the FP8 grouped GEMM was left out: {failed.splitlines()[:1]}")
            self._say(self.notes[-1])
            return None
        return product

    def _measure_slowdown(self, product: Product) -> None:
        """How much longer it takes beside transfers that outlast it, in percent of alone."""
        import torch

        what, compute = product.name, product.run

        index, size = len(SIZES_BYTES) - 1, SIZES_BYTES[-1]
        source = torch.randn(size // 2, device=self.device).to(torch.bfloat16)
        alone = self._timed(compute)
        for repetition in range(self.num_repetitions + 1):
            for metric, senders in (("one way", (0,)), ("both ways", (0, 1))):
                for name, transport in self.transports.items():
                    # Alone right before: the clocks drift with the chip's temperature.
                    alone = self._timed(compute)
                    # A rank that nothing comes into plans with the other's rate.
                    row = self.rows.get((metric, name, size))
                    rate = row.median * 1e9 if row else 0.0
                    num = max(self._swap_numbers(3 + int(1.4 * alone * 1e-3 * rate / size)))
                    self._meet()
                    first, last = self._timers()
                    begin, end = self._timers()
                    begin.record(self.compute)
                    for _ in range(NUM_AHEAD):  # while the host enqueues the transfers
                        compute()
                    self._enqueue(transport, index, source, num, senders, first, last)
                    for _ in range(NUM_MATMULS - NUM_AHEAD):
                        compute()
                    end.record(self.compute)
                    transport.step_end()
                    torch.cuda.synchronize(self.device)
                    slowdown = (begin.elapsed_time(end) / alone - 1) * 100
                    self._add(f"{what}, {metric}", name, size, "%", slowdown, repetition)
                    if 1 - self.rank in senders:
                        seconds = first.elapsed_time(last) * 1e-3
                        rate = source.nbytes * (num - 1) / seconds / 1e9
                        self._add(
                            f"rate beside {what}, {metric}", name, size, "GB/s", rate, repetition
                        )
            rate = product.flops * NUM_MATMULS / (alone * 1e-3) / 1e12
            self._add(f"{what} alone", "no transfer", 0, "TF/s", rate, repetition)
        for row in self.rows.values():
            if what in row.metric:
                self._say(str(row))

    def _timed(self, compute: Callable[[], object]) -> float:
        """Milliseconds of NUM_MATMULS calls with nothing else on either GPU."""
        import torch

        self._meet()
        begin, end = self._timers()
        begin.record(self.compute)
        for _ in range(NUM_MATMULS):
            compute()
        end.record(self.compute)
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end))

    # Bookkeeping

    def _timers(self) -> tuple[Any, Any]:
        import torch

        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _add(
        self, metric: str, kind: str, size: int, unit: str, value: float | None, repetition: int
    ) -> None:
        # The first repetition warms up: code is loaded, clocks rise.
        if value is not None and repetition > 0:
            row = self.rows.setdefault((metric, kind, size), Row(metric, kind, size, unit))
            row.values.append(value)

    def _swap(self, text: str) -> list[str]:
        """Both ranks' texts."""
        self.num_meetings += 1
        key = f"meeting {self.num_meetings}"
        self.store.set(f"{key} {self.rank}", text)
        self.store.wait([f"{key} {1 - self.rank}"], timedelta(seconds=60))
        other = self.store.get(f"{key} {1 - self.rank}").decode()
        return [text, other] if self.rank == 0 else [other, text]

    def _swap_numbers(self, number: int) -> list[int]:
        return [int(text) for text in self._swap(str(number))]

    def _meet(self) -> None:
        """Both ranks have come here and their GPUs are idle."""
        import torch

        torch.cuda.synchronize(self.device)
        self._swap("")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s, rank {self.rank}] {text}", flush=True)

    def _print(self, size: int, only: str = "") -> None:
        for row in self.rows.values():
            if row.num_bytes == size and only in row.metric:
                raw = self.rows.get((row.metric, RAW, size))
                ratio = f"  {row.median / raw.median:.3f} of raw" if raw else ""
                self._say(f"{row}{ratio}")

    def _write(self, complete: bool) -> None:
        """Rank 1 hands over its rows; rank 0 writes both ranks' and how they stand to the bars. Of
        a run that broke off each rank writes what it has, the ranks no longer being in step."""
        import torch

        mine = json.dumps([row.record() for row in self.rows.values()])
        path = self.out if self.rank == 0 else self.out.with_suffix(".rank1.json")
        by_rank = [json.loads(text) for text in (self._swap(mine) if complete else [mine])]
        if self.rank != 0 and complete:
            return
        record = {
            "command": command_line("transports", sys.argv[1:-3]),  # no worker
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": complete,
            "seconds": round(time.monotonic() - self.start, 1),
            "device": torch.cuda.get_device_name(self.device),
            "num_devices": torch.cuda.device_count(),
            "versions": library_versions(self.nccl_library),
            "environment": {
                k: os.environ[k] for k in sorted(os.environ) if k.startswith(("CUDA_DEV", "NCCL_"))
            },
            "notes": self.notes,
            "bars": bars(by_rank),
            "rows": [
                {**row, "rank": rank if complete else self.rank}
                for rank, rows in enumerate(by_rank)
                for row in rows
            ],
        }
        write_record(path, record)
        if complete:
            self.out.with_suffix(".rank1.json").unlink(missing_ok=True)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
