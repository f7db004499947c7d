"""What a rank that ran out of memory could change, each change tried out on the ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from msgspec.structs import replace

from ppruntime.config.keys import Config, RecomputeMode
from ppruntime.config.rules import broken_rules
from ppruntime.ledger import predict
from ppruntime.offload_plan import LINK_BYTES_PER_SECOND, flops_to_hide_behind, master_bytes
from ppruntime.order import make_order
from ppruntime.plan import StagePlan, cut
from ppruntime.plan_report import flop_costs
from ppruntime.schedules.timeline import simulate
from ppruntime.text_table import short_bytes

_SHARE = 0.95
"""Where a prediction was below what the device has, a change makes as much room again as it missed:
a twentieth at least."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One or two knobs that lower a rank's predicted peak."""

    change: str
    """As overrides of the command line."""
    peak_bytes: int
    cost: float
    """Step time over the present one, less 1; op times as FLOPs, free transfers."""
    copies: str
    """What moves to the host and back, and when that is hidden; empty without."""

    @property
    def text(self) -> str:
        return (
            f"{self.change} would need {short_bytes(self.peak_bytes)}; the step takes"
            f" {self.cost:+.1%} by FLOPs{self.copies}"
        )


def remedies(config: Config, rank: int, goal_bytes: float) -> list[Remedy]:
    """Changes with which the rank's predicted peak is at most `goal_bytes`, the cheapest first: one
    knob each, or two where no one alone is enough."""
    found = _fitting(config, rank, goal_bytes, [[knob] for knob in _knobs(config)])
    if not found:
        pairs = (
            [one, other] for one, other in combinations(_knobs(config), 2) if one.kind != other.kind
        )
        found = _fitting(config, rank, goal_bytes, pairs)
    return sorted(
        found, key=lambda remedy: (round(remedy.cost, 6), bool(remedy.copies), -remedy.peak_bytes)
    )


def out_of_memory_text(config: Config, rank: int, device_bytes: int | None) -> str:
    """The ledger of a rank that ran out of memory and the two cheapest changes that would fit, of
    different kinds if there are such.

    `device_bytes`: what the device has, if known.
    """
    ledger = predict(config)[rank]
    predicted = ledger.peak_bytes
    goal = _SHARE * (predicted if device_bytes is None else min(predicted, device_bytes))
    rows = ", ".join(f"{name} {short_bytes(num)}" for name, num in ledger.rows() if num)
    lines = [
        f"predicted for rank {rank}: {rows}; together {short_bytes(predicted)} at the most, in"
        f" {ledger.peak.op}"
        + (f"; the device has {short_bytes(device_bytes)}" if device_bytes is not None else "")
    ]
    found = remedies(config, rank, goal)
    first = found[:1]
    others = [r for r in found[1:] if bool(r.copies) != bool(first[0].copies)] or found[1:]
    lines.extend(remedy.text for remedy in first + others[:1])
    if not found:
        lines.append(
            "no ac.mode and no offload make it fit; use more ranks (pp.size, parallel.dp), fewer"
            " tokens"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Knob:
    """Keys and their new values."""

    kind: str
    """Knobs of one kind exclude each other."""
    values: tuple[tuple[str, Any], ...]

    @property
    def change(self) -> str:
        texts = ((key, "default" if value is None else value) for key, value in self.values)
        return " ".join(f"{key}={str(value).lower()}" for key, value in texts)

    def turn(self, config: Config) -> Config:
        for key, value in self.values:
            section, name = key.split(".")
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
        return config


_MODES: tuple[RecomputeMode, ...] = ("matmul", "attention", "projections", "full", "full_moe")


def _knobs(config: Config) -> Iterator[_Knob]:
    """What may help, by kind; whether it does and whether it is allowed is seen later."""
    # A list that no layer's mode reads would be refused.
    lists = () if config.ac.save is None else (("ac.save", None),)
    for mode in _MODES:
        if config.ac.mode != mode:
            yield _Knob("ac", (("ac.mode", mode), *lists))
    pp, train = config.pp, config.train
    moving = (("pp.activation_offload", True),) if not pp.activation_offload else ()
    if moving:
        yield _Knob("activations", moving)
    if not pp.offload_paced and pp.offload_target == "host":
        yield _Knob("activations", (*moving, ("pp.offload_paced", True)))
    if not pp.offload_masters:
        yield _Knob("masters", (("pp.offload_masters", True),))
    if train.micro_batch_size % 2 == 0:
        size, number = train.micro_batch_size // 2, 2 * train.num_micro_batches
        smaller = (("train.micro_batch_size", size), ("train.num_micro_batches", number))
        yield _Knob("batch", smaller)


def _fitting(
    config: Config, rank: int, goal_bytes: float, choices: Iterable[Sequence[_Knob]]
) -> list[Remedy]:
    """Those of the choices that are allowed and fit."""
    now, found = _step_time(config), []
    for knobs in choices:
        other = config
        for knob in knobs:
            other = knob.turn(other)
        if any(broken_rules(other, frozenset())):
            continue
        peak = predict(other)[rank].peak_bytes
        if peak <= goal_bytes:
            change = " ".join(knob.change for knob in knobs)
            cost = _step_time(other) / now - 1
            moves = {knob.kind for knob in knobs} & {"activations", "masters"}
            found.append(Remedy(change, peak, cost, _copies(other) if moves else ""))
    return found


def _step_time(config: Config) -> float:
    order = make_order(config).computations
    costs = flop_costs(config, _cut(config))
    return simulate(order, costs).makespan * config.train.micro_batch_size


def _copies(config: Config) -> str:
    """What the link between host and device has to do, and when computations hide it."""
    order, plan, parts = make_order(config), _cut(config), []
    rate = f"{LINK_BYTES_PER_SECOND / 1e9:g} GB/s"
    limit = flops_to_hide_behind(config, order, plan)
    if limit < float("inf"):
        parts.append(
            f"activations go to the host and back, hidden at {rate} unless a device does more than"
            f" {limit / 1e12:.4g} TFLOP/s"
        )
    if masters := max(_masters(config, plan)):
        parts.append(
            f"{short_bytes(masters)} of masters go there and back once a step, beside"
            f" computations, {1e3 * masters / LINK_BYTES_PER_SECOND:.3g} ms each way at {rate}"
        )
    return "".join(f"; {part}" for part in parts)


def _masters(config: Config, plan: Sequence[StagePlan]) -> list[int]:
    """By rank."""
    ranks = [0] * config.pp.size
    for stage in plan:
        ranks[stage.rank] += master_bytes(config, stage)
    return ranks


def _cut(config: Config) -> tuple[StagePlan, ...]:
    placement = make_order(config).computations.stage_to_rank
    layers, seq_len = config.pp.layers_per_stage, config.train.seq_len
    return cut(config.model.dims, placement, layers, seq_len=seq_len)
