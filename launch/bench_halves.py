"""Attention halves and their parts on one device: `bench_layers --only halves --out FILE`.

A half is a whole unit (mHC, norm, attention) of each kind of layer. Each line has a phase of its
own: forward, input gradient (weight gradients wait, as in a split backward), weight gradients. A
line is run by the reference and by the kernels that can run here, which are named; those that
cannot say why. Every line is compared with its floor: products at the rate of a bf16 matmul of the
same run, bytes at the rate of a copy. JSON is written after every line, so that a run that is cut
short leaves what it has.

    --model v4-flash        V4's kinds instead: SWA, CSA, HCA
    --device cpu --model tiny --tokens 16    runs anywhere, to see that it does
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from ppruntime.gpu_clock import Clock
from ppruntime.launch.command_line import command_line
from ppruntime.launch.records import write_record
from ppruntime.models.attention_kernels import REFERENCE, AttentionKernels, set_kernels
from ppruntime.models.carry import DIFFERENTIABLE, Carry, MicroBatch
from ppruntime.models.dims import (
    ModelDims,
    Role,
    UnitKind,
    UnitSpec,
    forward_flops_per_token,
    preset,
    unit_specs,
)
from ppruntime.models.fp8_linear import Fp8LinearOptions, convert_linears
from ppruntime.models.init import init_parameters
from ppruntime.models.kernel_limits import BACKENDS, AttentionOp, Backend
from ppruntime.models.kernels.attention_backends import (
    Choice,
    Target,
    attention_kernels,
    unavailable_reason,
)
from ppruntime.models.kernels.fp8_linear_backends import LinearBackend
from ppruntime.models.kernels.fp8_linear_backends import unavailable_reason as linears_unavailable
from ppruntime.models.linear import GroupedLinear, Linear, WeightGradQueue, set_queue
from ppruntime.models.residual import UsesResidual, residual
from ppruntime.models.rope import Rope
from ppruntime.models.units import build_unit
from ppruntime.models.weight_copies import WeightVersion, set_weight_version

LIMIT_SECONDS = 330.0
"""After this no new line is begun; what is left out is said."""
SLOW_MS = 150.0
"""A phase longer than this is repeated twice only: the reference at full width."""
BF16 = 2


@dataclass(frozen=True, slots=True)
class Work:
    """What a phase cannot do without."""

    flops: float
    num_bytes: float


@dataclass(slots=True)
class Line:
    """One phase of one thing by one backend."""

    part: str
    kind: str
    backend: str
    phase: str
    work: Work
    milliseconds: list[float] = field(default_factory=list)
    floor_ms: float = 0.0
    peak_bytes: int = 0
    """Most memory of the device during the three phases, beside what lay there before."""
    failure: str = ""
    host_ms: list[float] = field(default_factory=list)
    """What the host took to enqueue it: a step is no faster."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.milliseconds) if self.milliseconds else None

    def record(self) -> dict[str, object]:
        median = self.median
        ratio = median / self.floor_ms if median is not None and self.floor_ms else None
        return {**asdict(self), "median": median, "ratio_to_floor": ratio}

    def __str__(self) -> str:
        head = f"{self.part:15} {self.kind:13} {self.backend:10} {self.phase:17}"
        median = self.median
        if median is None:
            return f"{head} not run: {self.failure[:150]}"
        spread = (max(self.milliseconds) - min(self.milliseconds)) / median * 50
        ratio = median / self.floor_ms if self.floor_ms else float("nan")
        return (
            f"{head} {median:9.3f} ms +-{spread:4.1f} %  {ratio:6.2f} x floor"
            f"  host {statistics.median(self.host_ms):6.3f}"
        )


@dataclass(frozen=True, slots=True)
class Case:
    """Something with a forward and a backward, or a forward alone."""

    part: str
    kind: str
    module: nn.Module
    """Its kernels are set before each run."""
    forward: Callable[[AttentionKernels], Sequence[Tensor]]
    """Gives what the backward starts from; nothing without one."""
    leaves: Sequence[Tensor]
    work: dict[str, Work]
    """By phase, in order: forward, input gradient, weight gradients."""
    ops: tuple[AttentionOp, ...]
    """Whose kernels it is about."""


PHASES = ("forward", "input gradient", "weight gradients")


PROFILED_SHARE = 0.002
"""Kernels with a larger share of a half's time are named in its profile."""


