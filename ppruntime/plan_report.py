"""What a run will look like, before anything starts: one row a stage. `plan_text`, `plan_json`.

Weights are never allocated and no process group is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ppruntime.config_keys import Config
from ppruntime.memory import state_bytes
from ppruntime.models.dims import boundary_bytes, counts, forward_flops_per_token
from ppruntime.order import Order, make_order
from ppruntime.plan import StagePlan, cut, train_flops_per_token
from ppruntime.schedules.costs import Costs
from ppruntime.schedules.counts import Edge, num_transfers
from ppruntime.schedules.ops import Kind
from ppruntime.schedules.timeline import simulate


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage. Bytes are one rank's; activations are all that is in flight at the rank's peak."""

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
    """Masters and both moments."""
    activation_bytes: int
    slot_bytes: int
    """Receive buffers for activations and gradients."""
    in_flight: int
    """Micro-batches of this stage that are in flight at the most."""


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
    stages: tuple[StageReport, ...]


def report(config: Config) -> PlanReport:
    """Plans the run. Pure."""
    order, train, dims = make_order(config), config.train, config.model.dims
    stage_to_rank = order.computations.stage_to_rank
    plan = cut(dims, stage_to_rank, config.pp.layers_per_stage, seq_len=train.seq_len)
    flops = [_train_flops(config, stage) for stage in plan]
    in_flight = _in_flight(order)
    timeline = simulate(order.computations, flop_costs(config, plan))
    totals = counts(dims)
    stages = []
    for stage in plan:
        state = state_bytes(config, stage)
        outgoing = _boundary(config, stage) if stage.outputs else 0
        incoming = _boundary(config, plan[stage.index - 1]) if stage.index else 0
        stages.append(
            StageReport(
                stage=stage.index,
                rank=stage.rank,
                layers=stage.num_layers,
                units=tuple(unit.name for unit in stage.units),
                parameters=sum(u.parameters + u.engram_parameters for u in stage.units),
                train_flops_per_token=flops[stage.index],
                share_of_slowest=flops[stage.index] / max(flops),
                boundary_bytes=outgoing,
                weight_bytes=state.weights,
                gradient_bytes=state.gradients,
                optimizer_bytes=state.optimizer,
                activation_bytes=in_flight[stage.index] * _activation_bytes(config, stage),
                slot_bytes=_slot_bytes(order, stage, incoming, outgoing),
                in_flight=in_flight[stage.index],
            )
        )
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
        stages=tuple(stages),
    )


