"""Whole routed layers over the GPUs of a host: `ppruntime bench moe --ranks 2 --out FILE`.

Every variant is what a run with its keys would do: a way to the experts and back, and who
multiplies. All compute the same layer, 48 experts a GPU and 8,192 tokens each at V4.1-Flash's
widths: at 2 GPUs the products of one of 8. Times are those of the slowest rank, variants in turn;
outputs and gradients are compared with the first variant's. `bf16 yardstick` is the layer as torch
alone makes it fast, see `moe_yardstick`; its phases, those of deep_gemm and deep_ep and those of
the fused layer are timed by themselves too, against each other and against `moe_floor`. A variant
that cannot run is noted with its reason. `--pairs` measures forwards beside backwards instead, see
`bench_moe_pairs`. Further arguments are config overrides for all, such as `model.hidden_size=1280`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppruntime.config import Config, ConfigError, load
from ppruntime.experts.dispatch import open_dispatcher
from ppruntime.experts.options import choose_experts, moe_options
from ppruntime.gemm_budget import limit_gemms
from ppruntime.gpu_clock import Clock
from ppruntime.launch import bench_moe_pairs
from ppruntime.launch.bench_moe_parts import (
    Part,
    Step,
    readable_steps,
    token_phases,
    whole_phases,
    yardstick_steps,
)
from ppruntime.launch.bench_moe_record import Recorder, Row, distance, line
from ppruntime.launch.moe_floor import (
    BACKWARD,
    FORWARD,
    LayerSizes,
    Work,
    fused_work,
    phase_works,
    together,
)
from ppruntime.launch.moe_yardstick import Yardstick
from ppruntime.launch.records import end_in_order
from ppruntime.models.all_to_all import AllToAll
from ppruntime.models.dispatch import AnyExperts, Dispatcher, check_waits
from ppruntime.models.expert_rows import expert_layout
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_experts import Fp8Options
from ppruntime.models.fp8_wire import packed, to_wire
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.moe import MoEOptions, routed_experts
from ppruntime.models.moe_kernels import moe_kernels
from ppruntime.models.router import Routing, balanced_experts
from ppruntime.models.token_buffer import Arrived
from ppruntime.models.token_dispatch import TokenDispatcher
from ppruntime.models.weight_copies import WeightVersion, set_weight_version
from ppruntime.ranks import Layout, Ranks, join, leave, started_world

_BASE = Path(__file__).parent / "configs" / "v41-proxy-8.toml"
_EXPERTS_PER_RANK = 48
_SECONDS = 60.0
BOUNDS = {"y": 0.075, "dx": 0.08, "dp": 0.075, "dW13": 0.08, "dW2": 0.075}
"""Largest relative distances of what FP8 gives from bf16's, where no gate is clamped."""
LEAST_OF_FP8 = 0.02
"""The smallest: below it something else than FP8 ran."""
BF16_BOUND = 6e-3
"""Between two layers in bf16, each of which is about 3.5e-3 from the truth."""
YARDSTICK_BOUND = 7e-3
"""Of the yardstick, which rounds routing weights and the output's gradient to bf16 as well."""


PHASED = (
    "bf16 yardstick",
    "deep_gemm + deep_ep, FP8 rows",
    "deep_gemm + deep_ep, FP8 rows, n=2",
    "triton, mega_moe",
    "triton, mega_moe, n=2",
)
"""Variants whose phases are timed one by one too."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the layer."""

    name: str
    overrides: tuple[str, ...]
    micro_batches: int = 1
    """Forwards and backwards of one timed run: as many as are fused."""
    is_yardstick: bool = False
    """The layer of `moe_yardstick` instead, which no config asks for."""


