"""What a run will look like, before anything starts. `plan_text`, `plan_json`.

Weights are never allocated, no process group is made and torch is not loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ppruntime.config.keys import Config, RecomputeMode
from ppruntime.experts.arena_bytes import arena_bytes
from ppruntime.master_moments import master_moments
from ppruntime.memory import (
    activation_bytes,
    compute_dtype_name,
    gradient_bytes,
    head_bytes,
    host_table_bytes,
    lighter_bytes,
    lookup_bytes,
    recompute_bytes,
    state_bytes,
    workspace_bytes,
)
from ppruntime.models.dims import boundary_bytes, counts, forward_flops_per_token, unit_specs
from ppruntime.models.fp8_linear_rules import fp8_linears
from ppruntime.offload_plan import host_bytes, leaving_bytes, master_bytes, offload_text
from ppruntime.order import Order, make_order
from ppruntime.plan import StagePlan, cut, train_flops_per_token
from ppruntime.recompute import repeated_flops
from ppruntime.reduction_bytes import reduction_peak
from ppruntime.schedules.costs import Costs
from ppruntime.schedules.counts import Edge, num_transfers
from ppruntime.schedules.ops import Kind, Op
from ppruntime.schedules.timeline import simulate
from ppruntime.text_table import short, short_bytes, text_table


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage. Bytes are those of the data rank with the most."""

    stage: int
    rank: int
    layers: float
    units: tuple[str, ...]
    parameters: int
    """Backbone and Engram parameters of the stage, over all its expert ranks."""
    train_flops_per_token: float
    """Attention included; what the cut balances."""
    share_of_slowest: float
    """Of the stage with the most training FLOPs, 0 to 1."""
    boundary_bytes: int
    """Forward, outgoing, per micro-batch; 0 on the last stage."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Masters and both moments; masters that are away at the peak are not in it."""
    activation_bytes: int
    """Of all micro-batches in flight at the stage's peak, beside what lies in receive buffers."""
    recompute_bytes: int
    """What the backward of the largest recomputed half-layer makes anew."""
    workspace_bytes: int
    """Gradients inside the half-layer of a backward that makes the most of them, and what the
    reference's sparse attention takes; other operations' are not known."""
    head_bytes: int
    """What the head's loss allocates: logits and their gradients; before or after a recompute."""
    slot_bytes: int
    """Buffers of hops to and from other ranks, and for Engram rows."""
    host_bytes: int
    """Host memory for what is offloaded and for Engram tables there; no part of the total."""
    in_flight: int
    """Micro-batches of this stage that are in flight at the most, offloaded ones included."""
    held_bytes: int
    """What one micro-batch in flight keeps there, beside receive buffers."""
    leaving_bytes: int
    """By how much an offloaded one is lighter."""
    lighter_bytes: int
    """By how much one is lighter between I and W; below 0 where a recompute makes it heavier."""
    update_bytes: int
    """All that is there while gradients are reduced, with the buffer for that."""

    @property
    def total_bytes(self) -> int:
        """The most, in the order's ops or behind them."""
        ops = (
            self.weight_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + max(self.recompute_bytes + self.workspace_bytes, self.head_bytes)
            + self.slot_bytes
        )
        return max(ops, self.update_bytes)


@dataclass(frozen=True, slots=True)
class RankReport:
    """One pipeline rank: its stages' bytes, added up."""

    rank: int
    stages: tuple[int, ...]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """At the moment when the rank holds the most; its stages' peaks may come at other moments."""
    recompute_bytes: int
    """The largest of its stages': one backward runs at a time."""
    workspace_bytes: int
    """As of a stage, and the largest of them."""
    head_bytes: int
    """Of the head's loss."""
    slot_bytes: int
    """Its stages', and the arenas of dispatcher mega_moe."""
    update_bytes: int
    """All that is there while gradients are reduced, with the buffer for that."""
    total_bytes: int
    """The most, in the order's ops or behind them."""
    host_bytes: int
    """Host memory for what is offloaded and for Engram tables there; no part of the total."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The whole run. `parameters` is the backbone; Engram's are apart."""

    model: str
    schedule: str
    parameters: int
    engram_parameters: int
    active_matmul_parameters: int
    flops_per_token: int
    """6 x active matmul parameters."""
    world_size: int
    tokens_per_step: int
    bubble_fraction: float
    """Idle share of the busiest rank's step if op times are as FLOPs and transfers are free."""
    transfers_per_step: int
    offload: str | None
    """What is offloaded and what it costs, for people; None without offload."""
    stages: tuple[StageReport, ...]
    ranks: tuple[RankReport, ...]