def plan_json(config: Config) -> str:
    """The report as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(report(config))).decode()


def plan_text(config: Config) -> str:
    """The report as a table for people."""
    plan = report(config)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    headings = (
        "stage",
        "rank",
        "layers",
        "units",
        "params",
        "GFLOP/token",
        "of slowest",
        "sends",
        "weights",
        "grads",
        "optimizer",
        "activations",
        "slots",
        "total",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "units" else "right", no_wrap=True)
    for s in plan.stages:
        parts = (s.weight_bytes, s.gradient_bytes, s.optimizer_bytes, s.activation_bytes)
        table.add_row(
            str(s.stage),
            str(s.rank),
            f"{s.layers:g}",
            _span(s.units),
            _short(s.parameters),
            f"{s.train_flops_per_token / 1e9:.4g}",
            f"{s.share_of_slowest:.0%}",
            _bytes(s.boundary_bytes) if s.boundary_bytes else "-",
            *(_bytes(part) for part in parts),
            _bytes(s.slot_bytes) if s.slot_bytes else "-",
            _bytes(sum(parts) + s.slot_bytes),
        )
    console = Console(width=160, highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().strip("\n").splitlines()]
    engram = f", Engram {_short(plan.engram_parameters)}" if plan.engram_parameters else ""
    return "\n".join(
        [
            f"{plan.model}: {_short(plan.parameters)} parameters{engram},"
            f" {_short(plan.active_matmul_parameters)} active,"
            f" {plan.flops_per_token / 1e9:.4g} GFLOP/token (6N)",
            f"{plan.schedule} on {plan.world_size} ranks, {plan.tokens_per_step:,} tokens a step,"
            f" {plan.transfers_per_step:,} transfers, bubble {plan.bubble_fraction:.1%}"
            " (op times as FLOPs, free transfers)",
            "",
            *lines,
            "",
            "bytes are one rank's; activations and slots at their peak, by the model's sizes",
        ]
    )


def flop_costs(config: Config, plan: Sequence[StagePlan]) -> Costs:
    """Relative op times as FLOPs have them: the weight gradient costs one forward's products, the
    input gradient another and attention's 2.5; recomputed halves run their forward again in it."""
    seq_len, dims = config.train.seq_len, config.model.dims
    recompute = config.ac.mode == "full"
    forward, input_grad, weight_grad = [], [], []
    for stage in plan:
        f = i = w = 0.0
        for spec in stage.units:
            flops = forward_flops_per_token(dims, spec, seq_len)
            whole = flops.matmul + flops.attention + flops.index_scores
            f += whole
            i += flops.matmul + 2.5 * flops.attention + recompute * whole
            w += flops.matmul
        forward.append(f)
        input_grad.append(i)
        weight_grad.append(w)
    return Costs(tuple(forward), tuple(input_grad), tuple(weight_grad))


def _train_flops(config: Config, stage: StagePlan) -> float:
    dims, seq_len = config.model.dims, config.train.seq_len
    return sum(train_flops_per_token(dims, spec, seq_len) for spec in stage.units)


def _boundary(config: Config, stage: StagePlan) -> int:
    train = config.train
    dtype = "float32" if train.precision == "fp32" else "bfloat16"
    return boundary_bytes(
        config.model.dims, stage.after, train.micro_batch_size, train.seq_len, dtype=dtype
    )


def _activation_bytes(config: Config, stage: StagePlan) -> int:
    """Of one micro-batch in flight."""
    import torch  # loaded for the plan alone, and here so that a wrong one is refused without it

    from ppruntime.activations import activation_bytes

    train = config.train
    return activation_bytes(
        config.model.dims,
        stage,
        batch=train.micro_batch_size,
        seq_len=train.seq_len,
        dtype=torch.float32 if train.precision == "fp32" else torch.bfloat16,
        recompute=config.ac.mode == "full",
    )


def _in_flight(order: Order) -> list[int]:
    """Most micro-batches in flight per stage."""
    held, peak = [0] * order.computations.num_stages, [0] * order.computations.num_stages
    for rank in range(order.computations.num_ranks):
        for op in order.computations.ops(rank):
            if op.kind is Kind.F:
                held[op.stage] += 1
            elif op.kind in (Kind.B, Kind.W):
                held[op.stage] -= 1
            peak[op.stage] = max(peak[op.stage], held[op.stage])
    return peak


def _slot_bytes(order: Order, stage: StagePlan, incoming: int, outgoing: int) -> int:
    """Receive buffers of hops from other ranks. Gradients are as large as what differentiates,
    which is taken to be all of the boundary."""
    s, owner = stage.index, order.computations.stage_to_rank
    total = 0
    if s > 0 and owner[s - 1] != owner[s]:
        total += order.slots[Edge(s - 1, s, "F")] * incoming
    if s + 1 < len(owner) and owner[s + 1] != owner[s]:
        total += order.slots[Edge(s + 1, s, "B")] * outgoing
    return total


def _span(units: Sequence[str]) -> str:
    if len(units) <= 2:
        return ", ".join(units) or "none"
    return f"{units[0]} .. {units[-1]}"


def _short(number: float) -> str:
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.4g}{letter}"
    return f"{number:g}"


def _bytes(number: float) -> str:
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:g} B"
