"""Bytes that a stage keeps on one rank, by what they are. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ppruntime.config.keys import Config
from ppruntime.kernel_forms import (
    attention_kernels,
    expert_form,
    has_fp8_linears,
    head_kernel,
    kernel,
)
from ppruntime.models.activation_bytes import (
    Kept,
    PutOff,
    backward_workspace,
    kept_fields,
    kept_results,
    put_off_operands,
    saved_bytes,
)
from ppruntime.models.dims import (
    DTYPE_BYTES,
    ModelDims,
    UnitKind,
    UnitSpec,
    carry_shape,
    unit_parameters,
    unit_specs,
)
from ppruntime.models.fp8_expert_rules import copy_bytes, waiting_bytes
from ppruntime.models.fp8_linear_rules import fp8_linears
from ppruntime.models.head_bytes import HeadWorkspace, head_workspace
from ppruntime.models.kernel_limits import AttentionOp
from ppruntime.models.parameters import ParameterSpec, Part
from ppruntime.models.update_rules import update_rule
from ppruntime.plan import StagePlan
from ppruntime.recompute import kept_points

_FP32 = 4
_BF16 = 2
_ROW_NUMBER = 4
_DIFFERENTIABLE = ("streams", "mix", "kv", "trained_index_keys")
"""Carry fields whose gradient is sent back; the same as `carry.DIFFERENTIABLE`."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a stage holds on one rank through a step, activations apart."""

    weights: int
    """What the units multiply with: in the compute dtype, the few fp32 ones in fp32; FP8 copies
    besides."""
    gradients: int
    """fp32 sums over the step's micro-batches, and what FP8 experts hold of micro-batches whose
    weight gradients wait for a later one's."""
    optimizer: int
    """Moments (AdamW's two, the one of Muon and its tables, SignSGD has none), and fp32 masters
    where the weights are not the masters themselves."""
    copies: int
    """Of `weights`, what is in FP8: of linears both ways, of experts as [moe.compute] says."""


def state_bytes(config: Config, stage: StagePlan) -> StateBytes:
    """State of one stage on the data rank with the most: shards are whole rows, the first are full.

    Experts lie over ep ranks, their masters and moments over dp; those of all else over dp x ep.
    Engram tables are cut by rows over all data ranks and never gathered: fp32, their own masters.
    Those in host memory are not counted.
    """
    dims, compute = config.model.dims, config.moe.compute
    gradients = waiting_gradient_bytes(config, stage)
    weights = optimizer = copies = 0
    for spec in stage.units:
        in_fp8 = fp8_linears(spec) if config.kernels.linear != "reference" else ()
        for parameter, held in zip(
            unit_parameters(dims, spec), holdings(config, stage, spec), strict=True
        ):
            weights += held.weights
            gradients += held.sums
            optimizer += held.masters + held.moments
            here, _ = _shares(config, parameter)
            if parameter.name.removesuffix(".weight") in in_fp8:
                copies += 2 * here
            if parameter.part is Part.EXPERTS and compute.backend != "torch":
                copies += copy_bytes(here, turned=not compute.turns_on_demand(stage.index))
    return StateBytes(weights + copies, gradients, optimizer, copies)


@dataclass(frozen=True, slots=True)
class Holding:
    """One parameter on one rank through a step, in bytes of the device."""

    part: Part
    is_sharded: bool
    """Whether its master is a shard apart from what the unit multiplies with."""
    weights: int
    sums: int
    """Of gradients, over the step's micro-batches."""
    masters: int
    """0 where the weights are the masters."""
    moments: int
    sharded_sums: int
    """What is left of `sums` once they are reduced."""
    whole_shards: int
    """Of `sums`, as a reduction wants them: shards of one size, one for each rank."""


def holdings(config: Config, stage: StagePlan, spec: UnitSpec) -> tuple[Holding, ...]:
    """The unit's parameters, which is one of the stage's, in `unit_parameters`' order."""
    parameters = unit_parameters(config.model.dims, spec)
    return tuple(_holding(config, stage, parameter) for parameter in parameters)


