"""Bench of the knobs that save memory: `python -m ppruntime.launch.bench_memory --out FILE`.

One process trains the same pipeline rank again and again, once a knob: an order that keeps
`--in-flight` micro-batches in flight, as the first rank of a pipeline would. For every knob the
median step time and the peak of allocated and reserved device memory stand beside those without;
losses tell that exact knobs are exact. A knob whose run fails, as for lack of memory, says why.
First the copies themselves are timed, in both directions at once, while a matmul runs. On the CPU,
for a look at the bench itself, memory is not measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from ppruntime.build import build_pipeline
from ppruntime.config import Config, load
from ppruntime.config.help import kernels_left_to_auto
from ppruntime.data.batches import open_data
from ppruntime.host_memory import HostPool, Lane, pieces
from ppruntime.launch.command_line import command_line
from ppruntime.launch.records import end_in_order, write_record
from ppruntime.plan_report import report
from ppruntime.ranks import Layout, Ranks, join, leave
from ppruntime.trainer import Trainer

_OFFLOAD = ("pp.activation_offload=true",)
_PACED = (*_OFFLOAD, "pp.offload_paced=true")
_SIGNS = ("optim.type=sign_sgd", "optim.clip_norm=default")
KNOBS: Mapping[str, tuple[str, ...]] = {
    "off": (),
    "offload": _OFFLOAD,
    "offload, paced": _PACED,
    "offload, paced, one in two": (*_PACED, "pp.offload_every=2"),
    "offload as FP8": (*_OFFLOAD, "pp.offload_target=fp8"),
    "masters": ("pp.offload_masters=true",),
    "masters and offload, paced": ("pp.offload_masters=true", *_PACED),
    "SignSGD": _SIGNS,
    "SignSGD in the backward": (*_SIGNS, "optim.apply_in_backward=true"),
    "no recomputation": ("ac.mode=none",),
    "no recomputation, offload, paced": ("ac.mode=none", *_PACED),
}
"""Name -> overrides. The first one is what the others are measured against."""
ONE_GPU = (
    "model.num_experts=6",
    "ac.mode=full_moe",
    "moe.compute.backend=triton",
    *kernels_left_to_auto(but=("linear",)),
)
"""What lies under the given overrides on a GPU: eight layers at full width and three micro-batches
in flight then fit into 141 GB, by a plan of 128 GB, and take a step in seconds."""


@dataclass(slots=True)
class Row:
    """One knob. Bytes are of the device; None where they were not measured."""

    knob: str
    overrides: tuple[str, ...]
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    predicted_bytes: int | None = None
    """The plan's total of the rank."""
    host_bytes: int = 0
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.step_seconds) if self.step_seconds else float("nan")

    def text(self, off: Row) -> str:
        """A line, with ratios to `off`."""
        if self.failure:
            return f"{self.knob:34} failed: {self.failure[:120]}"
        memory = " " * 32
        if self.peak_allocated_bytes and off.peak_allocated_bytes:
            share = self.peak_allocated_bytes / off.peak_allocated_bytes
            memory = f"{self.peak_allocated_bytes / 1e9:8.2f} GB {share:6.1%}"
            memory += f" plan {(self.predicted_bytes or 0) / 1e9:7.2f} GB"
        same = "" if self.losses == off.losses else "  other losses"
        return (
            f"{self.knob:34} {self.median * 1e3:9.1f} ms {self.median / off.median:6.1%}  {memory}"
            f"  host {self.host_bytes / 1e9:6.2f} GB{same}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--config", type=Path, default=_configs() / "v41-proxy-8.toml")
    parser.add_argument("--only", action="append", choices=list(KNOBS), help="may be repeated")
    parser.add_argument("--in-flight", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="timed steps; one comes before them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_memory: there is no CUDA device to measure", file=sys.stderr)
        return 2
    base = (
        *("pp.size=1", "pp.layers_per_stage=default", "pp.schedule=async_1f1b"),
        f"pp.warmup_step=[{options.in_flight - 1}]",
        f"train.num_micro_batches={options.micro_batches}",
        f"run.device={options.device}",
        *(ONE_GPU if options.device == "cuda" else ()),
        *options.overrides,
    )
    names = [name for name in KNOBS if not options.only or name in options.only or name == "off"]
    rows: list[Row] = []
    copies: dict[str, float] = {}
    with _alone():
        ranks = join(Layout(1, 1, 1), use_cuda=options.device == "cuda", timeout_seconds=60)
        try:
            copies = copy_rates(ranks.device)
            print(*(f"{name}: {rate:.1f}" for name, rate in copies.items()), sep="\n", flush=True)
            for name in names:
                row = measure(name, (*base, *KNOBS[name]), options.config, ranks, options.steps)
                rows.append(row)
                print(row.text(rows[0]), flush=True)
                if row.failure:
                    print(row.failure, file=sys.stderr, flush=True)
                _write(options.out, rows, copies)  # a run that is cut short leaves what it has
        finally:
            leave()
    return int(any(row.failure for row in rows))