def variants(num_sms: int) -> Iterator[Variant]:
    """The readable layer first, which others are checked against, and the yardstick; then each way
    with each backend, then deep_ep's chunks and budgets."""
    torch_way, deep_ep = "moe.dispatch.type=torch", "moe.dispatch.type=deep_ep"
    fp8, fp8_grad = "moe.dispatch.fp8=true", "moe.dispatch.fp8_grad=true"
    late = "moe.dispatch.weight_grads_after_combine=true"
    two = "moe.compute.fused_wgrad_micro_batches=2"
    yield Variant("bf16 grouped + all-to-all", (torch_way, "moe.compute.backend=torch"))
    yield Variant("bf16 yardstick", (torch_way, "moe.compute.backend=torch"), is_yardstick=True)
    yield Variant("bf16 grouped + deep_ep", (deep_ep, "moe.compute.backend=torch"))
    for backend in ("triton", "deep_gemm"):
        multiply = f"moe.compute.backend={backend}"
        yield Variant(f"{backend} + all-to-all", (torch_way, multiply))
        yield Variant(f"{backend} + all-to-all, FP8 rows", (torch_way, multiply, fp8))
        yield Variant(f"{backend} + deep_ep", (deep_ep, multiply))
        yield Variant(f"{backend} + deep_ep, FP8 rows", (deep_ep, multiply, fp8))
        yield Variant(f"{backend} + deep_ep, FP8 rows, n=2", (deep_ep, multiply, fp8, two), 2)
        yield Variant(
            f"{backend} + deep_ep, FP8 rows and gradients, weight gradients last, n=2",
            (deep_ep, multiply, fp8, fp8_grad, late, two),
            2,
        )
        for chunks in (2, 4):
            parts = f"moe.dispatch.token_chunks={chunks}"
            fused = f"moe.compute.fused_wgrad_micro_batches={chunks}"
            for left in (0, 24):
                budget = (f"pp.gemm_sms={num_sms - left}",) if left else ()
                yield Variant(
                    f"{backend} + deep_ep, FP8 rows, {chunks} chunks, GEMMs on {num_sms - left}",
                    (deep_ep, multiply, fp8, late, parts, fused, *budget),
                )
        fused_way = ("moe.dispatch.type=mega_moe", multiply)
        yield Variant(f"{backend}, mega_moe", fused_way)
        yield Variant(f"{backend}, mega_moe, n=2", (*fused_way, two), 2)
    yield Variant("bf16, mega_moe", ("moe.dispatch.type=mega_moe", "moe.compute.backend=torch"))


def chosen(num_sms: int, only: Sequence[str]) -> list[Variant]:
    """All variants, or those of these names. Raises SystemExit for a name that none has."""
    known = list(variants(num_sms))
    if unknown := set(only) - {variant.name for variant in known}:
        names = "\n".join(variant.name for variant in known)
        raise SystemExit(f"bench moe: no variant is called {sorted(unknown)}; there are\n{names}")
    return [variant for variant in known if not only or variant.name in only]


@dataclass(frozen=True, slots=True)
class Layer:
    """A variant, ready to run."""

    variant: Variant
    config: Config
    dispatcher: Dispatcher
    experts: AnyExperts
    limit: Callable[[int | None], None]

    def forward(self, x_ND: Tensor, routing: Routing, counts_E: Tensor) -> Tensor:
        """The routed experts' weighted sum."""
        self.limit(self.config.pp.gemm_sms)
        return self.dispatcher.routed(self.experts, x_ND, routing, counts_E)