def _holding(config: Config, stage: StagePlan, parameter: ParameterSpec) -> Holding:
    here, shard = _shares(config, parameter)
    moments, compute = _num_moments(config, parameter), config.moe.compute
    if parameter.part is Part.ENGRAM_TABLE:
        rows = here * _FP32 if config.engram.tables == "device" else 0
        return Holding(parameter.part, False, rows, rows, 0, rows * moments, rows, 0)
    wide, layout = config.train.precision == "fp32", config.parallel
    # What stays fp32 in a bf16 model is not sharded: FSDP casts all that it gathers.
    sharded = layout.num_data_ranks > 1 if wide else not parameter.fp32
    weights = here * (_FP32 if wide or parameter.fp32 else _BF16)
    is_expert = parameter.part is Part.EXPERTS
    if is_expert and compute.backend != "torch" and compute.frees_weights(stage.index) and not wide:
        weights = 0
    own = shard if sharded else here
    num_shards = layout.dp if is_expert else layout.num_data_ranks
    learns = not parameter.frozen
    return Holding(
        part=parameter.part,
        is_sharded=sharded,
        weights=weights,
        sums=here * _FP32 * learns,
        masters=shard * _FP32 * sharded,
        moments=own * _FP32 * moments * learns,
        sharded_sums=own * _FP32 * learns,
        whole_shards=shard * num_shards * _FP32 * learns if sharded else 0,
    )


def waiting_gradient_bytes(config: Config, stage: StagePlan) -> int:
    """What FP8 experts of the stage hold of micro-batches whose weight gradients wait for a later
    one's."""
    compute = config.moe.compute
    if compute.backend == "torch":
        return 0
    num_waiting = compute.num_fused(stage.index) - 1
    blocks = sum(spec.kind is UnitKind.MOE for spec in stage.units)
    return blocks * num_waiting * _waiting_bytes(config)


def _waiting_bytes(config: Config) -> int:
    """What FP8 experts of one layer hold of a micro-batch whose weight gradients wait."""
    dims, train, ep = config.model.dims, config.train, config.parallel.ep
    tokens, per_token = train.micro_batch_size * train.seq_len, dims.experts_per_token
    # From other ranks a row comes once per expert.
    rows = (tokens, per_token) if ep == 1 else (tokens * per_token, 1)
    return waiting_bytes(*rows, _ceil(dims.num_experts, ep), dims.hidden_size, dims.expert_width)


def sharded_master_bytes(config: Config, stage: StagePlan) -> int:
    """fp32 masters of the stage on one rank that are apart from its weights."""
    wide = config.train.precision == "fp32"
    if wide and config.parallel.num_data_ranks == 1:
        return 0
    return sum(
        _shares(config, parameter)[1] * _FP32
        for spec in stage.units
        for parameter in unit_parameters(config.model.dims, spec)
        if parameter.part is not Part.ENGRAM_TABLE and (wide or not parameter.fp32)
    )


def table_bytes(config: Config, stage: StagePlan) -> int:
    """The stage's rows of Engram tables on one rank, wherever they lie."""
    return sum(
        _shares(config, parameter)[0] * _FP32
        for spec in stage.units
        for parameter in unit_parameters(config.model.dims, spec)
        if parameter.part is Part.ENGRAM_TABLE
    )


def host_table_bytes(config: Config, stage: StagePlan) -> int:
    """Host memory for the stage's Engram tables: rows, gradients, moments; 0 unless they are
    there."""
    if config.engram.tables == "device":
        return 0
    return sum(
        (2 + _num_moments(config, parameter)) * _shares(config, parameter)[0] * _FP32
        for spec in stage.units
        for parameter in unit_parameters(config.model.dims, spec)
        if parameter.part is Part.ENGRAM_TABLE
    )


