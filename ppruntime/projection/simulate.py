"""A pipeline's step on a cluster that is not ideal: parts -> machine -> step, waterfall, replicas.

`pipeline.Parts` says what ops and hops take; `Surroundings` what else happens: transfers
that slow compute down, noise, host copies, the data ranks' collectives. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ppruntime.config.keys import Config
from ppruntime.ledger import RankLedger
from ppruntime.plan import StagePlan
from ppruntime.projection.pipeline import SPREAD, Parts, shifted
from ppruntime.projection.projector import Job, Origin, Pace, ProjectionError, weakest
from ppruntime.projection.step_memory import memory_over_time
from ppruntime.projection.step_pieces import SENT, sent_parameters
from ppruntime.schedules.costs import Costs, StageBytes
from ppruntime.schedules.machine import HostCopies, Interference, Link, Machine, Noise, StepEnd
from ppruntime.schedules.ops import Kind, Schedule
from ppruntime.schedules.passes import add_offload
from ppruntime.schedules.simulated_step import Lost, SimulatedStep
from ppruntime.schedules.simulator import simulate_machine
from ppruntime.schedules.timeline import MemoryPoint

_UNDISTURBED, _SILENT = Interference(), Noise()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a pipeline's step suffers beside its own ops. The default is nothing."""

    interference: Interference = _UNDISTURBED
    interference_source: str = "none given"
    interference_origin: Origin = Origin.ASSUMED
    noise: Noise = _SILENT
    replicas: int = 1
    """Pipelines side by side, each with a draw of the noise of its own; the slowest counts."""
    reduce_s: tuple[float, ...] = ()
    """Per rank: gradients over the data ranks; begins when the rank's last op is done."""
    gather_s: tuple[float, ...] = ()
    """Per rank: weights over the data ranks, before the next step."""
    data_source: str = "--data-bandwidth"
    """Of these two, as `data_origin`."""
    data_origin: Origin = Origin.MODELLED
    offload_every: int | None = None
    """Activations of every so many micro-batches go to the host; None: none do."""
    host: HostCopies | None = None
    copied_bytes: StageBytes | None = None
    """Of host copies."""
    ledgers: tuple[RankLedger, ...] = ()
    """Per rank, for memory over time."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A row of the waterfall: the step once `name` is taken into account as well."""

    name: str
    step_s: float
    mfu: float
    """A share."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate` gives. `step` is that of the slowest replica."""

    pace: Pace
    step: SimulatedStep
    replica_s: tuple[float, ...]
    """Each replica's step, ascending; the job's step is the last."""
    rungs: tuple[Rung, ...]
    path_s: dict[str, float]
    """Seconds of the critical path by cause: compute, transfer, host."""
    path_by_stage_s: tuple[float, ...]
    """Seconds of compute on the critical path, per stage."""
    memory: tuple[tuple[MemoryPoint, ...], ...] = ()
    """Bytes per rank over time, by the ledger; empty unless that is given."""
    peak_bytes: tuple[float, ...] = ()
    """The ledger's peak per rank, its start's included."""


CAUSES = Lost._fields
"""Why a rank's time is lost, in the order of `Lost`."""


def machine_of(parts: Parts, around: Surroundings) -> Machine:
    """The machine that `parts` and `around` describe. A hop's time is all occupancy of its link, so
    interference lasts as long as the transfer; hops of one link class share a rank's way out."""
    kinds = (Kind.F, Kind.I, Kind.W)
    costs = Costs(*(tuple(stage.seconds(kind) for stage in parts.stages) for kind in kinds))
    return Machine(
        costs=costs,
        # A link of one second's worth per second: a message's bytes are its seconds.
        links=tuple(Link(hop.source.partition(":")[0], 0.0, 1.0) for hop in parts.hops),
        forward_bytes=tuple(hop.forward_s for hop in parts.hops),
        backward_bytes=tuple(hop.backward_s for hop in parts.hops),
        interference=around.interference,
        noise=replace(around.noise, jitter=max(around.noise.jitter, parts.jitter)),
        host=around.host,
        stage_bytes=around.copied_bytes,
        end=StepEnd(
            reduce=around.reduce_s,
            together=sum(piece.seconds for piece in parts.per_step),
            gather=around.gather_s,
        ),
    )


def with_data_ranks(
    parts: Parts, around: Surroundings, per_rank: tuple[Sequence[float], Sequence[float]] | None
) -> tuple[Parts, Surroundings]:
    """Both with the data ranks' collectives in `around`: from `per_rank` seconds of (reducing,
    gathering), else from the per-step pieces of these names, which every rank then takes as soon as
    its own work is done. Pieces that go there are no longer among `parts`."""
    rest = tuple(row for row in parts.per_step if row.name not in SENT)
    timed = {row.name: row for row in parts.per_step if row.name in SENT}
    parts = replace(parts, per_step=rest)
    if per_rank is not None:
        reduce_s, gather_s = per_rank
        return parts, replace(around, reduce_s=tuple(reduce_s), gather_s=tuple(gather_s))
    if not timed:
        return parts, around
    num_ranks = parts.schedule.num_ranks

    def on_all(name: str) -> tuple[float, ...]:
        return (timed[name].seconds,) * num_ranks if name in timed else ()

    return parts, replace(
        around,
        reduce_s=on_all("reduce"),
        gather_s=on_all("gather"),
        data_source="; ".join(f"{name}: {row.source}" for name, row in timed.items()),
        data_origin=weakest(*(Origin(row.origin) for row in timed.values())),
    )


