"""The projection of V4.1-Flash from the kernels as they are recorded today. Pure, no torch.

One call makes all of it again when kernels get faster.

Pieces of units are measured, modelled or assumed (`calibrate_kernels`); a plan puts them on stages;
the event simulator plays the step with the transport's slow-down, hops over InfiniBand and the data
ranks' collectives. An interval comes from the same step with pieces shorter and longer by what
their origin allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppruntime.config import Config
from ppruntime.models.dims import counts, unit_specs
from ppruntime.plan import cut
from ppruntime.projection.calibrate_kernels import (
    IB_BYTES_PER_S,
    expert_scale,
    kernel_calibration,
    per_step_rows,
    remote_copies,
    unit_pieces,
    weight_scale,
)
from ppruntime.projection.kernel_records import Kernels
from ppruntime.projection.pipeline import HopCost, Parts, Piece, StageCost
from ppruntime.projection.planner import Found, Plan
from ppruntime.projection.planner_inputs import expert_variants, task_of, with_fast_kernels
from ppruntime.projection.planner_ledger import plans_that_fit
from ppruntime.projection.planner_task import PlannedStage, Variant
from ppruntime.projection.projector import Job, Origin
from ppruntime.projection.simulate import (
    Simulation,
    Surroundings,
    collective_seconds,
    interval,
    simulate,
)
from ppruntime.schedules import make

H200_BYTES, SMALL_BYTES = 139e9, 79.5e9
RESERVED_BYTES = 10e9
"""Of a GPU, what the memory ledger does not have: context, communication's own buffers, ops'
workspaces, the allocator's slack; assumed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One projected setup."""

    name: str
    transport: str
    plan: Plan
    job: Job
    simulation: Simulation
    shares: dict[Origin, float]
    """Of all work and per-step time, by origin; interference and waits count as modelled."""
    stages: tuple[dict[Origin, float], ...]
    """Of each stage's work, by origin."""
    low_s: float
    high_s: float
    """The step's interval."""

    def mfu_of(self, step_s: float) -> float:
        return self.job.at_step_s(step_s).mfu

    @property
    def worst_bytes(self) -> tuple[int, float]:
        """(stage, bytes) of the stage that holds the most."""
        peaks = [stage.peak_bytes for stage in self.plan.stages]
        worst = max(range(len(peaks)), key=lambda s: peaks[s])
        return worst, peaks[worst]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Expert traffic of a layout without a pipeline, per GPU and step."""

    ep: int
    copies: str
    """What a token costs: a copy per rank, or per node."""
    again: bool
    """Whether the backward repeats the forward's exchange."""
    nvlink_bytes: float
    ib_bytes: float
    nvlink_s: float
    ib_s: float
    compute_s: float
    """All else, at these kernels' times."""
    tokens: int

    @property
    def bound_by(self) -> str:
        """What takes longest, if everything overlapped."""
        times = {"compute": self.compute_s, "NVLink": self.nvlink_s, "InfiniBand": self.ib_s}
        return max(times, key=lambda name: times[name])


def job_of(config: Config, peak_flops: float = 989e12) -> Job:
    """20T tokens on the run's GPUs."""
    return Job(
        flops_per_token=float(counts(config.model.dims).flops_per_token),
        total_tokens=20e12,
        num_gpus=config.world_size,
        gpu_flops=peak_flops,
        global_batch_tokens=float(config.global_batch_size * config.train.seq_len),
    )


def search(config: Config, kernels: Kernels, memory_bytes: float) -> Found:
    """The planner on the kernels' times, with memory by the ledger of the run that has them; the
    transport's slow-down comes in the simulation."""
    config = with_fast_kernels(config)
    task = task_of(
        config,
        kernel_calibration(config, kernels, "put"),
        memory_bytes=memory_bytes,
        reserved_bytes=RESERVED_BYTES,
        host_bytes_per_s=0.0,
        link=None,
        variants=expert_variants(config, kernels),
    )
    return plans_that_fit(config, task)


def project_plan(
    config: Config,
    kernels: Kernels,
    plan: Plan,
    transport: str,
    name: str,
    *,
    waterfall: bool = False,
) -> Row:
    """One plan's step on one transport, with its waterfall if wanted."""
    job = job_of(config)
    around = _around(config, kernels, plan, transport)

    parts = _parts(config, kernels, plan)
    middle = simulate(job, parts, around, waterfall=waterfall)
    low_s, high_s = interval(job, parts, around)
    return Row(
        name=name,
        transport=transport,
        plan=plan,
        job=job,
        simulation=middle,
        shares=_shares(parts, middle),
        stages=tuple(map(stage_shares, parts.stages)),
        low_s=low_s,
        high_s=high_s,
    )


