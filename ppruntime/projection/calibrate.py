"""Times of a model's units on this machine: per kind of unit and AC mode F, I and W, and what else
a step is made of. One unit is in memory at a time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ppruntime.build import build_stage
from ppruntime.config import Config, one_transport
from ppruntime.connect import open_beside
from ppruntime.data.batches import open_data
from ppruntime.experts.options import choose_experts
from ppruntime.gemm_budget import with_gemm_budget
from ppruntime.gpu_clock import Clock
from ppruntime.linear_options import choose_linears
from ppruntime.memory import activation_bytes
from ppruntime.messages import any_rank, first_complaint
from ppruntime.models.carry import CROSSING, DIFFERENTIABLE, MicroBatch
from ppruntime.models.dims import UnitSpec, unit_specs
from ppruntime.order import make_order
from ppruntime.plan import StagePlan, cut
from ppruntime.projection.calibration import (
    HeldBytes,
    OpTimes,
    PerStep,
    TransferTimes,
    UnitTimes,
    median_and_p95,
    unit_type,
)
from ppruntime.projection.projector import ProjectionError
from ppruntime.projection.step_pieces import piece_parameters
from ppruntime.ranks import Ranks
from ppruntime.stage import Stage
from ppruntime.trainer import make_optimizer
from ppruntime.transports.base import Boundary, Channel, TensorSpec
from ppruntime.wrap import hold_gradients

_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Depths:
    """What two depths of a model say: a layer's marginal cost, and the whole model's step."""

    depths: tuple[int, int]
    step_s: tuple[float, float]
    """One micro-batch forward and back through embedding, so many layers, and head: medians."""
    step_p95_s: tuple[float, float]
    num_layers: int
    """Of the whole model."""
    samples: int

    @property
    def layer_s(self) -> float:
        """What a layer more takes."""
        return (self.step_s[1] - self.step_s[0]) / (self.depths[1] - self.depths[0])

    @property
    def whole_s(self) -> float:
        """With all the model's layers, as if each were as those between the two depths."""
        return self.step_s[0] + (self.num_layers - self.depths[0]) * self.layer_s


def unit_rows(
    configs: Mapping[str, Config],
    ranks: Ranks,
    samples: int,
    *,
    beside: str = "no transfer in flight",
) -> Iterator[tuple[UnitTimes, HeldBytes]]:
    """A row for each kind of unit and AC mode; `configs` are the run's, by mode. `beside` says what
    else goes on, for the rows' sources.

    The units run in model order on what the ones before gave, so that selections and keys are real
    ones. Embedding and head, never recomputed, have a row for each mode too, as projections ask.
    """
    config = next(iter(configs.values()))
    carry: dict[str, Tensor] = {}
    batch = _batch(config, ranks.device)
    seen: set[str] = set()
    for spec in unit_specs(config.model.dims):
        kind = unit_type(config.model.dims, spec)
        if kind in seen:
            continue
        seen.add(kind)
        handed_on: dict[str, Tensor] = {}
        for mode, config_of_mode in configs.items():
            plan = _alone(spec)
            stage = _stage(config_of_mode, plan, ranks)
            inputs = tuple(carry[name] for name in plan.inputs)
            if not handed_on:
                outputs = stage.evaluate(0, inputs, batch)
                handed_on = dict(zip(plan.outputs, outputs, strict=True))
            times = _op_times(stage, inputs, batch, samples, ranks.device)
            source = f"{spec.name} alone, {config.train.precision}, {beside}"
            row = UnitTimes(
                unit=kind, ac_mode=mode, origin="measured", source=source, samples=samples, **times
            )
            kept = activation_bytes(config_of_mode, plan)
            held = HeldBytes(
                unit=kind,
                ac_mode=mode,
                num_bytes=kept,
                origin="modelled",
                source="what autograd keeps, by sizes",
            )
            yield row, held
            del stage
            _clean(ranks.device)
        carry |= handed_on


