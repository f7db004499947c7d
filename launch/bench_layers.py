"""Bench of the layers' kernels on one GPU: `python -m ppruntime.launch.bench_layers --out FILE`.

`--only linears` times dense linears in bf16 and FP8, see bench_linears; `--only parts` the head and
mHC, see bench_layer_parts.

`--only halves` times attention halves by kind, the indexer, RoPE and the grouped output, see
bench_halves.

`--only moe` times the MoE half, whole, see bench_moe_half.

`--only attention` times the sparse attention kernels at V4.1-Flash's width: forward and backward,
lists of 640 and of 128 slots, both ways to add up the keys' gradients, several tilings. Each is
compared with the fp32 reference on the same numbers. Variants are compiled side by side and timed
in turns, so that their ratios hold although clocks drift. Prints a line per variant, best first (~:
not bitwise the same when run again), and writes JSON with every repetition; also when the time
limit cuts the run short.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppruntime.gpu_clock import Clock
from ppruntime.launch import bench_halves, bench_layer_parts, bench_linears, bench_moe_half
from ppruntime.launch.command_line import command_line
from ppruntime.launch.records import end_in_order, write_record

HEADS, WIDTH, WINDOW, PAIRS = 64, 512, 128, 32
FLOPS_PER_SLOT = 4 * HEADS * WIDTH
"""Two products of the forward, per query and slot; the backward counts 2.5 times that."""

LIMIT_SECONDS = 85.0
NUM_WARM = 128
"""Queries of the first call, which compiles. Kernels are specialised for multiples of 16."""

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(slots=True)
class Row:
    """One variant: what it computes, its repetitions and its distance from the reference."""

    part: str
    variant: str
    slots: int
    flops: float
    milliseconds: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    repeats_bitwise: dict[str, bool] = field(default_factory=dict)
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds) if self.milliseconds else float("inf")

    @property
    def teraflops(self) -> float:
        return self.flops / self.median * 1e-9

    def record(self) -> dict[str, object]:
        spread = max(self.milliseconds) - min(self.milliseconds) if self.milliseconds else None
        median = self.median if self.milliseconds else None
        return {
            **asdict(self),
            "median": median,
            "spread": spread,
            "teraflops": self.teraflops if self.milliseconds else None,
        }

    def __str__(self) -> str:
        head = f"{self.part:18} {self.variant:34} {self.slots:4} slots"
        if self.failure:
            return f"{head}  failed: {self.failure[:120]}"
        spread = (max(self.milliseconds) - min(self.milliseconds)) / self.median * 50
        errors = " ".join(
            f"{name} {error:.1e}{'' if self.repeats_bitwise.get(name) else '~'}"
            for name, error in self.errors.items()
        )
        rate = f"{self.teraflops:6.0f} TFLOP/s"
        return f"{head} {self.median:8.3f} ms +-{spread:4.1f} % {rate}  {errors}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--only", choices=("attention", "halves", "moe", "linears", "parts"), default="attention"
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--model", default="v41-flash", help="halves: whose, such as v4-flash")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="halves: where")
    parser.add_argument(
        "--kinds", nargs="+", help='halves: only these, such as Reuse "Full ratio 1"; no parts'
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("bf16", "fp8"),
        default=["bf16"],
        help="halves: of the dense linears; both are compared within one run",
    )
    parser.add_argument("--skip", default="", help="leave out variants with this in their name")
    options = parser.parse_args(arguments)
    if options.only == "halves":
        return bench_halves.run(options)
    if options.only == "moe":
        return bench_moe_half.run(options)
    if not torch.cuda.is_available():
        print("bench_layers: there is no CUDA device to measure", file=sys.stderr)
        return 2
    if options.only == "parts":
        return bench_layer_parts.run(options.out, options.tokens, options.repetitions)
    if options.only == "linears":
        return bench_linears.run(options.out, options.tokens, options.repetitions)
    if options.tokens % NUM_WARM:
        parser.error(f"--tokens {options.tokens}: has to be a multiple of {NUM_WARM}")
    bench = Bench(options.tokens, options.repetitions, options.skip)
    try:
        bench.run()
    finally:
        write_record(options.out, bench.record())
        print(f"results in {options.out}")
    measured = {(row.part, row.slots) for row in bench.rows if row.milliseconds}
    return int(
        not bench.is_complete or len(measured) < len({(r.part, r.slots) for r in bench.rows})
    )


class Bench:
    """The attention part. `rows` grows while it runs."""

    def __init__(self, num_tokens: int, num_repetitions: int, skip: str = "") -> None:
        self.num_tokens, self.num_repetitions, self.skip = num_tokens, num_repetitions, skip
        self.start = time.monotonic()
        self.rows: list[Row] = []
        self.matmul_teraflops = 0.0
        self.is_complete = False

    def run(self) -> None:
        self.matmul_teraflops = _matmul_teraflops()
        self._say(f"bf16 matmul 8192^3: {self.matmul_teraflops:.0f} TFLOP/s")
        for num_slots in (640, 128):
            inputs = Inputs.make(self.num_tokens, num_slots, torch.device("cuda"))
            calls = self._compiled(inputs)
            self._say(f"{num_slots} slots: compiled")
            self._time(calls)
            self._say(f"{num_slots} slots: timed")
            self._compare(inputs, calls)
            self._say(f"{num_slots} slots: compared")
            for row in sorted((row for row, _ in calls), key=lambda r: (r.part, r.median)):
                print(row, flush=True)
        self.is_complete = True

    def record(self) -> dict[str, object]:
        import triton

        return {
            "command": command_line("layers"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "tokens": self.num_tokens,
            "complete": self.is_complete,
            "matmul_teraflops": self.matmul_teraflops,
            "rows": [row.record() for row in self.rows],
        }

    def _compiled(self, inputs: Inputs) -> list[tuple[Row, Call]]:
        """The variants, each run once on few queries; those that fail get no call."""
        forward = FLOPS_PER_SLOT * inputs.num_slots * self.num_tokens
        pairs = [
            (Row(part, variant, inputs.num_slots, forward * factor), make)
            for part, variant, factor, make in _variants()
            if not (self.skip and self.skip in variant)
        ]
        few = inputs.first(NUM_WARM)

        def attempt(pair: tuple[Row, Callable[[Inputs], Call]]) -> None:
            row, make = pair
            try:
                make(few)()
                torch.cuda.synchronize()
            except Exception as error:
                row.failure = f"{type(error).__name__}: {error}"

        # The packages ask the driver, which has to know the thread's device.
        with ThreadPoolExecutor(8, initializer=torch.cuda.synchronize) as pool:
            list(pool.map(attempt, pairs))
        self.rows += [row for row, _ in pairs]
        return [(row, make(inputs)) for row, make in pairs if not row.failure]

    def _time(self, calls: Sequence[tuple[Row, Call]]) -> None:
        clock = Clock(torch.device("cuda"))
        for repetition in range(self.num_repetitions + 1):
            for row, call in calls:
                if self._seconds() > LIMIT_SECONDS and row.milliseconds:
                    return
                milliseconds = clock(call)
                if repetition:
                    row.milliseconds.append(milliseconds)

    def _compare(self, inputs: Inputs, calls: Sequence[tuple[Row, Call]]) -> None:
        """Errors against the fp32 reference on the first queries, all keys."""
        few = inputs.first(1024)
        expected = few.reference()
        by_name = {(part, variant): make for part, variant, _, make in _variants()}
        for row, _ in calls:
            call = by_name[row.part, row.variant](few)
            found, again = call(), call()
            names = ("out",) if row.part == "forward" else ("dq", "dkeys", "dsink")
            row.errors = {
                name: _distance(tensor, expected[name])
                for name, tensor in zip(names, found, strict=False)
            }
            row.repeats_bitwise = {
                name: torch.equal(*pair) for name, *pair in zip(names, found, again, strict=False)
            }

    def _seconds(self) -> float:
        return time.monotonic() - self.start

    def _say(self, text: str) -> None:
        print(f"{self._seconds():6.1f} s  {text}", flush=True)


@dataclass(slots=True)
class Inputs:
    """One sequence's tensors as a layer has them: a causal window, then selected entries."""

    q: Tensor
    keys: Tensor
    slots: Tensor
    sink: Tensor
    dout: Tensor
    cos: Tensor
    sin: Tensor
    saved: tuple[Tensor, Tensor]
    """out and lse, which the backward gets."""

    @property
    def num_slots(self) -> int:
        return self.slots.shape[-1]

    @classmethod
    def make(cls, num_tokens: int, num_slots: int, device: torch.device) -> Inputs:
        """Every list is full except for the first tokens'; entries have ratio 2."""
        from ppruntime.models.documents import window_slots
        from ppruntime.models.kernels.sparse_attention import FORWARD_TILES, run_forward

        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)
        positions = torch.arange(num_tokens, device=device)
        parts = [window_slots(positions.unsqueeze(0), WINDOW)[0]]
        if num_slots > WINDOW:
            num_entries, num_selected = num_tokens // 2, num_slots - WINDOW
            scores = torch.rand(num_tokens, num_entries, generator=generator, device=device)
            visible = torch.arange(num_entries, device=device) < (positions.unsqueeze(1) + 1) // 2
            best = scores.masked_fill(~visible, -1.0).topk(num_selected)
            entries = best.indices.masked_fill(best.values < 0, num_entries).sort(1).values
            parts.append(torch.where(entries < num_entries, entries + num_tokens, -1))
        num_keys = num_tokens + (num_tokens // 2 if num_slots > WINDOW else 0)
        angles = positions.unsqueeze(1) * torch.logspace(0, -4, PAIRS, device=device)
        shape = (1, num_tokens, HEADS, WIDTH)
        inputs = cls(
            q=normal(shape).bfloat16(),
            keys=normal(1, num_keys, WIDTH).bfloat16(),
            slots=torch.cat(parts, 1).int().unsqueeze(0).contiguous(),
            sink=normal(HEADS),
            dout=normal(shape).bfloat16(),
            cos=angles.cos().unsqueeze(0),
            sin=angles.sin().unsqueeze(0),
            saved=(torch.empty(0), torch.empty(0)),
        )
        inputs.saved = run_forward(
            inputs.q,
            inputs.keys,
            inputs.slots,
            inputs.sink,
            inputs.cos,
            inputs.sin,
            tiles=FORWARD_TILES,
        )
        return inputs

    def first(self, num_queries: int) -> Inputs:
        """The same with the last `num_queries` queries only: their lists are full."""

        def cut(x: Tensor) -> Tensor:
            return x[:, -num_queries:].contiguous()

        return Inputs(
            cut(self.q),
            self.keys,
            cut(self.slots),
            self.sink,
            cut(self.dout),
            cut(self.cos),
            cut(self.sin),
            (cut(self.saved[0]), cut(self.saved[1])),
        )

    def reference(self) -> dict[str, Tensor]:
        from ppruntime.models.rope import Rotation, rotate
        from ppruntime.models.sparse_attention import sparse_attention

        leaves = [x.float().requires_grad_() for x in (self.q, self.keys, self.sink)]
        out = sparse_attention(leaves[0], leaves[1], self.slots, leaves[2])
        out = rotate(out, Rotation(self.cos, self.sin), inverse=True)
        grads = torch.autograd.grad(out, leaves, self.dout.float())
        return dict(zip(("out", "dq", "dkeys", "dsink"), (out.detach(), *grads), strict=True))


def _variants() -> list[tuple[str, str, float, Callable[[Inputs], Call]]]:
    """(part, variant, FLOPs in forwards, inputs -> call). The first of a part is the default."""
    from ppruntime.models.kernels import sparse_attention as kernels

    def forward(tiles: Any) -> Callable[[Inputs], Call]:
        def make(x: Inputs) -> Call:
            return lambda: kernels.run_forward(
                x.q, x.keys, x.slots, x.sink, x.cos, x.sin, tiles=tiles
            )

        return make

    def backward(tiles: Any, deterministic: bool) -> Callable[[Inputs], Call]:
        def make(x: Inputs) -> Call:
            return lambda: kernels.run_backward(
                x.dout,
                x.q,
                x.keys,
                x.slots,
                x.sink,
                x.cos,
                x.sin,
                *x.saved,
                deterministic=deterministic,
                tiles=tiles,
            )

        return make

    def library_forward(x: Inputs) -> Call:
        return lambda: _library(x, None)

    def library_backward(x: Inputs) -> Call:
        saved = _library(x, None)
        return lambda: _library(x, saved)

    libraries = [
        ("forward", "library", 1.0, library_forward),
        ("backward", "library", 2.5, library_backward),
    ]
    forwards = kernels.FORWARD_TILES_TO_TRY
    backwards = kernels.BACKWARD_TILES_TO_TRY
    return (
        [("forward", str(tiles), 1.0, forward(tiles)) for tiles in forwards]
        + [
            (part, str(tiles), 2.5, backward(tiles, deterministic))
            for deterministic, part in ((False, "backward"), (True, "backward, fixed"))
            for tiles in backwards
        ]
        + libraries
    )


def _library(x: Inputs, saved: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """The optional packages' forward, or with what it gave their backward."""
    from ppruntime.models.kernels import sparse_attention_library as library
    from ppruntime.models.rope import Rotation

    reason = library.unavailable_reason(x.q.device, x.q.dtype)
    if reason is not None:
        raise RuntimeError(reason)
    rotation = Rotation(x.cos, x.sin)
    if saved is None:
        return library.run_forward(x.q, x.keys, x.slots, x.sink, rotation)
    out, lse = saved
    return library.run_backward(x.dout, x.q, x.keys, x.slots, x.sink, rotation, out, lse)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def _matmul_teraflops() -> float:
    """The floor's rate: the best of a few bf16 products of random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    clock = Clock(a.device)
    return 2 * 8192**3 / min(clock(lambda: a @ b) for _ in range(8)) * 1e-9


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