def report(config: Config) -> PlanReport:
    """Plans the run. Pure."""
    order, train, dims = make_order(config), config.train, config.model.dims
    stage_to_rank = order.computations.stage_to_rank
    plan = cut(dims, stage_to_rank, config.pp.layers_per_stage, seq_len=train.seq_len)
    per_micro_batch = [_held_bytes(config, plan, stage) for stage in plan]
    stages = _stages(config, order, plan, per_micro_batch)
    timeline = simulate(order.computations, flop_costs(config, plan))
    totals = counts(dims)
    return PlanReport(
        model=config.model.name,
        schedule=order.computations.name,
        parameters=totals.parameters,
        engram_parameters=totals.engram_parameters,
        active_matmul_parameters=totals.active_matmul_parameters,
        flops_per_token=totals.flops_per_token,
        world_size=config.world_size,
        tokens_per_step=config.global_batch_size * train.seq_len,
        bubble_fraction=timeline.bubble_fraction,
        transfers_per_step=num_transfers(order.computations),
        offload=offload_text(config, order, plan),
        stages=stages,
        ranks=tuple(
            _rank(config, order, [s for s in plan if s.rank == rank], stages, per_micro_batch)
            for rank in range(order.computations.num_ranks)
        ),
    )


def plan_json(config: Config) -> str:
    """The report as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(report(config))).decode()


def plan_text(config: Config) -> str:
    """The report for people: what is trained, a row a stage, and a row a rank where ranks have
    several stages."""
    plan = report(config)
    headings = ("stage", "rank", "layers", "units", "params", "GFLOP/tok", "load", "sends")
    rows = [
        (
            str(s.stage),
            str(s.rank),
            f"{s.layers:g}",
            _span(s.units),
            short(s.parameters),
            f"{s.train_flops_per_token / 1e9:#.4g}",
            f"{s.share_of_slowest:.0%}",
            short_bytes(s.boundary_bytes),
            *_byte_cells(s),
        )
        for s in plan.stages
    ]
    lines = [*_header(config, plan)]
    if plan.offload is not None:
        host = max(rank.host_bytes for rank in plan.ranks)
        lines.append(f"{plan.offload}; host memory of a rank: up to {short_bytes(host)}")
    elif host := max(rank.host_bytes for rank in plan.ranks):
        lines.append(f"Engram tables: up to {short_bytes(host)} of a rank's host memory")
    lines += _turns(config)
    lines += ["", *text_table((*headings, *_BYTES), rows, left="units")]
    if len(plan.ranks) < len(plan.stages):
        per_rank = [
            (str(r.rank), ", ".join(map(str, r.stages)), *_byte_cells(r)) for r in plan.ranks
        ]
        lines += ["", *text_table(("rank", "stages", *_BYTES), per_rank, left="stages")]
    return "\n".join([*lines, "", *_LEGEND])


def _turns(config: Config) -> Iterator[str]:
    """What weight gradients that are added for several micro-batches at once do to a pipeline whose
    backwards are whole."""
    turns, pp = config.moe.compute.turns, config.pp
    if turns == 1 or pp.size == 1:
        return
    computations = make_order(config).computations
    if any(op.kind is Kind.B for rank in range(pp.size) for op in computations.ops(rank)):
        yield (
            f"moe.compute.fused_wgrad_micro_batches: one backward in {turns} has the experts'"
            " weight gradients of all, and other ranks wait for it; pp.defer_weight_grads = true"
            " puts them behind the gradient's way out"
        )


def _recomputed(config: Config) -> str:
    """What half-layers in `ac.mode` keep."""
    if config.ac.mode == "selective":
        return f"half-layers keep inputs and the results of {', '.join(config.ac.save or ())}"
    return _RECOMPUTED[config.ac.mode]


_RECOMPUTED: dict[RecomputeMode, str] = {
    "none": "nothing is recomputed",
    "full": "half-layers keep their inputs and the experts' results",
    "full_moe": "half-layers keep their inputs only",
    "projections": "half-layers keep inputs, the experts' results and products with weights",
    "attention": "half-layers keep inputs, the experts' results and attention's",
    "matmul": "half-layers keep inputs and every product's result",
}
_BYTES = ("weights", "grads", "optim", "acts", "made", "slots", "total")
_LEGEND = (
    "load: training FLOPs, in parts of the busiest stage's; sends: forward, per micro-batch",
    "bytes of one rank, by the model's sizes. grads: fp32 sums; optim: masters and moments;"
    " acts: saved for the backward",
    "by all micro-batches in flight at the peak; made: the largest half-layer that is recomputed,"
    " and the gradients",
    "inside one, or the head's logits and their gradients, if they are more; slots: buffers of"
    " hops; total:",
    "all columns together, or what is there behind the last op while gradients are reduced, if that"
    " is more",
)


def _byte_cells(part: StageReport | RankReport) -> tuple[str, ...]:
    numbers = (
        part.weight_bytes,
        part.gradient_bytes,
        part.optimizer_bytes,
        part.activation_bytes,
        max(part.recompute_bytes + part.workspace_bytes, part.head_bytes),
        part.slot_bytes,
        part.total_bytes,
    )
    return tuple(map(short_bytes, numbers))


def _header(config: Config, plan: PlanReport) -> list[str]:
    train = config.train
    engram = f", Engram {short(plan.engram_parameters)}" if plan.engram_parameters else ""
    return [
        f"{plan.model}: {short(plan.parameters)} parameters{engram},"
        f" {short(plan.active_matmul_parameters)} active,"
        f" {plan.flops_per_token / 1e9:.4g} GFLOP/token (6N)",
        f"{plan.schedule} on {plan.world_size} ranks, {plan.tokens_per_step:,} tokens a step,"
        f" {plan.transfers_per_step:,} transfers, bubble {plan.bubble_fraction:.1%}"
        " (op times as FLOPs, free transfers)",
        f"{train.precision}, micro-batches of {train.micro_batch_size} x {train.seq_len:,} tokens,"
        f" ac.mode {config.ac.mode}: {_recomputed(config)}{_other_modes(config)}",
        *_fp8_text(config),
    ]


def _fp8_text(config: Config) -> tuple[str, ...]:
    """Which linears run in FP8."""
    wanted = config.kernels.linear
    if wanted == "reference":
        return ()
    names = dict.fromkeys(n for spec in unit_specs(config.model.dims) for n in fp8_linears(spec))
    where = " if a backend works there" if wanted == "auto" else ""
    return (f"linears in FP8 by {wanted}{where}: {', '.join(names)}",)


def _other_modes(config: Config) -> str:
    others = len(config.ac.layer_modes or {})
    return f"; other modes on {others} layer{'s' * (others > 1)}" if others else ""


def _stages(
    config: Config, order: Order, plan: Sequence[StagePlan], per_micro_batch: Sequence[int]
) -> tuple[StageReport, ...]:
    flops = [_train_flops(config, stage) for stage in plan]
    reports = []
    for stage in plan:
        s, state = stage.index, state_bytes(config, stage)
        in_flight = _peak(order, {s: 1}, {s: 0}).activations
        leaving, masters = {s: leaving_bytes(config, stage)}, {s: master_bytes(config, stage)}
        lighter = {s: lighter_bytes(config, stage)}
        held = _peak(order, {s: per_micro_batch[s]}, leaving, masters, lighter)
        slots = _slot_bytes(config, order, plan, stage)
        reports.append(
            StageReport(
                stage=s,
                rank=stage.rank,
                layers=stage.num_layers,
                units=tuple(unit.name for unit in stage.units),
                parameters=sum(u.parameters + u.engram_parameters for u in stage.units),
                train_flops_per_token=flops[s],
                share_of_slowest=flops[s] / max(flops),
                boundary_bytes=boundary_of(config, stage),
                weight_bytes=state.weights,
                gradient_bytes=state.gradients,
                optimizer_bytes=state.optimizer - masters[s] + held.masters,
                activation_bytes=held.activations,
                recompute_bytes=recompute_bytes(config, stage),
                workspace_bytes=workspace_bytes(config, stage),
                head_bytes=head_bytes(config, stage).most,
                slot_bytes=slots,
                host_bytes=host_bytes(config, order, leaving, masters)
                + host_table_bytes(config, stage),
                in_flight=in_flight,
                held_bytes=per_micro_batch[s],
                leaving_bytes=leaving[s],
                lighter_bytes=lighter[s],
                update_bytes=state.weights
                + state.gradients
                + state.optimizer
                + slots
                + _reduction(config, [stage]),
            )
        )
    return tuple(reports)


def _rank(
    config: Config,
    order: Order,
    plan: Sequence[StagePlan],
    reports: Sequence[StageReport],
    per_micro_batch: Sequence[int],
) -> RankReport:
    """The rank that has the stages of `plan`."""
    stages = [reports[stage.index] for stage in plan]
    leaving = {stage.index: leaving_bytes(config, stage) for stage in plan}
    weights = sum(s.weight_bytes for s in stages)
    gradients = sum(s.gradient_bytes for s in stages)
    masters = {stage.index: master_bytes(config, stage) for stage in plan}
    sizes = {s.stage: per_micro_batch[s.stage] for s in stages}
    lighter = {s.stage: s.lighter_bytes for s in stages}
    held = _peak(order, sizes, leaving, masters, lighter)
    all_optimizer = sum(state_bytes(config, stage).optimizer for stage in plan)
    optimizer = all_optimizer + held.masters - sum(masters.values())
    activations = held.activations
    recompute = max(s.recompute_bytes for s in stages)
    workspace = max(s.workspace_bytes for s in stages)
    head = max(s.head_bytes for s in stages)
    made = max(recompute + workspace, head)
    slots = sum(s.slot_bytes for s in stages) + arena_bytes(config)
    update = weights + gradients + all_optimizer + slots + _reduction(config, plan)
    if config.optim.apply_in_backward and len(plan) > 1:
        update += activations  # of stages that are not through
    return RankReport(
        rank=plan[0].rank,
        stages=tuple(s.stage for s in stages),
        weight_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        activation_bytes=activations,
        recompute_bytes=recompute,
        workspace_bytes=workspace,
        head_bytes=head,
        slot_bytes=slots,
        update_bytes=update,
        total_bytes=max(weights + gradients + optimizer + activations + made + slots, update),
        host_bytes=host_bytes(config, order, leaving, masters)
        + sum(host_table_bytes(config, stage) for stage in plan),
    )


def _reduction(config: Config, stages: Sequence[StagePlan]) -> int:
    """The most that reducing gradients takes beyond what lasts through a step: of all stages of a
    rank one after another, or with updates in the backward of each by itself."""
    if not config.optim.apply_in_backward:
        return reduction_peak(config, stages).more
    return max(reduction_peak(config, [stage], applied=True).more for stage in stages)


def flop_costs(config: Config, plan: Sequence[StagePlan]) -> Costs:
    """Relative op times as FLOPs have them: the weight gradient costs one forward's products, the
    input gradient another and attention's 2.5; what a recompute repeats comes on top of it."""
    seq_len, dims = config.train.seq_len, config.model.dims
    forward, input_grad, weight_grad = [], [], []
    for stage in plan:
        f = i = w = 0.0
        for spec in stage.units:
            flops = forward_flops_per_token(dims, spec, seq_len)
            whole = flops.matmul + flops.attention + flops.index_scores
            f += whole
            again = repeated_flops(config, spec)
            i += flops.matmul + 2.5 * flops.attention
            i += again.matmul + again.attention + again.index_scores
            w += flops.matmul
        forward.append(f)
        input_grad.append(i)
        weight_grad.append(w)
    return Costs(tuple(forward), tuple(input_grad), tuple(weight_grad))


