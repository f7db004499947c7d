"""What the bench of the experts' kernels runs and compiles before: tiles, shapes, routings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

HIDDEN, WIDTH, EXPERTS, PER_TOKEN, TOKENS = 5120, 2304, 48, 6, 8192
WORKERS = 12
FORWARD_TILES = ((64, 128, 4, 3, 16), (128, 128, 8, 4, 8))
WEIGHT_GRAD_TILES = ((64, 128, 4, 3, 16, True, 168), (128, 128, 8, 3, 16, True))
"""Rows, columns, warps, stages, row blocks of a group; whether the accumulator is prefetched; a
thread's registers at the most."""


def tiles_of(choices: Sequence[Any]) -> Iterator[Any]:
    from ppruntime.models.kernels.grouped_gemm import Tile

    for choice in choices:
        yield Tile(*choice)


def gemm_shapes() -> dict[str, tuple[int, int]]:
    """Output and input width of each GEMM over the pool's rows."""
    return {
        "L1": (2 * WIDTH, HIDDEN),
        "L2": (HIDDEN, WIDTH),
        "dgrad L2": (WIDTH, HIDDEN),
        "dgrad L1": (HIDDEN, 2 * WIDTH),
    }


def weight_shapes() -> dict[str, tuple[int, int]]:
    return {"wgrad W13": (2 * WIDTH, HIDDEN), "wgrad W2": (HIDDEN, WIDTH)}


def compile_share(worker: int, shapes: Sequence[str]) -> int:
    """Runs this worker's share of the kernels once, so that they lie in the caches on disk."""
    import torch

    for run in kernel_runs(shapes)[worker::WORKERS]:
        run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return 0


def kernel_runs(shapes: Sequence[str], device: str = "cuda") -> list[Callable[[], object]]:
    """One run of every kernel that takes seconds to compile and that the bench of these shapes
    launches, as it launches it; those that take longest first.

    Triton has another kernel for a number of experts that 16 does not divide, deep_gemm for every
    number, with tiles chosen by rows."""
    from ppruntime.models.kernels import moe_layout
    from ppruntime.models.kernels.expert_backends import ExpertBackend, unavailable_reason

    made = {name: routed for name, routed in routings(device).items() if name in shapes}
    by_number = {routed.num_experts: routed for routed in made.values()}
    numbers = {num % 16 == 0: num for num in by_number}.values()
    with_deep_gemm = unavailable_reason(ExpertBackend.DEEP_GEMM) is None
    runs: list[Callable[[], object]] = [
        partial(_run_layer, num, tiles) for num in numbers for tiles in (False, True)
    ]
    for num, routed in by_number.items():
        if with_deep_gemm:
            runs += _runs_of_deep_gemm(moe_layout.expert_layout(routed.experts_NK, num))
    for num in numbers:
        all_tiles = "balanced" in made and num == EXPERTS
        counts = (4, 3, 2, 1) if with_deep_gemm else (4, 2, 1)
        runs += _runs_of_own_kernels(num, device, counts, all_tiles=all_tiles)
    return runs


def _runs_of_deep_gemm(layout: Any) -> Iterator[Callable[[], object]]:
    from ppruntime.models.kernels import deep_gemm

    for shape in gemm_shapes().values():
        yield partial(_run_gemm, deep_gemm.grouped_gemm, shape, layout)
    for shape in weight_shapes().values():
        yield partial(_run_weight_grads, deep_gemm.grouped_weight_grad, shape, layout, (1, 2, 4))


def _runs_of_own_kernels(
    num_experts: int, device: str, counts: Sequence[int], *, all_tiles: bool
) -> Iterator[Callable[[], object]]:
    """With few rows. `counts`: micro-batches whose weight gradients are added at once."""
    import torch

    from ppruntime.models.kernels import grouped_gemm, moe_layout, quantize, swiglu

    experts = torch.arange(num_experts, device=device).view(-1, 1)
    small, on_hopper = moe_layout.expert_layout(experts, num_experts), quantize.on_hopper(experts)
    usual, sms = grouped_gemm.WEIGHT_GRAD_TILE, grouped_gemm.all_sms(experts)
    tiles = list(tiles_of(WEIGHT_GRAD_TILES)) if all_tiles else [usual]
    tiles += [grouped_gemm.HOPPER_WEIGHT_GRAD_TILE] if on_hopper else []
    for name, shape in weight_shapes().items():
        scales = (False, True) if name == "wgrad W13" else (True, False)
        for tile in tiles:
            add = partial(grouped_gemm.grouped_weight_grad, tile=tile)
            for count in counts:
                if count != 3 or tile is tiles[-1]:  # three by a layer's own way alone
                    yield partial(_run_weight_grads, add, shape, small, (count,))
                if count != 3:
                    yield partial(_run_weight_grads, add, shape, small, (count,), scales)
        if all_tiles:
            stays = partial(grouped_gemm.grouped_weight_grad, tile=usual, gemm_sms=sms)
            yield partial(_run_weight_grads, stays, shape, small, (1, 2, 4), scales)
    tiles = list(tiles_of(FORWARD_TILES)) if all_tiles else [grouped_gemm.FORWARD_TILE]
    tiles += [grouped_gemm.HOPPER_TILE] if on_hopper else []
    for tile in tiles:
        multiply = partial(grouped_gemm.grouped_gemm, tile=tile)
        for shape in gemm_shapes().values():
            yield partial(_run_gemm, multiply, shape, small)
    yield partial(_run_swiglu_backward, small, swiglu.TRITON_BACKWARD)


