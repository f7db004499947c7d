"""Bench of head, residuals, router, SwiGLU and Engram, by `bench layers --only parts`.

Each part runs at a model's full width by every implementation that this device can run: forward,
whole backward, the backward split into input and weight gradients, memory beside inputs and
weights, distance from the reference. Two rates of the same run give the floor: bf16 products for
the head, device copies for the rest (the bytes that have to move if every tensor is read or written
once). Engram's rows come from 4,194,304 (on a CPU 8 a token), looked up in the forward, by known
routes, or from the host. Prints a line per variant and writes JSON with every repetition.

On a CPU (`--device cpu --model tiny --tokens 64`) the numbers mean nothing; it shows that the bench
runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppruntime.gpu_clock import Clock
from ppruntime.launch.command_line import command_line
from ppruntime.launch.records import end_in_order, write_record
from ppruntime.models.carry import IGNORED_LABEL
from ppruntime.models.dims import ModelDims, changed, preset
from ppruntime.models.engram import look_up
from ppruntime.models.engram_kernels import engram_kernels
from ppruntime.models.engram_rows import TableRows, open_to_device
from ppruntime.models.head import head_loss
from ppruntime.models.kernels import unavailable_reason
from ppruntime.models.linear import Linear, WeightGradQueue, set_queue
from ppruntime.models.mhc import HyperConnection
from ppruntime.models.moe_kernels import moe_kernels
from ppruntime.models.norm import RMSNorm
from ppruntime.models.residual import residual
from ppruntime.models.single_stream import LayerScale, PostGate

PASSES = ("forward", "backward", "input_grad", "weight_grad")
FARTHEST = 0.05
"""Relative distance from the first variant's results at which a variant has failed."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part with its inputs: `run` gives outputs, whose gradients are `douts`."""

    name: str
    variant: str
    run: Callable[[], Sequence[Tensor]]
    inputs: Sequence[Tensor]
    douts: Sequence[Tensor]
    queue: WeightGradQueue
    unit: str
    """Of the floor: "flops" or "bytes"."""
    forward: float
    """FLOPs or bytes of the forward, at the least."""
    backward: float


@dataclass(slots=True)
class Row:
    """What was measured of a part."""

    part: str
    variant: str
    unit: str
    forward: float
    backward: float
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    ratio_to_floor: dict[str, float] = field(default_factory=dict)
    ratio_to_reference: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    """Most memory during forward and backward beside inputs, weights and results of before."""
    errors: list[float] = field(default_factory=list)
    """Distance of outputs and gradients from the first variant's."""
    host_milliseconds: dict[str, float] = field(default_factory=dict)
    """The host's, of the last repetition: a step is no faster."""
    failure: str = ""

    def median(self, name: str) -> float:
        return statistics.median(self.milliseconds[name])

    def __str__(self) -> str:
        head = f"{self.part:10} {self.variant:10}"
        if self.failure:
            return f"{head} failed: {self.failure[:160]}"
        times = "  ".join(
            f"{name} {self.median(name):8.3f} ms" for name in PASSES if name in self.milliseconds
        )
        floor = "/".join(f"{self.ratio_to_floor[name]:.2f}" for name in ("forward", "backward"))
        peak = "" if self.peak_bytes is None else f"  peak {self.peak_bytes / 1e9:.2f} GB"
        return f"{head} {times}  x floor {floor}{peak}  error {max(self.errors):.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--model", default="v41-flash", help="preset whose sizes are used")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--head-tokens", type=int, help="tokens of the head; default: twice --tokens"
    )
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_layer_parts: there is no CUDA device to measure", file=sys.stderr)
        return 2
    return run(
        options.out,
        options.tokens,
        options.repetitions,
        model=options.model,
        head_tokens=options.head_tokens or 2 * options.tokens,
        device=options.device,
    )


