"""Config -> what one rank needs to run its part of the pipeline.

Everything that can be wrong with a run is found here, on every rank alike, before a boundary moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppruntime import config as configuration
from ppruntime.activation_offload import ActivationOffload, ToFp8, ToHost
from ppruntime.boundaries import probe, warm_up
from ppruntime.config import Config
from ppruntime.connect import (
    compute_dtype,
    connect,
    kinds_note,
    make_executor,
    make_outline,
    transport_options,
)
from ppruntime.device_room import leave_room
from ppruntime.engram_tables import EngramLookups, engram_options, place_tables
from ppruntime.executor import Executor
from ppruntime.experts.dispatch import open_dispatchers
from ppruntime.experts.hosts import host_facts
from ppruntime.experts.options import BY_TORCH, ExpertChoice, choose_experts, moe_options
from ppruntime.gemm_budget import GemmBudget, with_gemm_budget
from ppruntime.host_memory import HostPool
from ppruntime.kernel_choice import choose_kernels
from ppruntime.lanes import Lanes, OneLane, open_lanes
from ppruntime.linear_options import (
    IN_COMPUTE_DTYPE,
    LinearChoice,
    choose_linears,
    use_linears,
)
from ppruntime.master_offload import MasterOffload
from ppruntime.models.attention_kernels import set_kernels
from ppruntime.models.dims import ModelDims, UnitSpec, unit_parameters, unit_specs
from ppruntime.models.dispatch import Dispatcher
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.head import head_loss
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels.attention_backends import attention_kernels
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.moe import HERE
from ppruntime.models.moe_kernels import moe_kernels
from ppruntime.models.parameters import Part
from ppruntime.models.residual import UsesResidual, residual
from ppruntime.models.units import HeadUnit, build_unit
from ppruntime.order import Order
from ppruntime.plan import StagePlan
from ppruntime.ranks import Ranks
from ppruntime.recompute import kept_points
from ppruntime.schedules.counts import BOTH_BACKWARDS, BackwardKinds, backward_kinds
from ppruntime.schedules.formats import digest
from ppruntime.schedules.forward_only import forward_only
from ppruntime.schedules.ops import Schedule
from ppruntime.stage import Stage
from ppruntime.transports.agree import Fact, agree
from ppruntime.transports.base import Boundary, Transport
from ppruntime.transports.ledger import describe
from ppruntime.wrap import (
    Sharding,
    hold_gradients,
    reduce_grads,
    release_gathered,
    wrap_units,
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One rank's part of a model in training.

    `units` are this rank's, in model order; `params` and `buffers` theirs by full name.
    `param_order` names the parameters of the whole model, in its order.
    """

    dims: ModelDims
    plan: tuple[StagePlan, ...]
    order: Order
    stages: Mapping[int, Stage]
    units: tuple[tuple[UnitSpec, nn.Module], ...]
    params: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    param_order: tuple[str, ...]
    split: frozenset[str]
    """Names of the parameters of which this rank has a part by expert parallelism."""
    on_host: frozenset[str]
    """Names of the parameters that lie in host memory."""
    notes: tuple[str, ...]
    """What was chosen where the config leaves the choice."""
    dispatchers: tuple[Dispatcher, ...]
    """What brings tokens to the experts of the stages here, each once."""
    transport: Transport
    host_pool: HostPool
    """Where activations and masters lie that are off the device; empty without any."""
    lanes: Lanes
    """Where the stages here compute."""
    slot_bytes: int
    """Receive buffers that this rank's channels were opened with."""
    training: Executor
    evaluation: Executor

    @property
    def pairs_overlap(self) -> bool:
        """Whether the halves of the order's pairs run at once."""
        return self.lanes.overlap and bool(self.order.pairs)

    @property
    def loss_rank(self) -> int:
        """The pp rank with the last stage."""
        return self.order.computations.stage_to_rank[-1]