def _train_flops(config: Config, stage: StagePlan) -> float:
    dims, seq_len = config.model.dims, config.train.seq_len
    return sum(train_flops_per_token(dims, spec, seq_len) for spec in stage.units)


def boundary_of(config: Config, stage: StagePlan) -> int:
    """Bytes of a micro-batch that the stage hands on to the next one."""
    train = config.train
    return boundary_bytes(
        config.model.dims,
        stage.after,
        train.micro_batch_size,
        train.seq_len,
        dtype=compute_dtype_name(config),
    )


def _held_bytes(config: Config, plan: Sequence[StagePlan], stage: StagePlan) -> int:
    """What a micro-batch in flight keeps on the stage, beside receive buffers: a stage of the same
    rank hands its tensors over as they are."""
    before = plan[stage.index - 1] if stage.index else None
    received = boundary_of(config, before) if before and before.rank == stage.rank else 0
    return received + activation_bytes(config, stage)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank holds of what comes and goes."""

    activations: int
    masters: int


def _peak(
    order: Order,
    sizes: Mapping[int, int],
    moved: Mapping[int, int],
    masters: Mapping[int, int] | None = None,
    lighter: Mapping[int, int] | None = None,
) -> _Held:
    """The most that is held at once of some stages of one rank, `sizes` being what a micro-batch in
    flight weighs on each: from F to B, or to W where the backward is split; less `moved` between
    OFFLOADED and RELOAD, less `lighter` between I and W. `masters` by stage come and go if they are
    given."""
    rank = order.computations.stage_to_rank[min(sizes)]
    ops = list(order.lowered.ops(rank))
    before, after = defaultdict[Op, int](int), defaultdict[Op, int](int)  # changes of masters
    for stage, size in (masters or {}).items():
        if (moments := master_moments(ops, stage)) is not None:
            if moments.left.kind is Kind.F:
                before[moments.left] -= size
            else:
                # Until then they are in place of sums of gradients, which take no less and which a
                # total counts from the start.
                after[moments.leave] -= size
            if moments.back is None:
                after[moments.through] += size
            else:
                before[moments.back] += size
    here = sum((masters or {}).values())
    held, peak = 0, _Held(0, here)
    for op in ops:
        here += before[op]
        if op.stage not in sizes:
            continue
        size = sizes[op.stage]
        if op.kind is Kind.F:
            held += size
        elif op.kind is Kind.B:
            held -= size
        elif op.kind is Kind.I:
            held -= (lighter or {}).get(op.stage, 0)
        elif op.kind is Kind.W:
            held -= size - (lighter or {}).get(op.stage, 0)
        elif op.kind is Kind.OFFLOADED:
            held -= moved[op.stage]
        elif op.kind is Kind.RELOAD:
            held += moved[op.stage]
        here += after[op]
        if held + here > peak.activations + peak.masters:
            peak = _Held(held, here)
    return peak


def _slot_bytes(config: Config, order: Order, plan: Sequence[StagePlan], stage: StagePlan) -> int:
    """Buffers of hops to and from other ranks, and what Engram's lookups take up."""
    s, total = stage.index, lookup_bytes(config, stage)
    if s > 0 and plan[s - 1].rank != stage.rank:
        before = plan[s - 1]
        total += order.slots[Edge(s - 1, s, "F")] * boundary_of(config, before)
        sent = order.slots[Edge(s, s - 1, "B")]
        total += _buffers_to_send(config, s - 1, sent) * gradient_bytes(config, before.after)
    if s + 1 < len(plan) and plan[s + 1].rank != stage.rank:
        total += order.slots[Edge(s + 1, s, "B")] * gradient_bytes(config, stage.after)
        sent = order.slots[Edge(s, s + 1, "F")]
        total += _buffers_to_send(config, s, sent) * boundary_of(config, stage)
    return total


