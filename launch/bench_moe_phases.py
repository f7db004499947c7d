"""The experts' phases one by one, and the whole layer, on one GPU: part of `bench moe`. Bytes count
every operand once, though rows that several experts get are read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ppruntime.launch.bench_moe_record import Recorder, distance, num_sms
from ppruntime.launch.bench_moe_shapes import (
    EXPERTS,
    FORWARD_TILES,
    HIDDEN,
    SHAPES,
    WEIGHT_GRAD_TILES,
    WIDTH,
    routings,
    tile_text,
    tiles_of,
)

LIMIT = 10.0


class ExpertPhases(Recorder):
    """The run: rows, checks, and the tensors that all phases share."""

    def __init__(self, repetitions: int) -> None:
        import torch

        from ppruntime.models.kernels.expert_backends import ExpertBackend, unavailable_reason

        super().__init__(repetitions)
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

    def run(self, shapes: Sequence[str] = SHAPES) -> None:
        import torch

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
        made = routings()
        for shape in shapes:
            torch.cuda.reset_peak_memory_stats()
            self.shape(shape, *made[shape])
            peak = torch.cuda.max_memory_allocated() / 1e9
            self.notes.append(f"{shape}: at most {peak:.1f} GB allocated")

    def _quantize_weights(self, transposed: bool) -> None:
        from ppruntime.models.kernels import quantize

        for weight in (self.w13, self.w2):
            quantize.quantize_blocks(weight, transposed=transposed)

    # One routing

    def shape(self, shape: str, num_experts: int, experts_NK: Any) -> None:
        """All of one shape, with the first so many experts."""
        import torch

        from ppruntime.models.kernels import moe_layout, quantize, swiglu
        from ppruntime.models.kernels.quantize import Quantized

        def normal(*size: int) -> Any:
            x = torch.empty(*size, device="cuda", dtype=torch.bfloat16)
            return x.normal_(generator=self.generator)

        first = slice(num_experts)
        w13, w2, acc13, acc2 = (t[first] for t in (self.w13, self.w2, self.acc13, self.acc2))
        fp8_13, fp8_13t, fp8_2, fp8_2t = (
            Quantized(*(part[first] for part in copy))
            for copy in (self.fp8_13, self.fp8_13t, self.fp8_2, self.fp8_2t)
            if copy is not None  # both ways were asked for
        )
        num_rows = len(experts_NK)
        x, dy = normal(num_rows, HIDDEN), normal(num_rows, HIDDEN)
        weights = torch.rand(experts_NK.shape, generator=self.generator, device="cuda") + 0.1
        layout = moe_layout.expert_layout(experts_NK, num_experts)
        routed = int((experts_NK >= 0).sum())
        self.notes.append(f"{shape}: {routed} rows, padded {int(layout.start_E1[-1])}")
        per_row = routed * 1.0
        time = partial(self.time, shape)

        time("layout", {"triton": lambda: moe_layout.expert_layout(experts_NK, num_experts)})
        x8 = quantize.quantize_rows(x, power_of_two=True)
        time("x to FP8", {"triton": lambda: quantize.quantize_rows(x, power_of_two=True)},
             num_bytes=3 * x.numel())  # fmt: skip
        rows = Quantized(*moe_layout.gather_rows(x8.data, layout, x8.scale))
        time("gather x8", {"triton": lambda: moe_layout.gather_rows(x8.data, layout, x8.scale)},
             num_bytes=x.numel() + per_row * HIDDEN)  # fmt: skip
        z = self.gemm(shape, "L1", rows, fp8_13, w13, layout, routed)
        h8 = swiglu.swiglu(z, weights, layout, LIMIT, power_of_two=False)
        time("SwiGLU", {
            "triton": lambda: swiglu.swiglu(z, weights, layout, LIMIT, power_of_two=False),
        }, num_bytes=per_row * WIDTH * 5)  # fmt: skip
        o = self.gemm(shape, "L2", h8, fp8_2, w2, layout, routed)
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
        time("dy to FP8", {"triton": turn_dy}, num_bytes=2 * x.numel() + 2 * per_row * HIDDEN)
        d = self.gemm(shape, "dgrad L2", dy_rows, fp8_2t, w2.mT, layout, routed)
        grads = swiglu.swiglu_backward(z, d, weights, layout, LIMIT, power_of_two=False)
        time("SwiGLU back", {
            "gluon" if tile.hopper else "triton": partial(
                swiglu.swiglu_backward, z, d, weights, layout, LIMIT, power_of_two=False, tile=tile,
            )
            for tile in (swiglu.HOPPER_BACKWARD, swiglu.TRITON_BACKWARD)
            if quantize.on_hopper(z) or not tile.hopper
        }, num_bytes=per_row * WIDTH * 11)  # fmt: skip
        self.gemm(shape, "dgrad L1", grads.rows, fp8_13t, w13.mT, layout, routed)
        x_columns = turn_x()
        time("x8 to columns", {"triton": turn_x, "triton, tiles": partial(turn_x, True)},
             num_bytes=x.numel() + per_row * HIDDEN)  # fmt: skip
        self.weight_grad(shape, "wgrad W13", acc13, grads.columns, x_columns,
                         (None, turn_x(True)), layout, routed)  # fmt: skip
        self.weight_grad(shape, "wgrad W2", acc2, dy_columns, grads.inner_columns,
                         (turn_dy(True)[1], None), layout, routed)  # fmt: skip
        self.layer(shape, num_experts, x, experts_NK, weights, dy)

    def gemm(
        self, shape: str, phase: str, x: Any, fp8: Any, bf16: Any, layout: Any, routed: int
    ) -> Any:
        import torch

        from ppruntime.models.kernels import deep_gemm, grouped_gemm, quantize
        from ppruntime.models.kernels.quantize import Quantized, dequantize_blocks, dequantize_rows

        num, outs, ins = fp8.data.shape
        variants: dict[str, Callable[[], Any]] = {}
        tiles = (
            list(tiles_of(FORWARD_TILES)) if shape == "balanced" else [grouped_gemm.FORWARD_TILE]
        )
        for tile in tiles:
            variants[f"triton {tile_text(tile)}"] = partial(
                grouped_gemm.grouped_gemm, x, fp8, layout, tile=tile
            )
        usual = {"triton": grouped_gemm.FORWARD_TILE}
        if quantize.on_hopper(x.data):
            usual["gluon"] = grouped_gemm.HOPPER_TILE
            variants["gluon"] = partial(
                grouped_gemm.grouped_gemm, x, fp8, layout, tile=usual["gluon"]
            )
        if shape == "balanced":
            limit = num_sms() - 20
            for name, tile in usual.items():
                variants[f"{name}, {limit} SMs"] = partial(
                    grouped_gemm.grouped_gemm, x, fp8, layout, tile=tile, gemm_sms=limit
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
                self.check(f"{shape} {phase} {name}", distance(got[live], exact), 3e-3)
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

        from ppruntime.models.kernels import deep_gemm, grouped_gemm, quantize
        from ppruntime.models.kernels.quantize import Quantized, dequantize_columns

        operands = grouped_gemm.WeightGradOperands(left, right, layout)
        tiles = grouped_gemm.WeightGradOperands(tiled[0] or left, tiled[1] or right, layout)
        num, outs, ins = accumulator.shape
        all_tiles = shape == "balanced"
        usual = [grouped_gemm.WEIGHT_GRAD_TILE]
        choices = list(tiles_of(WEIGHT_GRAD_TILES)) if all_tiles else usual
        dy = torch.randn(routed, outs, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(routed, ins, device="cuda", dtype=torch.bfloat16)
        ends = layout.count_E.cumsum(0, dtype=torch.int32)
        bf16 = partial(torch._grouped_mm, dy.t(), x, offs=ends)
        launch = grouped_gemm.grouped_weight_grad
        for count in (1, 2, 4):
            variants: dict[str, Callable[[], Any]] = {}
            for tile in choices:
                name = f"triton {tile_text(tile)}"
                variants[name] = partial(launch, accumulator, [operands] * count, tile=tile)
                variants[f"{name} tiles"] = partial(launch, accumulator, [tiles] * count, tile=tile)
            if all_tiles:
                variants[f"triton, {num_sms()} SMs persistent, tiles"] = partial(
                    launch, accumulator, [tiles] * count, tile=usual[0], gemm_sms=num_sms()
                )
            if quantize.on_hopper(accumulator):
                gluon = grouped_gemm.HOPPER_WEIGHT_GRAD_TILE
                variants["gluon"] = partial(launch, accumulator, [operands] * count, tile=gluon)
                variants["gluon, tiles"] = partial(launch, accumulator, [tiles] * count, tile=gluon)
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
        self.check(f"{shape} {phase} triton", distance(accumulator[expert], exact), 5e-4)
        launch(accumulator, [operands])
        apart = accumulator.clone()
        accumulator.zero_()
        launch(accumulator, [operands, operands])
        same = torch.equal(accumulator, apart)
        self.check(f"{shape} {phase} n=2 differs from two launches", float(not same), 0)
        if self.deep_gemm is None:
            accumulator.zero_()
            deep_gemm.grouped_weight_grad(accumulator, [operands, operands])
            self.check(f"{shape} {phase} deep_gemm n=2", distance(accumulator, apart), 1e-6)

    def layer(
        self, shape: str, num_experts: int, x: Any, experts_NK: Any, weights: Any, dy: Any
    ) -> None:
        """The whole layer through autograd, per backend and option, and its error."""
        import torch
        from msgspec.structs import replace

        from ppruntime.models.dims import preset
        from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options
        from ppruntime.models.kernels.expert_backends import ExpertBackend
        from ppruntime.models.weight_copies import WeightVersion, set_weight_version

        dims = replace(preset("v41-flash"), num_experts=num_experts)
        options = {
            "triton": Fp8Options(),
            "triton, n=2": Fp8Options(fused_wgrad_micro_batches=2),
            "triton, n=4": Fp8Options(fused_wgrad_micro_batches=4),
            "triton, recompute": Fp8Options(keep_expert_activations=False),
            "triton, turned on demand": Fp8Options(fp8_transposed_on_demand=True),
            "triton, wgrad tiles": Fp8Options(wgrad_tile_scales=True),
        }
        if self.deep_gemm is None:
            backend = ExpertBackend.DEEP_GEMM
            options["deep_gemm"] = Fp8Options(backend=backend)
            for num in (2, 3, 4):
                options[f"deep_gemm, n={num}"] = Fp8Options(
                    backend=backend, fused_wgrad_micro_batches=num
                )
        x = x.clone().requires_grad_()
        weights = weights.clone().requires_grad_()
        routed = int((experts_NK >= 0).sum())
        flops = 6.0 * routed * HIDDEN * WIDTH
        for name, option in options.items():
            experts = Fp8Experts(dims, option, device="meta")
            experts.gate_up.weight = torch.nn.Parameter(self.w13[:num_experts])
            experts.down.weight = torch.nn.Parameter(self.w2[:num_experts])
            for weight, acc in zip(experts.parameters(), (self.acc13, self.acc2), strict=True):
                weight.grad_dtype = torch.float32
                weight.grad = acc[:num_experts]
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
            return distance(y[tokens], exact)