def run(
    out: Path,
    num_tokens: int,
    num_repetitions: int,
    *,
    model: str = "v41-flash",
    head_tokens: int = 16384,
    device: str = "cuda",
) -> int:
    """Measures, prints and writes `out`. Gives 1 if a variant that should run failed."""
    dims, place = preset(model), torch.device(device)
    rates = {"flops": _matmul_rate(place), "bytes": _copy_rate(place)}
    print(
        f"floor: {rates['flops'] / 1e12:.1f} TFLOP/s, {rates['bytes'] / 1e9:.0f} GB/s", flush=True
    )
    rows: list[Row] = []
    parts = [_heads(dims, head_tokens, place), _mhcs(dims, num_tokens, place)]
    parts += [_one_streams(dims, kind, num_tokens, place) for kind in ("gated", "layerscale")]
    parts += [_routers(dims, num_tokens, place), _swiglus(dims, num_tokens, place)]
    if dims.engram_layers:
        parts += [_gates(dims, num_tokens, place), _rows(dims, num_tokens, place)]
    for makers in parts:
        reference: Row | None = None
        results: list[Tensor] = []
        for part in makers:
            row = Row(part.name, part.variant, part.unit, part.forward, part.backward)
            rows.append(row)
            try:
                found = _measure(part, row, num_repetitions, place)
            except Exception as error:
                row.failure = f"{type(error).__name__}: {error}"
                print(row, flush=True)
                continue
            if reference is None:
                reference, results = row, found
            row.errors = [_distance(f, e) for f, e in zip(found, results, strict=True)]
            if max(row.errors) > FARTHEST:
                row.failure = f"results are {max(row.errors):.1e} from the first variant's"
            for name in ("forward", "backward"):
                least = getattr(part, name) / rates[part.unit] * 1e3
                row.ratio_to_floor[name] = row.median(name) / least
                row.ratio_to_reference[name] = row.median(name) / reference.median(name)
            print(row, flush=True)
    versions = {"torch": torch.__version__}
    if unavailable_reason("triton") is None:
        import triton

        versions["triton"] = triton.__version__
    record = {
        "command": command_line("layers"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": versions,
        "model": model,
        "tokens": num_tokens,
        "head_tokens": head_tokens,
        "rates": rates,
        "rows": [asdict(row) for row in rows],
    }
    write_record(out, record)
    print(f"results in {out}")
    return int(any(row.failure for row in rows))


def _heads(dims: ModelDims, num_tokens: int, device: torch.device) -> Iterator[Part]:
    width, vocab = dims.hidden_size, dims.vocab_size
    hidden = torch.randn(num_tokens, width, device=device).bfloat16().requires_grad_()
    projection = Linear(width, vocab, device=device, dtype=torch.bfloat16, fp32_output=True)
    torch.nn.init.normal_(projection.weight, std=0.02)
    labels = torch.randint(vocab, (num_tokens,), device=device)
    labels[::97] = IGNORED_LABEL
    queue = WeightGradQueue()
    set_queue(projection, queue)
    products = 2.0 * num_tokens * width * vocab
    for kernel in ("reference", "chunked", "triton"):
        if kernel == "triton" and device.type != "cuda":
            continue
        loss_of = head_loss(kernel, device)

        def run(loss_of: Any = loss_of) -> Sequence[Tensor]:
            return [loss_of(hidden, projection, labels)]

        yield Part(
            "head", kernel, run, (hidden, projection.weight),
            (torch.full((), 1 / num_tokens, device=device),), queue, "flops", products,
            2 * products,
        )  # fmt: skip


def _mhcs(dims: ModelDims, num_tokens: int, device: torch.device) -> Iterator[Part]:
    width, num_streams = dims.hidden_size, dims.num_streams
    connection = HyperConnection(dims, device=device)
    norm = RMSNorm(width, dims.norm_eps, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        connection.projection.weight.normal_(std=0.02)
        connection.base.normal_()
        connection.scale.fill_(1.0)
        norm.weight.fill_(1.0)
    queue = WeightGradQueue()
    set_queue(connection, queue)
    shape = (1, num_tokens, num_streams, width)
    streams = torch.randn(shape, device=device).bfloat16().requires_grad_()
    y = torch.randn(1, num_tokens, width, device=device).bfloat16().requires_grad_()
    mix = torch.rand(shape[:-1], device=device).requires_grad_() if dims.family == "v41" else None
    douts = [torch.randn_like(t) for t in (streams, y)]
    if mix is not None:
        douts.append(torch.randn_like(mix))
    inputs = [streams, y, *([] if mix is None else [mix]), *connection.parameters(), norm.weight]
    row = 2.0 * num_tokens * width
    for kernel in _kernels(device):
        functions = residual(kernel, device)

        def run(functions: Any = functions) -> Sequence[Tensor]:
            x, handle, coefficients = functions.read(connection, norm, streams, mix)
            outputs = [functions.write(handle, y, coefficients), x]
            return outputs if mix is None else [*outputs, coefficients.pre_BTS]

        yield Part(
            "mhc", kernel, run, inputs, douts, queue, "bytes",
            (2 * num_streams + 2) * row, (3 * num_streams + 3) * row,
        )  # fmt: skip


def _gates(dims: ModelDims, num_tokens: int, device: torch.device) -> Iterator[Part]:
    width, num_streams = dims.hidden_size, dims.num_streams
    shapes = (
        (1, num_tokens, num_streams, width),
        (1, num_tokens, (num_streams + 1) * width),
        (num_streams, width),
        (num_streams, width),
    )
    inputs = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    douts = [torch.randn_like(inputs[0])]
    row = 2.0 * num_tokens * width
    for kernel in _kernels(device):
        gated = engram_kernels(kernel, device).gated

        def run(gated: Any = gated) -> Sequence[Tensor]:
            return [gated(*inputs, None, dims.norm_eps)]

        yield Part(
            "engram gate", kernel, run, inputs, douts, WeightGradQueue(),
            "bytes", (3 * num_streams + 1) * row, (5 * num_streams + 2) * row,
        )  # fmt: skip


def _rows(dims: ModelDims, num_tokens: int, device: torch.device) -> Iterator[Part]:
    """A quarter of the tokens' rows is one and the same, as blanks and frequent words have it."""
    columns = (dims.engram_max_order - 1) * dims.engram_heads
    num_rows = 1 << 22 if device.type == "cuda" else 8 * num_tokens
    rows = torch.randint(num_rows, (1, num_tokens, columns), device=device)
    rows[:, ::4] = 7
    table = torch.randn(num_rows, dims.engram_head_dim, device=device).requires_grad_()
    dout = torch.randn(1, num_tokens, columns, dims.engram_head_dim, device=device).bfloat16()
    # A row once as it is stored, and for every token in bf16; back a row's sum is read and written.
    num_read = len(set(rows.flatten().tolist()))
    read, given = 4.0 * num_read * dims.engram_head_dim, 2.0 * dout.numel()
    variants = ["plain", "routes"]
    if device.type == "cuda":
        variants += ["triton", "host"]
    for variant in variants:
        place = "triton" if variant in ("triton", "host") else "reference"
        kernels = engram_kernels(place, device, tables_on_host=variant == "host")
        source: TableRows | None = None
        if variant != "plain":
            local = table.detach()
            if variant == "host":
                local = open_to_device(local.cpu())
            source = TableRows(
                local, num_rows=num_rows, dtype=torch.bfloat16, device=device, kernels=kernels
            )
            source.announce([rows])
            source.turn = 0

        def run(source: TableRows | None = source) -> Sequence[Tensor]:
            return [look_up(rows, table, torch.bfloat16, source)]

        yield Part(
            "engram rows", variant, run, [table], [dout], WeightGradQueue(), "bytes",
            read + given, 2 * read + given,
        )  # fmt: skip


def _kernels(device: torch.device) -> tuple[str, ...]:
    """Who computes a part there; all get the same inputs and gradients, so that they compare."""
    return ("reference", "triton") if device.type == "cuda" else ("reference",)


def _one_streams(
    dims: ModelDims, residual_type: str, num_tokens: int, device: torch.device
) -> Iterator[Part]:
    width = dims.hidden_size
    one = changed(dims, residual_type=residual_type)
    connection = (PostGate if residual_type == "gated" else LayerScale)(one, device=device)
    norm = RMSNorm(width, dims.norm_eps, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in (*connection.parameters(), norm.weight):
            parameter.uniform_(0.5, 1.5)
        if isinstance(connection, PostGate):
            connection.projection.weight.normal_(std=0.02)
    queue = WeightGradQueue()
    set_queue(connection, queue)
    stream = torch.randn(1, num_tokens, 1, width, device=device).bfloat16().requires_grad_()
    y = torch.randn(1, num_tokens, width, device=device).bfloat16().requires_grad_()
    inputs = [stream, y, *connection.parameters(), norm.weight]
    row = 2.0 * num_tokens * width
    douts = [torch.randn_like(t) for t in (stream, y)]
    for kernel in _kernels(device):
        functions = residual(kernel, device, residual_type)

        def run(functions: Any = functions) -> Sequence[Tensor]:
            x, handle, factor = functions.read(connection, norm, stream, None)
            return [functions.write(handle, y, factor), x]

        yield Part(
            residual_type, kernel, run, inputs, douts, queue, "bytes", 5 * row, 7 * row,
        )  # fmt: skip


def _routers(dims: ModelDims, num_tokens: int, device: torch.device) -> Iterator[Part]:
    """The routers' product, fp32 weights on bf16 rows; its floor is one bf16 product."""
    queue = WeightGradQueue()
    gate = Linear(dims.hidden_size, dims.num_experts, device=device, dtype=torch.float32)
    torch.nn.init.normal_(gate.weight, std=0.02)
    set_queue(gate, queue)
    x = torch.randn(num_tokens, dims.hidden_size, device=device).bfloat16().requires_grad_()
    dout = torch.randn(num_tokens, dims.num_experts, device=device)
    flops = 2.0 * num_tokens * dims.hidden_size * dims.num_experts
    for name in ("reference", "library") if device.type == "cuda" else ("reference",):
        products = moe_kernels("reference", name, device, torch.bfloat16).wide_products

        def run(products: Any = products) -> Sequence[Tensor]:
            found: Sequence[Tensor] = products([gate], x)
            return found

        yield Part("router", name, run, [x, gate.weight], [dout], queue, "flops", flops, 2 * flops)


def _swiglus(dims: ModelDims, num_tokens: int, device: torch.device) -> Iterator[Part]:
    """The shared expert's activation."""
    width = dims.num_shared_experts * dims.expert_width
    z = torch.randn(num_tokens, 2 * width, device=device).bfloat16().requires_grad_()
    dout = torch.randn(num_tokens, width, device=device).bfloat16()
    row = 2.0 * num_tokens * width
    for kernel in _kernels(device):
        swiglu = moe_kernels(kernel, "reference", device, torch.bfloat16).swiglu

        def run(swiglu: Any = swiglu) -> Sequence[Tensor]:
            return [swiglu(z, dims.swiglu_limit)]

        yield Part("swiglu", kernel, run, [z], [dout], WeightGradQueue(), "bytes", 3 * row, 5 * row)


def _measure(part: Part, row: Row, num_repetitions: int, device: torch.device) -> list[Tensor]:
    """Fills in times and memory; gives outputs and gradients of one run."""
    on_gpu = device.type == "cuda"
    results = _all(part)
    _settle(device)
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _all(part)
        _settle(device)
        row.peak_bytes = torch.cuda.max_memory_allocated() - before
    row.milliseconds = {name: [] for name in PASSES}
    clock = Clock(device)
    for repetition in range(num_repetitions + 1):
        times: dict[str, float] = {}

        def timed(name: str, call: Callable[[], Any], times: dict[str, float] = times) -> Any:
            times[name], result = clock.timed(call)
            row.host_milliseconds[name] = clock.host_milliseconds
            return result

        outputs = timed("forward", part.run)
        timed("backward", partial(_backward, part, outputs))
        outputs = part.run()
        part.queue.deferring = True
        timed("input_grad", partial(_backward, part, outputs))
        part.queue.deferring = False
        tasks = part.queue.pop()
        timed("weight_grad", partial(_run_all, tasks))
        del tasks, outputs
        for tensor in part.inputs:
            tensor.grad = None
        if repetition:
            for name, milliseconds in times.items():
                row.milliseconds[name].append(milliseconds)
    return results


def _all(part: Part) -> list[Tensor]:
    outputs = part.run()
    return [*(o.detach() for o in outputs), *_backward(part, outputs)]


def _backward(part: Part, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the inputs; of those that were put off, none."""
    grads = torch.autograd.grad(outputs, part.inputs, part.douts, allow_unused=True)
    return [grad for grad in grads if grad is not None]


def _run_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _distance(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp_min(1e-30))


def _matmul_rate(device: torch.device) -> float:
    """FLOP/s of the best of a few bf16 products of random numbers."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    clock = Clock(device)
    best = min(clock(lambda: a @ b) for _ in range(8))
    return 2.0 * size**3 / best * 1e3


def _copy_rate(device: torch.device) -> float:
    """Bytes/s, read and written, of the best of a few copies."""
    numel = 1 << (28 if device.type == "cuda" else 20)
    a, b = (torch.empty(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
    clock = Clock(device)
    best = min(clock(lambda: b.copy_(a)) for _ in range(8))
    return 2.0 * a.nbytes / best * 1e3


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
