"""Bench of the FP8 experts on one GPU: `python3 -m ppruntime.launch.bench_moe --out FILE`.

Times every phase of one routed layer, forward and backward, at V4.1-Flash's widths and 49,152
routed rows over 48 experts, for each backend, beside bf16 `torch._grouped_mm` in the same run;
tries several tiles; compares results with fp64 of the same FP8 values. Kernels are compiled
beforehand by worker processes, so that the run itself is short. Writes JSON, also of a run that
broke off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

HIDDEN, WIDTH, EXPERTS, PER_TOKEN, TOKENS = 5120, 2304, 48, 6, 8192
LIMIT = 10.0
WORKERS = 12
FORWARD_TILES = ((64, 128, 4, 3, 16), (64, 128, 4, 4, 16), (128, 128, 8, 4, 8), (64, 128, 4, 3, 8))
WEIGHT_GRAD_TILES = (
    (64, 128, 4, 4, 16, True),
    (64, 128, 4, 4, 72, True),
    (64, 128, 4, 3, 8, True),
    (128, 128, 8, 4, 8, True),
)
"""Rows, columns, warps, stages, row blocks of a group; whether the accumulator is prefetched."""


@dataclass(slots=True)
class Row:
    """One timed thing: every repetition in milliseconds, and the work it did."""

    shape: str
    phase: str
    variant: str
    flops: float
    num_bytes: float
    milliseconds: list[float] = field(default_factory=list)

    def record(self) -> dict[str, object]:
        median = statistics.median(self.milliseconds)
        return {
            **asdict(self),
            "median_ms": median,
            "lowest_ms": min(self.milliseconds),
            "tflops": self.flops / median / 1e9,
            "gb_per_second": self.num_bytes / median / 1e6,
        }

    def __str__(self) -> str:
        median = statistics.median(self.milliseconds)
        rates = f"{self.flops / median / 1e9:7.0f} TFLOP/s" if self.flops else " " * 15
        if self.num_bytes:
            rates += f" {self.num_bytes / median / 1e6:6.0f} GB/s"
        return (
            f"{self.shape:8} {self.phase:14} {self.variant:34} {median:8.3f} ms"
            f" (from {min(self.milliseconds):7.3f}) {rates}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--compile", type=int, metavar="WORKER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        return _compile(arguments.compile)
    begin = time.monotonic()
    command = [sys.executable, "-m", "ppruntime.launch.bench_moe", "--out", str(arguments.out)]
    workers = [subprocess.Popen([*command, "--compile", str(worker)]) for worker in range(WORKERS)]
    codes = [worker.wait() for worker in workers]
    print(f"compiled in {time.monotonic() - begin:.0f} s, exit codes {codes}", flush=True)
    bench = _Bench(arguments)
    try:
        bench.run()
    finally:
        bench.write(time.monotonic() - begin)
    return int(any(bench.failed_checks))


# What there is to compile: each GEMM of the layer with each tile, and deep_gemm's.


def _tiles(choices: Sequence[Any]) -> Iterator[Any]:
    from ppruntime.models.kernels.grouped_gemm import Tile

    for choice in choices:
        yield Tile(*choice)


def _gemm_shapes() -> dict[str, tuple[int, int]]:
    """Output and input width of each GEMM over the pool's rows."""
    return {
        "L1": (2 * WIDTH, HIDDEN),
        "L2": (HIDDEN, WIDTH),
        "dgrad L2": (WIDTH, HIDDEN),
        "dgrad L1": (HIDDEN, 2 * WIDTH),
    }


def _weight_shapes() -> dict[str, tuple[int, int]]:
    return {"wgrad W13": (2 * WIDTH, HIDDEN), "wgrad W2": (HIDDEN, WIDTH)}


