"""What `bench memory` runs: layouts, tokens, knobs, and what the plan says of each. Pure.

A case is a layout with a number of tokens; its rows are knobs, the first of them `off`. Sizes are
chosen by the plan for an H200: at 8,192 tokens `off` fits, above that only rows with knobs do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppruntime.config import Config, ConfigError, load
from ppruntime.config.help import kernels_left_to_auto
from ppruntime.ledger import predict
from ppruntime.offload_plan import LINK_BYTES_PER_SECOND, flops_to_hide_behind
from ppruntime.order import make_order
from ppruntime.plan import cut, train_flops_per_token
from ppruntime.plan_report import report

H200_BYTES = 150.1e9
"""What CUDA says an H200 has."""
HEADROOM_BYTES = 8e9
"""Left for CUDA's context, NCCL, workspaces and the allocator's slack, which no plan counts."""
_OFFLOAD = ("pp.activation_offload=true",)
_PACED = (*_OFFLOAD, "pp.offload_paced=true")
_ONE_IN_TWO = (*_PACED, "pp.offload_every=2")
_MASTERS = ("pp.offload_masters=true",)
_SIGNS = ("optim.type=sign_sgd", "optim.clip_norm=default")
_APART = ("pp.defer_weight_grads=true",)
_TWO_AT_ONCE = ("moe.compute.fused_wgrad_micro_batches=2",)
_IN_BACKWARD = (*_SIGNS, "optim.apply_in_backward=true")
ONE_IN_TWO = "offload, paced, one in two"
KNOBS: Mapping[str, tuple[str, ...]] = {
    "off": (),
    "offload": _OFFLOAD,
    "offload, paced": _PACED,
    ONE_IN_TWO: _ONE_IN_TWO,
    "offload as FP8": (*_OFFLOAD, "pp.offload_target=fp8"),
    "masters": _MASTERS,
    "masters and offload, paced": (*_MASTERS, *_PACED),
    "masters and one in two": (*_MASTERS, *_ONE_IN_TWO),
    "SignSGD": _SIGNS,
    "SignSGD in the backward": _IN_BACKWARD,
    "experts' weights freed": (
        "moe.compute.free_bf16_expert_weights=true",
        "moe.compute.fp8_transposed_on_demand=true",
    ),
    "weight gradients apart": _APART,
    "weight gradients of two": _TWO_AT_ONCE,
    "weight gradients apart, of two": (*_APART, *_TWO_AT_ONCE),
    "no recomputation": ("ac.mode=none",),
    "no recomputation, offload, paced": ("ac.mode=none", *_PACED),
}
"""Name -> overrides. The first one is what the others are measured against."""
FAST = (
    "ac.mode=full_moe",
    "moe.compute.backend=triton",
    *kernels_left_to_auto(but=("linear",)),
    "kernels.attention_deterministic=true",
)
"""What lies under the given overrides on a GPU: the fastest exact kernels whose bits repeat, and
the recomputation that keeps least."""


@dataclass(frozen=True, slots=True)
class Case:
    """One layout and number of tokens."""

    layout: str
    """`one`, `ppN` or `dpN`: see `layout_sizes`."""
    seq_len: int
    """Tokens of a micro-batch."""
    num_experts: int | None
    """None: the run file's."""
    in_flight: int
    """Micro-batches that the first stage keeps in flight."""
    num_micro_batches: int
    """Of each data rank in a step."""
    num_steps: int
    """Timed ones; one comes before them."""
    knobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One row to run: a knob of a case."""

    case: Case
    knob: str
    config: Config
    overrides: tuple[str, ...]
    is_exact: bool
    """Whether its losses are to be `off`'s bit by bit."""

    @property
    def num_ranks(self) -> int:
        return self.config.world_size

    @property
    def case_name(self) -> str:
        """What its rows share; tokens are as the config has them."""
        return f"{self.case.layout}, {self.config.train.seq_len:,} tokens"

    @property
    def name(self) -> str:
        return f"{self.case_name}, {self.knob}"


# By the kind of layout. One GPU alone has no room for moments beside eight layers with all experts:
# there all rows, off too, are SignSGD's.
_CASES: Mapping[str, tuple[tuple[int, int, int, int, int, tuple[str, ...]], ...]] = {
    "one": (
        (
            *(8192, 10, 5, 8, 2),
            (
                *("off", ONE_IN_TWO, "offload, paced", "masters and one in two"),
                *("SignSGD in the backward", "offload as FP8"),
            ),
        ),
        (16384, 12, 4, 5, 1, ("off", "masters and one in two")),
        (24576, 10, 3, 4, 1, ("off", "masters")),
    ),
    "pp": (
        (
            *(8192, 16, 4, 6, 2),
            (
                *("off", ONE_IN_TWO, "offload, paced", "masters and offload, paced"),
                *("SignSGD in the backward", "experts' weights freed"),
            ),
        ),
        (16384, 24, 4, 5, 1, ("off", "masters and one in two")),
        (24576, 18, 4, 5, 1, ("off", "masters and one in two")),
    ),
    "dp": (
        (
            *(8192, 8, 5, 6, 2),
            ("off", "masters", "masters and one in two", "SignSGD in the backward"),
        ),
        (16384, 10, 4, 5, 1, ("off", "offload, paced")),
        (24576, 8, 3, 4, 1, ("off", "SignSGD in the backward")),
    ),
}


