"""`ppruntime plan --search`: the best plans within a memory cap, the bound, and why."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ppruntime.launch.intervals import spread_words
from ppruntime.projection.pipeline import SPREAD
from ppruntime.projection.projector import Job, Origin, ProjectionError, positive
from ppruntime.projection.step_pieces import SENT
from ppruntime.text_table import short, short_bytes, text_table

if TYPE_CHECKING:
    from ppruntime.config import Config
    from ppruntime.projection.calibration import Calibration, PerStep, Slowdown
    from ppruntime.projection.planner import Found, Plan
    from ppruntime.projection.planner_task import Task, Variant

BENCHES = Path(__file__).resolve().parents[1] / "docs" / "bench"
"""Records of kernels, where no calibration is given."""
_TRANSPORT = "put"
"""Whose slow-down counts with them if none is named."""


def search(
    config: Config,
    *,
    calibration: Path | None,
    benches: Path | None,
    link: str | None,
    memory_gb: float,
    reserved_gb: float,
    host_gb_per_s: float,
    transport: str | None,
    peak_flops: float,
    json: bool,
) -> int:
    """Plans, prints, and gives the exit code. See `ppruntime plan --help`."""
    from ppruntime.models.dims import counts
    from ppruntime.projection.calibrate_kernels import kernel_calibration
    from ppruntime.projection.calibration import read_calibration
    from ppruntime.projection.kernel_records import read_kernels
    from ppruntime.projection.planner_inputs import (
        expert_variants,
        per_step_of,
        task_of,
        with_fast_kernels,
    )
    from ppruntime.projection.planner_ledger import plans_that_fit
    from ppruntime.schedules.machine import Interference

    positive("--memory-gb", memory_gb)
    if calibration is not None and benches is not None:
        raise ProjectionError(
            "--calibration and --benches are both times of the parts; leave one of them out"
        )
    if not 0 <= reserved_gb < memory_gb or not 0 <= host_gb_per_s < float("inf"):
        raise ProjectionError(
            f"--reserved-gb {reserved_gb:g} of --memory-gb {memory_gb:g}, --host-gb-per-s "
            f"{host_gb_per_s:g}; reserve less than there is, rates are 0 or more"
        )
    variants: tuple[Variant, ...] = ()
    asked = config
    if calibration is not None:
        known = read_calibration(calibration)
    else:
        kernels = read_kernels(benches or BENCHES)
        transport = transport or _TRANSPORT
        if transport not in kernels.interference:
            raise ProjectionError(
                f"the benches have no transport {transport}; choose one of "
                f"{', '.join(kernels.interference)}"
            )
        config = with_fast_kernels(config)
        known = kernel_calibration(config, kernels, transport)
        variants = expert_variants(config, kernels)
    task = task_of(
        config,
        known,
        memory_bytes=1e9 * memory_gb,
        reserved_bytes=1e9 * reserved_gb,
        host_bytes_per_s=1e9 * host_gb_per_s,
        link=link,
        variants=variants,
    )
    slows = _slowdown(known, transport, config.pp.transport_of_all)
    if slows is not None:
        task = replace(
            task, interference=Interference(slows.one_way, slows.both_ways, slows.blocking)
        )
    found = plans_that_fit(config, task)
    job = Job(
        flops_per_token=float(counts(config.model.dims).flops_per_token),
        total_tokens=20e12,
        num_gpus=config.world_size,
        gpu_flops=peak_flops,
        global_batch_tokens=float(config.global_batch_size * config.train.seq_len),
    )
    source = (
        f"kernel records in {benches or 'docs/bench'}: halves of v41-flash measured on one GPU, "
        "the rest modelled or assumed"
        if calibration is None
        else f"{calibration}, of {known.date} on {known.device}"
    )
    shares = _Shares(_of_units(task), per_step_of(config, known))
    counted = _counted(known, slows, config.parallel.num_data_ranks)
    print(
        _json(found, job, source, shares, counted, config, asked)
        if json
        else _text(found, task, job, source, shares, counted, config, asked)
    )
    return 0


def _slowdown(known: Calibration, asked: str | None, of_the_run: str | None) -> Slowdown | None:
    """The row of the transport that was asked for, else of the run's if there is one. Raises
    ProjectionError where it was asked for and is not there, or counts already."""
    rows = {row.transport: row for row in known.slowdowns}
    if asked is None:
        return rows.get(of_the_run or "") if known.transport == "idle" else None
    if known.transport != "idle":
        raise ProjectionError(
            f"--transport {asked}: the calibration's units were timed beside {known.transport} "
            "already; leave it out, or give one that was made without transfers"
        )
    if asked not in rows:
        raise ProjectionError(
            f"--transport {asked}: the calibration says nothing of what it does to compute, only "
            f"of {', '.join(rows) or 'none'}; leave it out, or add it with ppruntime calibrate "
            "--in-flight --idle"
        )
    return rows[asked]


def _counted(known: Calibration, slows: Slowdown | None, num_data_ranks: int) -> list[str]:
    """What the steps are with, and what they are without."""
    if slows is not None:
        lines = [
            f"steps are with compute slowed down by {100 * slows.one_way:.3g} % while messages go "
            f"one way and {100 * slows.both_ways:.3g} % both ways, {100 * slows.blocking:.3g} % "
            f"stands still ({slows.origin}: {slows.transport}: {slows.source})"
        ]
    elif known.transport != "idle":
        lines = [f"units were timed beside {known.transport}, so its slow-down is in them"]
    else:
        have = ", ".join(row.transport for row in known.slowdowns) or "none"
        lines = [
            "not counted: what transfers do to compute; --transport counts what the calibration "
            f"has of it ({have})"
        ]
    said = {row.name for row in known.per_step}
    missing = [name for name in SENT if name not in said]
    if num_data_ranks > 1 and missing:
        lines.append(
            f"not counted: {' and '.join(missing)} over {num_data_ranks} data ranks; `ppruntime "
            "simulate --data-bandwidth` counts them"
        )
    return lines


@dataclass(frozen=True, slots=True)
class _Shares:
    """What the steps of plans rest on."""

    units: Mapping[Origin, float]
    """Of the work on units, and taken for all else in virtual time."""
    per_step: Sequence[PerStep]

    def of(self, plan: Plan) -> dict[Origin, float]:
        """Of the plan's step, by origin; they add up to 1."""
        once = sum(piece.seconds for piece in self.per_step)
        found = {o: share * (1 - once / plan.step_s) for o, share in self.units.items()}
        for piece in self.per_step:
            found[Origin(piece.origin)] += piece.seconds / plan.step_s
        return found