def _compile(worker: int) -> int:
    """Runs this worker's share of the kernels once, so that they lie in the caches on disk."""
    import torch

    from ppruntime.models.kernels import deep_gemm, grouped_gemm, moe_layout
    from ppruntime.models.kernels.expert_backends import ExpertBackend, unavailable_reason

    experts = torch.arange(EXPERTS, device="cuda").view(-1, 1)
    small = moe_layout.expert_layout(experts, EXPERTS)
    multiply, add = grouped_gemm.grouped_gemm, grouped_gemm.grouped_weight_grad
    tasks: list[Callable[[], object]] = [_run_layer]
    if unavailable_reason(ExpertBackend.DEEP_GEMM) is None:
        # It chooses its tiles by the number of rows: the real ones.
        layout = moe_layout.expert_layout(_routings()["balanced"][1], EXPERTS)
        for shape in _gemm_shapes().values():
            tasks += [partial(_run_gemm, deep_gemm.grouped_gemm, shape, layout)]
        for shape in _weight_shapes().values():
            run = partial(_run_weight_grad, deep_gemm.grouped_weight_grad, shape, layout)
            tasks += [partial(run, 1), partial(run, 2)]
    for shape in _gemm_shapes().values():
        for tile in _tiles(FORWARD_TILES):
            tasks += [partial(_run_gemm, partial(multiply, tile=tile), shape, small)]
    for name, shape in _weight_shapes().items():
        for tile in _tiles(WEIGHT_GRAD_TILES):
            run = partial(_run_weight_grad, partial(add, tile=tile), shape, small)
            tiles = (False, True) if name == "wgrad W13" else (True, False)
            tasks += [partial(run, num) for num in (1, 2)]
            tasks += [partial(run, num, tiles=tiles) for num in (1, 2)]
    for task in tasks[worker::WORKERS]:
        task()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return 0


