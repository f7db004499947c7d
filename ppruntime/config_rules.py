"""What has to hold between the keys of a config, and which options are not built yet.

A rule is a generator of (key, sentence): the key that is to blame, and what is wrong, with the values
and the remedy. An option that would have no effect is a mistake, not a silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

from ppruntime.config_errors import show
from ppruntime.config_keys import LOOP_SCHEDULES, V_SCHEDULES, Config
from ppruntime.models.dims import validate

Broken: TypeAlias = Iterator[tuple[str, str]]
IsSet: TypeAlias = Callable[[str], bool]

_MOST_LAYERS = 4096
_LARGEST_SIZE = 2**31 - 1
_WARMUP_SCHEDULES = ("async_1f1b", "1f1b_w")
_WHOLE_BACKWARD_SCHEDULES = ("gpipe", "1f1b", "async_1f1b", "interleaved_1f1b")


@dataclass(frozen=True, slots=True)
class _NotBuilt:
    """A key of which only some values work so far."""

    key: str
    works: tuple[Any, ...]
    remedy: str


_NOT_BUILT = (
    _NotBuilt("pp.transport", ("auto", "local", "gloo"), 'use "auto", "local" or "gloo"'),
    _NotBuilt("pp.transport_ctas", (None,), "leave it out"),
    _NotBuilt("pp.gemm_sms", (None,), "leave it out"),
    _NotBuilt("pp.nccl_library", (None,), "leave it out"),
    _NotBuilt("pp.activation_offload", (False,), 'leave it out; ac.mode = "full" saves memory too'),
    _NotBuilt("pp.offload_masters", (False,), "leave it out"),
    _NotBuilt("optim.type", ("adamw",), 'use "adamw"'),
    _NotBuilt("ac.mode", ("none", "full"), 'use "none" or "full"'),
    _NotBuilt("ac.layer_modes", (None,), "leave it out; ac.mode holds for every layer"),
    _NotBuilt("ac.recompute_engram", (False,), 'leave it out; ac.mode = "full" recomputes it too'),
    _NotBuilt("moe.dispatch.type", ("torch",), 'use "torch"'),
    _NotBuilt("moe.compute.backend", ("torch",), 'use "torch"'),
    *(
        _NotBuilt(f"kernels.{op}", ("reference",), 'use "reference"')
        for op in (
            "attention",
            "indexer",
            "mhc",
            "rope",
            "grouped_output",
            "engram",
            "linear",
            "head",
        )
    ),
    _NotBuilt("fault.nonfinite", ("stop",), 'use "stop"'),
)


def broken_rules(config: Config, is_set: IsSet) -> Broken:
    """The rules that `config` breaks; `is_set` tells which keys a file or the command line gave."""
    yield from _unbuilt_options(config)
    yield from _model(config, is_set)
    yield from _stages(config)
    yield from _cut(config)
    yield from _warmup(config)
    yield from _split_backward(config)
    yield from _experts(config)
    yield from _data(config, is_set)
    yield from _evaluation(config, is_set)
    yield from _learning_rate(config)
    yield from _routing(config)
    yield from _timeline(config)
    yield from _paths(config)


def _unbuilt_options(config: Config) -> Broken:
    for option in _NOT_BUILT:
        value = reduce(getattr, option.key.split("."), config)  # type: Any
        if value not in option.works:
            yield option.key, f"{option.key} = {show(value)} is not built yet; {option.remedy}"


def _model(config: Config, is_set: IsSet) -> Broken:
    dims = config.model.dims
    sizes = {
        name: size for name in dims.__struct_fields__ if type(size := getattr(dims, name)) is int
    }
    bounds = dict.fromkeys(sizes, _LARGEST_SIZE) | {"num_layers": _MOST_LAYERS}
    problems = [
        f"{n} is {sizes[n]}; it has to be at most {bounds[n]}"
        for n in sizes
        if sizes[n] > bounds[n]
    ]
    for text in problems or validate(dims):
        # To blame is the first field in the sentence that the author wrote, else the preset's name.
        fields = [word for word in re.findall(r"\w+", text) if word in dims.__struct_fields__]
        blamed = next((field for field in fields if is_set(f"model.{field}")), "name")
        yield (
            f"model.{blamed}",
            f"model.{text}" if text.split()[0] in fields else f"[model]: {text}",
        )


def _stages(config: Config) -> Broken:
    pp = config.pp
    if pp.schedule in V_SCHEDULES and pp.num_chunks != 2:
        yield (
            "pp.stages_per_rank",
            f"pp.stages_per_rank = {pp.num_chunks} does not fit pp.schedule = {show(pp.schedule)}, "
            "whose stages form a V; leave it out or use 2",
        )
    if pp.schedule not in V_SCHEDULES | LOOP_SCHEDULES and pp.num_chunks != 1:
        yield (
            "pp.stages_per_rank",
            f"pp.stages_per_rank = {pp.num_chunks} does not fit pp.schedule = {show(pp.schedule)}, "
            f"which has one stage per rank; use 1 or one of {_either(LOOP_SCHEDULES)}",
        )


def _cut(config: Config) -> Broken:
    pp, num_layers = config.pp, config.model.dims.num_layers
    layers = pp.layers_per_stage
    if layers is None:
        return
    key = "pp.layers_per_stage"
    if len(layers) != pp.num_stages:
        yield (
            key,
            f"{key} has {len(layers)} entries, pp.size {pp.size} x {pp.num_chunks} stages per rank "
            f"needs {pp.num_stages}; leave it out for a balanced cut",
        )
        return
    for stage, count in enumerate(layers):
        if count % 0.5:
            yield (
                key,
                f"{key} gives stage {stage} {count:g} layers; a stage has a multiple of 0.5, "
                f"such as {round(2 * count) / 2:g}",
            )
            return
    if sum(layers) != num_layers:
        rest = num_layers - sum(layers[:-1])
        remedy = (
            f"the last entry could be {rest:g}"
            if rest >= 0
            else f"the entries before the last are already {-rest:g} too many"
        )
        yield key, f"{key} sums to {sum(layers):g}, the model has {num_layers} layers; {remedy}"


def _warmup(config: Config) -> Broken:
    pp = config.pp
    key, step = "pp.warmup_step", config.pp.warmup_step
    if step is None:
        return
    if pp.schedule not in _WARMUP_SCHEDULES:
        yield (
            key,
            f"{key} = {show(step)} has no effect on pp.schedule = {show(pp.schedule)}; leave it out or "
            f"use {_either(_WARMUP_SCHEDULES)}",
        )
    if isinstance(step, tuple) and len(step) != pp.size:
        yield key, f"{key} has {len(step)} entries, pp.size {pp.size} needs one per rank"
    elif isinstance(step, tuple) and any(a < b for a, b in zip(step, step[1:], strict=False)):
        yield (
            key,
            f"{key} = {show(step)} rises from one rank to the next, which deadlocks; such as "
            f"{show(tuple(sorted(step, reverse=True)))} would work",
        )


def _split_backward(config: Config) -> Broken:
    pp = config.pp
    if pp.defer_weight_grads and pp.schedule not in _WHOLE_BACKWARD_SCHEDULES:
        yield (
            "pp.defer_weight_grads",
            f"pp.defer_weight_grads = true has no effect on pp.schedule = {show(pp.schedule)}, which "
            f"splits its backwards itself; leave it out or use {_either(_WHOLE_BACKWARD_SCHEDULES)}",
        )


def _experts(config: Config) -> Broken:
    ep, num_experts = config.parallel.ep, config.model.dims.num_experts
    if num_experts % ep:
        yield (
            "parallel.ep",
            f"parallel.ep = {ep} does not divide the model's {num_experts} experts; use a divisor of "
            f"{num_experts}",
        )


def _data(config: Config, is_set: IsSet) -> Broken:
    data = config.data
    if data.type == "tokens" and data.path is None:
        yield (
            "data.path",
            'data.path is missing, data.type = "tokens" needs the prefix of a token file; make one with '
            '"ppruntime data build --out PREFIX FILES", or use data.type = "stdlib"',
        )
    if data.type not in ("random", "counting"):
        return
    for name in ("path", "validation_share", "reset_positions", "ignore_tokens"):
        if is_set(f"data.{name}"):
            yield (
                f"data.{name}",
                f"data.{name} has no effect on data.type = {show(data.type)}, which makes its tokens up; "
                "leave it out",
            )


def _evaluation(config: Config, is_set: IsSet) -> Broken:
    train, data = config.train, config.data
    if train.eval_interval is None and is_set("train.eval_steps"):
        yield (
            "train.eval_steps",
            f"train.eval_steps = {train.eval_steps} has no effect without train.eval_interval; set both or "
            "neither",
        )
    if train.eval_interval is not None and data.validation_share == 0:
        yield (
            "train.eval_interval",
            f"train.eval_interval = {train.eval_interval} needs documents to evaluate on, and "
            "data.validation_share is 0; set it to a share such as 0.01",
        )


def _learning_rate(config: Config) -> Broken:
    optim, steps = config.optim, config.train.steps
    if optim.min_lr > optim.lr:
        yield (
            "optim.min_lr",
            f"optim.min_lr = {optim.min_lr:g} is above optim.lr = {optim.lr:g}; it is where the learning "
            "rate ends, at most optim.lr",
        )
    if optim.warmup_steps > steps:
        yield (
            "optim.warmup_steps",
            f"optim.warmup_steps = {optim.warmup_steps} is more than train.steps = {steps}; the learning "
            "rate would never reach optim.lr",
        )


def _routing(config: Config) -> Broken:
    train = config.train
    if train.force_balanced_routing and train.routing_bias_rate:
        yield (
            "train.routing_bias_rate",
            f"train.routing_bias_rate = {train.routing_bias_rate:g} has no effect with "
            "train.force_balanced_routing = true; leave one of them out",
        )


def _timeline(config: Config) -> Broken:
    step, steps = config.run.timeline_step, config.train.steps
    if step is not None and step >= steps:
        yield (
            "run.timeline_step",
            f"run.timeline_step = {step} is never reached, steps are numbered 0 to {steps - 1}; leave it "
            "out for the last one",
        )


def _paths(config: Config) -> Broken:
    for key, path in (
        ("run.dir", config.run.dir),
        ("data.path", config.data.path),
        ("pp.nccl_library", config.pp.nccl_library),
    ):
        if path is not None and not (path and path.isprintable()):
            yield (
                key,
                f"{key} = {show(path)} is not a path; it is empty or has unprintable characters",
            )


def _either(names: tuple[str, ...] | frozenset[str]) -> str:
    return " or ".join(show(name) for name in sorted(names))