def build_pipeline(config: Config, ranks: Ranks, *, draw_on_device: bool = False) -> Pipeline:
    """Plans, builds and initialises this rank's stages and opens its channels. A collective.
    `draw_on_device`: for benches, see `init_parameters`; runs draw alike on every device.

    Raises on every rank alike when ranks do not agree on the configuration, the order or a
    boundary.
    """
    config = with_gemm_budget(config, ranks.device)
    train, dims, outline = config.train, config.model.dims, make_outline(config)
    order, plan = outline.order, outline.plan
    shape = {"batch": train.micro_batch_size, "seq_len": train.seq_len}
    experts, linears = choose_experts(config), choose_linears(config)
    agree(
        ranks.world_store("build"),
        ranks.rank,
        range(ranks.layout.world),
        [
            *(Fact(key, str(value)) for key, value in configuration.flatten(config).items()),
            Fact("torch", torch.__version__),
            Fact("the experts' backend", str(experts.backend)),
            Fact("the dense linears' backend", str(linears.backend)),
            Fact("the order of work", digest(order.lowered)),
            Fact("attention's kernels", str(choose_kernels(config, ranks.device).choice)),
            *host_facts(config.moe.dispatch.type, ranks.expert_group_ranks),
        ],
        timeout_seconds=config.fault.init_timeout_seconds,
        what="the stages are built",
    )
    # Half: who waits for a rank that waits in there hears the reason before its own limit.
    own = [s for s in plan if s.rank == ranks.pp_rank]
    budget = GemmBudget(config, ranks.device)
    dispatchers = open_dispatchers(
        config,
        ranks,
        [s.index for s in own],
        timeout_seconds=config.pp.timeout_seconds / 2,
        gemm_sms=budget.sms,
    )
    lanes = open_lanes([s.index for s in own], ranks.device, overlap=config.pp.overlap_pairs)
    stages = {
        s.index: build_stage(
            config,
            s,
            ranks,
            experts=experts,
            dispatcher=dispatchers[s.index],
            linears=linears,
            gemm_sms=budget.sms,
            draw_on_device=draw_on_device,
        )
        for s in own
    }

    handed_on = {s.index: describe(b) for s, b in zip(plan, outline.boundaries, strict=False)}
    for index in handed_on.keys() & stages.keys():
        made = probe(stages[index], outline.received(index), device=ranks.device, **shape)
        handed_on[index] = describe(made)
        release_gathered(list(stages[index].units))
    agree(
        ranks.world_store("boundaries"),
        ranks.rank,
        range(ranks.layout.world),
        [Fact(f"what stage {index} hands on", text) for index, text in handed_on.items()],
        timeout_seconds=config.fault.init_timeout_seconds,
        what="the first transfer",
    )

    evaluation = forward_only(order.computations)
    if ranks.device.type == "cuda":
        for index, stage in stages.items():
            received = outline.received(index)
            backwards = backward_kinds(order.computations, index)
            warm_up_stage(
                stage, received, ranks, backwards=backwards, lanes=lanes, budget=budget, **shape
            )
    kind_of: dict[int, str] = {}
    transport = connect(
        outline,
        ranks,
        [order.lowered, evaluation],
        kind=config.pp.transport,
        timeout_seconds=config.pp.timeout_seconds,
        options=transport_options(config),
        tell_kinds=kind_of.update,
    )

    host_pool = HostPool(ranks.device)
    offload = _activation_offload(config, stages, ranks.device, host_pool)
    masters = None
    if config.pp.offload_masters:
        units_of = {index: stage.units for index, stage in stages.items()}
        masters = MasterOffload(units_of, ranks.device, host_pool)

    leave_room(ranks.device)
    units_of_stage = {index: stage.units for index, stage in stages.items()}
    lookups = EngramLookups(units_of_stage, ahead=config.engram.lookups_ahead)

    def executor(schedule: Schedule, *, training: bool) -> Executor:
        return make_executor(
            outline,
            schedule,
            ranks,
            stages,
            transport,
            training=training,
            offload=offload if training else None,
            masters=masters if training else None,
            lookups=lookups,
            lanes=lanes,
            budget=budget,
        )

    units = tuple(
        (spec, unit)
        for index in sorted(stages)
        for spec, unit in zip(plan[index].units, stages[index].units, strict=True)
    )
    return Pipeline(
        dims=dims,
        plan=plan,
        order=order,
        stages=stages,
        units=units,
        params={f"{s.name}.{n}": p for s, u in units for n, p in u.named_parameters()},
        buffers={f"{s.name}.{n}": b for s, u in units for n, b in u.named_buffers()},
        param_order=tuple(
            f"{spec.name}.{p.name}"
            for spec in unit_specs(dims)
            for p in unit_parameters(dims, spec)
        ),
        split=frozenset(
            f"{spec.name}.{p.name}"
            for spec, _ in units
            for p in unit_parameters(dims, spec)
            if p.part is Part.EXPERTS and ranks.layout.ep > 1
        ),
        on_host=frozenset(
            f"{spec.name}.{p.name}"
            for spec, _ in units
            for p in unit_parameters(dims, spec)
            if p.part is Part.ENGRAM_TABLE and config.engram.tables == "host"
        ),
        notes=(
            *(
                choice.note
                for choice in (experts, linears, choose_kernels(config, ranks.device))
                if choice.note
            ),
            *_lane_notes(config, lanes),
            *filter(None, [kinds_note(config, outline.channels, kind_of)]),
        ),
        dispatchers=tuple(dict.fromkeys(dispatchers.values())),
        transport=transport,
        host_pool=host_pool,
        lanes=lanes,
        slot_bytes=sum(
            channel.slots * channel.boundary.slot_bytes
            for channel in outline.channels
            if channel.dst_rank == ranks.pp_rank != channel.src_rank
        ),
        training=executor(order.lowered, training=True),
        evaluation=executor(evaluation, training=False),
    )