def _run_gemm(function: Callable[..., object], shape: tuple[int, int], layout: Any) -> None:
    import torch

    from ppruntime.models.kernels.quantize import Quantized, pool_rows_like

    outs, ins = shape
    x = pool_rows_like(layout.pair_P, layout.num_rows, ins)
    data = torch.zeros(EXPERTS, outs, ins, device="cuda", dtype=torch.uint8)
    scale = torch.ones(EXPERTS, outs // 128, ins // 128, device="cuda")
    function(x, Quantized(data.view(torch.float8_e4m3fn), scale), layout)


def _run_weight_grad(
    function: Callable[..., object],
    shape: tuple[int, int],
    layout: Any,
    num: int,
    tiles: tuple[bool, bool] = (False, False),
) -> None:
    import torch

    from ppruntime.models.kernels.grouped_gemm import WeightGradOperands
    from ppruntime.models.kernels.quantize import columns_like

    left, right = (
        columns_like(layout.pair_P, layout.num_rows, channels, tile_scales=tiled)
        for channels, tiled in zip(shape, tiles, strict=True)
    )
    accumulator = torch.zeros(EXPERTS, *shape, device="cuda")
    function(accumulator, [WeightGradOperands(left, right, layout)] * num)


def _run_layer() -> None:
    """Every other kernel, at the real widths and with few tokens."""
    import torch
    from msgspec.structs import replace

    from ppruntime.models.dims import preset
    from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options

    dims = replace(preset("v41-flash"), num_experts=EXPERTS)
    for tiles in (False, True):
        options = Fp8Options(wgrad_tile_scales=tiles, fp8_transposed_on_demand=tiles)
        experts = Fp8Experts(dims, options, device="cuda", dtype=torch.bfloat16)
        torch.nn.init.zeros_(experts.gate_up.weight)
        torch.nn.init.zeros_(experts.down.weight)
        for per_token in (PER_TOKEN, 1):
            x = torch.zeros(64, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            routing = torch.arange(64 * per_token, device="cuda").view(64, per_token) % EXPERTS
            weights = torch.ones(64, per_token, device="cuda", requires_grad=True)
            experts(x, routing, weights).sum().backward()


def _routings() -> dict[str, tuple[int, Any]]:
    """Per shape: rows of x, and their experts.

    balanced   8,192 tokens, top 6 of 48: 1,024 rows per expert
    ep8        what one of 8 ranks receives of 65,536 tokens that spread over 384 experts: 49,152
               rows, each for one of its 48 experts, 1,024 per expert
    random     8,192 tokens, 6 random ones of 48
    """
    import torch

    from ppruntime.models.router import balanced_experts

    pairs = torch.arange(TOKENS * PER_TOKEN, device="cuda")
    spread = balanced_experts(8 * TOKENS, 8 * EXPERTS, PER_TOKEN, device="cuda").flatten()
    received = spread[spread < EXPERTS].view(-1, 1)
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator, device="cuda")
    return {
        "balanced": (TOKENS, (pairs % EXPERTS).view(TOKENS, PER_TOKEN)),
        "ep8": (len(received), received),
        "random": (TOKENS, scores.argsort(-1)[:, :PER_TOKEN].contiguous()),
    }


class _Bench:
    """The run: rows, checks, and the tensors that all phases share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from ppruntime.models.kernels.expert_backends import ExpertBackend, unavailable_reason

        self.arguments = arguments
        self.rows: list[Row] = []
        self.checks: list[dict[str, object]] = []
        self.failed_checks: list[str] = []
        self.notes: list[str] = []
        self.deep_gemm = unavailable_reason(ExpertBackend.DEEP_GEMM)
        if self.deep_gemm is not None:
            self.notes.append(self.deep_gemm)
        generator = torch.Generator("cuda").manual_seed(1)

        def weight(*shape: int) -> Any:
            w = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
            return w.normal_(0, 0.02, generator=generator)

        self.w13 = weight(EXPERTS, 2 * WIDTH, HIDDEN)
        self.w2 = weight(EXPERTS, HIDDEN, WIDTH)
        self.acc13 = torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN, device="cuda")
        self.acc2 = torch.zeros(EXPERTS, HIDDEN, WIDTH, device="cuda")
        self.generator = generator

    def run(self) -> None:
        from ppruntime.models.kernels import quantize

        self.fp8_13, self.fp8_13t = quantize.quantize_blocks(self.w13, transposed=True)
        self.fp8_2, self.fp8_2t = quantize.quantize_blocks(self.w2, transposed=True)
        num = self.w13.numel() + self.w2.numel()
        self.time("weights", "quantise", {
            "with turned copy": partial(self._quantize_weights, True),
            "without": partial(self._quantize_weights, False),
        }, num_bytes=4 * num, repetitions=3)  # fmt: skip
        self.time("weights", "turn", {
            "on demand": lambda: [quantize.transpose_blocks(w) for w in (self.fp8_13, self.fp8_2)],
        }, num_bytes=2 * num, repetitions=3)  # fmt: skip
        for shape, (num_rows, experts_NK) in _routings().items():
            self.shape(shape, num_rows, experts_NK)

    def _quantize_weights(self, transposed: bool) -> None:
        from ppruntime.models.kernels import quantize

        for weight in (self.w13, self.w2):
            quantize.quantize_blocks(weight, transposed=transposed)

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
        """Times the variants in turn, again and again, by events on the current stream."""
        import torch

        rows = [Row(shape, phase, name, flops, num_bytes) for name in variants]
        total = repetitions or self.arguments.repetitions
        for repetition in range(-2, total):
            events = []
            for run in variants.values():
                first, last = _event(), _event()
                first.record()
                run()
                last.record()
                events.append((first, last))
            torch.cuda.synchronize()
            for row, (first, last) in zip(rows, events, strict=True):
                if repetition >= 0:
                    row.milliseconds.append(first.elapsed_time(last))
        for row in rows:
            print(row, flush=True)
        self.rows += rows

    def check(self, name: str, value: float, bound: float) -> None:
        """A number that has to stay below its bound."""
        passed = value <= bound
        self.checks.append({"check": name, "value": value, "bound": bound, "passed": passed})
        print(f"{'ok' if passed else 'FAILED':6} {name}: {value:.3g} (bound {bound:g})", flush=True)
        if not passed:
            self.failed_checks.append(name)

    # One routing

    def shape(self, shape: str, num_rows: int, experts_NK: Any) -> None:
        import torch

        from ppruntime.models.kernels import moe_layout, quantize, swiglu
        from ppruntime.models.kernels.quantize import Quantized

        def normal(*size: int) -> Any:
            x = torch.empty(*size, device="cuda", dtype=torch.bfloat16)
            return x.normal_(generator=self.generator)

        x, dy = normal(num_rows, HIDDEN), normal(num_rows, HIDDEN)
        weights = torch.rand(experts_NK.shape, generator=self.generator, device="cuda") + 0.1
        layout = moe_layout.expert_layout(experts_NK, EXPERTS)
        routed = int((experts_NK >= 0).sum())
        self.notes.append(f"{shape}: {routed} rows, padded {int(layout.start_E1[-1])}")
        per_row = routed * 1.0
        time = partial(self.time, shape)

        time("layout", {"triton": lambda: moe_layout.expert_layout(experts_NK, EXPERTS)})
        x8 = quantize.quantize_rows(x, power_of_two=True)
        time("x to FP8", {"triton": lambda: quantize.quantize_rows(x, power_of_two=True)},
             num_bytes=3 * x.numel())  # fmt: skip
        rows = Quantized(*moe_layout.gather_rows(x8.data, layout, x8.scale))
        time("gather x8", {"triton": lambda: moe_layout.gather_rows(x8.data, layout, x8.scale)},
             num_bytes=2 * per_row * HIDDEN)  # fmt: skip
        z = self.gemm(shape, "L1", rows, self.fp8_13, self.w13, layout, routed)
        h8 = swiglu.swiglu(z, weights, layout, LIMIT, power_of_two=False)
        time("SwiGLU", {
            "triton": lambda: swiglu.swiglu(z, weights, layout, LIMIT, power_of_two=False),
        }, num_bytes=per_row * WIDTH * 5)  # fmt: skip
        o = self.gemm(shape, "L2", h8, self.fp8_2, self.w2, layout, routed)
        time("sum to tokens", {
            "triton": lambda: moe_layout.gather_sum(o, layout, dtype=torch.bfloat16),
        }, num_bytes=2 * per_row * HIDDEN + 2 * x.numel())  # fmt: skip

        def turn_dy(tiles: bool = False) -> Any:
            return quantize.quantize_routed(
                dy, layout, with_rows=True, power_of_two=False, tile_scales=tiles
            )

        def turn_x(tiles: bool = False) -> Any:
            return quantize.quantize_routed(
                x8, layout, with_rows=False, power_of_two=True, tile_scales=tiles
            )[1]

        dy_rows, dy_columns = turn_dy()
        time("dy to FP8", {"triton": turn_dy}, num_bytes=4 * per_row * HIDDEN)
        d = self.gemm(shape, "dgrad L2", dy_rows, self.fp8_2t, self.w2.mT, layout, routed)
        grads = swiglu.swiglu_backward(z, d, weights, layout, LIMIT, power_of_two=False)
        time("SwiGLU back", {
            f"triton w{num_warps}": partial(
                swiglu.swiglu_backward, z, d, weights, layout, LIMIT,
                power_of_two=False, num_warps=num_warps,
            )
            for num_warps in (16, 8)
        }, num_bytes=per_row * WIDTH * 11)  # fmt: skip
        self.gemm(shape, "dgrad L1", grads.rows, self.fp8_13t, self.w13.mT, layout, routed)
        x_columns = turn_x()
        time("x8 to columns", {"triton": turn_x, "triton, tiles": partial(turn_x, True)},
             num_bytes=2 * per_row * HIDDEN)  # fmt: skip
        self.weight_grad(shape, "wgrad W13", self.acc13, grads.columns, x_columns,
                         (None, turn_x(True)), layout, routed)  # fmt: skip
        self.weight_grad(shape, "wgrad W2", self.acc2, dy_columns, grads.inner_columns,
                         (turn_dy(True)[1], None), layout, routed)  # fmt: skip
        self.layer(shape, x, experts_NK, weights, dy)

    def gemm(
        self, shape: str, phase: str, x: Any, fp8: Any, bf16: Any, layout: Any, routed: int
    ) -> Any:
        import torch

        from ppruntime.models.kernels import deep_gemm, grouped_gemm
        from ppruntime.models.kernels.quantize import Quantized, dequantize_blocks, dequantize_rows

        num, outs, ins = fp8.data.shape
        variants: dict[str, Callable[[], Any]] = {}
        tiles = list(_tiles(FORWARD_TILES)) if shape == "balanced" else [grouped_gemm.FORWARD_TILE]
        for tile in tiles:
            variants[f"triton {_text(tile)}"] = partial(
                grouped_gemm.grouped_gemm, x, fp8, layout, tile=tile
            )
        if shape == "balanced":
            limit = _num_sms() - 20
            variants[f"triton, {limit} SMs"] = partial(
                grouped_gemm.grouped_gemm, x, fp8, layout, gemm_sms=limit
            )
        if self.deep_gemm is None:
            variants["deep_gemm"] = partial(deep_gemm.grouped_gemm, x, fp8, layout)
        dense = torch.randn(routed, ins, device="cuda", dtype=torch.bfloat16)
        ends = layout.count_E.cumsum(0, dtype=torch.int32)
        variants["bf16 torch"] = lambda: torch._grouped_mm(dense, bf16.mT, offs=ends)
        self.time(
            shape,
            phase,
            variants,
            flops=2.0 * routed * outs * ins,
            num_bytes=routed * (ins + 2 * outs) + fp8.data.numel(),
        )
        # The last expert, all its rows, in fp64.
        expert = num - 1
        start = int(layout.start_E1[expert])
        live = slice(start, start + int(layout.count_E[expert]))
        scale = x.scale[:, live].t()
        exact = (
            dequantize_rows(Quantized(x.data[live], scale)).double()
            @ dequantize_blocks(Quantized(*(t[expert:] for t in fp8)))[0].double().t()
        )
        first = None
        for name, run in variants.items():
            if name != "bf16 torch":
                got = run()
                first = got if first is None else first
                self.check(f"{shape} {phase} {name}", _distance(got[live], exact), 3e-3)
        return first

    def weight_grad(
        self,
        shape: str,
        phase: str,
        accumulator: Any,
        left: Any,
        right: Any,
        tiled: tuple[Any, Any],
        layout: Any,
        routed: int,
    ) -> None:
        import torch

        from ppruntime.models.kernels import deep_gemm, grouped_gemm
        from ppruntime.models.kernels.quantize import Quantized, dequantize_columns

        operands = grouped_gemm.WeightGradOperands(left, right, layout)
        tiles = grouped_gemm.WeightGradOperands(tiled[0] or left, tiled[1] or right, layout)
        num, outs, ins = accumulator.shape
        all_tiles = shape == "balanced"
        usual = [grouped_gemm.WEIGHT_GRAD_TILE]
        choices = list(_tiles(WEIGHT_GRAD_TILES)) if all_tiles else usual
        dy = torch.randn(routed, outs, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(routed, ins, device="cuda", dtype=torch.bfloat16)
        ends = layout.count_E.cumsum(0, dtype=torch.int32)
        bf16 = partial(torch._grouped_mm, dy.t(), x, offs=ends)
        launch = grouped_gemm.grouped_weight_grad
        for count in (1, 2):
            variants: dict[str, Callable[[], Any]] = {}
            for tile in choices:
                name = f"triton {_text(tile)}"
                variants[name] = partial(launch, accumulator, [operands] * count, tile=tile)
                variants[f"{name} tiles"] = partial(launch, accumulator, [tiles] * count, tile=tile)
            if all_tiles:
                variants[f"triton, {_num_sms()} SMs persistent, tiles"] = partial(
                    launch, accumulator, [tiles] * count, gemm_sms=_num_sms()
                )
            if self.deep_gemm is None:
                variants["deep_gemm"] = partial(
                    deep_gemm.grouped_weight_grad, accumulator, [operands] * count
                )
            if count == 1:
                variants["bf16 torch"] = bf16
                variants["bf16 torch + fp32 add"] = lambda: accumulator.add_(bf16())
            self.time(
                shape,
                phase if count == 1 else f"{phase} n={count}",
                variants,
                flops=2.0 * routed * outs * ins * count,
                num_bytes=8.0 * accumulator.numel() + count * routed * (outs + ins),
            )
        expert = num - 1
        start, stop = (int(layout.start_E1[i]) // 128 for i in (expert, expert + 1))
        l64, r64 = (
            dequantize_columns(Quantized(q.data[start:stop], q.scale[start:stop])).double()
            for q in (left, right)
        )
        exact = l64.t() @ r64
        accumulator.zero_()
        launch(accumulator, [operands])
        self.check(f"{shape} {phase} triton", _distance(accumulator[expert], exact), 5e-4)
        launch(accumulator, [operands])
        apart = accumulator.clone()
        accumulator.zero_()
        launch(accumulator, [operands, operands])
        same = torch.equal(accumulator, apart)
        self.check(f"{shape} {phase} n=2 differs from two launches", float(not same), 0)
        if self.deep_gemm is None:
            accumulator.zero_()
            deep_gemm.grouped_weight_grad(accumulator, [operands, operands])
            self.check(f"{shape} {phase} deep_gemm n=2", _distance(accumulator, apart), 1e-6)

    def layer(self, shape: str, x: Any, experts_NK: Any, weights: Any, dy: Any) -> None:
        """The whole layer through autograd, per backend and option, and its error."""
        import torch
        from msgspec.structs import replace

        from ppruntime.models.dims import preset
        from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options
        from ppruntime.models.kernels.expert_backends import ExpertBackend
        from ppruntime.models.weight_copies import WeightVersion, set_weight_version

        dims = replace(preset("v41-flash"), num_experts=EXPERTS)
        options = {
            "triton": Fp8Options(),
            "triton, n=2": Fp8Options(fused_wgrad_micro_batches=2),
            "triton, recompute": Fp8Options(keep_expert_activations=False),
            "triton, turned on demand": Fp8Options(fp8_transposed_on_demand=True),
            "triton, wgrad tiles": Fp8Options(wgrad_tile_scales=True),
        }
        if self.deep_gemm is None:
            backend = ExpertBackend.DEEP_GEMM
            options["deep_gemm"] = Fp8Options(backend=backend)
            options["deep_gemm, n=2"] = Fp8Options(backend=backend, fused_wgrad_micro_batches=2)
        x = x.clone().requires_grad_()
        weights = weights.clone().requires_grad_()
        routed = int((experts_NK >= 0).sum())
        flops = 6.0 * routed * HIDDEN * WIDTH
        for name, option in options.items():
            experts = Fp8Experts(dims, option, device="meta")
            experts.gate_up.weight = torch.nn.Parameter(self.w13)
            experts.down.weight = torch.nn.Parameter(self.w2)
            for weight, acc in zip(experts.parameters(), (self.acc13, self.acc2), strict=True):
                weight.grad_dtype = torch.float32
                weight.grad = acc
            set_weight_version(experts, WeightVersion())
            experts.quantized()
            begin = torch.cuda.memory_allocated()
            y = experts(x, experts_NK, weights)
            self.notes.append(
                f"{shape} {name}: keeps {(torch.cuda.memory_allocated() - begin) / 1e9:.3f} GB"
            )
            if name in ("triton", "deep_gemm"):
                self.check(f"{shape} layer {name}", self._layer_error(
                    experts, x, experts_NK, weights, y), 0.075)  # fmt: skip
            with torch.no_grad():
                self.time(shape, "forward", {
                    name: partial(experts, x, experts_NK, weights),
                }, flops=flops)  # fmt: skip
            pairs = option.fused_wgrad_micro_batches

            def both(experts: Any = experts, pairs: int = pairs) -> None:
                for _ in range(pairs):
                    experts(x, experts_NK, weights).backward(dy)

            self.time(shape, "fwd + bwd", {f"{name} ({pairs} micro-batches)": both},
                      flops=3 * flops * pairs)  # fmt: skip
            x.grad = weights.grad = None
            del experts, y

    def _layer_error(self, experts: Any, x: Any, experts_NK: Any, weights: Any, y: Any) -> float:
        """Relative distance of 32 tokens' outputs from fp32 with the unquantised weights."""
        import torch

        from ppruntime.models.experts import clamped_swiglu

        with torch.no_grad():
            tokens = torch.arange(0, len(x), len(x) // 32, device="cuda")[:32]
            exact = torch.zeros(len(tokens), HIDDEN, device="cuda", dtype=torch.float64)
            for i, token in enumerate(tokens.tolist()):
                for k, expert in enumerate(experts_NK[token].tolist()):
                    inner = clamped_swiglu(self.w13[expert].float() @ x[token].float(), LIMIT)
                    exact[i] += weights[token, k] * (self.w2[expert].float() @ inner)
            return _distance(y[tokens], exact)

    def write(self, seconds: float) -> None:
        import torch
        import triton

        record = {
            "command": " ".join(sys.argv),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "seconds": seconds,
            "complete": bool(self.rows) and not sys.exc_info()[0],
            "notes": self.notes,
            "checks": self.checks,
            "rows": [row.record() for row in self.rows],
        }
        self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
        self.arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        for note in self.notes:
            print(note)
        failed = self.failed_checks or "none"
        print(f"{seconds:.0f} s; failed checks: {failed}; {self.arguments.out}", flush=True)


def _num_sms() -> int:
    import torch

    return torch.cuda.get_device_properties(0).multi_processor_count


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _text(tile: Any) -> str:
    text = f"{tile.rows}x{tile.columns} w{tile.num_warps} s{tile.num_stages} g{tile.group}"
    return f"{text} prefetch" if tile.prefetch else text


def _distance(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
