"""Calibrations that runs make: what all of them say of themselves, merging, writing. No model."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from ppruntime.config import Config
from ppruntime.plan import StagePlan, cut
from ppruntime.projection.calibration import (
    LEAST_SAMPLES,
    Calibration,
    HeldBytes,
    PerStep,
    Row,
    Slowdown,
    StagePeak,
    StageTimes,
    TransferTimes,
    UnitTimes,
    changed_sizes,
    of_other_sizes,
    read_calibration,
)
from ppruntime.projection.pipeline import modes_of
from ppruntime.projection.projector import ProjectionError
from ppruntime.typed_command import typed


def calibration_of(
    config: Config,
    *,
    few_samples: bool,
    transport: str,
    stages: Sequence[StageTimes] = (),
    units: Sequence[UnitTimes] = (),
    transfers: Sequence[TransferTimes] = (),
    per_step: Sequence[PerStep] = (),
    slowdowns: Sequence[Slowdown] = (),
    memory: Sequence[HeldBytes] = (),
    peaks: Sequence[StagePeak] = (),
) -> Calibration:
    """A calibration of this run on this machine. Rows with fewer than 100 samples are refused
    (ProjectionError), or with `few_samples` become assumed ones whose source says how many."""
    refuse_profilers()

    def checked(rows: Sequence[Row]) -> list[Row]:
        return [_checked(row, few_samples=few_samples) for row in rows]

    train = config.train
    on_cuda = torch.cuda.is_available()
    return msgspec.convert(
        {
            "schema": 1,
            "command": typed(),
            "device": torch.cuda.get_device_name() if on_cuda else platform.machine(),
            "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": config.model.name,
            "sizes": changed_sizes(config),
            "precision": train.precision,
            "seq_len": train.seq_len,
            "micro_batch_size": train.micro_batch_size,
            "ep": config.parallel.ep,
            "transport": transport,
            "routing": "balanced" if train.force_balanced_routing else "by the router",
            "seeds": (train.seed,),
            "zero_weights": False,
            "profiled": False,
            "layers_per_stage": _cut(config) if stages else None,
            "stages": checked(_in_their_modes(config, stages)),
            "units": checked(units),
            "transfers": checked(transfers),
            "per_step": checked(per_step),
            "slowdowns": checked(slowdowns),
            "memory": list(memory),
            "peaks": list(peaks),
        },
        Calibration,
        from_attributes=True,
    )


def _cut(config: Config) -> tuple[float, ...]:
    return tuple(stage.num_layers for stage in _stages(config))


def _stages(config: Config) -> tuple[StagePlan, ...]:
    return cut(
        config.model.dims,
        range(config.pp.num_stages),
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )


def _in_their_modes(config: Config, rows: Sequence[StageTimes]) -> list[StageTimes]:
    plan = _stages(config) if rows else ()
    return [
        msgspec.structs.replace(row, ac_modes=modes_of(config, plan[row.stage])) for row in rows
    ]


def refuse_profilers() -> None:
    """Raises ProjectionError while something watches every call or kernel of this process."""
    watching = [
        name
        for name, on in (
            ("a Python profiler", sys.getprofile() is not None),
            ("the torch profiler", torch.autograd.profiler._is_profiler_enabled),
        )
        if on
    ]
    if watching:
        raise ProjectionError(f"{watching[0]} is on, which stretches every op; run without it")


def refuse_before(
    path: Path, config: Config, *, transport: str, samples: int, few_samples: bool, stages: bool
) -> None:
    """What `calibration_of` and `merged` would refuse after the run, before it: a profiler, too few
    `samples`, a file at `path` that is of another run. `stages`: rows of stages are to come.

    Raises ProjectionError.
    """
    row = PerStep(name="", seconds=0.0, origin="measured", source="", samples=samples)
    _checked(row, few_samples=few_samples)
    new = calibration_of(config, few_samples=few_samples, transport=transport)
    if stages:
        new = msgspec.structs.replace(new, layers_per_stage=_cut(config))
    merged(path, new)


def merged(path: Path, new: Calibration) -> Calibration:
    """`new` with the rows that the file at `path` has beside them; `new` alone if there is no file.

    Rows of one thing are the new ones, unless only the old one was measured. `command` names all
    that gave rows, one after another. Raises ProjectionError if the file is of another run.
    """
    if not path.exists():
        return new
    old = read_calibration(path)
    for name in ("device", "model", "seq_len", "micro_batch_size", "ep", "transport", "routing"):
        if getattr(old, name) != getattr(new, name):
            raise ProjectionError(
                f"{path} is of {name} {getattr(old, name)}, this run of {getattr(new, name)}; "
                "write to another file"
            )
    complaint = of_other_sizes(old, new.sizes)
    if old.precision not in (None, new.precision):
        complaint = f"of precision {old.precision}, this run of {new.precision}"
    if complaint is not None:
        raise ProjectionError(f"{path} is {complaint}; write to another file")
    cuts = {c.layers_per_stage for c in (old, new) if c.layers_per_stage is not None}
    if len(cuts) > 1:
        raise ProjectionError(f"{path} has stages of another cut; write to another file")
    commands = old.command.split(_THEN)
    changes: dict[str, object] = {
        "layers_per_stage": cuts.pop() if cuts else None,
        "command": _THEN.join(dict.fromkeys([*commands, new.command])),
    }
    for group, keys in _KEYS.items():
        rows = {tuple(getattr(row, k) for k in keys): row for row in getattr(old, group)}
        for row in getattr(new, group):
            key = tuple(getattr(row, k) for k in keys)
            if row.origin != "modelled" or key not in rows or rows[key].origin != "measured":
                rows[key] = row
        changes[group] = tuple(rows[key] for key in sorted(rows))
    return msgspec.structs.replace(new, **changes)


def check_idle(idle: Calibration, in_flight: Calibration) -> None:
    """Raises ProjectionError unless the two are of one run, without transfers and beside some."""
    same = ("device", "model", "sizes", "precision", "seq_len", "micro_batch_size", "ep", "routing")
    for name in same:
        if getattr(idle, name) != getattr(in_flight, name):
            raise ProjectionError(
                f"the calibration without transfers is of {name} {getattr(idle, name)}, the one "
                f"beside them of {getattr(in_flight, name)}; time both on the same run"
            )
    if idle.transport != "idle" or in_flight.transport == "idle":
        raise ProjectionError(
            f"ops were timed with {idle.transport} and with {in_flight.transport} in flight; the "
            "first file has to be idle, the second not"
        )


def slowdown_row(idle: Calibration, in_flight: Calibration) -> Slowdown:
    """What the transport of `in_flight` does to compute: by how much the units that both files have
    take longer beside its messages both ways, all together. `one_way` is the same, since one way
    was not timed: more than it is.

    Raises ProjectionError as `check_idle` does, and where they have no unit in common.
    """
    check_idle(idle, in_flight)
    alone, beside = ({(r.unit, r.ac_mode): r for r in c.units} for c in (idle, in_flight))
    both = sorted(alone.keys() & beside.keys())
    if not both:
        raise ProjectionError(
            "the two calibrations have no unit and ac.mode in common; time the same --modes"
        )

    def seconds(rows: Mapping[tuple[str, str], UnitTimes]) -> float:
        return sum(
            rows[key].forward_s + rows[key].input_grad_s + rows[key].weight_grad_s for key in both
        )

    share = max(0.0, seconds(beside) / seconds(alone) - 1)
    rows = [each[key] for each in (alone, beside) for key in both]
    is_measured = all(row.origin == "measured" for row in rows)
    return Slowdown(
        transport=in_flight.transport,
        one_way=share,
        both_ways=share,
        origin="measured" if is_measured else "assumed",
        samples=min(row.samples or 0 for row in rows),
        source=f"{len(both)} units beside messages both ways against those alone, F + I + W of all;"
        " one way taken for the same",
    )


_THEN = "; "
"""Between the commands of one file."""

_KEYS = {
    "stages": ("stage",),
    "units": ("unit", "ac_mode"),
    "transfers": ("link", "num_bytes"),
    "per_step": ("name",),
    "slowdowns": ("transport",),
    "memory": ("unit", "ac_mode"),
    "peaks": ("stage",),
}
"""What tells rows of a group apart."""


def write_calibration(known: Calibration, path: Path) -> None:
    """Writes the file, whole or not at all, and reads it again as a projection would; makes its
    folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    read_calibration(beside)
    beside.replace(path)


def _checked(row: Row, *, few_samples: bool) -> Row:
    if row.origin != "measured" or row.samples >= LEAST_SAMPLES:
        return row
    if not few_samples:
        raise ProjectionError(
            f"{row.samples} samples are too few for a median and a 95th percentile, "
            f"{LEAST_SAMPLES} are needed; measure more, or keep them as assumed with --few-samples"
        )
    return msgspec.structs.replace(
        row, origin="assumed", source=f"{row.source}; {row.samples} samples only"
    )