def _of_units(task: Task) -> dict[Origin, float]:
    """Of the least work, by origin of the units that it is of; they add up to 1."""
    total = sum(unit.choices[0].work_s for unit in task.units) or 1.0
    return {
        origin: sum(unit.choices[0].work_s for unit in task.units if unit.origin is origin) / total
        for origin in Origin
    }


def _mfu_between(plan: Plan, job: Job, shares: _Shares) -> tuple[float, float]:
    """The plan's MFU in percent if all its times are longer and shorter than they stand, by origin
    as `intervals.spread_words` says."""
    off = sum(share * SPREAD[origin] for origin, share in shares.of(plan).items())
    low, high = (100 * job.at_step_s(plan.step_s * (1 + sign * off)).mfu for sign in (1, -1))
    return low, high


def _rests_on(source: str, shares: Mapping[Origin, float]) -> str:
    parts = ", ".join(f"{100 * share:.0f} % {origin}" for origin, share in shares.items())
    return (
        f"{source}; of the best plan's step, where whole units count as their weakest part: {parts}"
    )


def _text(
    found: Found,
    task: Task,
    job: Job,
    source: str,
    shares: _Shares,
    counted: Sequence[str],
    config: Config,
    asked: Config,
) -> str:
    best = found.plans[0]
    pace = job.at_step_s(best.step_s)
    bound = job.at_step_s(found.bounds.step_s)
    lines = [
        f"{config.model.name} on {job.num_gpus:,} GPUs (pp {task.num_stages}, dp "
        f"{config.parallel.dp}, ep {config.parallel.ep}), {short(job.global_batch_tokens)} tokens "
        f"a step, {task.num_micro_batches} micro-batches, at most {task.memory_bytes / 1e9:g} GB a "
        f"GPU of which {task.reserved_bytes / 1e9:g} GB reserved (assumed)",
        _rests_on(source, shares.of(best)),
        "",
    ]
    rows = [_row(plan, job, task, shares) for plan in found.plans]
    if found.uniform is not None:
        rows.append(_row(found.uniform, job, task, shares))
    names = ("plan", "order", "step s", "MFU %", "interval", "cycle ms", "busiest", "most memory")
    lines += text_table(names, rows, left="plan")
    lines += [spread_words(SPREAD), *counted]
    if found.uniform is not None:
        gain = found.uniform.step_s / best.step_s - 1
        lines.append(
            f"the best plan's step is {100 * gain:.1f} % faster than the best uniform one "
            f"({100 * job.at_step_s(found.uniform.step_s).mfu:.2f} -> {100 * pace.mfu:.2f} % MFU)"
        )
    else:
        lines.append(f"no uniform plan to compare with: {found.why_no_uniform}")
    lines += [
        f"bound: no cut of these units and modes has a cycle under "
        f"{1e3 * found.bounds.cut_s:.2f} ms in this memory (work spread evenly: "
        f"{1e3 * found.bounds.balance_s:.2f} ms), so no step is under {found.bounds.step_s:.4g} s, "
        f"{100 * bound.mfu:.2f} % MFU; the best plan is "
        f"{100 * (best.step_s / found.bounds.step_s - 1):.2f} % above it",
        "",
        "as overrides of a run:",
        *overrides(best, config),
        *kernel_overrides(config, asked),
        *left_out(best),
        "",
    ]
    stages = [
        (
            str(index),
            f"{stage.layers:g}",
            f"{1e3 * stage.work_s:.2f}",
            str(stage.in_flight),
            short_bytes(stage.static_bytes),
            short_bytes(stage.slot_bytes),
            short_bytes(stage.held_bytes),
            short_bytes(stage.offloaded_bytes),
            short_bytes(stage.made_bytes),
            short_bytes(stage.peak_bytes),
            _modes(stage.units, stage.modes),
            stage.variant,
        )
        for index, stage in enumerate(best.stages)
    ]
    headings: tuple[str, ...] = ("stage", "layers", "ms", "in flight", "lies there", "slots")
    headings += ("kept", "offloaded", "made", "peak", "recomputed", "experts")
    lines += text_table(headings, stages, left="experts")
    lines += [_peaks_words(task), "", _why(best, task)]
    return "\n".join(lines)


