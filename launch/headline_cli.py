"""`ppruntime headline`: the whole projection of V4.1-Flash, from the kernels' records of today."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppruntime.launch.outputs import check_output
from ppruntime.launch.plan_search import BENCHES
from ppruntime.launch.projected_job import PLAN_OF_RECORD
from ppruntime.launch.whole_numbers import Whole
from ppruntime.projection.projector import Job, Origin
from ppruntime.text_table import short

if TYPE_CHECKING:
    from ppruntime.config import Config
    from ppruntime.projection.headline import Exchange, Row
    from ppruntime.projection.kernel_records import Kernels

_PUBLISHED = (
    ("published, nccl", 28.94, "115.8 GB"),
    ("published, put", 33.98, "117.5 GB"),
    ("published, 80 GB cap, put", 31.60, "79.5 GB"),
)
"""MFUs (unrounded values that give all published figures) and most memory of another
implementation, from an 8-node emulation."""
_PUBLISHED_EP64 = (150e9, 143e9)
"""Bytes per GPU and step over InfiniBand, and what the target step has room for."""


def headline(
    *,
    benches: Path = BENCHES,
    out: Path | None = None,
    micro_batches: Whole = 320,
) -> int:
    """Projects V4.1-Flash on H200s: PP16 x EP8 beside published rows, memory, PP4 x EP8, pp = 1.

    Parameters
    ----------
    benches
        Folder with the records moe-experts, layers-attention and transports .json.
    out
        Markdown file to write as well.
    micro_batches
        Per step of PP16 x EP8.
    """
    from ppruntime.config import load
    from ppruntime.projection.kernel_records import read_kernels

    check_output("--out", out)
    kernels = read_kernels(benches)

    def config(*overrides: str) -> Config:
        return load([PLAN_OF_RECORD], [f"train.num_micro_batches={micro_batches}", *overrides])

    parts = [*_head(kernels), *_pp16(config, kernels), *_pp4(config, kernels)]
    parts += _pp1(config("parallel.dp=12"), kernels)
    text = "\n".join(parts) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text)
    return 0


def _head(kernels: Kernels) -> list[str]:
    return [
        "# V4.1-Flash on H200s, projected",
        "",
        "Written by `ppruntime headline --out docs/headline.md` from the kernels' records in "
        "docs/bench of",
        f"{', '.join(sorted(set(kernels.dates)))} ({kernels.device}). No pipeline step of this "
        "model was run on GPUs.",
        "",
        *_rests_on(kernels),
        *_RESTS_ON,
    ]


def _rests_on(kernels: Kernels) -> list[str]:
    """What is measured and what is modelled; a head that was timed whole is no model."""
    lines = _MEASURED if kernels.moe_half is None else _MEASURED_WHOLE
    if kernels.head is None:
        return [*lines]
    tokens = f"{kernels.head.tokens:,}"
    head = f"  the whole head at {tokens} tokens (of a model with fewer layers);"
    return [
        line.replace("GPUs;", f"GPUs,\n{head}").replace("the head by its tokens,", "").rstrip()
        for line in lines
    ]


_MEASURED = (
    "- measured: whole attention halves with the residual streams' mHC, by kind, routed experts'",
    "  forward and backward, mHC around them, Engram's gate, each alone on one GPU, and the",
    "  slow-downs and rates of transports between two GPUs;",
    "- modelled: halves that reuse keys at ratio 2 by those at ratio 1, the head by its tokens,",
    "  router, shared expert and Engram's projection by FLOPs at the measured bf16 rate, dispatch",
    "  within a node by bytes over NVLink, the order in virtual time, the data ranks' collectives;",
)
_MEASURED_WHOLE = (
    "- measured: whole attention and MoE halves with the residual streams' mHC, by kind, those",
    "  of MoE with the rows of one of eight ranks, Engram's gate, each alone on one GPU, and the",
    "  slow-downs and rates of transports between two GPUs;",
    "- modelled: halves that reuse keys at ratio 2 by those at ratio 1, the head by its tokens,",
    "  Engram's projection by FLOPs at the measured bf16 rate, dispatch within a node by bytes",
    "  over NVLink, the order in virtual time, the data ranks' collectives;",
)
_RESTS_ON = (
    "- assumed: InfiniBand at 46 GB/s a GPU each way, Engram lookups over it with nothing hidden,",
    "  10 GB a GPU for context and all else that the memory ledger lacks, transports' slow-downs",
    "  over InfiniBand as over NVLink (nccl with as many thread blocks as it takes by itself: with",
    "  a run's default of 4, single products beside it slow down less, but whole pipelines lose",
    "  5 % to it, about what comes out here), hosts that run ahead of their GPUs (an FP8 half's",
    "  takes as long as the GPU, see the halves' record), no stragglers, no failures.",
    "",
    "Memory is the ledger's of each plan's run with its kernels on auto (weights, gradients,",
    "optimizer, slots, what is in flight and made again, the head's loss, the update; `ppruntime",
    "plan --ledger`), and the 10 GB. A recomputed MoE half runs its experts again (full_moe).",
    "",
    "What a search's plan says of experts is `moe.compute.free_bf16_expert_weights`,",
    "`fp8_transposed_on_demand` and `fused_wgrad_micro_batches` of a run, for its stages.",
    "",
    "Intervals: measured pieces off by 2 %, modelled by 15 %, assumed by 40 %, all the same way,",
    "slow-downs by transports and the data ranks' collectives among them.",
    "Peak for MFU: 989 TFLOP/s a GPU; 6N FLOPs a token; days for 20T tokens.",
    "",
)


def _pp16(config: Callable[..., Config], kernels: Kernels) -> list[str]:
    from ppruntime.projection.headline import H200_BYTES, SMALL_BYTES, job_of, project_plan, search

    lines = ["## PP16 x EP8, 8,192 tokens a micro-batch", ""]
    table: list[Sequence[str]] = []
    memory: list[str] = []
    for gpus in (1536, 1024):
        here = config(f"parallel.dp={gpus // 128}")
        job = job_of(here)
        for name, mfu, most in _PUBLISHED:
            table.append(_published_row(name, job, mfu, most))
        found = search(here, kernels, H200_BYTES)
        rows: list[Row] = []
        if found.uniform is not None:
            even = found.uniform
            rows += [project_plan(here, kernels, even, t, even.name) for t in ("nccl", "put")]
        best = found.plans[0]
        rows += [
            project_plan(here, kernels, best, t, "best plan", waterfall=t == "put")
            for t in ("nccl", "put")
        ]
        small = search(here, kernels, SMALL_BYTES)
        rows.append(project_plan(here, kernels, small.plans[0], "put", "best plan, 79.5 GB cap"))
        table += [_row(row) for row in rows]
        if gpus == 1536:
            memory = [*_memory(rows[-2]), *_memory(rows[-1]), *_waterfall(rows[-2])]
    headings = (
        "setup",
        "transport",
        "GPUs",
        "tokens a step",
        "MFU %",
        "interval",
        "step s",
        "days",
        "most memory",
        "measured / modelled / assumed",
    )
    return [*lines, *_markdown(headings, table), "", *memory]


def _published_row(name: str, job: Job, mfu: float, most: str) -> tuple[str, ...]:
    pace = job.at_mfu(mfu / 100)
    return (
        name,
        name.rpartition(" ")[2],
        f"{job.num_gpus:,}",
        short(job.global_batch_tokens),
        f"{mfu:.2f}",
        "-",
        f"{pace.step_s:.2f}",
        f"{pace.days:.1f}",
        most,
        "as published",
    )


def _row(row: Row) -> tuple[str, ...]:
    pace = row.simulation.pace
    stage, most = row.worst_bytes
    return (
        f"{row.name}, {row.plan.order}",
        row.transport,
        f"{row.job.num_gpus:,}",
        short(row.job.global_batch_tokens),
        f"{100 * pace.mfu:.2f}",
        f"{100 * row.mfu_of(row.high_s):.1f} to {100 * row.mfu_of(row.low_s):.1f}",
        f"{pace.step_s:.2f}",
        f"{pace.days:.1f}",
        f"{most / 1e9:.1f} GB, stage {stage}",
        _share_words(row),
    )


def _share_words(row: Row) -> str:
    return " / ".join(f"{100 * row.shares[origin]:.0f} %" for origin in Origin)


def _memory(row: Row) -> list[str]:
    """The plan, a row a stage."""
    cells = [
        (
            str(index),
            f"{stage.layers:g}",
            f"{1e3 * stage.work_s:.1f}",
            f"{100 * row.stages[index][Origin.MEASURED]:.0f}",
            str(stage.in_flight),
            f"{stage.static_bytes / 1e9:.1f}",
            f"{stage.slot_bytes / 1e9:.1f}",
            f"{stage.held_bytes / 1e9:.2f}",
            f"{stage.made_bytes / 1e9:.1f}",
            f"{stage.peak_bytes / 1e9:.1f}",
            f"{stage.peak_bytes / 2**30:.1f}",
            f"{sum(mode != 'none' for mode in stage.modes)} of {len(stage.modes)}",
            stage.variant,
        )
        for index, stage in enumerate(row.plan.stages)
    ]
    headings = (
        "stage",
        "layers",
        "work ms",
        "of it measured %",
        "in flight",
        "lies there GB",
        "slots GB",
        "kept a micro-batch GB",
        "made in an op GB",
        "peak GB",
        "peak GiB",
        "units recomputed",
        "experts",
    )
    return [
        f"### {row.name}, {row.job.num_gpus:,} GPUs: memory per stage (by the ledger, and 10 GB "
        "assumed)",
        "",
        *_markdown(headings, cells),
        "",
    ]


def _waterfall(row: Row) -> list[str]:
    cells = [(r.name, f"{r.step_s:.2f}", f"{100 * r.mfu:.2f}") for r in row.simulation.rungs]
    return [
        f"### {row.name}, {row.transport}, {row.job.num_gpus:,} GPUs, "
        f"{short(row.job.global_batch_tokens)} tokens a step: one thing after another",
        "",
        f"Measured / modelled / assumed, of the whole step: {_share_words(row)}.",
        "Work counts piece by piece on the busiest stage, as the tables above do for each; waits,",
        "transfers and slow-downs count as modelled.",
        "",
        *_markdown(("", "step s", "MFU %"), cells),
        "",
    ]


def _pp4(config: Callable[..., Config], kernels: Kernels) -> list[str]:
    """Four stages; how many micro-batches the published row had is not known."""
    from ppruntime.projection.headline import project_plan, search
    from ppruntime.projection.simulate import CAUSES

    cells = []
    cuts: list[str] = []
    for count in (4, 8, 16):
        here = config(
            "pp.size=4",
            "pp.layers_per_stage=[10, 10, 10, 10]",
            "parallel.dp=2",
            "train.seq_len=16384",
            f"train.num_micro_batches={count}",
        )
        found = search(here, kernels, math.inf)
        plans = [(found.plans[0], "best cut")]
        if found.uniform is not None:
            plans.insert(0, (found.uniform, found.uniform.name))
        for plan, name in plans:
            row = project_plan(here, kernels, plan, "put", name)
            step, pace = row.simulation.step, row.simulation.pace
            lost = step.lost[step.busiest]
            shares = ", ".join(
                f"{cause} {100 * value / pace.step_s:.1f}"
                for cause, value in zip(CAUSES, lost, strict=True)
                if value > 0.0005 * pace.step_s
            )
            imbalance = max(step.work) - sum(step.work) / len(step.work)
            cells.append(
                (
                    str(count),
                    f"{name}, {plan.order}",
                    f"{100 * pace.mfu:.1f}",
                    f"{100 * row.mfu_of(row.high_s):.1f} to {100 * row.mfu_of(row.low_s):.1f}",
                    short(row.job.global_batch_tokens),
                    shares,
                    f"{100 * imbalance / pace.step_s:.1f}",
                    f"{row.worst_bytes[1] / 1e9:.0f} GB",
                    _share_words(row),
                )
            )
            if plan is found.plans[0] and count == 8:
                layers = ", ".join(f"{value:g}" for value in plan.layers_per_stage)
                cuts.append(f"The best cut at M = 8: pp.layers_per_stage = [{layers}].")
    headings = (
        "M",
        "plan",
        "MFU %",
        "interval",
        "tokens a step",
        "busiest rank loses, % of the step",
        "imbalance %",
        "most memory",
        "measured / modelled / assumed",
    )
    return [
        "## PP4 x EP8, 64 GPUs, 16,384 tokens a micro-batch",
        "",
        "Published: 23 to 28 %, its number of micro-batches M not said. No memory cap here: the",
        "most memory is what it would take, more than an H200 has; such runs keep masters",
        "elsewhere or train a smaller model.",
        "",
        *_markdown(headings, cells),
        "",
        *cuts,
        "",
    ]


def _pp1(config: Config, kernels: Kernels) -> list[str]:
    """Layouts without a pipeline, and the published EP64 row."""
    from ppruntime.projection.headline import exchanges, job_of

    tokens = 16384
    job = job_of(config)
    cells = [_exchange_row(e) for e in exchanges(config, kernels, (8, 48, 64), tokens)]
    moved, room = _PUBLISHED_EP64
    headings = (
        "EP",
        "a token goes once to each",
        "exchange again in backward",
        "NVLink GB",
        "InfiniBand GB",
        "NVLink s",
        "InfiniBand s",
        "compute s",
        "longest",
    )
    step = moved / 46e9
    return [
        "## pp = 1: expert traffic per GPU and step, 16,384 tokens a GPU",
        "",
        f"Tokens a step are 16,384 x GPUs, GPUs as many as EP: {short(16384 * 64)} on 64. Compute "
        "is the sum of the",
        "units above at this length, nothing recomputed (modelled); bytes are modelled; rates: "
        "NVLink as put measured,",
        "InfiniBand 46 GB/s (assumed). No step of such a layout was measured.",
        "",
        *_markdown(headings, cells),
        "",
        f"The published EP64 row: {moved / 1e9:.0f} GB a GPU and step over InfiniBand take "
        f"{step:.2f} s at 46 GB/s,",
        f"where its target step has room for {room / 1e9:.0f} GB ({room / 46e9:.2f} s): "
        f"{'InfiniBand' if moved > room else 'compute'}-bound. Its bytes lie between",
        "the two ways of copying with the exchange repeated. At that target the MFU would be "
        f"{_mfu(job, room / 46e9, tokens):.1f} %, at {step:.2f} s {_mfu(job, step, tokens):.1f} %,",
        "with the exchange hidden entirely (arithmetic on published bytes, nothing measured here).",
    ]


def _mfu(job: Job, step_s: float, tokens: int) -> float:
    return 100 * job.flops_per_token * tokens / (step_s * job.gpu_flops)


def _exchange_row(found: Exchange) -> tuple[str, ...]:
    return (
        str(found.ep),
        found.copies if found.ep > 8 else "rank",
        "yes" if found.again else "no",
        f"{found.nvlink_bytes / 1e9:.0f}",
        f"{found.ib_bytes / 1e9:.0f}",
        f"{found.nvlink_s:.2f}",
        f"{found.ib_s:.2f}",
        f"{found.compute_s:.2f}",
        found.bound_by,
    )


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