def sent_bytes(config: Config, plan: Sequence[StagePlan], stage: StagePlan) -> int:
    """Of messages to other ranks that have been sent and lie where they were made, in torch's
    memory: one a channel. A GPU's transport lets go of one once it sees that the copy is past, and
    the host that would look is ahead of the device. Of "auto" nothing is known before the run."""
    s, total = stage.index, 0
    if s > 0 and plan[s - 1].rank != stage.rank and _is_of_gpus(config, s - 1):
        total += gradient_bytes(config, plan[s - 1].after)
    if s + 1 < len(plan) and plan[s + 1].rank != stage.rank and _is_of_gpus(config, s):
        total += boundary_of(config, stage)
    return total


def _is_of_gpus(config: Config, hop: int) -> bool:
    named = config.pp.transport
    return (named if isinstance(named, str) else named[hop]) in ("nccl", "copy_engine", "put")


def _buffers_to_send(config: Config, hop: int, slots: int) -> int:
    """Messages that the source's end of a channel has room for: put's window is as large as the
    other end's, nccl packs one at a time. Of "auto" nothing is known before the run: copy_engine,
    inside a host, has none."""
    named = config.pp.transport
    kind = named if isinstance(named, str) else named[hop]
    return {"put": slots, "nccl": 1}.get(kind, 0)


def _span(units: Sequence[str]) -> str:
    """First and last unit: "2.moe .. 4.moe" for layers.2.moe to layers.4.moe."""
    names = [name.removeprefix("layers.") for name in units]
    return ", ".join(names) or "none" if len(names) <= 2 else f"{names[0]} .. {names[-1]}"
