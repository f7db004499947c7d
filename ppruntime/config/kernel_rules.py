"""What has to hold between a config's kernels, its model and its device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, cast

from ppruntime.config.errors import show
from ppruntime.config.keys import Config
from ppruntime.config.rule import Broken, Rule
from ppruntime.models import fp8_linear_rules
from ppruntime.models.kernel_limits import AttentionOp, misfit
from ppruntime.models.kernel_limits import Backend as AttentionBackend


def _engram(config: Config) -> Iterator[Broken]:
    ahead, num = config.engram.lookups_ahead, config.train.num_micro_batches
    if not config.model.dims.engram_layers:
        for key, usual in (
            ("engram.lookups_ahead", 0),
            ("engram.tables", "device"),
            ("kernels.engram", "reference"),
        ):
            value = reduce(getattr, key.split("."), cast(Any, config))
            if value not in (usual, "auto"):
                yield (
                    key,
                    f"{key} = {show(value)} has no effect: the model has no Engram; leave it out",
                )
    elif ahead >= num:
        yield (
            "engram.lookups_ahead",
            f"engram.lookups_ahead = {ahead} is as many forwards as a step has,"
            f" train.num_micro_batches = {num}; use {num - 1} or less",
        )
    if config.kernels.engram == "triton" and config.run.device == "cpu":
        yield (
            "kernels.engram",
            'kernels.engram = "triton" does not run with run.device = "cpu"; use "reference"',
        )


def _attention_kernels(config: Config) -> Iterator[Broken]:
    kernels = config.kernels
    for op in AttentionOp:
        key, name = f"kernels.{op.value}", getattr(kernels, op.value)
        reason = None if name == "auto" else misfit(op, AttentionBackend(name), config.model.dims)
        if reason is not None:
            yield key, f'{key} = {show(name)}: {reason}; use "reference" or "auto"'
    if kernels.attention_deterministic and kernels.attention not in ("auto", "triton"):
        yield (
            "kernels.attention_deterministic",
            "kernels.attention_deterministic = true has no effect on kernels.attention = "
            f'{show(kernels.attention)}; leave it out or use "triton"',
        )


def _layer_kernels(config: Config) -> Iterator[Broken]:
    for name, otherwise in (("mhc", "reference"), ("head", "chunked")):
        if getattr(config.kernels, name) != "triton":
            continue
        for key, value in (("train.precision", "fp32"), ("run.device", "cpu")):
            if reduce(getattr, key.split("."), cast(Any, config)) == value:
                yield (
                    f"kernels.{name}",
                    f'kernels.{name} = "triton" does not run with {key} = {show(value)}; use '
                    f"{show(otherwise)}",
                )
    dims = config.model.dims
    num_streams, takes = dims.num_streams, (2, 4, 8) if dims.residual_type == "mhc" else (1,)
    if config.kernels.mhc != "reference" and num_streams not in takes:
        yield (
            "kernels.mhc",
            f"kernels.mhc = {show(config.kernels.mhc)} takes 2, 4 or 8 streams, model.num_streams "
            f'is {num_streams}; use "reference"',
        )


def _gemm_sms(config: Config) -> Iterator[Broken]:
    if config.pp.gemm_sms is not None and config.run.device == "cpu":
        yield (
            "pp.gemm_sms",
            f'run.device = "cpu" and pp.gemm_sms = {config.pp.gemm_sms}: a CPU has no'
            " multiprocessors to leave free; leave pp.gemm_sms out",
        )


def _fp8_linears(config: Config) -> Iterator[Broken]:
    key, wanted = "kernels.linear", config.kernels.linear
    if wanted == "reference" and config.kernels.linear_wgrad_tile_scales:
        yield (
            "kernels.linear_wgrad_tile_scales",
            f"kernels.linear_wgrad_tile_scales = true has no effect on {key} = {show(wanted)},"
            f' which has no FP8; set {key} = "auto", or leave it out',
        )
    if wanted in ("auto", "reference"):
        return
    if (reason := fp8_linear_rules.misfit(config.model.dims)) is not None:
        yield key, f'{key} = {show(wanted)} does not take this model: {reason}; use "reference"'


KERNEL_RULES: tuple[Rule, ...] = (
    _engram,
    _attention_kernels,
    _layer_kernels,
    _gemm_sms,
    _fp8_linears,
)
