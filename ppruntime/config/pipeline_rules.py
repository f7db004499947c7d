"""What has to hold between the keys that cut, order, move and recompute a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ppruntime.config.errors import ConfigError, did_you_mean, show
from ppruntime.config.keys import (
    LOOP_SCHEDULES,
    PAIR_SCHEDULES,
    V_SCHEDULES,
    Config,
    Pipeline,
    RecomputeMode,
)
from ppruntime.config.rule import Broken, Rule, either
from ppruntime.models.save_points import (
    ALIASES,
    SAVE_NAMES,
    SavePoint,
    names_in,
    op_name,
    point_of,
)

_WARMUP_SCHEDULES = ("async_1f1b", "1f1b_w")
_ON_CPU = frozenset({"gloo", "shared_memory"})
_ON_GPUS = frozenset({"nccl", "copy_engine", "put"})
_WHOLE_BACKWARD_SCHEDULES = ("gpipe", "1f1b", "async_1f1b", "interleaved_1f1b")


def one_transport(config: Config) -> str:
    """`pp.transport` for what crosses one hop alone, such as calibrations and emulations. Raises
    ConfigError for a list."""
    if isinstance(config.pp.transport, str):
        return config.pp.transport
    raise ConfigError(
        f"pp.transport = {show(config.pp.transport)} names one for each hop, and what is measured"
        f" here crosses one; name one, such as {show(config.pp.transport[0])}"
    )


def _stages(config: Config) -> Iterator[Broken]:
    pp = config.pp
    does_not_fit = (
        f"pp.stages_per_rank = {pp.num_chunks} does not fit pp.schedule = {show(pp.schedule)}"
    )
    if pp.schedule in V_SCHEDULES and pp.num_chunks != 2:
        remedy = "whose stages form a V; leave it out or use 2"
        yield "pp.stages_per_rank", f"{does_not_fit}, {remedy}"
    if pp.schedule not in V_SCHEDULES | LOOP_SCHEDULES and pp.num_chunks != 1:
        remedy = f"which has one stage per rank; use 1, or {either(LOOP_SCHEDULES)}"
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
            f"out, or use {either(_WARMUP_SCHEDULES)}",
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
            f"{either(_WHOLE_BACKWARD_SCHEDULES)}",
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


def _transport(config: Config) -> Iterator[Broken]:
    pp, device = config.pp, config.run.device
    key, names, num_hops = "pp.transport", pp.transport_names, pp.num_stages - 1
    told = f"{key} = {show(pp.transport)}"
    if isinstance(pp.transport, tuple) and len(names) != num_hops:
        yield (
            key,
            f"{told} has {len(names)} entries, {pp.num_stages} stages have {num_hops} hops from one"
            " to the next; give one for each hop, or one name for all",
        )
        return
    # The turn of a V, and all hops of one rank, stay inside it whatever is named.
    inside = {pp.size - 1} if pp.schedule in V_SCHEDULES else set()
    leaving = [name for hop, name in enumerate(names) if hop not in inside or len(names) < num_hops]
    if pp.size > 1 and "local" in leaving:
        yield (
            key,
            f"{told} does not leave a rank, and pp.size = {pp.size}; use"
            f' {either(_ON_CPU) if device == "cpu" else either(_ON_GPUS)}, or "auto"',
        )
    misplaced = {"cpu": _ON_GPUS, "cuda": _ON_CPU}.get(device, frozenset()) & set(leaving)
    if pp.size > 1 and misplaced:
        there = _ON_CPU if device == "cpu" else _ON_GPUS
        yield (
            key,
            f"{told} does not move what lies where run.device = {show(device)} has it; use"
            f' {either(there)}, or "auto"',
        )
    # What auto takes shows when the ranks meet, and which library put finds is part of it.
    takers = {"transport_ctas": {"nccl"}, "recv_lead": {"nccl"}, "nccl_library": {"put", "auto"}}
    for name, kinds in takers.items():
        value = getattr(pp, name)
        if value is not None and not kinds & set(names):
            yield (
                f"pp.{name}",
                f"pp.{name} = {show(value)} has no effect on {told}; leave it out or use"
                f" {show(min(kinds - {'auto'}))}",
            )


def _overlapping_pairs(config: Config) -> Iterator[Broken]:
    pp = config.pp
    if pp.overlap_pairs and pp.schedule not in PAIR_SCHEDULES:
        yield (
            "pp.overlap_pairs",
            f"pp.overlap_pairs = true has no effect on pp.schedule = {show(pp.schedule)}, which has"
            f" no pairs; leave it out, or use {either(PAIR_SCHEDULES)}",
        )
    key, halves = "pp.pair_gemm_sms", pp.pair_gemm_sms
    if halves is not None and not pp.overlap_pairs:
        yield (
            key,
            f"{key} = {show(halves)} has no effect without pp.overlap_pairs = true; set both or"
            " neither",
        )
    elif halves is not None and config.run.device == "cpu":
        yield key, f'{key} = {show(halves)} has no effect on run.device = "cpu"; leave it out'


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


def _modes(config: Config, layer: int) -> tuple[RecomputeMode, RecomputeMode]:
    """Of attention and MoE."""
    # Read here, so that no mode is made up where one of the keys was refused.
    mode, others = config.ac.mode, config.ac.layer_modes
    found = (others or {}).get(str(layer), mode)
    return found if isinstance(found, tuple) else (found, found)


def _recompute_engram(config: Config) -> Iterator[Broken]:
    ac, layers = config.ac, config.model.dims.engram_layers
    if not ac.recompute_engram:
        return
    key = "ac.recompute_engram"
    if not layers:
        yield key, f"{key} = true has no effect: the model has no Engram; leave it out"
        return
    modes = {_modes(config, layer)[0] for layer in layers}
    if not modes & {"full", "full_moe"}:
        names = ", ".join(map(show, sorted(modes)))
        yield (
            key,
            f"{key} = true has no effect on layers whose mode is {names}; leave it out, or use "
            f'"full" or "full_moe" for one of the layers {", ".join(map(str, layers))}',
        )


def _saved_names(config: Config) -> Iterator[Broken]:
    key, ac, dims = "ac.save", config.ac, config.model.dims
    halves = [
        names_in(
            is_moe=is_moe,
            has_engram=layer in dims.engram_layers,
            has_mhc=dims.residual_type == "mhc",
        )
        for layer in range(dims.num_layers)
        for is_moe, mode in zip((False, True), _modes(config, layer), strict=True)
        if mode == "selective"
    ]
    there = frozenset[str]().union(*halves)
    names = ", ".join(show(point) for point in SavePoint if point in there)
    names = f"{names} and of the ops that `ppruntime keys {key}` lists"
    if ac.save is None:
        if halves:
            yield (
                "ac.mode" if ac.mode == "selective" else "ac.layer_modes",
                f'the mode "selective" keeps what {key} names, and {key} is not set; set it to a '
                f"list of some of {names}",
            )
        return
    if not halves:
        yield (
            key,
            f'{key} = {show(ac.save)} has no effect without the mode "selective"; leave it out, or '
            'set ac.mode = "selective"',
        )
        return
    if not ac.save:
        yield (
            key,
            f'{key} = [] names nothing; name some of {names}, or use ac.mode = "full_moe", which '
            "keeps nothing but Engram's rows",
        )
    for name in sorted(set(ac.save)):
        if name not in SAVE_NAMES and name not in ALIASES:
            hint = did_you_mean(name, (*SAVE_NAMES, *ALIASES))
            yield (
                key,
                f"{key} names {show(name)}, which is no group and no op that can be kept"
                f"{hint or ';'} name some of {names}",
            )
        elif op_name(name) not in there:
            yield (
                key,
                f'{key} names {show(name)}, which no half-layer in mode "selective" has; name some '
                f"of {names}",
            )
    yield from _named_twice(key, ac.save)


def _named_twice(key: str, names: tuple[str, ...]) -> Iterator[Broken]:
    """A name that comes again, by itself, by an op that stands for it, or with its group."""
    known = [name for name in names if name in SAVE_NAMES or name in ALIASES]
    for name in sorted(set(known)):
        if (number := known.count(name)) > 1:
            yield key, f"{key} names {show(name)} {number} times; name it once"
        elif op_name(name) != name and op_name(name) in known:
            yield key, f"{key} names {show(name)}, which is {show(op_name(name))}; name it once"
        elif name not in tuple(SavePoint) and (point := point_of(name)) in known:
            yield (
                key,
                f"{key} names {show(name)} and {show(point)}, which has it; name one of them",
            )


PIPELINE_RULES: tuple[Rule, ...] = (
    _stages,
    _cut,
    _warmup,
    _deferred_weight_grads,
    _activation_offload,
    _offload_masters,
    _transport,
    _overlapping_pairs,
    _layer_modes,
    _recompute_engram,
    _saved_names,
)