def _lane_notes(config: Config, lanes: Lanes) -> list[str]:
    if not config.pp.overlap_pairs or lanes.overlap:
        return []
    return ["pp.overlap_pairs = true: without a GPU the halves of a pair run one after the other"]


def _activation_offload(
    config: Config, stages: Mapping[int, Stage], device: torch.device, host_pool: HostPool
) -> ActivationOffload | None:
    """Where this rank's activations go between forward and backward; None: they stay."""
    pp = config.pp
    if not pp.activation_offload:
        return None
    standing = {index: stage.standing_tensors for index, stage in stages.items()}
    if pp.offload_target == "fp8":
        return ActivationOffload(ToFp8(compute_dtype(config)), standing)
    return ActivationOffload(ToHost(device, host_pool), standing)


def warm_up_stage(
    stage: Stage,
    received: Boundary | None,
    ranks: Ranks,
    *,
    batch: int,
    seq_len: int,
    backwards: BackwardKinds = BOTH_BACKWARDS,
    lanes: Lanes | None = None,
    budget: GemmBudget | None = None,
) -> None:
    """Loads every kernel that a step of the stage needs, see `boundaries.warm_up`; nothing stays.
    With the stage's lane, in whose memory a step will be; and with each budget of its pairs, as
    kernels differ by it."""
    units = list(stage.units)
    lanes = lanes or OneLane()
    for half in budget.halves if budget is not None else (None,):
        hold_gradients(units)
        with lanes.step():
            lanes.enter(stage.index, ())
            if budget is not None:
                budget.use(half)
            warm_up(
                stage,
                received,
                backwards=backwards,
                batch=batch,
                seq_len=seq_len,
                device=ranks.device,
            )
            stage.flush_weight_grads()
            for unit in units:  # one by one: with updates in the backward no step needs more
                reduce_grads([unit], ranks.data_group)
                unit.zero_grad(set_to_none=True)
    if budget is not None:
        budget.use(None)


def build_stage(
    config: Config,
    plan: StagePlan,
    ranks: Ranks,
    *,
    experts: ExpertChoice = BY_TORCH,
    dispatcher: Dispatcher = HERE.dispatcher,
    linears: LinearChoice = IN_COMPUTE_DTYPE,
    draw_on_device: bool = False,
    gemm_sms: GemmSms | None = None,
) -> Stage:
    """One stage of this rank: its units, initialised, wrapped, with one queue for the weight
    gradients that can wait. Only these units' memory is ever allocated. Of the experts this rank
    has those that `dispatcher` says. `draw_on_device`: see `init_parameters`; `gemm_sms`: the
    budget of its products, None: the config's, for good.

    Masters are fp32: in bf16 the wrapping casts them once a step, see `wrap.shard_unit`.
    """
    dims, dtype = config.model.dims, compute_dtype(config)
    kernels = attention_kernels(choose_kernels(config, ranks.device).choice)
    names = config.kernels.swiglu, config.kernels.router
    around = moe_kernels(*names, ranks.device, dtype)
    moe = moe_options(config, plan.index, experts, dispatcher, around, gemm_sms=gemm_sms)
    engram = engram_options(config, ranks)
    units = []
    for spec in plan.units:
        unit = build_unit(
            dims, spec, moe=moe, engram=engram, device=ranks.device, dtype=torch.float32
        )
        init_parameters(unit, spec.name, config.train.seed, draw_on_device=draw_on_device)
        if isinstance(unit, HeadUnit):
            unit.loss_of = head_loss(config.kernels.head, ranks.device)
        if isinstance(unit, UsesResidual):
            unit.residual = residual(config.kernels.mhc, ranks.device, dims.residual_type)
        set_kernels(unit, kernels)
        use_linears(unit, linears, config, gemm_sms)
        units.append(unit)
    place_tables(config, ranks, units)
    expert_mesh = ranks.expert_mesh if ranks.layout.ep > 1 else None
    sharded = dtype is not torch.float32 or ranks.layout.num_data_ranks > 1
    wrap_units(
        units,
        recompute=[kept_points(config, spec) for spec in plan.units],
        sharding=Sharding(ranks.data_mesh, dtype, expert_mesh) if sharded else None,
        fp32_names=[
            frozenset(p.name for p in unit_parameters(dims, spec) if p.fp32) for spec in plan.units
        ],
        compile_units=config.kernels.compile,
    )
    queue = WeightGradQueue()
    for unit in units:
        set_queue(unit, queue)
    return Stage(
        plan.index,
        units,
        inputs=plan.inputs,
        outputs=plan.outputs,
        queue=queue,
        backward_here=config.run.backward_thread == "rank",
    )