def _run_gemm(function: Callable[..., object], shape: tuple[int, int], layout: Any) -> None:
    import torch

    from ppruntime.models.kernels.quantize import Quantized, pool_rows_like

    (outs, ins), num, device = shape, len(layout.count_E), layout.pair_P.device
    x = pool_rows_like(layout.pair_P, layout.num_rows, ins)
    data = torch.zeros(num, outs, ins, device=device, dtype=torch.uint8)
    scale = torch.ones(num, outs // 128, ins // 128, device=device)
    function(x, Quantized(data.view(torch.float8_e4m3fn), scale), layout)


def _run_weight_grads(
    function: Callable[..., object],
    shape: tuple[int, int],
    layout: Any,
    counts: Sequence[int],
    tiles: tuple[bool, bool] = (False, False),
) -> None:
    """Of so many micro-batches at once, one number after another."""
    import torch

    from ppruntime.models.kernels.grouped_gemm import WeightGradOperands
    from ppruntime.models.kernels.quantize import columns_like

    left, right = (
        columns_like(layout.pair_P, layout.num_rows, channels, tile_scales=tiled)
        for channels, tiled in zip(shape, tiles, strict=True)
    )
    accumulator = torch.zeros(len(layout.count_E), *shape, device=layout.pair_P.device)
    for count in counts:
        function(accumulator, [WeightGradOperands(left, right, layout)] * count)


def _run_swiglu_backward(layout: Any, tile: Any) -> None:
    import torch

    from ppruntime.models.kernels.swiglu import swiglu_backward

    z, grad = (
        torch.zeros(layout.num_rows, width, device=layout.pair_P.device, dtype=torch.bfloat16)
        for width in (2 * WIDTH, WIDTH)
    )
    weights = torch.ones(layout.row_NK.shape, device=layout.pair_P.device)
    swiglu_backward(z, grad, weights, layout, 10.0, power_of_two=False, tile=tile)


def _run_layer(num_experts: int, tiles: bool) -> None:
    """Every other kernel, at the real widths and with few tokens."""
    import torch
    from msgspec.structs import replace

    from ppruntime.models.dims import preset
    from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options

    dims = replace(preset("v41-flash"), num_experts=num_experts)
    options = Fp8Options(wgrad_tile_scales=tiles, fp8_transposed_on_demand=tiles)
    experts = Fp8Experts(dims, options, device="cuda", dtype=torch.bfloat16)
    torch.nn.init.zeros_(experts.gate_up.weight)
    torch.nn.init.zeros_(experts.down.weight)
    for per_token in (PER_TOKEN, 1) if num_experts == EXPERTS else (1,):
        x = torch.zeros(64, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        routing = torch.arange(64 * per_token, device="cuda").view(64, per_token) % num_experts
        weights = torch.ones(64, per_token, device="cuda", requires_grad=True)
        experts(x, routing, weights).sum().backward()


class Routed(NamedTuple):
    """One shape: how many experts there are, and those of each row of x."""

    num_experts: int
    experts_NK: Any


SHAPES = ("balanced", "ep8", "random", "ep48", "ep96")


def routings(device: str = "cuda") -> dict[str, Routed]:
    """By shape:

    balanced   8,192 tokens, top 6 of 48: 1,024 rows per expert
    ep8        what one of 8 ranks receives of 65,536 tokens that spread over 384 experts: 49,152
               rows, each for one of its 48 experts, 1,024 per expert
    random     8,192 tokens, 6 random ones of 48
    ep48       what one of 48 ranks with 16,384 tokens each receives: 8 experts, 12,288 rows each
    ep96       the same of 96 ranks: 4 experts, 24,576 rows each
    """
    import torch

    from ppruntime.models.router import balanced_experts

    pairs = torch.arange(TOKENS * PER_TOKEN, device=device)
    spread = balanced_experts(8 * TOKENS, 8 * EXPERTS, PER_TOKEN, device=device).flatten()
    received = spread[spread < EXPERTS].view(-1, 1)
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator, device=device)
    of_many = torch.arange(2 * TOKENS * PER_TOKEN, device=device).view(-1, 1)
    return {
        "balanced": Routed(EXPERTS, (pairs % EXPERTS).view(TOKENS, PER_TOKEN)),
        "ep8": Routed(EXPERTS, received),
        "random": Routed(EXPERTS, scores.argsort(-1)[:, :PER_TOKEN].contiguous()),
        "ep48": Routed(8, of_many % 8),
        "ep96": Routed(4, of_many % 4),
    }


def tile_text(tile: Any) -> str:
    text = f"{tile.rows}x{tile.columns} w{tile.num_warps} s{tile.num_stages} g{tile.group}"
    text = f"{text} prefetch" if tile.prefetch else text
    return f"{text} r{tile.max_registers}" if tile.max_registers else text