def lookup_bytes(config: Config, stage: StagePlan) -> int:
    """The most that Engram's lookups of a step take up on one rank: the row numbers of all its
    micro-batches, what it asks for and what it is asked for, and the rows that came early. A row
    that several tokens read is there once, so that it is less."""
    train, dims = config.train, config.model.dims
    num_engrams = sum(spec.engram_parameters > 0 for spec in stage.units)
    columns = (dims.engram_max_order - 1) * dims.engram_heads
    rows = num_engrams * train.micro_batch_size * train.seq_len * columns
    row = dims.engram_head_dim * DTYPE_BYTES[compute_dtype_name(config)]
    return rows * (2 * _ROW_NUMBER * train.num_micro_batches + config.engram.lookups_ahead * row)


def activation_bytes(config: Config, stage: StagePlan) -> int:
    """Bytes that the stage keeps of one micro-batch from its forward to its backward: what autograd
    saves and, between its units, the carry, each piece of memory once.

    Parameters, tokens and the few kB of expert loads are not counted, nor what was received: that
    lies in its receive buffer until then. Recomputed halves keep the carry that they get, and the
    results that their mode names (`recompute`).
    """
    total = 0
    makers: dict[str, UnitSpec] = {}  # of the live fields that this stage made
    held: set[tuple[UnitSpec, str]] = set()
    for spec in stage.units:
        if (points := kept_points(config, spec)) is not None:
            held |= {(maker, name) for name, maker in makers.items()}
            results = _kept(config, spec, points)
            held |= {(spec, name) for name in results.fields}
            total += results.num_bytes
            kept: frozenset[str] = frozenset()
        else:
            total += _saved_bytes(config, spec)
            kept = kept_fields(*_case(config, spec), engram=kernel(config, "engram"))
        held |= {(makers[name], name) for name in kept & spec.reads & makers.keys()}
        made = {name: spec for name in spec.live_after if name in spec.writes}
        held |= {(spec, name) for name in (kept & made.keys()) - spec.reads}
        makers = {name: m for name, m in makers.items() if name in spec.live_after} | made
    return total + sum(_field_bytes(config, maker, name) for maker, name in held)


def recompute_bytes(config: Config, stage: StagePlan) -> int:
    """Bytes that autograd saves when the backward computes a half-layer again, beside what is kept
    of it: the largest one's, since they go one by one. 0 where nothing is recomputed."""
    return max(
        (
            _saved_bytes(config, spec) - _kept(config, spec, points).saved_again
            for spec in stage.units
            if (points := kept_points(config, spec)) is not None
        ),
        default=0,
    )


@dataclass(frozen=True, slots=True)
class BackwardPeak:
    """Where a backward of a stage holds the most, in bytes. It goes unit by unit: behind it
    activations are freed and sums made, ahead of it activations wait."""

    freed: int = 0
    """Of the micro-batch's activations; below 0 where more was made for put-off weight gradients
    than is gone."""
    recompute: int = 0
    """Made again by the unit that is computed."""
    workspace: int = 0
    """What that unit's backward makes and frees again."""
    head: int = 0
    """The same of the head's loss."""
    sums_to_come: int = 0
    """Of gradients, in the stage's first backward: there are none yet ahead of it."""

    @property
    def more(self) -> int:
        """Beside all activations and sums."""
        made = self.recompute + self.workspace + self.head
        return made - self.freed - self.sums_to_come