def exchanges(config: Config, kernels: Kernels, eps: Sequence[int], tokens: int) -> list[Exchange]:
    """Layouts with pp = 1: what crosses which link, 8 GPUs a node. Forward: FP8 there, bf16 back;
    backward: bf16 both ways."""
    dims = config.model.dims
    compute = 0.0
    scale = tokens / (config.train.micro_batch_size * config.train.seq_len)
    for spec in unit_specs(dims):
        pieces = unit_pieces(config, spec, "none", kernels)
        compute += scale * sum(
            p.forward_s + p.input_grad_s + p.weight_grad_s for p in pieces if p.name != "dispatch"
        )
    found = []
    for ep in eps:
        for copies in ("rank", "node"):
            for again in (False, True):
                width = dims.hidden_size * (7 + 3 * again) * tokens * dims.num_layers
                nodes = max(1, ep // 8)
                reached = remote_copies(dims, ep, 1)
                outside = reached * (ep - 8) / (ep - 1) if ep > 8 else 0.0
                inside = reached - outside
                if copies == "node":
                    crossing = remote_copies(dims, ep, 8) if nodes > 1 else 0.0
                    inside, outside = reached, crossing  # forwarded inside the node it reaches
                nvlink, ib = inside * width, outside * width
                found.append(
                    Exchange(
                        ep=ep,
                        copies=copies,
                        again=again,
                        nvlink_bytes=nvlink,
                        ib_bytes=ib,
                        nvlink_s=nvlink / kernels.nvlink_bytes_per_s["put"],
                        ib_s=ib / IB_BYTES_PER_S,
                        compute_s=compute,
                        tokens=tokens,
                    )
                )
            if ep <= 8:
                break
    return found


# --- parts ---------------------------------------------------------------------------------------


def _parts(config: Config, kernels: Kernels, plan: Plan) -> Parts:
    """Pieces on the plan's stages."""
    specs = {spec.name: spec for spec in unit_specs(config.model.dims)}
    variants = {v.name: v for v in expert_variants(config, kernels)}
    stages = []
    for stage in plan.stages:
        pieces: list[Piece] = []
        for name, mode in zip(stage.units, stage.modes, strict=True):
            pieces += unit_pieces(config, specs[name], mode, kernels)
        pieces += _variant_pieces(config, stage, variants.get(stage.variant), kernels)
        stages.append(StageCost(tuple(pieces)))
    boundary = (
        2.0
        * config.train.micro_batch_size
        * config.train.seq_len
        * config.model.dims.num_streams
        * config.model.dims.hidden_size
    )
    hop_s = boundary / IB_BYTES_PER_S
    hop = HopCost(hop_s, hop_s, Origin.ASSUMED, "ib: streams at 46 GB/s, published")
    warmup = plan.warmup if plan.order == "async_1f1b" else None
    return Parts(
        schedule=make(
            plan.order, len(plan.stages), config.train.num_micro_batches, warmup_step=warmup
        ),
        stages=tuple(stages),
        hops=(hop,) * (len(plan.stages) - 1),
        per_step=tuple(per_step_rows(config, kernels)),
    )


def _variant_pieces(
    config: Config, stage: PlannedStage, variant: Variant | None, kernels: Kernels
) -> list[Piece]:
    """What a use of the experts changes: as good as their own times, which it is taken from."""
    if variant is None:
        return []
    blocks = sum(name.endswith(".moe") for name in stage.units)
    changes = (variant.input_grad_s, variant.weight_grad_s)
    if not any(changes) or not blocks:
        return []
    input_grad_s, weight_grad_s = (blocks * change for change in changes)
    is_like = expert_scale(config, kernels) == weight_scale(config) == 1
    origin = Origin.MEASURED if is_like else Origin.MODELLED
    source = kernels.experts.source
    return [Piece(variant.name, 0.0, input_grad_s, weight_grad_s, origin, source)]


def _around(config: Config, kernels: Kernels, plan: Plan, transport: str) -> Surroundings:
    layers = plan.layers_per_stage
    stages = cut(config.model.dims, range(len(plan.stages)), layers, seq_len=config.train.seq_len)
    reduce_s, gather_s = collective_seconds(config, stages, len(plan.stages), IB_BYTES_PER_S)
    return Surroundings(
        interference=kernels.interference[transport],
        interference_origin=Origin.MODELLED,
        interference_source=f"{transport}, measured over NVLink, taken for InfiniBand",
        reduce_s=reduce_s,
        gather_s=gather_s,
    )


def stage_shares(stage: StageCost) -> dict[Origin, float]:
    """Of a stage's work, piece by piece: by origin; they add up to 1."""
    seconds = _work_s(stage)
    total = sum(seconds.values()) or 1.0
    return {origin: time / total for origin, time in seconds.items()}


def _work_s(stage: StageCost) -> dict[Origin, float]:
    """Of one micro-batch. What fusing saves has a piece below 0, taken from its origin's."""
    seconds = dict.fromkeys(Origin, 0.0)
    for piece in stage.pieces:
        seconds[piece.origin] += piece.forward_s + piece.input_grad_s + piece.weight_grad_s
    return seconds


def _shares(parts: Parts, simulation: Simulation) -> dict[Origin, float]:
    """On the busiest rank: its work by origin; all beside it counts as modelled."""
    step = simulation.step
    count = parts.schedule.num_micro_batches
    work = _work_s(parts.stages[step.busiest])
    seconds = {origin: count * time for origin, time in work.items()}
    for row in parts.per_step:
        seconds[Origin(row.origin)] += row.seconds
    seconds[Origin.MODELLED] += max(0.0, step.seconds - sum(seconds.values()))
    total = sum(seconds.values())
    return {origin: time / total for origin, time in seconds.items()}