class Bench:
    """`lines` and `profiles` grow while it runs, and with them the file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        # An Engram before a half has lines of its own.
        self.dims: ModelDims = replace(preset(options.model), engram_layers=())
        self.target = Target(self.dims, self.dtype, self.device)
        self.clock = Clock(self.device)
        self.start = time.monotonic()
        self.lines: list[Line] = []
        self.profiles: list[dict[str, object]] = []
        self.left_out: list[str] = []
        self.flops_per_ms = self.bytes_per_ms = 0.0

    def run(self) -> None:
        self._measure_floor()
        kinds = self.options.kinds
        for make in (self._parts, self._halves) if kinds is None else (self._halves,):
            for case in make():
                is_half = make == self._halves
                if "bf16" in self.options.precision or not is_half:
                    for backend, choice in self._choices(case):
                        self._run_case(case, backend, choice)
                        self._write()
                if "fp8" in self.options.precision and is_half:
                    try:
                        suffix = self._to_fp8(case.module)
                    except ValueError as error:
                        self.left_out.append(f"{case.part} {case.kind} fp8: {error}")
                        continue
                    for backend, choice in self._choices(case):
                        if backend != "reference":
                            self._run_case(case, f"{backend} {suffix}", choice)
                            self._write()

    def _to_fp8(self, unit: nn.Module) -> str:
        """Puts FP8 forms in the place of the unit's dense linears, by the fastest that runs here;
        gives how the lines name them. Weights are quantised in the first run, as in a step."""
        wanted = (LinearBackend.FASTEST, LinearBackend.SCALED_MM, LinearBackend.TRITON)
        reasons = {backend: linears_unavailable(backend) for backend in wanted}
        found = next((b for b, reason in reasons.items() if reason is None), None)
        backend = found or LinearBackend.REFERENCE
        convert_linears(unit, Fp8LinearOptions(backend=backend))
        set_weight_version(unit, WeightVersion())
        return f"fp8 {backend.value}"

    def _measure_floor(self) -> None:
        size = 8192 if self.device.type == "cuda" else 512
        a, b = (torch.randn(size, size, device=self.device).to(self.dtype) for _ in range(2))
        self.flops_per_ms = 2 * size**3 / min(self.clock(lambda: a @ b) for _ in range(8))
        big = torch.empty(1 << (29 if self.device.type == "cuda" else 24), device=self.device)
        other = torch.empty_like(big)
        moved = 2 * big.numel() * big.element_size()
        self.bytes_per_ms = moved / min(self.clock(lambda: other.copy_(big)) for _ in range(5))
        print(
            f"floor: products at {self.flops_per_ms * 1e-9:.0f} TFLOP/s, copies at "
            f"{self.bytes_per_ms * 1e-6:.0f} GB/s",
            flush=True,
        )

    def _choices(self, case: Case) -> Iterator[tuple[str, Choice | str]]:
        """(name, choice or why not) for the reference, own kernels, and with the packages."""
        yield "reference", Choice()
        attention = AttentionOp.ATTENTION
        for name, first in (("triton", Backend.TRITON), ("library", Backend.LIBRARY)):
            alone = case.ops[0] if len(case.ops) == 1 else attention
            if first not in BACKENDS[alone]:
                continue
            wanted = {
                attention: first,
                AttentionOp.INDEXER: first if alone is AttentionOp.INDEXER else Backend.TRITON,
                AttentionOp.ROPE: Backend.TRITON,
                AttentionOp.GROUPED_OUTPUT: Backend.LIBRARY,
                AttentionOp.NORM: Backend.TRITON,
                AttentionOp.COMPRESSOR: Backend.LIBRARY,
            }
            reasons = (unavailable_reason(op, wanted[op], self.target) for op in case.ops)
            reason = next((r for r in reasons if r is not None), None)
            chosen = {op: wanted[op] if op in case.ops else Backend.REFERENCE for op in AttentionOp}
            choice = Choice(
                attention=chosen[attention],
                indexer=chosen[AttentionOp.INDEXER],
                rope=chosen[AttentionOp.ROPE],
                grouped_output=chosen[AttentionOp.GROUPED_OUTPUT],
                norm=chosen[AttentionOp.NORM],
                compressor=chosen[AttentionOp.COMPRESSOR],
            )
            yield name, choice if reason is None else reason

    def _run_case(self, case: Case, backend: str, choice: Choice | str) -> None:
        lines = [
            Line(case.part, case.kind, backend, phase, work) for phase, work in case.work.items()
        ]
        for line in lines:
            flops_ms = line.work.flops / self.flops_per_ms
            line.floor_ms = flops_ms + line.work.num_bytes / self.bytes_per_ms
        self.lines += lines
        if isinstance(choice, str):
            failure = choice
        elif time.monotonic() - self.start > LIMIT_SECONDS:
            failure = f"the limit of {LIMIT_SECONDS:.0f} s was reached"
        else:
            failure = self._time(case, attention_kernels(choice), lines)
            if not failure and case.part.endswith(" half") and backend != "reference":
                self.profiles.append(self._profile(case, backend, attention_kernels(choice)))
        if failure:
            self.left_out.append(f"{case.part} {case.kind} {backend}: {failure}")
        for line in lines:
            line.failure = failure
            print(line, flush=True)

    def _prepare(self, case: Case, kernels: AttentionKernels) -> WeightGradQueue:
        """Sets the module's kernels; its weight gradients wait in the queue."""
        queue = WeightGradQueue()
        set_kernels(case.module, kernels)
        if isinstance(case.module, UsesResidual):
            name = "reference" if kernels is REFERENCE else "auto"
            case.module.residual = residual(name, self.device, self.dims.residual_type)
        set_queue(case.module, queue)
        queue.deferring = True
        return queue

    def _profile(self, case: Case, backend: str, kernels: AttentionKernels) -> dict[str, object]:
        """Which kernels take more than `PROFILED_SHARE` of the three phases together."""
        queue = self._prepare(case, kernels)
        activity = torch.profiler.ProfilerActivity
        on_device = activity.CUDA if self.device.type == "cuda" else activity.CPU
        self._once(case, kernels, queue)  # makes the sums that the others add to
        with torch.profiler.profile(activities=[on_device]) as profile:
            for _ in range(3):
                self._once(case, kernels, queue)
        self._reset(case)
        spans: dict[str, list[float]] = {}
        for event in profile.events() or ():
            if event.device_type.name.lower() == self.device.type and "spin" not in event.name:
                microseconds = event.time_range.elapsed_us() / 3
                spans.setdefault(event.name, []).append(microseconds)
        total = sum(map(sum, spans.values()))
        kernels_by_time = sorted(spans.items(), key=lambda item: -sum(item[1]))
        named = [
            {
                "kernel": name[:90],
                "us": sum(each),
                "share": sum(each) / total,
                "launches": len(each) / 3,
            }
            for name, each in kernels_by_time
            if sum(each) > PROFILED_SHARE * total
        ]
        return {"kind": case.kind, "backend": backend, "total_us": total, "kernels": named}

    def _reset(self, case: Case) -> None:
        set_kernels(case.module, REFERENCE)
        case.module.zero_grad(set_to_none=True)

    def _time(self, case: Case, kernels: AttentionKernels, lines: Sequence[Line]) -> str:
        """Fills the lines' times; what went wrong, if something did."""
        queue = self._prepare(case, kernels)
        repetitions = self.options.repetitions
        is_cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated() if is_cuda else 0
        try:
            done = 0
            while done <= repetitions:
                times = self._once(case, kernels, queue)
                if is_cuda and not done:
                    torch.cuda.reset_peak_memory_stats()
                if done:  # the first run compiles
                    for line, (milliseconds, host_ms) in zip(lines, times, strict=True):
                        line.milliseconds.append(milliseconds)
                        line.host_ms.append(host_ms)
                    if sum(milliseconds for milliseconds, _ in times) > SLOW_MS:
                        repetitions = min(repetitions, 2)
                done += 1
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            queue.pop()
            if is_cuda:
                for line in lines:
                    line.peak_bytes = torch.cuda.max_memory_allocated() - before
            self._reset(case)
        return ""

    def _once(
        self, case: Case, kernels: AttentionKernels, queue: WeightGradQueue
    ) -> list[tuple[float, float]]:
        """By phase: the device's milliseconds and the host's."""
        times: list[tuple[float, float]] = []

        def timed(call: Callable[[], object]) -> None:
            milliseconds = self.clock(call)
            times.append((milliseconds, self.clock.host_milliseconds))

        outputs: list[Tensor] = []
        timed(lambda: outputs.extend(case.forward(kernels)))
        if len(case.work) == 1:
            return times
        grads = [torch.ones_like(output) for output in outputs]
        for leaf in case.leaves:
            leaf.grad = None
        timed(lambda: torch.autograd.backward(outputs, grads))
        tasks = queue.pop()
        timed(lambda: [task() for task in tasks])
        return times

    # What is measured

    def _parts(self) -> Iterator[Case]:
        """The operations one by one, at the model's sizes."""
        dims, tokens = self.dims, self.options.tokens
        rope = Rope(dims, compressed=True, device=self.device)
        positions = torch.arange(tokens, device=self.device).unsqueeze(0)
        rotation = rope(positions)
        heads, width, groups = dims.num_heads, dims.head_dim, dims.o_groups
        q_b = Linear(dims.q_lora_rank, heads * width, device=self.device, dtype=self.dtype)
        o_a = GroupedLinear(
            groups, heads // groups * width, dims.o_lora_rank, device=self.device, dtype=self.dtype
        )
        for linear in (q_b, o_a):
            nn.init.normal_(linear.weight, std=0.02)
        latent = self._normal(1, tokens, dims.q_lora_rank).requires_grad_()
        o = self._normal(1, tokens, groups, heads // groups * width).requires_grad_()
        product = Work(2.0 * tokens * q_b.weight.numel(), 0.0)
        yield Case(
            "q_b and RoPE",
            "all",
            q_b,
            lambda k: (k.project_rotated(q_b, latent, rotation, heads),),
            (latent,),
            dict.fromkeys(PHASES, product),
            (AttentionOp.ROPE,),
        )
        product = Work(2.0 * tokens * o_a.weight.numel(), 0.0)
        yield Case(
            "grouped output",
            "all",
            o_a,
            lambda k: (k.grouped(o_a, o),),
            (o,),
            dict.fromkeys(PHASES, product),
            (AttentionOp.GROUPED_OUTPUT,),
        )
        q = self._normal(1, tokens, heads, width).requires_grad_()
        tail = 2.0 * q.element_size() * tokens * heads * dims.rope_dim
        yield Case(
            "RoPE alone",
            "queries",
            nn.Module(),
            lambda k: (k.rotate(q, rotation),),
            (q,),
            {"forward": Work(0.0, tail)},
            (AttentionOp.ROPE,),
        )
        for ratio in sorted({r for r in dims.compress_ratios if 0 < r < dims.hca_ratio}):
            yield self._indexer(ratio, positions)

    def _indexer(self, ratio: int, positions: Tensor) -> Case:
        dims, tokens = self.dims, self.options.tokens
        q = self._normal(1, tokens, dims.index_heads, dims.index_head_dim)
        weights = self._normal(1, tokens, dims.index_heads)
        keys = self._normal(1, tokens // ratio, dims.index_head_dim)
        mean_visible = tokens / (2 * ratio)

        def select(kernels: AttentionKernels) -> Sequence[Tensor]:
            kernels.select(dims, q, weights, keys, positions, ratio)
            return ()

        flops = 2.0 * dims.index_heads * dims.index_head_dim * mean_visible * tokens
        work = {"forward": Work(flops, 0.0)}
        return Case(
            "indexer", f"ratio {ratio}", nn.Module(), select, (), work, (AttentionOp.INDEXER,)
        )

    def _halves(self) -> Iterator[Case]:
        """A unit of each kind, fed with what the units before it hand on."""
        dims, tokens = self.dims, self.options.tokens
        positions = torch.arange(tokens, device=self.device).unsqueeze(0)
        batch = MicroBatch(positions % dims.vocab_size, positions, positions)
        carry = Carry(
            streams=self._normal(1, tokens, dims.num_streams, dims.hidden_size),
            mix=torch.rand(1, tokens, dims.num_streams, device=self.device),
        )
        known, wanted = self._kinds(), self.options.kinds
        unknown = [name for name in wanted or () if name not in known]
        if unknown:
            raise SystemExit(f"--kinds {unknown[0]}: this model has {', '.join(known)}")
        for kind, spec in known.items():
            unit = build_unit(dims, spec, device=self.device, dtype=self.dtype)
            init_parameters(unit, spec.name, 0)
            given = _detached(carry)
            case = Case(
                "attention half",
                kind,
                unit,
                lambda _, unit=unit, given=given: _differentiable(unit(given, batch)),  # type: ignore[misc]
                [t for t in given if isinstance(t, Tensor) and t.requires_grad],
                self._half_work(spec),
                self._half_ops(spec),
            )
            if wanted is None or kind in wanted:
                yield case
            with torch.no_grad():
                made = unit(given, batch)
            # The next kinds read these, and the same streams.
            carry = carry._replace(
                **{
                    name: getattr(made, name)
                    for name in ("kv", "index_keys", "slots", "candidates")
                    if getattr(made, name) is not None
                }
            )

    def _kinds(self) -> dict[str, UnitSpec]:
        """One unit of each kind; of those that share keys, consumers right after their source."""
        halves = [spec for spec in unit_specs(self.dims) if spec.kind is UnitKind.ATTENTION]
        found: dict[str, UnitSpec] = {}
        for spec in halves:
            assert spec.layer is not None
            ratio = self.dims.compress_ratios[spec.layer]
            name = f"Full ratio {ratio}" if spec.role is Role.FULL else _NAMES[spec.role]
            if spec.role in (Role.REUSE, Role.REINDEX) and ratio != 1:
                continue
            found.setdefault(name, spec)
        # The last source's keys are those that Reuse and Reindex read.
        order = {"Reindex": 2, "Reuse": 1}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], 0)))

    def _half_ops(self, spec: UnitSpec) -> tuple[AttentionOp, ...]:
        selects = spec.role in (Role.FULL, Role.REINDEX, Role.CSA)
        return tuple(op for op in AttentionOp if selects or op is not AttentionOp.INDEXER)

    def _half_work(self, spec: UnitSpec) -> dict[str, Work]:
        """Products as counted in dims, attention's backward 2.5 times its forward; the residual
        streams read twice and written once forward (2.5 with the sublayer's own passes), and half
        as much again backward."""
        dims, tokens = self.dims, self.options.tokens
        flops = forward_flops_per_token(dims, spec, tokens)
        item = torch.empty((), dtype=self.dtype).element_size()
        streams = float(item * tokens * dims.num_streams * dims.hidden_size)
        once = flops.matmul * tokens
        return {
            "forward": Work(once + (flops.attention + flops.index_scores) * tokens, 2.5 * streams),
            "input gradient": Work(once + 2.5 * flops.attention * tokens, 3.75 * streams),
            "weight gradients": Work(once, 0.0),
        }

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def _write(self) -> None:
        is_cuda = self.device.type == "cuda"
        record = {
            "command": command_line("layers"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
            "versions": {"torch": torch.__version__},
            "model": self.options.model,
            "tokens": self.options.tokens,
            "seconds": time.monotonic() - self.start,
            "teraflops": self.flops_per_ms * 1e-9,
            "gigabytes_per_s": self.bytes_per_ms * 1e-6,
            "precision": self.options.precision,
            "left_out": self.left_out,
            "lines": [line.record() for line in self.lines],
            "profiles": self.profiles,
        }
        write_record(self.options.out, record)


_NAMES = {
    Role.SWA: "SWA",
    Role.REUSE: "Reuse",
    Role.REINDEX: "Reindex",
    Role.CSA: "CSA",
    Role.HCA: "HCA",
}


def _detached(carry: Carry) -> Carry:
    """The same numbers as leaves, which need a gradient where the model gives one."""
    leaves: dict[str, Any] = {
        name: value.detach().requires_grad_(name in DIFFERENTIABLE)
        for name, value in carry._asdict().items()
        if isinstance(value, Tensor)
    }
    return carry._replace(**leaves)


def _differentiable(carry: Carry) -> list[Tensor]:
    """What of a unit's result has a gradient: it begins the backward."""
    found = [getattr(carry, name) for name in DIFFERENTIABLE]
    return [x for x in found if isinstance(x, Tensor) and x.grad_fn is not None]


def run(options: argparse.Namespace) -> int:
    """Runs with `out, model, tokens, repetitions, device` as bench_layers parses them."""
    return run_bench(options, Bench)


def run_bench(options: argparse.Namespace, make: type[Bench]) -> int:
    """Runs one kind of halves; 1 if nothing could be timed, 2 without the device."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_layers: there is no CUDA device; use --device cpu for a small one")
        return 2
    bench = make(options)
    bench.run()
    print(f"results in {options.out}")
    for text in bench.left_out:
        print(f"left out: {text}")
    return int(not any(line.milliseconds for line in bench.lines))