def _peaks_words(task: Task) -> str:
    from ppruntime.projection.step_memory import WITHOUT

    return (
        "kept, offloaded: of one micro-batch; made: computed again, or in the head's loss; peak: "
        f"the memory ledger's for the run with these overrides, and {task.reserved_bytes / 1e9:g} "
        f"GB reserved for {WITHOUT}"
    )


def overrides(plan: Plan, config: Config) -> list[str]:
    """section.key=value texts on top of `config` with which a run is cut, ordered and recomputed as
    planned. Offload is left out: a plan has it in bytes, a run by micro-batches."""
    lines = [f"pp.schedule={plan.order}", f"pp.layers_per_stage={_list(plan.layers_per_stage)}"]
    if plan.order in ("async_1f1b", "1f1b_w"):
        lines.append(f"pp.warmup_step={_list(plan.warmup)}")
    elif config.pp.warmup_step is not None:
        lines.append("pp.warmup_step=default")
    lines += _mode_overrides(plan, config)
    if any(stage.experts for stage in plan.stages):
        if config.moe.compute.backend == "torch":
            lines.append("moe.compute.backend=auto")
        lines += _expert_overrides(plan)
    return lines


def kernel_overrides(config: Config, asked: Config) -> list[str]:
    """What makes the kernels of `asked` those of `config`, whose times and memory are planned."""
    kernels, given = config.kernels, asked.kernels
    return [
        f"kernels.{name}={getattr(kernels, name)}"
        for name in kernels.__struct_fields__
        if getattr(kernels, name) != getattr(given, name)
    ]


def left_out(plan: Plan) -> list[str]:
    """What the plan has and its overrides do not."""
    moved = [str(index) for index, stage in enumerate(plan.stages) if stage.offloaded_bytes]
    if not moved:
        return []
    return [
        f"not among them: what stages {', '.join(moved)} offload, without which they do not fit; a "
        "plan has it in bytes, pp.activation_offload by micro-batches"
    ]


def _mode_overrides(plan: Plan, config: Config) -> list[str]:
    """The mode of most layers, those of the others, and the list of what is saved: the config's."""
    from ppruntime.recompute import mode_overrides

    halves: dict[str, list[str]] = {}
    saves = "ac.save=default"
    for stage in plan.stages:
        for unit, name in zip(stage.units, stage.modes, strict=True):
            if unit.startswith("layers."):
                mode, save = mode_overrides(name)
                saves = save if ":" in name else saves
                halves.setdefault(unit.split(".")[1], []).append(mode.removeprefix("ac.mode="))
    pairs = [tuple(modes) for modes in halves.values()]
    same = [modes[0] for modes in pairs if len(set(modes)) == 1]
    usual = max(sorted(set(same)), key=same.count) if same else "none"
    others = ", ".join(
        f'"{layer}" = ["{modes[0]}", "{modes[1]}"]'
        for layer, modes in halves.items()
        if set(modes) != {usual}
    )
    lines = [f"ac.mode={usual}", *([] if config.ac.save is None else [saves])]
    return [*lines, f"ac.layer_modes={{{others}}}"] if others else lines


