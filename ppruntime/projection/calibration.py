"""Times of a model's parts, from a JSON file: what a projection is made of. No torch.

The format is `Calibration`; docs/projection.md shows a file. Measurements make such files; one may
also be written by hand, with rows that say they are assumed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from ppruntime.config.keys import TRAIN_KEYS_OF_DIMS, Config
from ppruntime.models.dims import ModelDims, Role, UnitKind, UnitSpec, preset
from ppruntime.projection.projector import Origin, ProjectionError
from ppruntime.recompute import is_mode_name

LEAST_SAMPLES = 100
"""A measured row with fewer says too little about a median and a 95th percentile."""

OriginName: TypeAlias = Literal["measured", "modelled", "assumed"]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every row says about its times."""

    origin: OriginName
    source: str
    """The run, file, formula or reason that the times come from."""
    samples: int = 0
    """How often a measured time was taken."""


class OpTimes(Row, frozen=True, kw_only=True):
    """Seconds of one micro-batch on one GPU: medians. B takes input_grad_s + weight_grad_s."""

    forward_s: float
    input_grad_s: float
    """With what is recomputed for it."""
    weight_grad_s: float
    forward_p95_s: float | None = None
    input_grad_p95_s: float | None = None
    weight_grad_p95_s: float | None = None
    """95th percentiles, where they were taken."""


class StageTimes(OpTimes, frozen=True, kw_only=True):
    """A whole stage, timed as one. Holds for the file's `layers_per_stage` only."""

    stage: int
    ac_modes: tuple[str, ...] | None = None
    """Of its half-layers in order, as rows of units have them; None: not said."""
    whole_backwards: bool = False
    """I and W were timed as one, and each is given half of it: right for an order that has them as
    one, a guess for one that parts them."""


class UnitTimes(OpTimes, frozen=True, kw_only=True):
    """A unit of one type, timed alone or as a difference of two stacks."""

    unit: str
    """As `unit_type` names it."""
    ac_mode: str
    """As `recompute.mode_name` has it: `ac.mode` of a run, "selective" with its list."""


class TransferTimes(Row, frozen=True, kw_only=True):
    """One message between two stages, one way."""

    link: str
    """Class of the link: nvlink, ib, ..."""
    num_bytes: int
    seconds: float
    p95_s: float | None = None


class Slowdown(Row, frozen=True, kw_only=True):
    """What a transport in flight does to compute on the same GPU: the difference between ops timed
    with transfers and without."""

    transport: str
    one_way: float
    """Share by which ops take longer while messages go in or out."""
    both_ways: float
    blocking: float = 0.0
    """Share of an op's work that stands still meanwhile, see `schedules.machine.Interference`."""


class HeldBytes(Row, frozen=True, kw_only=True):
    """Bytes that one micro-batch keeps on a unit from its forward to its backward."""

    unit: str
    ac_mode: str
    num_bytes: int


class StagePeak(Row, frozen=True, kw_only=True):
    """The most that a rank held while it ran a stage, in an emulation or a run."""

    stage: int
    allocated_bytes: int
    reserved_bytes: int