def measure(knob: str, overrides: tuple[str, ...], path: Path, ranks: Ranks, num_steps: int) -> Row:
    """Trains one step untimed and `num_steps` timed ones."""
    row = Row(knob, overrides)
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        config = load([path], overrides)
        row.predicted_bytes = report(config).ranks[0].total_bytes
        _train(config, ranks, row, num_steps)
    except (RuntimeError, ValueError) as error:  # out of memory is an answer too
        row.failure = f"{type(error).__name__}: {error}"
    if on_gpu:
        row.peak_allocated_bytes = torch.cuda.max_memory_allocated()
        row.peak_reserved_bytes = torch.cuda.max_memory_reserved()
    gc.collect()
    return row


def _train(config: Config, ranks: Ranks, row: Row, num_steps: int) -> None:
    pipeline = build_pipeline(config, ranks)
    try:
        trainer, data = Trainer(config, ranks, pipeline), open_data(config)
        for step in range(num_steps + 1):
            start = time.perf_counter()
            result = trainer.step(step, data)  # ends with the loss on the host
            seconds = time.perf_counter() - start
            row.losses.append(result.loss)
            if step:
                row.step_seconds.append(seconds)
        row.host_bytes = pipeline.host_pool.num_bytes
    finally:
        pipeline.transport.close()


def copy_rates(device: torch.device, *, num_bytes: int = 1 << 30) -> dict[str, float]:
    """GB/s of copies to the host, back, and both at once, alone and while a matmul runs; and how
    much longer the matmuls take beside them. Empty on the CPU."""
    if device.type != "cuda":
        return {}
    pool = HostPool(device)
    out, home = Lane(device), Lane(device)
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pages = [pool.take(num_bytes) for _ in buffers]
    a = torch.randn(8192, 8192, device=device).bfloat16()
    rates: dict[str, float] = {}

    def timed(outwards: bool, homewards: bool, num_products: int) -> tuple[float, float]:
        """Seconds until the copies and until the products are done."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        ends = []
        if outwards:
            ends.append(out.copy(pieces([buffers[0]], pages[0])))
        if homewards:
            ends.append(home.copy((p, b) for b, p in pieces([buffers[1]], pages[1])))
        for _ in range(num_products):
            _ = a @ a
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        for end in ends:
            assert end is not None, "copies on a device end later"
            end.synchronize()
        copied = time.perf_counter() - start
        done.synchronize()
        return copied, time.perf_counter() - start

    for _ in range(2):  # the first time warms up
        alone = timed(False, False, 60)[1]
        for beside, num_products in (("alone", 0), ("beside a matmul", 60)):
            rates[f"GB/s to the host, {beside}"] = num_bytes / timed(True, False, num_products)[0]
            rates[f"GB/s back, {beside}"] = num_bytes / timed(False, True, num_products)[0]
            both = timed(True, True, num_products)
            rates[f"GB/s both at once, each, {beside}"] = num_bytes / both[0]
    rates = {name: rate / 1e9 for name, rate in rates.items()}
    rates["matmuls beside both copies, % of alone"] = both[1] / alone * 100
    return rates


@contextmanager
def _alone() -> Iterator[None]:
    """A world of this process, unless one was started."""
    given = dict(os.environ)
    if "RANK" not in given:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(given)


def _write(out: Path, rows: Sequence[Row], copies: Mapping[str, float]) -> None:
    on_gpu = torch.cuda.is_available()
    record = {
        "command": command_line("memory"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {"torch": torch.__version__},
        "copies": copies,
        "rows": [asdict(row) | {"median_seconds": row.median} for row in rows],
    }
    write_record(out, record)


def _configs() -> Path:
    return Path(__file__).resolve().parent / "configs"


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