def backward_peak(
    config: Config, stage: StagePlan, *, is_first: bool = False, frees: bool = True
) -> BackwardPeak:
    """The first of the moments with the most, of the stage's first backward or of a later one.
    Unless it `frees`, what put-off weight gradients read stays, or all activations where that is
    not known.

    In a first backward a unit counts twice: with its sums, and before it makes most of them, with
    its workspace.
    """
    kept, moments = activation_bytes(config, stage), []
    put_off = None if frees else _put_off_bytes(config, stage)
    to_come = sum(held.sums for spec in stage.units for held in holdings(config, stage, spec))
    for i, spec in reversed([*enumerate(stage.units)]):
        up_to_here = replace(stage, units=stage.units[: i + 1])
        alone, freed = replace(stage, units=(spec,)), 0
        if frees or put_off is not None:
            freed = kept - activation_bytes(config, up_to_here) - sum((put_off or ())[i + 1 :])
        again = recompute_bytes(config, alone)
        work = _workspace_bytes(config, spec, puts_off=not frees)
        head = head_bytes(config, alone)
        later = to_come - _output_sums(config, stage, spec)
        to_come -= sum(held.sums for held in holdings(config, stage, spec))
        if is_first:
            moments += [BackwardPeak(freed, again, work, 0, later)] if work else []
            moments.append(BackwardPeak(freed, again, 0, head.first_backward, to_come))
        else:
            loss = head.backward if frees else head.input_grad
            moments.append(BackwardPeak(freed, again, work, loss))
    return max(moments, key=lambda moment: moment.more, default=BackwardPeak())


def lighter_bytes(config: Config, stage: StagePlan) -> int:
    """By how much lighter a micro-batch is between an input gradient and its put-off weight
    gradients than before: below 0 where a recompute made more for them than was kept. 0 where what
    they read is not known."""
    put_off = _put_off_bytes(config, stage)
    return 0 if put_off is None else activation_bytes(config, stage) - sum(put_off)


def put_off_sums(config: Config, stage: StagePlan) -> int:
    """Gradient sums that an input gradient does not make, but the put-off weight gradients: those
    of linear layers. 0 where `lighter_bytes` does not know either."""
    if _put_off_bytes(config, stage) is None:
        return 0
    of_linears = (
        held.sums
        for spec in stage.units
        for parameter, held in zip(
            unit_parameters(config.model.dims, spec), holdings(config, stage, spec), strict=True
        )
        if len(parameter.shape) > 1 and parameter.name.endswith(".weight")
        if spec.kind is not UnitKind.EMBED
    )
    return sum(of_linears)


def _put_off_bytes(config: Config, stage: StagePlan) -> list[int] | None:
    """What put-off weight gradients of each unit read, beside what was received; None where it is
    not known of all."""
    found = []
    for i, spec in enumerate(stage.units):
        operands = _operands(config, spec)
        if operands is None:
            return None
        streams = _field_bytes(config, stage.units[i - 1], "streams") if i else 0
        found.append(operands.num_bytes + operands.reads_streams * streams)
    return found


def put_off_bytes(config: Config, spec: UnitSpec) -> int:
    """What put-off weight gradients of a unit read that does not begin its stage; 0 where it is not
    known."""
    operands = _operands(config, spec)
    if operands is None:
        return 0
    embedding = unit_specs(config.model.dims)[0]
    return operands.num_bytes + operands.reads_streams * _field_bytes(config, embedding, "streams")


def _operands(config: Config, spec: UnitSpec) -> PutOff | None:
    return put_off_operands(
        *_case(config, spec),
        head=head_kernel(config),
        mhc=kernel(config, "mhc"),
        wide_products=AttentionOp.COMPRESSOR in attention_kernels(config),
        router=kernel(config, "router"),
        fp8_linears=has_fp8_linears(config),
        experts=expert_form(config),
    )


def _output_sums(config: Config, stage: StagePlan, spec: UnitSpec) -> int:
    """Gradient sums that the unit's backward makes before that of sparse attention."""
    parameters = unit_parameters(config.model.dims, spec)
    held = zip(parameters, holdings(config, stage, spec), strict=True)
    return sum(h.sums for p, h in held if p.name.startswith("attention.o_"))


def workspace_bytes(config: Config, stage: StagePlan) -> int:
    """What the backward of one unit of the stage makes and frees again, at the most; the head's
    loss apart."""
    return max((_workspace_bytes(config, spec) for spec in stage.units), default=0)