def optimizer_row(config: Config, ranks: Ranks, samples: int) -> PerStep:
    """The update of the busiest rank: measured on one unit, scaled by its parameters; and for one
    data rank, as the unit was alone."""
    dims = config.model.dims
    plan = cut(
        dims,
        make_order(config).computations.stage_to_rank,
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )
    spec = next(s for s in unit_specs(dims) if s.layer is not None)
    stage = _stage(config, _alone(spec), ranks)
    for param in stage.units.parameters():
        param.grad = torch.randn_like(param) * 1e-3
    optimizer = make_optimizer(config, [(spec, *stage.units)])
    seconds, _ = median_and_p95(timed(optimizer.step, samples, ranks.device))
    num_shards = config.parallel.num_data_ranks
    here, most = (
        round(num_shards * piece_parameters(config, stages, "optimizer"))
        for stages in ((_alone(spec),), plan)
    )
    return PerStep(
        name="optimizer",
        seconds=seconds * most / here,
        origin="modelled",
        source=f"{config.optim.type} on {spec.name}, {samples} samples, x parameters of the "
        f"busiest rank ({most:,}) over its own ({here:,})",
        samples=samples,
        data_ranks=1,
        optimizer=config.optim.type,
        parameters=most,
    )


def transfer_rows(
    config: Config, ranks: Ranks, sizes: Sequence[int], samples: int
) -> list[TransferTimes]:
    """One-way times between pp ranks 0 and 1, half a round trip; a collective of all ranks, which
    need to be two pipeline ranks at least."""
    rows = []
    for num_bytes in sizes:
        spec = TensorSpec("payload", (num_bytes,), torch.uint8)
        ends = {"boundary": Boundary((spec,)), "slots": 1}
        there = Channel(0, "forward", 0, 1, 0, 1, **ends)  # type: ignore[arg-type]
        back = Channel(1, "backward", 1, 0, 1, 0, **ends)  # type: ignore[arg-type]
        transport = open_beside(config, ranks, (there, back))
        payload = (torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device),)
        seconds = []
        for _ in range(_WARM_UP + samples):
            _synchronize(ranks.device)
            start = time.perf_counter()
            if ranks.pp_rank == 0:
                transport.post(back, 0)
                transport.send(there, 0, payload)
                transport.take(back, 0)
                transport.release(back, 0)
            elif ranks.pp_rank == 1:
                transport.post(there, 0)
                received = transport.take(there, 0)
                transport.send(back, 0, tuple(t.clone() for t in received))
                transport.release(there, 0)
            transport.step_end()
            _synchronize(ranks.device)
            seconds.append((time.perf_counter() - start) / 2)
        transport.close()
        median, p95 = median_and_p95(seconds[_WARM_UP:])
        rows.append(
            TransferTimes(
                link=one_transport(config),
                num_bytes=num_bytes,
                seconds=median,
                p95_s=p95,
                origin="measured",
                source="half a round trip between pp ranks 0 and 1, no compute beside it",
                samples=samples,
            )
        )
    return rows


def depths(
    config: Config,
    ranks: Ranks,
    shallow: int,
    deep: int,
    samples: int,
    *,
    tell: Callable[[int, float, float], None] = lambda depth, median, p95: None,
) -> Depths:
    """A micro-batch through embedding, the model's first `shallow` or `deep` layers, and head.
    `tell` hears each depth with its median and 95th percentile as soon as they are there."""
    specs = unit_specs(config.model.dims)
    num_layers = config.model.dims.num_layers
    if not 0 < shallow < deep <= num_layers:
        raise ProjectionError(
            f"--depths {shallow},{deep}: give two depths of the model's {num_layers} layers, the "
            "smaller first, such as 4,8"
        )
    medians, highs = [], []
    for depth in (shallow, deep):
        units = (specs[0], *specs[1 : 1 + 2 * depth], specs[-1])
        plan = StagePlan(index=0, rank=0, units=units, before=None, after=specs[-1])
        stage = _stage(config, plan, ranks)
        batch = _batch(config, ranks.device)

        def step(stage: Stage = stage, batch: MicroBatch = batch) -> None:
            _begin(stage, ranks.device)
            stage.forward(0, (), batch)
            stage.backward(0, ())

        median, p95 = median_and_p95(timed(step, samples, ranks.device))
        tell(depth, median, p95)
        medians.append(median)
        highs.append(p95)
        del stage, step
        _clean(ranks.device)
    return Depths(
        depths=(shallow, deep),
        step_s=(medians[0], medians[1]),
        step_p95_s=(highs[0], highs[1]),
        num_layers=num_layers,
        samples=samples,
    )