class PerStep(Row, frozen=True, kw_only=True):
    """What a step takes beside its pipeline: optimizer, reduce, gather, clip, ..."""

    name: str
    seconds: float
    p95_s: float | None = None
    data_ranks: int | None = None
    """Data ranks (dp x ep) that it was timed on; None: it does not depend on them."""
    optimizer: str | None = None
    """`optim.type`, of what depends on it."""
    parameters: int | None = None
    """What it was timed on: `step_pieces.piece_parameters` of that run; None: of the cut that it is
    projected to."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file. Rows that a projection does not need may be absent; those that it needs may not."""

    schema: Literal[1]
    command: str
    device: str
    versions: dict[str, str]
    date: str
    model: str
    """As `model.name` of a run."""
    sizes: dict[str, str] = {}
    """Keys of `[model]` with which that run's sizes were not the preset's: `changed_sizes`."""
    precision: str | None = None
    """`train.precision` of units and stages; None: not said."""
    seq_len: int
    micro_batch_size: int
    ep: int
    """GPUs that shared the experts."""
    transport: str
    """What was in flight while ops were timed: a transport's name, or idle."""
    routing: str
    """How tokens found their experts: real, spread, ..."""
    seeds: tuple[int, ...]
    """Of weights, data and routing, one a run."""
    zero_weights: bool
    """Kernels run too fast on zeros, so such files are refused."""
    profiled: bool
    """A profiler was on, which stretches ops, so such files are refused."""
    layers_per_stage: tuple[float, ...] | None = None
    """The cut that `stages` were timed at."""
    stages: tuple[StageTimes, ...] = ()
    units: tuple[UnitTimes, ...] = ()
    transfers: tuple[TransferTimes, ...] = ()
    per_step: tuple[PerStep, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    memory: tuple[HeldBytes, ...] = ()
    peaks: tuple[StagePeak, ...] = ()


_ROLES = "|".join(role for role in Role if role)
_UNIT = re.compile(rf"embed|head|moe\.({_ROLES})|attention\.({_ROLES})\.ratio\d+(\.engram)?")
"""What `unit_type` may give."""


def read_calibration(path: Path) -> Calibration:
    """The file at `path`. Raises ProjectionError where it is not one that may be projected from."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ProjectionError(f"{path} cannot be read ({error.strerror}); name a file") from error
    except msgspec.DecodeError as error:
        raise ProjectionError(
            f"{path} is not a calibration: {error}; docs/projection.md shows one"
        ) from error
    problem = _problem(found)
    if problem:
        raise ProjectionError(f"{path}: {problem}")
    return found


def changed_sizes(config: Config) -> dict[str, str]:
    """Keys of the run's `[model]` that are not as in the preset, with their values as JSON."""
    usual, dims = preset(config.model.name), config.model.dims
    return {
        name: msgspec.json.encode(getattr(dims, name)).decode()
        for name in dims.__struct_fields__
        if name not in TRAIN_KEYS_OF_DIMS and getattr(dims, name) != getattr(usual, name)
    }


def of_other_sizes(known: Calibration, sizes: Mapping[str, str]) -> str | None:
    """What the file is of and what a run with these `changed_sizes` is; None where they agree."""

    def words(changes: Mapping[str, str]) -> str:
        listed = ", ".join(f"model.{name} = {value}" for name, value in sorted(changes.items()))
        return f"{known.model} with {listed}" if listed else f"{known.model} as it is"

    if known.sizes == sizes:
        return None
    return f"of {words(known.sizes)}, this run of {words(sizes)}"


def unit_type(dims: ModelDims, spec: UnitSpec) -> str:
    """Name of all units that cost the same: embed, head, moe.routed, attention.reuse.ratio2,
    attention.swa.ratio0.engram."""
    if spec.layer is None:
        return str(spec.kind)
    name = f"{spec.kind}.{spec.role}"
    if spec.kind is UnitKind.ATTENTION:
        name += f".ratio{dims.compress_ratios[spec.layer]}"
    return name + ".engram" * (spec.engram_parameters > 0)


class FoundTransfer(NamedTuple):
    """What `transfer_seconds` gives."""

    seconds: float
    is_exact: bool
    """A row was of just so many bytes."""
    rows: tuple[TransferTimes, ...]
    """What it rests on."""


def transfer_seconds(rows: Sequence[TransferTimes], num_bytes: int) -> FoundTransfer:
    """Time of `num_bytes`: a row's own, else linear between the two nearest rows, below the
    smallest as long as it, above the largest at its bytes per second."""
    ordered = sorted(rows, key=lambda row: row.num_bytes)
    for row in ordered:
        if row.num_bytes == num_bytes:
            return FoundTransfer(row.seconds, True, (row,))
    above = next((i for i, row in enumerate(ordered) if row.num_bytes > num_bytes), len(ordered))
    if above == 0:
        return FoundTransfer(ordered[0].seconds, False, (ordered[0],))
    low = ordered[above - 1]
    if above == len(ordered):
        return FoundTransfer(low.seconds * num_bytes / low.num_bytes, False, (low,))
    high = ordered[above]
    part = (num_bytes - low.num_bytes) / (high.num_bytes - low.num_bytes)
    seconds = low.seconds + part * (high.seconds - low.seconds)
    return FoundTransfer(seconds, False, (low, high))


def median_and_p95(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the smallest value that 95 % do not exceed."""
    ordered = sorted(values)
    assert ordered, "nothing was measured"
    return median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1]


def _problem(found: Calibration) -> str | None:
    """Why nothing may be projected from it."""
    if found.zero_weights:
        return "weights were zeros, on which kernels run too fast; calibrate with random weights"
    if found.profiled:
        return "a profiler was on, which stretches every op; calibrate without one"
    if found.stages and found.layers_per_stage is None:
        return "stages were timed at an unknown cut; add layers_per_stage"
    groups: tuple[tuple[str, Sequence[Row]], ...] = (
        ("stages", found.stages),
        ("units", found.units),
        ("transfers", found.transfers),
        ("per_step", found.per_step),
        ("slowdowns", found.slowdowns),
        ("memory", found.memory),
        ("peaks", found.peaks),
    )
    for group, rows in groups:
        keys = [_key(row) for row in rows]
        for index, row in enumerate(rows):
            place = f"{group}[{index}]"
            for name, time in _times(row):
                if not 0 <= time < math.inf:
                    return f"{place}.{name} is {time:g}; times are finite and 0 or more"
            timed = not isinstance(row, HeldBytes | StagePeak)  # bytes are counted, not sampled
            if timed and Origin(row.origin) is Origin.MEASURED and row.samples < LEAST_SAMPLES:
                return (
                    f"{place} was measured {row.samples} times; measure {LEAST_SAMPLES} times or "
                    'more, or let origin be "assumed"'
                )
            if keys.index(keys[index]) != index:
                return f"{place} and {group}[{keys.index(keys[index])}] are the same; keep one"
            if isinstance(row, TransferTimes) and row.num_bytes < 1:
                return f"{place}.num_bytes is {row.num_bytes}; give 1 or more"
            if isinstance(row, PerStep) and row.data_ranks is not None and row.data_ranks < 1:
                return f"{place}.data_ranks is {row.data_ranks}; give 1 or more"
            if isinstance(row, PerStep) and row.parameters is not None and row.parameters < 0:
                return f"{place}.parameters is {row.parameters}; give 0 or more"
            if isinstance(row, StageTimes):
                num_stages = len(found.layers_per_stage or ())
                if not 0 <= row.stage < num_stages:
                    return (
                        f"{place}.stage is {row.stage}, layers_per_stage has stages 0 to "
                        f"{num_stages - 1}; leave the row out"
                    )
            if isinstance(row, UnitTimes | HeldBytes) and not _UNIT.fullmatch(row.unit):
                return (
                    f"{place}.unit is {row.unit!r}, which no model has; write such as "
                    "attention.reuse.ratio2, moe.routed, embed or head"
                )
            if isinstance(row, StageTimes) and not all(map(is_mode_name, row.ac_modes or ())):
                return (
                    f"{place}.ac_modes are {', '.join(row.ac_modes or ())}, which no run has; "
                    "write one for each half-layer, such as full"
                )
            if isinstance(row, UnitTimes | HeldBytes) and not is_mode_name(row.ac_mode):
                return (
                    f"{place}.ac_mode is {row.ac_mode!r}, which no run has; write such as full, or "
                    "selective:experts+attention, in this order"
                )
            if isinstance(row, HeldBytes) and row.num_bytes < 0:
                return f"{place}.num_bytes is {row.num_bytes}; give 0 or more"
            if isinstance(row, Slowdown) and (complaint := _no_slowdown(row)):
                return f"{place} {complaint}"
    return None


def _no_slowdown(row: Slowdown) -> str | None:
    shares = (row.one_way, row.both_ways)
    if all(0 <= share < math.inf for share in shares) and 0 <= row.blocking <= 1:
        return None
    return (
        f"is {row.one_way:g}, {row.both_ways:g}, blocking {row.blocking:g}; the first two are "
        "shares from 0 up, the third lies in 0 to 1"
    )


def _key(row: Row) -> tuple[object, ...]:
    """What two rows may not have in common."""
    if isinstance(row, StageTimes):
        return (row.stage,)
    if isinstance(row, UnitTimes):
        return (row.unit, row.ac_mode)
    if isinstance(row, TransferTimes):
        return (row.link, row.num_bytes)
    if isinstance(row, Slowdown):
        return (row.transport,)
    if isinstance(row, HeldBytes):
        return (row.unit, row.ac_mode)
    if isinstance(row, StagePeak):
        return (row.stage,)
    assert isinstance(row, PerStep), f"a row of unknown kind: {row}"
    return (row.name,)


def _times(row: Row) -> list[tuple[str, float]]:
    names = [name for name in row.__struct_fields__ if name == "seconds" or name.endswith("_s")]
    found = [(name, getattr(row, name)) for name in names]
    return [(name, time) for name, time in found if time is not None]
