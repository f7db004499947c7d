"""What the benches recorded of kernels alone: experts, sparse attention, transports. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ppruntime.models.dims import preset
from ppruntime.projection.calibration import read_calibration
from ppruntime.projection.projector import ProjectionError
from ppruntime.schedules.machine import Interference

RECORDED = "v41-flash"
"""Preset whose kernels, halves and parts the benches time."""
HEAD_SIZES = ("hidden_size", "vocab_size", "num_streams")
_LARGE = 335_544_320


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """Seconds of the routed experts of one rank and micro-batch, the fastest backend measured."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    fused_gain_s: Mapping[int, float]
    """By n: what n micro-batches' weight gradients in one launch save, per micro-batch."""
    turn_s: float
    """Turning FP8 weights when a backward asks for it, instead of keeping a turned copy."""
    quantise_s: float
    """Weights to FP8, once a step."""
    rows: int
    samples: int
    source: str


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of a part of a unit, measured as a whole at `tokens` tokens."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the benches say. Rates are of one GPU."""

    experts: ExpertTimes
    attention_s: Mapping[int, tuple[float, float]]
    """By slots a query sees: (forward, backward) at `attention_tokens` tokens."""
    attention_tokens: int
    attention_samples: int
    halves: Mapping[str, PartTimes]
    """Whole attention halves with the residual's mHC, by the bench's name of the kind; each by the
    fastest kernels that ran."""
    moe_half: PartTimes | None
    """A whole MoE half of one of eight ranks without dispatch, by the fastest experts and kernels;
    None before the bench ran."""
    parts: Mapping[str, PartTimes]
    """Our kernels for mhc, head and engram gate, by the bench's names; not every record has all."""
    head: PartTimes | None
    """The whole head as a unit by itself; None where no calibration of a model with that head is
    there."""
    bf16_flops: float
    memory_bytes_per_s: float
    """Read and written, in a copy."""
    nvlink_bytes_per_s: Mapping[str, float]
    """One way, by transport, at the size of a boundary."""
    interference: Mapping[str, Interference]
    device: str
    dates: tuple[str, ...]


def read_kernels(folder: Path) -> Kernels:
    """From moe-experts, layers-attention, layers-halves, layer-parts and transports .json, and from
    layers-moe.json and calibration.json if they are there. Raises ProjectionError if one of the
    others is not, or lacks a row."""
    try:
        names = ("moe-experts", "layers-attention", "layers-halves", "layer-parts", "transports")
        records = [json.loads((folder / f"{name}.json").read_text()) for name in names]
        moe, layers, halves, parts, moved = records
        moe_half = None
        if (path := folder / "layers-moe.json").exists():
            records.append(json.loads(path.read_text()))
            moe_half = min(_halves(records[-1], "MoE half").values(), key=_together)
        return Kernels(
            experts=_experts(moe),
            attention_s=_attention(layers),
            attention_tokens=layers["tokens"],
            attention_samples=min(len(row["milliseconds"]) for row in layers["rows"]),
            halves=_halves(halves, "attention half"),
            moe_half=moe_half,
            parts=_parts(parts),
            head=_head(folder / "calibration.json", moe["device"]),
            bf16_flops=min(
                1e12 * _median(moved, "bf16 matmul alone", "no transfer", 0),
                1e12 * layers["matmul_teraflops"],
            ),
            memory_bytes_per_s=2e9 * _median(moved, "copy inside a GPU", "raw peer copy"),
            nvlink_bytes_per_s={
                kind: 1e9 * _median(moved, "one way", kind) for kind in ("nccl", "put")
            },
            interference={kind: _interference(moved, kind) for kind in ("nccl", "put")},
            device=moe["device"],
            dates=tuple(record["date"][:10] for record in records),
        )
    except (OSError, KeyError, ValueError, StopIteration) as error:
        raise ProjectionError(
            f"{folder} has no complete kernel records ({type(error).__name__}: {error}); run the "
            "benches moe, layers and transports, or name another folder with --benches"
        ) from error


