"""Bench of dense linears on one GPU: `python -m ppruntime.launch.bench_layers --only linears`.

Times whole linears at V4.1-Flash's widths, casts included: q_a, q_b, o_b and the shared expert,
forward and backward, in bf16 and in FP8 by every backend that runs here, by the last one also with
scales of whole tiles in weight gradients. Weights are quantised
beforehand, as a step's first micro-batch does; what that costs has a row of its own. All make
weight gradients in fp32. FP8 adds them to a sum; bf16 is timed with that add ("bf16, fp32 sums")
and without it ("bf16", the baseline of all ratios). Variants take turns, so that ratios hold
although clocks drift. Prints a line per row and writes JSON with every repetition, also of a run
cut short.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ppruntime.gpu_clock import Clock
from ppruntime.launch.command_line import command_line
from ppruntime.launch.records import write_record
from ppruntime.models.dims import ModelDims, preset

LIMIT_SECONDS = 240.0
BASELINE = "bf16"
TILES = ", wgrad tiles"
"""Ends the name of the variant of the last backend whose weight gradients have scales of tiles."""
BARS = {("o_b", "all"): 1.4, ("q_b", "all"): 1.3}
"""Ratios to bf16 that the fastest FP8 variant is to reach."""

Call = Callable[[], object]


@dataclass(slots=True)
class Row:
    """One timed phase of one variant of a layer. `phase`: forward, backward (both gradients), all,
    or weights (their quantisation)."""

    layer: str
    phase: str
    variant: str
    flops: float
    milliseconds: list[float] = field(default_factory=list)
    error: float | None = None
    """Of the result, relative to fp32's on the same numbers."""
    failure: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.milliseconds) if self.milliseconds else None

    def record(self, baseline: float | None) -> dict[str, object]:
        """`baseline`: the median of bf16's row of the same layer and phase."""
        median = self.median
        return {
            **asdict(self),
            "median": median,
            "spread": max(self.milliseconds) - min(self.milliseconds) if median else None,
            "teraflops": self.flops / median * 1e-9 if median else None,
            "ratio_to_bf16": baseline / median if median and baseline else None,
        }

    def line(self, baseline: float | None) -> str:
        head = f"{self.layer:8} {self.phase:9} {self.variant:22}"
        if self.median is None:
            return f"{head} failed: {self.failure[:120]}"
        rate = f"{self.flops / self.median * 1e-9:6.0f} TFLOP/s" if self.flops else ""
        ratio = f"{baseline / self.median:5.2f}x bf16" if baseline else ""
        error = f"error {self.error:.1e}" if self.error is not None else ""
        return f"{head} {self.median:8.3f} ms {rate:15} {ratio:12} {error}".rstrip()


@dataclass(slots=True)
class Layer:
    """A layer to be timed: how to make it in bf16, and its widths."""

    name: str
    make: Callable[[], nn.Module]
    num_in: int
    num_out: int
    weights: int
    """Elements of its weights: 2 FLOPs each and row, three times."""


def layers(dims: ModelDims, device: torch.device) -> list[Layer]:
    """The dense layers of a model that have an FP8 form."""
    from ppruntime.models.experts import SharedExpert
    from ppruntime.models.linear import Linear

    hidden, width = dims.hidden_size, dims.num_shared_experts * dims.expert_width
    shapes = {
        "q_a": (hidden, dims.q_lora_rank),
        "q_b": (dims.q_lora_rank, dims.num_heads * dims.head_dim),
        "o_b": (dims.o_groups * dims.o_lora_rank, hidden),
    }

    def linear(num_in: int, num_out: int) -> Callable[[], nn.Module]:
        return lambda: Linear(num_in, num_out, device=device, dtype=torch.bfloat16)

    found = [Layer(name, linear(i, o), i, o, i * o) for name, (i, o) in shapes.items()]

    def shared() -> nn.Module:
        return SharedExpert(dims, device=device, dtype=torch.bfloat16)

    return [*found, Layer("shared", shared, hidden, hidden, 3 * hidden * width)]


def backends() -> dict[str, str | None]:
    """FP8 backends by name, with why they do not run here, if so."""
    from ppruntime.models.kernels.fp8_linear_backends import LinearBackend, unavailable_reason

    timed = (b for b in LinearBackend if b is not LinearBackend.REFERENCE)
    return {backend.value: unavailable_reason(backend) for backend in timed}


def variants(layer: Layer, names: Sequence[str]) -> dict[str, nn.Module]:
    """The layer in bf16 twice and in FP8 by the backends `names`, around the same numbers."""
    from ppruntime.models.experts import SharedExpert
    from ppruntime.models.fp8_linear import Fp8Linear, Fp8LinearOptions, Fp8SharedExpert
    from ppruntime.models.kernels.fp8_linear_backends import LinearBackend
    from ppruntime.models.linear import Linear
    from ppruntime.models.weight_copies import WeightVersion, set_weight_version

    def made() -> nn.Module:
        module = layer.make()
        for seed, weight in enumerate(module.parameters()):
            generator = torch.Generator(weight.device).manual_seed(seed)
            nn.init.normal_(weight, 0, 0.02, generator=generator)
        return module

    found = {BASELINE: made(), "bf16, fp32 sums": made()}
    for name, tiles in [(name, False) for name in names] + [(name, True) for name in names[-1:]]:
        backend = LinearBackend(name)
        plain, options = made(), Fp8LinearOptions(backend=backend, wgrad_tile_scales=tiles)
        if isinstance(plain, SharedExpert):
            module: nn.Module = Fp8SharedExpert(plain, options)
        else:
            assert isinstance(plain, Linear)
            module = Fp8Linear(plain, options)
        set_weight_version(module, WeightVersion())
        found[f"fp8 {name}{TILES if tiles else ''}"] = module
    return found