def timed(act: Callable[[], object], samples: int, device: torch.device) -> list[float]:
    """Seconds of each call of `act`, after a few that do not count; on a device its own, with the
    host ahead as it is in a run."""
    clock = Clock(device)
    return [clock(act) / 1e3 for _ in range(_WARM_UP + samples)][_WARM_UP:]


def _op_times(
    stage: Stage,
    inputs: Sequence[Tensor],
    batch: MicroBatch,
    samples: int,
    device: torch.device,
) -> dict[str, float]:
    """Median and 95th percentile of F, I and W; the three run in turn, as in a step."""
    names = ("forward", "input_grad", "weight_grad")
    clocks = {name: Clock(device) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    stand_ins: tuple[Tensor, ...] | None = None
    for _ in range(_WARM_UP + samples):
        _begin(stage, device)
        forward, outputs = clocks["forward"].timed(lambda: stage.forward(0, inputs, batch))
        if stand_ins is None:
            stand_ins = tuple(
                torch.randn_like(output) * 1e-2
                for name, output in zip(stage.outputs, outputs, strict=True)
                if name in DIFFERENTIABLE
            )
        del outputs  # as a run has sent them by then
        input_grad = clocks["input_grad"](partial(stage.backward_input, 0, stand_ins))
        weight_grad = clocks["weight_grad"](partial(stage.weight_grads, 0))
        for name, milliseconds in zip(names, (forward, input_grad, weight_grad), strict=True):
            taken[name].append(milliseconds / 1e3)
    rows: dict[str, float] = {}
    for name, seconds in taken.items():
        rows[f"{name}_s"], rows[f"{name}_p95_s"] = median_and_p95(seconds[_WARM_UP:])
    assert rows.keys() <= set(OpTimes.__struct_fields__), "names of a row"
    return rows


def _alone(spec: UnitSpec) -> StagePlan:
    """A stage of one unit, which gets and hands on what the unit itself reads and writes."""
    before = _with_alive(spec, spec.reads)
    after = _with_alive(spec, spec.writes & frozenset(spec.live_after))
    return StagePlan(
        index=0, rank=0, units=(spec,), before=before if spec.reads else None, after=after
    )


def _with_alive(spec: UnitSpec, fields: frozenset[str]) -> UnitSpec:
    """The unit with `fields` alive behind it."""
    return replace(spec, live_after=tuple(name for name in CROSSING if name in fields))


def _stage(config: Config, plan: StagePlan, ranks: Ranks) -> Stage:
    config = with_gemm_budget(config, ranks.device)
    stage = build_stage(
        config,
        plan,
        ranks,
        experts=choose_experts(config),
        linears=choose_linears(config),
        draw_on_device=True,  # times do not depend on their bits
    )
    refuse_zero_weights(stage, plan.units[0].name, ranks)
    return stage


def refuse_zero_weights(stage: Stage, name: str, ranks: Ranks) -> None:
    """Raises ProjectionError, on all ranks alike, where some stage's matrices are zeros on all its
    data ranks; gains of 1 make no numbers. A collective of all ranks."""
    matrices = [p.detach() for p in stage.units.parameters() if p.dim() > 1]
    shards = [m.to_local() if isinstance(m, DTensor) else m for m in matrices]
    has_numbers = not shards or any(bool(shard.any()) for shard in shards)
    complaint = None
    if not any_rank(has_numbers, ranks.data_group):
        complaint = (
            f"all weights of {name} are zeros, on which kernels run too fast; initialise them"
        )
    if (heard := first_complaint(complaint, ranks.world_group)) is not None:
        raise ProjectionError(heard)


def _begin(stage: Stage, device: torch.device) -> None:
    one = torch.ones((), device=device)
    stage.reset(loss_seed=one, balance_seed=one)
    hold_gradients(list(stage.units))


def _batch(config: Config, device: torch.device) -> MicroBatch:
    return on_device(open_data(config).micro_batch(0, 0, 0), device)


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch's tokens, there once this returns."""
    masked = None if batch.masked is None else batch.masked.to(device)
    ids, labels, positions = (t.to(device) for t in (batch.ids, batch.labels, batch.positions))
    return MicroBatch(ids, labels, positions, masked)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