def _experts(record: Mapping[str, Any]) -> ExpertTimes:
    """The fastest backend for forward and backward in the case of eight ranks."""
    rows = {(r["shape"], r["phase"], r["variant"]): r for r in record["rows"]}

    def seconds(phase: str, variant: str, shape: str = "ep8") -> float:
        return float(rows[shape, phase, variant]["median_ms"]) / 1e3

    suffix = " (1 micro-batches)"
    name = min(
        (v for s, phase, v in rows if s == "ep8" and phase == "fwd + bwd" and v.endswith(suffix)),
        key=lambda variant: seconds("fwd + bwd", variant),
    )
    backend = name.removesuffix(suffix)
    whole, forward = seconds("fwd + bwd", name), seconds("forward", backend)
    weight = sum(
        min(
            r["median_ms"] / 1e3
            for (s, p, v), r in rows.items()
            # One micro-batch's are the own kernel's in every backend.
            if s == "ep8" and p == phase and v.startswith((backend.split(",")[0], "gluon"))
        )
        for phase in ("wgrad W13", "wgrad W2")
    )
    gains = {
        n: whole - seconds("fwd + bwd", together) / n
        for n in range(2, 17)
        if ("ep8", "fwd + bwd", together := f"{backend}, n={n} ({n} micro-batches)") in rows
    }
    case = next(n for n in record["notes"] if n.startswith("ep8: "))
    samples = len(rows["ep8", "fwd + bwd", name]["milliseconds"])
    return ExpertTimes(
        forward_s=forward,
        input_grad_s=whole - forward - weight,
        weight_grad_s=weight,
        fused_gain_s=gains,
        turn_s=seconds("turn", "on demand", "weights"),
        quantise_s=seconds("quantise", "with turned copy", "weights"),
        rows=int(case.split("ep8: ")[1].split()[0]),
        samples=samples,
        source=f"moe-experts.json, ep8, {backend}, {samples} samples",
    )


def _attention(record: Mapping[str, Any]) -> dict[int, tuple[float, float]]:
    best: dict[tuple[str, int], float] = {}
    for row in record["rows"]:
        if row["failure"] or row["part"] not in ("forward", "backward"):
            continue
        key = (row["part"], row["slots"])
        best[key] = min(best.get(key, float("inf")), row["median"] / 1e3)
    return {slots: (best["forward", slots], best["backward", slots]) for _, slots in best}


def _halves(record: Mapping[str, Any], name: str) -> dict[str, PartTimes]:
    """The halves of that name by kind, each by the fastest kernels."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in record["lines"]:
        if line["part"] == name and line["median"] is not None:
            times = found.setdefault((line["kind"], line["backend"]), {})
            times[line["phase"]] = line["median"] / 1e3
    best: dict[str, PartTimes] = {}
    for (kind, backend), times in found.items():
        part = PartTimes(
            times["forward"],
            times["input gradient"],
            times["weight gradients"],
            record["tokens"],
            f"{'layers-moe' if name == 'MoE half' else 'layers-halves'}.json, {kind}, {backend}",
        )
        if kind not in best or _together(part) < _together(best[kind]):
            best[kind] = part
    return best


def _head(path: Path, device: str) -> PartTimes | None:
    """From a calibration on the same device, of any model whose head has the sizes of v41-flash's,
    with the whole vocabulary and nothing in flight."""
    if not path.exists():
        return None
    known = read_calibration(path)
    here, there = (preset(name) for name in (RECORDED, known.model))
    same = all(getattr(here, size) == getattr(there, size) for size in HEAD_SIZES)
    if known.device != device or known.transport != "idle" or known.sizes or not same:
        return None
    for row in known.units:
        if row.unit == "head" and row.ac_mode == "none" and row.origin == "measured":
            return PartTimes(
                row.forward_s,
                row.input_grad_s,
                row.weight_grad_s,
                known.micro_batch_size * known.seq_len,
                f"{path.name}, {row.source}, {row.samples} samples",
            )
    return None


def _together(part: PartTimes) -> float:
    return part.forward_s + part.input_grad_s + part.weight_grad_s


def _parts(record: Mapping[str, Any]) -> dict[str, PartTimes]:
    def seconds(row: Mapping[str, Any], name: str) -> float:
        return float(median(row["milliseconds"][name])) / 1e3

    return {
        row["part"]: PartTimes(
            seconds(row, "forward"),
            seconds(row, "input_grad"),
            seconds(row, "weight_grad"),
            record["head_tokens" if row["part"] == "head" else "tokens"],
            f"layer-parts.json, {row['part']}",
        )
        for row in record["rows"]
        if row["variant"] == "triton" and not row["failure"]
    }


def _median(record: Mapping[str, Any], metric: str, kind: str, num_bytes: int = _LARGE) -> float:
    values = [
        value
        for row in record["rows"]
        if (row["metric"], row["kind"], row["num_bytes"]) == (metric, kind, num_bytes)
        for value in row["values"]
    ]
    if not values:
        raise KeyError(f"{metric}, {kind}, {num_bytes} bytes")
    return float(median(values))


def _interference(record: Mapping[str, Any], kind: str) -> Interference:
    """Mean over the two GEMMs that the bench ran beside the transport."""

    def share(way: str) -> float:
        gemms = ("bf16 matmul", "FP8 grouped GEMM")
        return sum(_median(record, f"{gemm}, {way}", kind) for gemm in gemms) / 2 / 100

    return Interference(max(0.0, share("one way")), max(0.0, share("both ways")))