def _workspace_bytes(config: Config, spec: UnitSpec, *, puts_off: bool = False) -> int:
    return backward_workspace(
        *_case(config, spec),
        attention_kernel=AttentionOp.ATTENTION in attention_kernels(config),
        fp8_linears=has_fp8_linears(config),
        experts=expert_form(config),
        puts_off=puts_off,
    )


def head_bytes(config: Config, stage: StagePlan) -> HeadWorkspace:
    """What the loss allocates for a micro-batch beside what it keeps, on a GPU, which widens no
    operands of bf16 products as a CPU does; nothing without the head."""
    if not any(spec.kind is UnitKind.HEAD for spec in stage.units):
        return HeadWorkspace()
    return head_workspace(
        config.model.dims,
        config.train.micro_batch_size * config.train.seq_len,
        compute_dtype_name(config),
        head_kernel(config),
    )


def gradient_bytes(config: Config, after: UnitSpec) -> int:
    """Bytes of one micro-batch that come back where a stage ends with the unit `after`."""
    crossing = [name for name in after.live_after if name in _DIFFERENTIABLE]
    return sum(_field_bytes(config, after, name) for name in crossing)


def compute_dtype_name(config: Config) -> str:
    """The type of activations, by torch's name."""
    return "float32" if config.train.precision == "fp32" else "bfloat16"


def _num_moments(config: Config, parameter: ParameterSpec) -> int:
    """fp32 tensors of a parameter's shape that the optimizer keeps of it."""
    match config.optim.type:
        case "adamw":
            return 2
        case "sign_sgd":
            return 0
        case "muon":
            return update_rule(config.model.dims, parameter).num_moments


def _shares(config: Config, parameter: ParameterSpec) -> tuple[int, int]:
    """Elements of a parameter that a rank computes with, and those that it is the master of."""
    dp, ep = config.parallel.dp, config.parallel.ep
    rows, per_row = parameter.shape[0], prod(parameter.shape[1:])
    shards = dp * ep
    if parameter.part is Part.EXPERTS:
        rows, shards = _ceil(rows, ep), dp
    elif parameter.part is Part.ENGRAM_TABLE:
        rows, shards = _ceil(rows, dp * ep), 1
    return rows * per_row, _ceil(rows, shards) * per_row


def _ceil(number: int, parts: int) -> int:
    return -(-number // parts)


def _kept(config: Config, spec: UnitSpec, points: frozenset[str]) -> Kept:
    dims, _, batch, seq_len, dtype = _case(config, spec)
    kernels = attention_kernels(config)
    return kept_results(
        dims,
        spec,
        points,
        batch,
        seq_len,
        dtype,
        kernels=kernels,
        mhc=kernel(config, "mhc"),
        engram=kernel(config, "engram"),
        router=kernel(config, "router"),
        fp8_linears=has_fp8_linears(config),
        experts=expert_form(config),
    )


def _saved_bytes(config: Config, spec: UnitSpec) -> int:
    return saved_bytes(
        *_case(config, spec),
        head=head_kernel(config),
        mhc=kernel(config, "mhc"),
        engram=kernel(config, "engram"),
        attention_kernel=AttentionOp.ATTENTION in attention_kernels(config),
        wide_products=AttentionOp.COMPRESSOR in attention_kernels(config),
        router=kernel(config, "router"),
        fp8_linears=has_fp8_linears(config),
        experts=expert_form(config),
    )


def _case(config: Config, spec: UnitSpec) -> tuple[ModelDims, UnitSpec, int, int, str]:
    train = config.train
    dtype = compute_dtype_name(config)
    return config.model.dims, spec, train.micro_batch_size, train.seq_len, dtype


def _field_bytes(config: Config, maker: UnitSpec, name: str) -> int:
    """Bytes of a carry field as it leaves the unit `maker`."""
    dims, spec, batch, seq_len, dtype = _case(config, maker)
    shape, field_dtype = carry_shape(dims, name, batch, seq_len, after=spec, dtype=dtype)
    return prod(shape) * DTYPE_BYTES[field_dtype]
