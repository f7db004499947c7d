"""What has to hold between the keys that place, move and compute experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, cast

from ppruntime.config.errors import show
from ppruntime.config.keys import Config, Dispatch, ExpertCompute
from ppruntime.config.rule import Broken, Rule

_FP8_BLOCK = 128


def _experts(config: Config) -> Iterator[Broken]:
    ep, num_experts = config.parallel.ep, config.model.dims.num_experts
    if num_experts % ep:
        yield (
            "parallel.ep",
            f"parallel.ep = {ep} does not divide the model's {num_experts} experts; use a "
            f"divisor of {num_experts}",
        )


def _dispatch(config: Config) -> Iterator[Broken]:
    """What is said of rows on their way needs a way."""
    options, ep = config.moe.dispatch, config.parallel.ep
    if options.type == "mega_moe":
        return
    if ep == 1:
        set_here = [
            name
            for name in Dispatch.__struct_fields__
            if getattr(options, name) != getattr(Dispatch(), name)
        ]
        for name in set_here:
            yield (
                f"moe.dispatch.{name}",
                f"moe.dispatch.{name} = {show(getattr(options, name))} has no effect on"
                " parallel.ep = 1, all experts are where their tokens are; leave it out",
            )
        return
    hidden = config.model.dims.hidden_size
    for name in ("fp8", "fp8_grad"):
        if getattr(options, name) and hidden % _FP8_BLOCK:
            yield (
                f"moe.dispatch.{name}",
                f"moe.dispatch.{name} = true needs rows of a multiple of {_FP8_BLOCK} values;"
                f" model.hidden_size is {hidden}; leave it out",
            )
    if options.type == "deep_ep":
        yield from _deep_ep(config)
        return
    for name in ("token_chunks", "transfer_sms"):
        if (value := getattr(options, name)) != getattr(Dispatch(), name):
            yield (
                f"moe.dispatch.{name}",
                f'moe.dispatch.{name} = {value} has no effect on moe.dispatch.type = "torch"; leave'
                ' it out or use "deep_ep"',
            )


def _deep_ep(config: Config) -> Iterator[Broken]:
    options, ep, key = config.moe.dispatch, config.parallel.ep, "moe.dispatch.type"
    if ep not in (2, 4, 8):
        yield (
            key,
            f'{key} = "deep_ep" moves tokens inside a host of 2, 4 or 8 ranks; parallel.ep is {ep};'
            ' use "torch"',
        )
    if config.train.precision != "bf16":
        yield (
            key,
            f'{key} = "deep_ep" moves rows in bf16 or FP8; train.precision is'
            f' {show(config.train.precision)}; use "torch"',
        )
    if config.run.device == "cpu":
        yield key, f'{key} = "deep_ep" needs GPUs; run.device is "cpu"; use "torch"'
    if options.transfer_sms % 2:
        yield (
            "moe.dispatch.transfer_sms",
            f"moe.dispatch.transfer_sms = {options.transfer_sms} is odd, half of them send and half"
            f" receive; use {options.transfer_sms - 1}",
        )
    if options.token_chunks > (tokens := config.train.micro_batch_size * config.train.seq_len):
        yield (
            "moe.dispatch.token_chunks",
            f"moe.dispatch.token_chunks = {options.token_chunks} parts of a micro-batch of {tokens}"
            f" tokens; use {tokens} or less",
        )


def _expert_compute(config: Config) -> Iterator[Broken]:
    compute, dims, key = config.moe.compute, config.model.dims, "moe.compute.backend"
    if compute.backend == "torch":
        for name in ExpertCompute.__struct_fields__:
            value = getattr(compute, name)
            if name != "backend" and value != getattr(ExpertCompute(), name):
                yield (
                    f"moe.compute.{name}",
                    f"moe.compute.{name} = {show(value)} has no effect on {key} = "
                    f'{show(compute.backend)}; leave it out or use "triton"',
                )
        return
    if dims.hidden_size % _FP8_BLOCK or dims.expert_width % _FP8_BLOCK:
        yield (
            key,
            f"{key} = {show(compute.backend)} needs widths that are multiples of {_FP8_BLOCK}; "
            f"model.hidden_size is {dims.hidden_size}, model.expert_width {dims.expert_width}; use "
            '"torch"',
        )


def _mega_moe(config: Config) -> Iterator[Broken]:
    key, dispatch, dims = "moe.dispatch.type", config.moe.dispatch, config.model.dims
    if dispatch.type != "mega_moe":
        if dispatch.capacity_factor is not None and config.parallel.ep > 1:
            yield (
                "moe.dispatch.capacity_factor",
                f"moe.dispatch.capacity_factor = {dispatch.capacity_factor:g} has no effect on "
                f'{key} = {show(dispatch.type)}; leave it out or use "mega_moe"',
            )
        return
    for other, value in (("train.precision", "fp32"), ("run.device", "cpu")):
        if reduce(getattr, other.split("."), cast(Any, config)) == value:
            yield (
                key,
                f'{key} = "mega_moe" does not run with {other} = {show(value)}; use "torch", which '
                "runs everywhere",
            )
    if dims.hidden_size % _FP8_BLOCK or dims.expert_width % _FP8_BLOCK:
        yield (
            key,
            f'{key} = "mega_moe" needs widths that are multiples of {_FP8_BLOCK}; '
            f"model.hidden_size is {dims.hidden_size}, model.expert_width {dims.expert_width}; use "
            '"torch"',
        )
    backend = config.moe.compute.backend
    if backend == "deep_gemm":
        yield (
            "moe.compute.backend",
            f'moe.compute.backend = "deep_gemm" cannot wait for rows that {key} = "mega_moe" '
            'brings while it multiplies; use "triton", or "torch" for bf16',
        )
    for name in ("fp8", "fp8_grad"):
        if backend == "torch" and getattr(dispatch, name):
            yield (
                f"moe.dispatch.{name}",
                f'moe.dispatch.{name} = true: {key} = "mega_moe" sends what its experts multiply, '
                'and moe.compute.backend = "torch" is bf16; leave it out or use "triton"',
            )
    if dispatch.token_chunks != 1:
        yield (
            "moe.dispatch.token_chunks",
            f"moe.dispatch.token_chunks = {dispatch.token_chunks} has no effect on {key} = "
            '"mega_moe", which multiplies rows block by block as they come; leave it out',
        )
    gemm_sms, halves = config.pp.gemm_sms, config.pp.pair_gemm_sms
    if config.pp.overlap_pairs and halves is None:
        yield (
            "pp.overlap_pairs",
            f'pp.overlap_pairs = true with {key} = "mega_moe", whose products wait for rows on the'
            " multiprocessors that they occupy, needs pp.pair_gemm_sms, so that both halves find"
            " room; set it, such as [66, 66] on 132",
        )
    budgets = {"pp.gemm_sms": gemm_sms, "pp.pair_gemm_sms": min(halves) if halves else None}
    for name, budget in budgets.items():
        if budget is not None and dispatch.transfer_sms >= budget:
            yield (
                "moe.dispatch.transfer_sms",
                f"moe.dispatch.transfer_sms = {dispatch.transfer_sms} leaves none of {name} = "
                f"{budget} for the products that run beside it; use fewer",
            )


def _expert_stages(config: Config) -> Iterator[Broken]:
    compute, num_stages = config.moe.compute, config.pp.num_stages
    fused = compute.fused_wgrad_micro_batches
    if isinstance(fused, tuple) and len(fused) != num_stages:
        yield (
            "moe.compute.fused_wgrad_micro_batches",
            f"moe.compute.fused_wgrad_micro_batches has {len(fused)} entries for {num_stages} "
            "stages; give one a stage, or one number for all",
        )
    for name in ("fp8_transposed_on_demand", "free_bf16_expert_weights"):
        stages = getattr(compute, name)
        if isinstance(stages, tuple) and any(stage >= num_stages for stage in stages):
            yield (
                f"moe.compute.{name}",
                f"moe.compute.{name} names stage {max(stages)}; stages are numbered 0 to "
                f"{num_stages - 1}",
            )


def _freed_experts(config: Config) -> Iterator[Broken]:
    key, precision = "moe.compute.free_bf16_expert_weights", config.train.precision
    freed = config.moe.compute.free_bf16_expert_weights
    if freed and config.moe.compute.backend != "torch" and precision != "bf16":
        yield (
            key,
            f"{key} = {show(freed)} has no effect on train.precision = {show(precision)}, which "
            'has no weights in bf16; leave it out or use "bf16"',
        )


EXPERT_RULES: tuple[Rule, ...] = (
    _experts,
    _dispatch,
    _expert_compute,
    _mega_moe,
    _expert_stages,
    _freed_experts,
)
