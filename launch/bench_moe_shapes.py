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


def compile_share(worker: int) -> int:
    """Runs this worker's share of the kernels once, so that they lie in the caches on disk."""
    import torch

    from ppruntime.models.kernels import deep_gemm, grouped_gemm, moe_layout, quantize
    from ppruntime.models.kernels.expert_backends import ExpertBackend, unavailable_reason

    experts = torch.arange(EXPERTS, device="cuda").view(-1, 1)
    small = moe_layout.expert_layout(experts, EXPERTS)
    multiply, add = grouped_gemm.grouped_gemm, grouped_gemm.grouped_weight_grad
    tasks: list[Callable[[], object]] = [_run_layer]
    if unavailable_reason(ExpertBackend.DEEP_GEMM) is None:
        # It chooses its tiles by the numbers of rows and experts: the real ones.
        for name in ("balanced", "ep48", "ep96"):
            routing = routings()[name]
            layout = moe_layout.expert_layout(routing.experts_NK, routing.num_experts)
            for shape in gemm_shapes().values():
                tasks += [partial(_run_gemm, deep_gemm.grouped_gemm, shape, layout)]
            for shape in weight_shapes().values():
                run = partial(_run_weight_grad, deep_gemm.grouped_weight_grad, shape, layout)
                tasks += [partial(run, 1), partial(run, 2)]
    on_hopper = quantize.on_hopper(experts)
    gluon = [grouped_gemm.HOPPER_TILE] if on_hopper else []
    for shape in gemm_shapes().values():
        for tile in (*gluon, *tiles_of(FORWARD_TILES)):
            tasks += [partial(_run_gemm, partial(multiply, tile=tile), shape, small)]
    gluon = [grouped_gemm.HOPPER_WEIGHT_GRAD_TILE] if on_hopper else []
    for name, shape in weight_shapes().items():
        for tile in (*gluon, *tiles_of(WEIGHT_GRAD_TILES)):
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

    (outs, ins), num = shape, len(layout.count_E)
    x = pool_rows_like(layout.pair_P, layout.num_rows, ins)
    data = torch.zeros(num, outs, ins, device="cuda", dtype=torch.uint8)
    scale = torch.ones(num, outs // 128, ins // 128, device="cuda")
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
    accumulator = torch.zeros(len(layout.count_E), *shape, device="cuda")
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