def layout_sizes(layout: str) -> tuple[int, int]:
    """(pp.size, parallel.dp) of `one`, `ppN` or `dpN`. Raises ConfigError for anything else."""
    if layout == "one":
        return 1, 1
    found = re.fullmatch(r"(pp|dp)([1-9]\d*)", layout)
    if found is None or int(found[2]) < 2:
        raise ConfigError(f"--layouts has {layout!r}; take one, ppN or dpN with N of 2 or more")
    return (int(found[2]), 1) if found[1] == "pp" else (1, int(found[2]))


def cases_of(layout: str, tokens: Sequence[int] = ()) -> tuple[Case, ...]:
    """The cases of a layout, of these numbers of tokens only if any are named."""
    layout_sizes(layout)
    rows = _CASES[layout.rstrip("0123456789")]
    return tuple(Case(layout, *row) for row in rows if not tokens or row[0] in tokens)


def overrides_of(case: Case, device: str) -> tuple[str, ...]:
    """Of all rows of a case, without what a knob or the command line sets."""
    pp, dp = layout_sizes(case.layout)
    warm_up = [max(case.in_flight - 1 - 2 * rank, 0) for rank in range(pp)]
    return (
        f"pp.size={pp}",
        f"parallel.dp={dp}",
        "pp.layers_per_stage=default",
        "pp.schedule=async_1f1b",
        f"pp.warmup_step={warm_up}",
        f"train.num_micro_batches={case.num_micro_batches}",
        f"train.seq_len={case.seq_len}",
        f"run.device={device}",
        *((f"model.num_experts={case.num_experts}",) if case.num_experts else ()),
        *(_SIGNS if case.layout == "one" else ()),
        *(FAST if device == "cuda" else ()),
    )


def runs_of(
    case: Case,
    files: Sequence[str],
    given: Sequence[str] = (),
    *,
    device: str = "cuda",
    only: Sequence[str] = (),
) -> tuple[Run, ...]:
    """The rows of a case, or `off` and those of `only`, which need not be among the case's.
    `given`: the command line's overrides; a knob lies on top of them.

    Raises ConfigError where a row cannot be a run.
    """
    base = (*overrides_of(case, device), *given)
    off = load(files, base)
    runs = []
    for knob in dict.fromkeys(("off", *(only or case.knobs))):
        overrides = (*base, *KNOBS[knob])
        config = load(files, overrides)
        runs.append(Run(case, knob, config, overrides, _has_the_bits_of(off, config)))
    return tuple(runs)


def _has_the_bits_of(off: Config, config: Config) -> bool:
    """Whether the knobs between two configs are all bitwise."""
    is_rounded = config.pp.activation_offload and config.pp.offload_target == "fp8"
    return config.optim.type == off.optim.type and not is_rounded


def plan_of(config: Config) -> dict[str, Any]:
    """What the plan says of a row, for the record: bytes by pipeline rank, and the link.

    `peak_bytes` is the ledger's, of live tensors; `total_bytes` the plan's bound, which adds up the
    most of every kind. `hidden_up_to_flops_per_s` is None where nothing is copied.
    """
    order, plan = make_order(config), report(config)
    stages = cut(
        config.model.dims,
        order.computations.stage_to_rank,
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )
    tokens = config.train.micro_batch_size * config.train.seq_len * config.train.num_micro_batches
    flops = [
        tokens
        * sum(
            train_flops_per_token(config.model.dims, unit, config.train.seq_len)
            for stage in stages
            if stage.rank == rank
            for unit in stage.units
        )
        for rank in range(config.pp.size)
    ]
    hidden = flops_to_hide_behind(config, order, stages)
    return {
        "ranks": [
            {
                "rank": ledger.rank,
                "peak_bytes": ledger.peak_bytes,
                "peak_op": ledger.peak.op,
                "total_bytes": ranked.total_bytes,
                "resting_parameters": ledger.resting_parameters,
                "optimizer": ledger.optimizer,
                "host_bytes": ranked.host_bytes,
                "rows": dict(ledger.rows()),
            }
            for ledger, ranked in zip(predict(config), plan.ranks, strict=True)
        ],
        "offload": plan.offload,
        "flops_per_step": max(flops),
        "hidden_up_to_flops_per_s": hidden if math.isfinite(hidden) else None,
        "link_bytes_per_second": LINK_BYTES_PER_SECOND,
    }


def planned_peak(plan: Mapping[str, Any]) -> float:
    """The most that any rank of a row's plan takes up, by the ledger."""
    return float(max(rank["peak_bytes"] for rank in plan["ranks"]))


def refusal(plan: Mapping[str, Any], device_bytes: float) -> str:
    """Why a row is not begun; empty if it fits by the plan."""
    most, room = planned_peak(plan), device_bytes - HEADROOM_BYTES
    if most <= room:
        return ""
    return (
        f"does not fit: planned with {most / 1e9:.1f} GB, the device has {device_bytes / 1e9:.1f},"
        f" and {HEADROOM_BYTES / 1e9:g} of them are for what no plan counts"
    )