def order_of(parts: Parts, around: Surroundings) -> Schedule:
    """The order that is played: the parts' own, with offloads if these are wanted."""
    if around.offload_every is None:
        return parts.schedule
    return add_offload(parts.schedule, every=around.offload_every)


def simulate(job: Job, parts: Parts, around: Surroundings, *, waterfall: bool = True) -> Simulation:
    """The step, the slowest of all replicas, and where its time went; `rungs` are empty without
    `waterfall`, which plays the step several times more."""
    schedule, machine = order_of(parts, around), machine_of(parts, around)
    noise = machine.noise
    steps = [
        simulate_machine(schedule, replace(machine, noise=replace(noise, seed=noise.seed + i)))
        for i in range(1 if noise.is_none else around.replicas)
    ]
    slowest = max(steps, key=lambda step: step.seconds)
    path: dict[str, float] = defaultdict(float)
    by_stage = [0.0] * schedule.num_stages
    for leg in slowest.critical_path:
        path[leg.cause] += leg.finish - leg.start
        if leg.cause == "compute":
            by_stage[leg.op.stage] += leg.finish - leg.start
    return Simulation(
        pace=job.at_step_s(slowest.seconds),
        step=slowest,
        replica_s=tuple(sorted(step.seconds for step in steps)),
        rungs=tuple(_waterfall(job, parts, around, slowest)) if waterfall else (),
        path_s=dict(path),
        path_by_stage_s=tuple(by_stage),
        memory=tuple(map(memory_over_time, around.ledgers, slowest.rows)),
        peak_bytes=tuple(float(ledger.peak_bytes) for ledger in around.ledgers),
    )


def interval(
    job: Job, parts: Parts, around: Surroundings, spread: Mapping[Origin, float] = SPREAD
) -> tuple[float, float]:
    """The step's seconds with everything shorter, and with everything longer, by the spread of its
    origin: ops, hops, per-step pieces, slow-downs and the data ranks' collectives."""
    low, high = (
        simulate(
            job,
            shifted(parts, shift, spread),
            _shifted_around(around, shift, spread),
            waterfall=False,
        ).pace.step_s
        for shift in (-1.0, 1.0)
    )
    return low, high


def _shifted_around(
    around: Surroundings, shift: float, spread: Mapping[Origin, float]
) -> Surroundings:
    slows = 1 + shift * spread[around.interference_origin]
    collectives = 1 + shift * spread[around.data_origin]
    return replace(
        around,
        interference=Interference(
            slows * around.interference.one_way,
            slows * around.interference.both_ways,
            min(1.0, slows * around.interference.blocking),
        ),
        reduce_s=tuple(collectives * seconds for seconds in around.reduce_s),
        gather_s=tuple(collectives * seconds for seconds in around.gather_s),
    )


def _waterfall(job: Job, parts: Parts, around: Surroundings, whole: SimulatedStep) -> list[Rung]:
    """From what the ops would take on ranks that never wait, one thing after another."""
    rungs: list[Rung] = []

    def add(name: str, step_s: float) -> None:
        rungs.append(Rung(name, step_s, job.at_step_s(step_s).mfu))

    work = whole.work
    add("work spread evenly, no rank ever waits", sum(work) / len(work))
    add("+ imbalance between ranks", max(work))
    free_hops = tuple(replace(hop, forward_s=0.0, backward_s=0.0) for hop in parts.hops)
    calm = Surroundings(host=around.host, copied_bytes=around.copied_bytes)
    quiet = replace(parts, jitter=0.0, per_step=(), hops=free_hops)

    def play(parts: Parts, around: Surroundings) -> float:
        return simulate_machine(order_of(parts, around), machine_of(parts, around)).seconds

    add("+ fill, drain and waits of the order", play(quiet, calm))
    quiet = replace(quiet, hops=parts.hops)
    add("+ transfers", play(quiet, calm))
    if around.interference != _UNDISTURBED:
        calm = replace(calm, interference=around.interference)
        add("+ transfers slow compute down", play(quiet, calm))
    if around.offload_every is not None:
        calm = replace(calm, offload_every=around.offload_every)
        add("+ host copies", play(quiet, calm))
    end = whole.seconds - whole.makespan
    if not machine_of(parts, around).noise.is_none:
        add("+ jitter, stragglers, stalls; slowest replica", whole.makespan)
    if end:
        add("+ gradient reduction, per-step pieces, gather", whole.seconds)
    return rungs


def collective_seconds(
    config: Config, plan: Sequence[StagePlan], num_ranks: int, bytes_per_second: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds per rank of (reducing fp32 gradients, gathering compute weights) over the data ranks.

    Raises ProjectionError for a rate that is none.
    """
    if not 0 < bytes_per_second < float("inf"):
        raise ProjectionError(f"data ranks reduce at {bytes_per_second:g} B/s; give a number > 0")
    item = 4 if config.train.precision == "fp32" else 2
    sent = sent_parameters(config, plan, num_ranks)
    reduce = tuple(4 * count / bytes_per_second for count in sent)
    return reduce, tuple(item * count / bytes_per_second for count in sent)