class Bench:
    """`rows` grows while it runs."""

    def __init__(
        self, dims: ModelDims, num_tokens: int, num_repetitions: int, device: torch.device
    ) -> None:
        self.dims, self.device = dims, device
        self.num_tokens, self.num_repetitions = num_tokens, num_repetitions
        self.clock = Clock(device)
        self.start = time.monotonic()
        self.rows: list[Row] = []
        self.missing: dict[str, str] = {}
        self.is_complete = False

    def run(self, names: Sequence[str] | None = None) -> None:
        """`names`: FP8 backends; None: all that run here."""
        if names is None:
            reasons = backends()
            self.missing = {name: why for name, why in reasons.items() if why is not None}
            names = [name for name, why in reasons.items() if why is None]
        for layer in layers(self.dims, self.device):
            rows = self._time(layer, names)
            self.rows += rows
            for row in rows:
                print(row.line(self._baseline(row)), flush=True)
        for name, why in self.missing.items():
            print(f"left out: {name}: {why}")
        for (name, phase), bar in BARS.items():
            reached = [r for r in self._ratios(name, phase) if r is not None]
            if reached:
                verdict = "reached" if max(reached) >= bar else "missed"
                print(f"{name}: {max(reached):.2f}x bf16, bar {bar}x {verdict}")
        self.is_complete = all(row.milliseconds for row in self.rows)

    def record(self) -> dict[str, object]:
        """All of it, for JSON."""
        import triton

        is_cuda = self.device.type == "cuda"
        return {
            "command": command_line("layers"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "tokens": self.num_tokens,
            "complete": self.is_complete,
            "missing": self.missing,
            "bars": {f"{name} {phase}": bar for (name, phase), bar in BARS.items()},
            "rows": [row.record(self._baseline(row)) for row in self.rows],
        }

    def _baseline(self, row: Row) -> float | None:
        for other in self.rows:
            if (other.layer, other.phase, other.variant) == (row.layer, row.phase, BASELINE):
                return other.median
        return None

    def _ratios(self, layer: str, phase: str) -> list[float | None]:
        found: list[float | None] = []
        for row in self.rows:
            baseline = self._baseline(row)
            if (row.layer, row.phase) == (layer, phase) and row.variant.startswith("fp8"):
                found.append(baseline / row.median if baseline and row.median else None)
        return found

    def _time(self, layer: Layer, names: Sequence[str]) -> list[Row]:
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(width: int) -> Tensor:
            shape = (self.num_tokens, width)
            return torch.randn(shape, generator=generator, device=self.device).bfloat16()

        x, grad = normal(layer.num_in).requires_grad_(), normal(layer.num_out)
        modules = variants(layer, names)
        flops = 2.0 * self.num_tokens * layer.weights
        runs: list[tuple[list[Row], nn.Module]] = []
        expected = _wide(modules[BASELINE], x)
        for variant, module in modules.items():
            rows = [
                Row(layer.name, phase, variant, flops * share)
                for phase, share in (("forward", 1), ("backward", 2), ("all", 3))
            ]
            if variant.startswith("fp8"):
                rows.append(Row(layer.name, "weights", variant, 0))
            try:
                y = module(x)
                y.backward(grad)  # compiles
                self._wait()
                y = y.detach().float()
                rows[0].error = float((y - expected).norm() / expected.norm())
                runs.append((rows, module))
            except Exception as error:
                for row in rows:
                    row.failure = f"{type(error).__name__}: {error}"
                runs.append((rows, module))
        for _ in range(self.num_repetitions):
            for rows, module in runs:
                if rows[0].failure or time.monotonic() - self.start > LIMIT_SECONDS:
                    continue
                self._repeat(rows, module, x, grad)
        return [row for rows, _ in runs for row in rows]

    def _repeat(self, rows: Sequence[Row], module: nn.Module, x: Tensor, grad: Tensor) -> None:
        forward, backward, both, *weights = rows
        if forward.variant == BASELINE:
            module.zero_grad()  # the others have their fp32 sums already
        x.grad = None
        results: list[Tensor] = []

        def run_backward() -> None:
            results[0].backward(grad)  # type: ignore[no-untyped-call]

        forward.milliseconds.append(self.clock(lambda: results.append(module(x))))
        backward.milliseconds.append(self.clock(run_backward))
        both.milliseconds.append(forward.milliseconds[-1] + backward.milliseconds[-1])
        for row in weights:
            row.milliseconds.append(self.clock(partial(_quantize_weights, module)))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.no_grad()
def _quantize_weights(module: nn.Module) -> None:
    for weight in module.parameters():
        module.kernels.quantize_blocks(weight.unsqueeze(0), transposed=True)  # type: ignore[union-attr, operator]


@torch.no_grad()
def _wide(module: nn.Module, x: Tensor) -> Tensor:
    """The bf16 layer's result by fp32 products of its bf16 weights."""
    wide: Tensor = copy.deepcopy(module).float()(x.detach().float())
    return wide


def run(out: Path, num_tokens: int, num_repetitions: int) -> int:
    """The bench on this machine's GPU; 0 if every row was measured."""
    bench = Bench(preset("v41-flash"), num_tokens, num_repetitions, torch.device("cuda"))
    try:
        bench.run()
    finally:
        write_record(out, bench.record())
        print(f"results in {out}")
    return int(not bench.is_complete)