def _expert_overrides(plan: Plan) -> list[str]:
    """What stages with FP8 experts do with them."""
    uses, lines = [stage.experts for stage in plan.stages], []
    for name in ("free_bf16_expert_weights", "fp8_transposed_on_demand"):
        stages = [s for s, use in enumerate(uses) if use is not None and getattr(use, name)]
        lines.append(f"moe.compute.{name}={_list(stages) if stages else 'false'}")
    fused = [1 if use is None else use.fused_wgrad_micro_batches for use in uses]
    return [*lines, f"moe.compute.fused_wgrad_micro_batches={_list(fused)}"]


def _list(numbers: Sequence[float]) -> str:
    return f"[{','.join(f'{number:g}' for number in numbers)}]"


def _row(plan: Plan, job: Job, task: Task, shares: _Shares) -> tuple[str, ...]:
    stage = plan.stages[plan.busiest]
    most = max(range(len(plan.stages)), key=lambda s: plan.stages[s].peak_bytes)
    return (
        plan.name,
        plan.order,
        f"{plan.step_s:.3f}",
        f"{100 * job.at_step_s(plan.step_s).mfu:.2f}",
        "{:.1f} to {:.1f}".format(*_mfu_between(plan, job, shares)),
        f"{1e3 * plan.cycle_s:.2f}",
        f"stage {plan.busiest}, {1e3 * stage.work_s:.2f} ms",
        f"stage {most}, {short_bytes(plan.stages[most].peak_bytes)}",
    )


def _modes(units: tuple[str, ...], modes: tuple[str, ...]) -> str:
    """How many attention and MoE halves are recomputed."""
    counts = []
    for kind in ("attn", "moe"):
        of_kind = [mode for unit, mode in zip(units, modes, strict=True) if unit.endswith(kind)]
        counts.append(f"{sum(mode != 'none' for mode in of_kind)}/{len(of_kind)} {kind}")
    return ", ".join(counts)


def _why(plan: Plan, task: Task) -> str:
    """What holds the plan where it is."""
    stage = plan.stages[plan.busiest]
    work = [s.work_s for s in plan.stages]
    tight = [
        str(index) for index, s in enumerate(plan.stages) if s.peak_bytes > 0.97 * task.memory_bytes
    ]
    stall = plan.cycle_s / max(work) - 1
    return (
        f"why: stage {plan.busiest} ({', '.join(stage.units[:1])} .. {stage.units[-1]}) is the "
        f"busiest at {1e3 * stage.work_s:.2f} ms against {1e3 * sum(work) / len(work):.2f} ms on "
        f"average; a cycle waits {100 * stall:.2f} % beyond it for hops of {1e3 * task.hop_s:.2f} "
        f"ms; stages within 3 % of the memory cap: {', '.join(tight) or 'none'}"
    )


def _json(
    found: Found,
    job: Job,
    source: str,
    shares: _Shares,
    counted: Sequence[str],
    config: Config,
    asked: Config,
) -> str:
    def of(plan: Plan | None) -> dict[str, object] | None:
        if plan is None:
            return None
        return asdict(plan) | {
            "layers_per_stage": plan.layers_per_stage,
            "overrides": [*overrides(plan, config), *kernel_overrides(config, asked)],
            "not_in_overrides": left_out(plan),
            "mfu": 100 * job.at_step_s(plan.step_s).mfu,
            "mfu_between": _mfu_between(plan, job, shares),
        }

    best_shares = shares.of(found.plans[0])
    return json_module.dumps(
        {
            "gpus": job.num_gpus,
            "global_batch_tokens": job.global_batch_tokens,
            "rests_on": _rests_on(source, best_shares),
            "intervals": spread_words(SPREAD),
            "counted": list(counted),
            "shares": {str(origin): share for origin, share in best_shares.items()},
            "plans": [of(plan) for plan in found.plans],
            "uniform": of(found.uniform),
            "faster_than_uniform": found.uniform.step_s / found.plans[0].step_s - 1
            if found.uniform
            else None,
            "bounds": asdict(found.bounds),
        },
        indent=2,
    )