class Bench(Recorder):
    """The run on one rank. All ranks do the same; rank 0 writes."""

    def __init__(self, repetitions: int, ranks: Ranks, overrides: Sequence[str]) -> None:
        super().__init__(repetitions, speaks=ranks.rank == 0)
        self.ranks, self.overrides = ranks, tuple(overrides)
        self.cuda = ranks.device.type == "cuda"
        self.clock = Clock(ranks.device)
        self.gemm_sms = GemmSms()
        self.config = self._config(())
        self.dims = self.config.model.dims
        torch.manual_seed(1 + ranks.rank)
        num_tokens, per_token = self.config.train.seq_len, self.dims.experts_per_token
        self.dtype = torch.bfloat16
        size = (num_tokens, self.dims.hidden_size)
        self.x = torch.randn(size, device=ranks.device, dtype=self.dtype, requires_grad=True)
        self.grad = torch.randn(size, device=ranks.device)
        world = ranks.layout.ep
        spread = balanced_experts(
            world * num_tokens, self.dims.num_experts, per_token, device=ranks.device
        )
        mine = spread[ranks.rank * num_tokens :][:num_tokens].contiguous()
        weights = torch.rand(num_tokens, per_token, device=ranks.device) + 0.1
        weights.requires_grad_()
        self.routing = Routing(mine, weights, weights)
        self.counts_E = torch.bincount(mine.flatten(), minlength=self.dims.num_experts)
        held = self.dims.num_experts // world
        width, hidden = self.dims.expert_width, self.dims.hidden_size
        self.gate_up, self.down = (
            nn.Parameter(torch.empty(shape, device=ranks.device, dtype=self.dtype).normal_(0, 0.02))
            for shape in ((held, 2 * width, hidden), (held, hidden, width))
        )
        for weight in (self.gate_up, self.down):  # one accumulator for all variants
            weight.grad_dtype = torch.float32
            weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        self.first: list[Tensor] | None = None
        self._experts: dict[Fp8Options | None, AnyExperts] = {}

    def _config(self, overrides: Sequence[str]) -> Config:
        world = self.ranks.layout.ep
        base = (
            *("pp.size=1", f"parallel.ep={world}", "model.name=v41-flash", "ac.mode=none"),
            f"model.num_experts={_EXPERTS_PER_RANK * world}",
        )
        return load([_BASE], [*base, *self.overrides, *overrides])

    def limit(self, sms: int | None) -> None:
        """What products may occupy from now on; None: all."""
        if self.cuda and sms != self.gemm_sms.now:
            limit_gemms(sms, self.ranks.device)
            self.gemm_sms.now = sms

    def layer(self, variant: Variant, *, stage: int | None = None) -> Layer | None:
        """None, with a note, if it cannot run here. Layers of two stages share nothing that sends.
        A collective."""
        if variant.is_yardstick:
            return self._yardstick(variant)
        try:
            config = self._config(variant.overrides)
            choice = choose_experts(config)
            dispatcher = open_dispatcher(
                config, self.ranks, timeout_seconds=_SECONDS, gemm_sms=self.gemm_sms, stage=stage
            )
        except (ConfigError, ValueError) as error:
            self.notes.append(f"{variant.name}: {error}")
            return None
        options: MoEOptions = moe_options(config, 0, choice, dispatcher, gemm_sms=self.gemm_sms)
        experts = self._experts_of(options)
        return Layer(variant, config, dispatcher, experts, self.limit)

    def _yardstick(self, variant: Variant) -> Layer:
        way = Yardstick(self.ranks.world_group, self.counts_E)
        x, weights_NK = self.x.detach(), self.routing.weights_NK.detach()
        way.choose_sums(lambda run: self.most(self.milliseconds(run)), x, weights_NK)
        experts = Experts(self.dims, held=way.held(self.dims.num_experts), device="meta")
        experts.gate_up.weight, experts.down.weight = self.gate_up, self.down
        kernels = moe_kernels("auto", "reference", self.ranks.device, self.dtype)
        experts.swiglu = kernels.swiglu
        return Layer(variant, self._config(variant.overrides), way, experts, self.limit)

    def _experts_of(self, options: MoEOptions) -> AnyExperts:
        """One for all variants that multiply alike: their FP8 copies are gigabytes."""
        if (found := self._experts.get(options.fp8)) is None:
            found = routed_experts(self.dims, options, device="meta")
            found.gate_up.weight, found.down.weight = self.gate_up, self.down
            set_weight_version(found, WeightVersion())
            self._experts[options.fp8] = found
        return found

    def run(self, only: Sequence[str] = (), *, pairs: bool = False) -> None:
        """Checks every variant against the first, then times all in turn. `only`: their names; the
        parts by themselves are left out then. `pairs`: forwards beside backwards instead."""
        num_sms = 132
        if self.cuda:
            num_sms = torch.cuda.get_device_properties(self.ranks.device).multi_processor_count
        if pairs:
            bench_moe_pairs.measure(self, chosen(num_sms, only or bench_moe_pairs.USUAL), num_sms)
            return
        wanted = chosen(num_sms, only)
        layers = [found for v in wanted if (found := self.layer(v)) is not None]
        for layer in layers:
            self._compare(layer)
        if not only:
            self._transfers(layers)
            self._fused_phases(layers)
        self._phases(layers)
        rows = self.x.shape[0] * self.dims.experts_per_token
        flops = 6.0 * rows * self.dims.hidden_size * self.dims.expert_width
        self._time("forward", layers, self._forward, flops, FORWARD)
        self._time("fwd + bwd", layers, self._both, 3 * flops, (*FORWARD, *BACKWARD))
        if self.speaks:
            for row in self.rows:
                if row.shape == "phase":
                    print(line(row, self.rows), flush=True)
        check_waits(layer.dispatcher for layer in layers)

    def _forward(self, layer: Layer) -> None:
        with torch.no_grad():
            for _ in range(layer.variant.micro_batches):
                layer.forward(self.x, self.routing, self.counts_E)

    def _both(self, layer: Layer) -> None:
        for _ in range(layer.variant.micro_batches):
            y = layer.forward(self.x, self.routing, self.counts_E)
            torch.autograd.backward(y, self.grad)

    def _compare(self, layer: Layer) -> None:
        """Outputs and gradients against those of the first variant, on this rank's tokens, and
        those of the weights against themselves in a second run."""
        copies, variant = self._results(layer), layer.variant.name
        if self.first is None:
            self.first = copies
        fp8 = layer.config.moe.compute.backend != "torch"
        for name, one, other in zip(BOUNDS, copies, self.first, strict=True):
            error = distance(one, other)
            bound = BOUNDS[name] if fp8 or layer.config.moe.dispatch.fp8 else BF16_BOUND
            if layer.variant.is_yardstick:
                bound = YARDSTICK_BOUND
            self.check(f"{variant}: {name}", self.most(error), bound)
            if fp8:
                too_exact = self.most(LEAST_OF_FP8 / max(error, 1e-30))
                self.check(f"{variant}: {LEAST_OF_FP8:g} over {name}", too_exact, 1)
        again = self._results(layer)[-2:]
        differ = not all(map(torch.equal, copies[-2:], again))
        self.check(f"{variant}: dW differs in a second run", self.most(float(differ)), 0)

    def _results(self, layer: Layer) -> list[Tensor]:
        """Of one launch's micro-batches: y, and gradients of one micro-batch."""
        for tensor in (self.x, self.routing.weights_NK):
            tensor.grad = None
        grads = self.zeroed_weight_grads()
        for _ in range(layer.variant.micro_batches):
            y = layer.forward(self.x, self.routing, self.counts_E)
            torch.autograd.backward(y, self.grad)
        found = [y.detach(), self.x.grad, self.routing.weights_NK.grad, *grads]
        return [t.detach().clone() / (1 if i == 0 else layer.variant.micro_batches)
                for i, t in enumerate(found) if t is not None]  # fmt: skip

    def zeroed_weight_grads(self) -> list[Tensor]:
        """The accumulators that all variants add to, emptied."""
        grads = [weight.grad for weight in (self.gate_up, self.down) if weight.grad is not None]
        for grad in grads:
            grad.zero_()
        return grads

    def _transfers(self, layers: Sequence[Layer]) -> None:
        """Tokens there and results back by themselves, once per way and kind of row, with bytes
        really sent one way to other ranks: per token and rank, or per token and expert."""
        done: set[tuple[str, bool]] = set()
        for layer in layers:
            options = layer.config.moe.dispatch
            if (options.type, options.fp8) in done or options.type == "mega_moe":
                continue
            done.add((options.type, options.fp8))
            kind = "FP8 rows" if options.fp8 else "bf16 rows"
            for phase, num_bytes, run in self._sends(layer):
                floor_ms = Work(wire_bytes=num_bytes).floor_ms()
                variant = f"{options.type}, {kind}"
                row = Row("transfer", phase, variant, 0.0, num_bytes, floor_ms=floor_ms)
                self._time_alone(row, run)

    def _fused_phases(self, layers: Sequence[Layer]) -> None:
        """The parts of each fused layer by themselves."""
        for layer in layers:
            if layer.config.moe.dispatch.type != "mega_moe":
                continue
            from ppruntime.launch.bench_moe_fused import fused_phases  # needs Triton
            from ppruntime.models.mega_moe import MegaMoe

            assert isinstance(layer.dispatcher, MegaMoe)
            x = self.x.detach()
            for phase in fused_phases(layer.dispatcher, layer.experts, x, self.routing):
                fp8 = layer.config.moe.compute.backend != "torch"
                floor_ms = Work(phase.flops, 0.0, phase.num_bytes).floor_ms(fp8=fp8)
                row = Row("fused", phase.name, layer.variant.name, phase.flops, phase.num_bytes,
                          floor_ms=floor_ms)  # fmt: skip
                self._time_alone(row, phase.run)

    def _phases(self, layers: Sequence[Layer]) -> None:
        """The phases of the layers of PHASED by themselves, and the steps of both in bf16."""
        for layer in layers:
            name, fused = layer.variant.name, layer.variant.micro_batches
            steps = list(self._steps(layer))
            for step in steps:
                phase = f"{step.phase}: {step.name}"
                self._time_alone(Row("step", phase, name, 0.0, 0.0), step.run)
            if name not in PHASED:
                continue
            works = self.works(layer)
            for part in [*whole_phases(steps)] if steps else self._parts(layer):
                if fused > 1 and part.name != "wgrad":
                    continue  # as with one
                work = fused_work(part.name, works)
                fp8 = layer.config.moe.compute.backend != "torch"
                num_bytes = fused * (work.wire_bytes or work.memory_bytes)
                floor_ms = fused * work.floor_ms(fp8=fp8)
                row = Row("phase", part.name, name, fused * work.flops, num_bytes,
                          floor_ms=floor_ms, micro_batches=fused)  # fmt: skip
                self._time_alone(row, part.run)

    def works(self, layer: Layer) -> dict[str, Work]:
        """What the phases of one micro-batch do, of this rank's rows."""
        num, world, rank = self.dims.num_experts, self.ranks.layout.ep, self.ranks.rank
        everyones = self.counts_E.clone()
        dist.all_reduce(everyones)
        here = slice(rank * num // world, (rank + 1) * num // world)
        owner_NK = self.routing.experts_NK // (num // world)
        others = (other for other in range(world) if other != rank)
        sizes = LayerSizes(
            num_tokens=len(self.x),
            num_rows=int(everyones[here].sum()),
            num_away=sum(int((owner_NK == other).any(1).sum()) for other in others),
            num_experts=num // world,
            hidden=self.dims.hidden_size,
            width=self.dims.expert_width,
        )
        fp8 = layer.config.moe.compute.backend != "torch"
        return phase_works(sizes, fp8=fp8, num_fused=layer.variant.micro_batches)

    def _steps(self, layer: Layer) -> Iterator[Step]:
        """Of the layers in bf16 that torch computes."""
        x, experts, way = self.x.detach(), layer.experts, layer.dispatcher
        if not isinstance(experts, Experts):
            return
        if isinstance(way, Yardstick):
            yield from yardstick_steps(way, experts, x, self.routing, self.grad)
        elif isinstance(way, AllToAll):
            with torch.no_grad():
                steps = list(readable_steps(way, experts, x, self.routing, self.counts_E))
            yield from steps

    def _parts(self, layer: Layer) -> Iterator[Part]:
        """Of a layer in FP8 that has phases of its own."""
        x, experts, way = self.x.detach(), layer.experts, layer.dispatcher
        if isinstance(way, TokenDispatcher):
            yield from token_phases(way, experts, x, self.routing, self.grad)
            return
        from ppruntime.launch.bench_moe_fused import fused_parts  # needs Triton
        from ppruntime.models.fp8_experts import Fp8Experts
        from ppruntime.models.mega_moe import MegaMoe

        assert isinstance(way, MegaMoe)
        assert isinstance(experts, Fp8Experts)
        yield from fused_parts(way, experts, x, self.routing, self.grad)

    def _time_alone(self, row: Row, run: Callable[[], object]) -> None:
        for repetition in range(-2, self.repetitions):
            slowest = self.most(self.milliseconds(run))
            if repetition >= 0:
                row.milliseconds.append(slowest)
        if self.speaks:
            print(row, flush=True)
        self.rows.append(row)

    def _sends(self, layer: Layer) -> Iterator[tuple[str, float, Callable[[], object]]]:
        """Phase, bytes and what is run. A message's bytes per row are those of FP8 and scales, or
        of bf16; results come back in bf16."""
        dispatcher, x, experts_NK = layer.dispatcher, self.x.detach(), self.routing.experts_NK
        fp8, width = layer.config.moe.dispatch.fp8, x.shape[1]
        row_bytes = packed(to_wire(x[:1])).shape[1] if fp8 else 2 * width
        if isinstance(dispatcher, AllToAll):
            layout, routes = expert_layout(experts_NK), dispatcher.routes(self.counts_E)
            there = x[layout.token_R]
            message = packed(to_wire(there)) if fp8 else there
            name, ops, own = dispatcher.exchange.name, torch.ops.ppruntime, dispatcher.exchange.rank
            send, receive = routes.send, routes.receive
            back = there.new_empty(sum(receive), width)
            yield (
                "dispatch",
                float((sum(send) - send[own]) * row_bytes),
                partial(ops.expert_dispatch, message, send, receive, name),
            )
            yield (
                "combine",
                2.0 * (sum(receive) - receive[own]) * width,
                partial(ops.expert_combine, back, receive, send, name),
            )
        elif isinstance(dispatcher, TokenDispatcher):
            buffer, weights_NK = dispatcher.buffer, self.routing.weights_NK.detach()
            rows = to_wire(x) if fp8 else x

            def dispatch() -> Arrived:
                num = self.dims.num_experts
                return buffer.dispatch(rows, experts_NK, weights_NK, num, after=buffer.now())()

            arrived = dispatch()
            y = x.new_zeros(len(arrived.expert_SK), width)

            def combine() -> object:
                return buffer.combine(y, arrived.handle, None, after=buffer.now())()

            owner_NK = experts_NK // len(dispatcher.held(self.dims.num_experts))
            others = (rank for rank in range(buffer.num_ranks) if rank != buffer.rank)
            away = sum(int((owner_NK == rank).any(1).sum()) for rank in others)
            yield "dispatch", float(away * row_bytes), dispatch
            yield "combine", 2.0 * away * width, combine

    def _time(
        self,
        phase: str,
        layers: Sequence[Layer],
        run: Callable[[Layer], None],
        flops: float,
        parts: Sequence[str],
    ) -> None:
        """In turn, again and again; of each run the slowest rank's time. `parts`: phases that it
        is made of."""
        rows = []
        for layer in layers:
            num = layer.variant.micro_batches
            works = self.works(layer)
            fp8 = layer.config.moe.compute.backend != "torch"
            floor_ms = num * together(works[part] for part in parts).floor_ms(fp8=fp8)
            name = f"{layer.variant.name} ({num} micro-batches)"
            rows.append(
                Row("layer", phase, name, flops * num, 0.0, floor_ms=floor_ms, micro_batches=num)
            )
        for repetition in range(-2, self.repetitions):
            for row, layer in zip(rows, layers, strict=True):
                slowest = self.most(self.milliseconds(partial(run, layer)))
                if repetition >= 0:
                    row.milliseconds.append(slowest)
        if self.speaks:
            for row in rows:
                print(line(row, rows), flush=True)
        self.rows += rows

    def milliseconds(self, run: Callable[[], object]) -> float:
        """This rank's time for a call that all ranks begin together."""
        if not self.cuda:
            begin = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - begin)
        dist.barrier()  # all begin together
        torch.cuda.synchronize()
        milliseconds = self.clock(run)
        self.clock.expect(self.most(self.clock.host_milliseconds))  # ranks wait alike
        return milliseconds

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        most = torch.tensor(value, device=self.ranks.device, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return float(most)


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank's part; see `bench_moe`."""
    parser = argparse.ArgumentParser(description="Whole routed layers over several GPUs")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--ranks", type=int, help="as many as were started, for the record")
    parser.add_argument("--pairs", action="store_true", help="forwards beside backwards")
    parser.add_argument("--only", action="append", default=[], help="a variant's name; repeatable")
    parsed, overrides = parser.parse_known_args(arguments)
    layout = Layout(1, 1, started_world())
    ranks = join(layout, use_cuda=torch.cuda.is_available(), timeout_seconds=_SECONDS)
    begin = time.monotonic()
    bench = Bench(parsed.repetitions, ranks, overrides)
    try:
        bench.run(parsed.only, pairs=parsed.pairs)
    finally:
        if ranks.rank == 0:
            sizes: dict[str, Any] = {
                "ranks": layout.ep,
                "experts": bench.dims.num_experts,
                "tokens_per_rank": bench.x.shape[0],
            }
            bench.write(parsed.out, time.monotonic() - begin, **sizes)
    failed = bool(bench.failed_checks)
    leave()
    return int(failed)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
