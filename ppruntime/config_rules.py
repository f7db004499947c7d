"""What has to hold between the keys of a config, and which options are not built yet.

A rule is a generator of (key, sentence): the key that is to blame, and what is wrong, with the
values and the remedy. An option that would have no effect is a mistake, not a silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, TypeAlias, cast

from ppruntime.config_errors import show
from ppruntime.config_keys import (
    LOOP_SCHEDULES,
    V_SCHEDULES,
    Config,
    Data,
    Dispatch,
    ExpertCompute,
    Fault,
    Optim,
    Pipeline,
    Section,
    Train,
)
from ppruntime.models import fp8_linear_rules
from ppruntime.models.dims import Role, attention_role, preset, validate
from ppruntime.models.kernel_limits import AttentionOp, misfit
from ppruntime.models.kernel_limits import Backend as AttentionBackend

Broken: TypeAlias = tuple[str, str]
"""The key to blame, and the sentence about it."""
Rule: TypeAlias = Callable[[Config], Iterator[Broken]]

_MOST_LAYERS = 4096
_LARGEST_SIZE = 2**31 - 1
_FP8_BLOCK = 128
_WARMUP_SCHEDULES = ("async_1f1b", "1f1b_w")
_WHOLE_BACKWARD_SCHEDULES = ("gpipe", "1f1b", "async_1f1b", "interleaved_1f1b")


@dataclass(frozen=True, slots=True)
class _NotBuilt:
    """A key of which only some values work so far."""

    key: str
    works: tuple[Any, ...]
    remedy: str


_NOT_BUILT = (_NotBuilt("optim.type", ("adamw", "sign_sgd"), 'use "adamw" or "sign_sgd"'),)


def broken_rules(config: Config, wrong_keys: Set[str]) -> Iterator[Broken]:
    """The rules that `config` breaks.

    Keys in `wrong_keys` were refused and have made-up values: a rule that reads one says nothing.
    """
    guarded = cast(Config, _Guard(config, wrong_keys))
    unbuilt: list[Rule] = [partial(_unbuilt, option) for option in _NOT_BUILT]
    for rule in (*unbuilt, *_RULES):
        with suppress(_InDoubt):
            yield from rule(guarded)


class _InDoubt(Exception):
    """A rule has read a key whose value was refused."""


class _Guard:
    """A section of a config, or all of it, in which reading a refused key ends the rule."""

    def __init__(self, section: Section, wrong_keys: Set[str], prefix: str = "") -> None:
        self._section, self._wrong_keys, self._prefix = section, wrong_keys, prefix

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._wrong_keys:
            raise _InDoubt
        kind = getattr(type(self._section), name)
        if isinstance(kind, property):
            assert kind.fget is not None
            return kind.fget(self)  # so that what the property reads is guarded too
        value = getattr(self._section, name)
        return _Guard(value, self._wrong_keys, f"{key}.") if isinstance(value, Section) else value


def _unbuilt(option: _NotBuilt, config: Config) -> Iterator[Broken]:
    value: Any = reduce(getattr, option.key.split("."), config)
    if value not in option.works:
        yield option.key, f"{option.key} = {show(value)} is not built yet; {option.remedy}"


def _model(config: Config) -> Iterator[Broken]:
    dims, usual = config.model.dims, preset(config.model.name)
    names = dims.__struct_fields__
    sizes = {name: size for name in names if type(size := getattr(dims, name)) is int}
    bounds = dict.fromkeys(sizes, _LARGEST_SIZE) | {"num_layers": _MOST_LAYERS}
    too_large = [
        f"{name} is {sizes[name]}; it has to be at most {bounds[name]}"
        for name in sizes
        if sizes[name] > bounds[name]
    ]
    for text in too_large or validate(dims):
        # To blame is the first size in the sentence that is not the preset's.
        sizes_named = [word for word in re.findall(r"\w+", text) if word in names]
        changed = (n for n in sizes_named if getattr(dims, n) != getattr(usual, n))
        blamed = next(changed, "name")
        yield f"model.{blamed}", f"model: {text}"


def _stages(config: Config) -> Iterator[Broken]:
    pp = config.pp
    does_not_fit = (
        f"pp.stages_per_rank = {pp.num_chunks} does not fit pp.schedule = {show(pp.schedule)}"
    )
    if pp.schedule in V_SCHEDULES and pp.num_chunks != 2:
        remedy = "whose stages form a V; leave it out or use 2"
        yield "pp.stages_per_rank", f"{does_not_fit}, {remedy}"
    if pp.schedule not in V_SCHEDULES | LOOP_SCHEDULES and pp.num_chunks != 1:
        remedy = f"which has one stage per rank; use 1, or {_either(LOOP_SCHEDULES)}"
        yield "pp.stages_per_rank", f"{does_not_fit}, {remedy}"


def _cut(config: Config) -> Iterator[Broken]:
    pp, num_layers = config.pp, config.model.dims.num_layers
    layers = pp.layers_per_stage
    if layers is None:
        return
    key = "pp.layers_per_stage"
    total = sum(layers)
    uneven = [stage for stage, count in enumerate(layers) if count % 0.5]
    if len(layers) != pp.num_stages:
        yield (
            key,
            f"{key} has {len(layers)} entries, pp.size {pp.size} x {pp.num_chunks} stages per "
            f"rank needs {pp.num_stages}; leave it out for a balanced cut",
        )
    elif uneven:
        stage = uneven[0]
        yield (
            key,
            f"{key} gives stage {stage} {layers[stage]:g} layers; a stage has a multiple of 0.5, "
            f"such as {round(2 * layers[stage]) / 2:g}",
        )
    elif total != num_layers:
        rest = num_layers - sum(layers[:-1])
        remedy = (
            f"the last entry could be {rest:g}"
            if rest >= 0
            else f"the entries before the last are already {-rest:g} too many"
        )
        yield key, f"{key} sums to {total:g}, the model has {num_layers} layers; {remedy}"


def _warmup(config: Config) -> Iterator[Broken]:
    pp = config.pp
    key, step = "pp.warmup_step", config.pp.warmup_step
    if step is None:
        return
    if pp.schedule not in _WARMUP_SCHEDULES:
        yield (
            key,
            f"{key} = {show(step)} has no effect on pp.schedule = {show(pp.schedule)}; leave it "
            f"out, or use {_either(_WARMUP_SCHEDULES)}",
        )
    elif isinstance(step, tuple) and len(step) != pp.size:
        yield (
            key,
            f"{key} has {len(step)} entries, pp.size = {pp.size} needs {pp.size}, one a rank",
        )
    elif isinstance(step, tuple) and any(a < b for a, b in pairwise(step)):
        falling = show(tuple(sorted(step, reverse=True)))
        yield (
            key,
            f"{key} = {show(step)} rises from one rank to the next, which deadlocks; {falling} "
            "would work",
        )


def _deferred_weight_grads(config: Config) -> Iterator[Broken]:
    pp = config.pp
    if pp.defer_weight_grads and pp.schedule not in _WHOLE_BACKWARD_SCHEDULES:
        yield (
            "pp.defer_weight_grads",
            f"pp.defer_weight_grads = true has no effect on pp.schedule = {show(pp.schedule)}, "
            "which splits its backwards itself; leave it out, or use "
            f"{_either(_WHOLE_BACKWARD_SCHEDULES)}",
        )


def _activation_offload(config: Config) -> Iterator[Broken]:
    pp = config.pp
    for name in ("offload_every", "offload_paced", "offload_target"):
        value = getattr(pp, name)
        if not pp.activation_offload and value != getattr(Pipeline(), name):
            yield (
                f"pp.{name}",
                f"pp.{name} = {show(value)} has no effect without pp.activation_offload = true; set"
                " both or neither",
            )
    if not pp.activation_offload:
        return
    if pp.offload_paced and pp.offload_target == "fp8":
        yield (
            "pp.offload_paced",
            'pp.offload_paced = true has no effect on pp.offload_target = "fp8", which copies'
            ' nothing off the device; leave it out, or use "host"',
        )
    if pp.offload_every > config.train.num_micro_batches:
        yield (
            "pp.offload_every",
            f"pp.offload_every = {pp.offload_every} is more than train.num_micro_batches ="
            f" {config.train.num_micro_batches}: only the first would move; use a smaller one",
        )


def _offload_masters(config: Config) -> Iterator[Broken]:
    key = "pp.offload_masters"
    if not config.pp.offload_masters:
        return
    if config.train.precision == "fp32" and config.parallel.num_data_ranks == 1:
        yield (
            key,
            f'{key} = true has no effect with train.precision = "fp32" on one data rank, where the'
            ' weights are their own masters; leave it out, or use "bf16"',
        )
    if config.train.num_micro_batches < 2:
        yield (
            key,
            f"{key} = true has no effect with train.num_micro_batches = 1: first and last forward"
            " are one; leave it out",
        )


def _layer_modes(config: Config) -> Iterator[Broken]:
    key, modes, num_layers = "ac.layer_modes", config.ac.layer_modes, config.model.dims.num_layers
    if modes is None:
        return
    if not modes:
        yield key, f"{key} names no layer; leave it out, ac.mode holds for every layer"
    layers = {str(layer) for layer in range(num_layers)}
    for name in sorted(modes.keys() - layers):
        yield (
            key,
            f"{key} names {show(name)}, which is no layer; layers are numbered 0 to "
            f"{num_layers - 1} through the whole model",
        )


def _recompute_engram(config: Config) -> Iterator[Broken]:
    ac, layers = config.ac, config.model.dims.engram_layers
    if not ac.recompute_engram:
        return
    key = "ac.recompute_engram"
    if not layers:
        yield key, f"{key} = true has no effect: the model has no Engram; leave it out"
        return
    modes = {
        found if isinstance(found, str) else found[0]
        for found in ((ac.layer_modes or {}).get(str(layer), ac.mode) for layer in layers)
    }
    if not modes & {"full", "full_moe"}:
        names = ", ".join(map(show, sorted(modes)))
        yield (
            key,
            f"{key} = true has no effect on layers whose mode is {names}; leave it out, or use "
            f'"full" or "full_moe" for one of the layers {", ".join(map(str, layers))}',
        )


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


def _transport(config: Config) -> Iterator[Broken]:
    pp = config.pp
    for name, kind in (("transport_ctas", "nccl"), ("recv_lead", "nccl"), ("nccl_library", "put")):
        value = getattr(pp, name)
        if value is not None and pp.transport != kind:
            yield (
                f"pp.{name}",
                f"pp.{name} = {show(value)} has no effect on pp.transport = {show(pp.transport)}; "
                f"leave it out or use {show(kind)}",
            )


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
    gemm_sms = config.pp.gemm_sms
    if gemm_sms is not None and dispatch.transfer_sms >= gemm_sms:
        yield (
            "moe.dispatch.transfer_sms",
            f"moe.dispatch.transfer_sms = {dispatch.transfer_sms} leaves none of pp.gemm_sms = "
            f"{gemm_sms} for the products that run beside it; use fewer",
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


def _data_path(config: Config) -> Iterator[Broken]:
    if config.data.type == "tokens" and config.data.path is None:
        yield (
            "data.path",
            'data.path is missing, data.type = "tokens" needs the prefix of a token file; make '
            'one with "ppruntime data build --out PREFIX FILES", or use data.type = "stdlib"',
        )


def _made_up_data(config: Config) -> Iterator[Broken]:
    if config.data.type not in ("random", "counting"):
        return
    for name in ("path", "validation_share", "reset_positions", "ignore_tokens"):
        if getattr(config.data, name) != getattr(Data(), name):
            yield (
                f"data.{name}",
                f"data.{name} has no effect on data.type = {show(config.data.type)}, which makes "
                "its tokens up; leave it out",
            )


def _evaluation(config: Config) -> Iterator[Broken]:
    train = config.train
    if train.eval_interval is None:
        if train.eval_steps != Train().eval_steps:
            yield (
                "train.eval_steps",
                f"train.eval_steps = {train.eval_steps} has no effect without "
                "train.eval_interval; set both or neither",
            )
    elif config.data.validation_share == 0:
        yield (
            "train.eval_interval",
            f"train.eval_interval = {train.eval_interval} needs documents to evaluate on, and "
            "data.validation_share is 0; set it to a share such as 0.01",
        )


def _sign_sgd(config: Config) -> Iterator[Broken]:
    optim = config.optim
    if optim.type != "sign_sgd":
        if optim.apply_in_backward:
            yield (
                "optim.apply_in_backward",
                f"optim.apply_in_backward = true does not work with optim.type ="
                f' {show(optim.type)}, only with "sign_sgd", whose updates need no other gradient;'
                " leave it out",
            )
        return
    for name in ("betas", "eps", "clip_norm"):
        value = getattr(optim, name)
        if name == "clip_norm" and optim.apply_in_backward:
            continue
        if value != getattr(Optim(), name):
            yield (
                f"optim.{name}",
                f'optim.{name} = {show(value)} has no effect on optim.type = "sign_sgd", which'
                " reads nothing but signs; leave it out",
            )
    if not optim.apply_in_backward:
        return
    if optim.clip_norm is not None:
        yield (
            "optim.clip_norm",
            f"optim.clip_norm = {show(optim.clip_norm)} needs all gradients before the first"
            " update, and optim.apply_in_backward = true frees them one by one; leave one of them"
            " out",
        )
    if config.fault.nonfinite != "stop":
        yield (
            "fault.nonfinite",
            f"fault.nonfinite = {show(config.fault.nonfinite)} needs all gradients before the first"
            ' update, and optim.apply_in_backward = true frees them one by one; use "stop"',
        )


def _nonfinite_max(config: Config) -> Iterator[Broken]:
    fault, key = config.fault, "fault.nonfinite_max"
    if fault.nonfinite != "skip" and fault.nonfinite_max != Fault().nonfinite_max:
        yield (
            key,
            f"{key} = {fault.nonfinite_max} has no effect on fault.nonfinite ="
            f' {show(fault.nonfinite)}; leave it out, or use "skip"',
        )


def _learning_rate(config: Config) -> Iterator[Broken]:
    optim = config.optim
    if optim.min_lr > optim.lr:
        yield (
            "optim.min_lr",
            f"optim.min_lr = {optim.min_lr:g} is above optim.lr = {optim.lr:g}; it is where the "
            "learning rate ends, at most optim.lr",
        )


def _learning_rate_warmup(config: Config) -> Iterator[Broken]:
    warmup_steps, steps = config.optim.warmup_steps, config.train.steps
    if warmup_steps > steps:
        yield (
            "optim.warmup_steps",
            f"optim.warmup_steps = {warmup_steps} is more than train.steps = {steps}; the "
            "learning rate would never reach optim.lr",
        )


def _routing(config: Config) -> Iterator[Broken]:
    train = config.train
    if train.force_balanced_routing and train.routing_bias_rate:
        yield (
            "train.routing_bias_rate",
            f"train.routing_bias_rate = {train.routing_bias_rate:g} has no effect with "
            "train.force_balanced_routing = true; leave one of them out",
        )


def _indexer_loss(config: Config) -> Iterator[Broken]:
    dims = config.model.dims
    key, weight = "train.indexer_loss_weight", config.train.indexer_loss_weight
    roles = {attention_role(dims, layer) for layer in range(len(dims.compress_ratios))}
    if weight and not roles & {Role.FULL, Role.REINDEX, Role.CSA}:
        yield key, f"{key} = {weight:g} has no effect: no layer has an indexer; leave it out"


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
    if wanted in ("auto", "reference"):
        return
    if (reason := fp8_linear_rules.misfit(config.model.dims)) is not None:
        yield key, f'{key} = {show(wanted)} does not take this model: {reason}; use "reference"'


def _timeline(config: Config) -> Iterator[Broken]:
    step, steps = config.run.timeline_step, config.train.steps
    if step is not None and step >= steps:
        yield (
            "run.timeline_step",
            f"run.timeline_step = {step} is never reached, steps are numbered 0 to {steps - 1}; "
            "leave it out for the last one",
        )


def _paths(config: Config) -> Iterator[Broken]:
    for key in ("run.dir", "data.path", "pp.nccl_library"):
        path: str | None = reduce(getattr, key.split("."), config)  # type: ignore[assignment]
        if path is not None and not (path and path.isprintable()):
            words = "is not a path; it is empty or has unprintable characters"
            yield key, f"{key} = {show(path)} {words}"


_RULES: tuple[Rule, ...] = (
    _model,
    _stages,
    _cut,
    _warmup,
    _deferred_weight_grads,
    _activation_offload,
    _offload_masters,
    _experts,
    _dispatch,
    _expert_compute,
    _mega_moe,
    _expert_stages,
    _freed_experts,
    _transport,
    _layer_modes,
    _recompute_engram,
    _engram,
    _data_path,
    _made_up_data,
    _evaluation,
    _sign_sgd,
    _nonfinite_max,
    _learning_rate,
    _learning_rate_warmup,
    _routing,
    _indexer_loss,
    _attention_kernels,
    _layer_kernels,
    _gemm_sms,
    _fp8_linears,
    _timeline,
    _paths,
)


def _either(names: Iterable[str]) -> str:
    return " or ".join(show(name) for name in sorted(names))
