"""What a step takes beside its pipeline, timed on the ranks of the run itself.

Each sample is a step: weights are gathered and their low-precision copies made, the order runs (not
timed), gradients are reduced, clipped and applied. All ranks begin a piece together, and its time
is the slowest rank's, so the pieces' sum is no less than what a step takes beside its pipeline.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ppruntime.build import Pipeline, build_pipeline
from ppruntime.config import Config
from ppruntime.data.batches import open_data
from ppruntime.models.carry import MicroBatch
from ppruntime.models.dispatch import check_waits
from ppruntime.models.weight_copies import WeightCopies, renew_copies
from ppruntime.optim import clip_, global_norm
from ppruntime.order import make_order
from ppruntime.plan import cut
from ppruntime.projection.calibrate import on_device
from ppruntime.projection.calibration import PerStep, median_and_p95
from ppruntime.projection.projector import ProjectionError
from ppruntime.projection.step_pieces import piece_parameters
from ppruntime.ranks import Ranks
from ppruntime.trainer import make_optimizer
from ppruntime.wrap import hold_gradients, reduce_grads

_WARM_UP = 2


def per_step_rows(
    config: Config,
    ranks: Ranks,
    samples: int,
    *,
    tell: Callable[[int, float], None] = lambda num_steps, seconds: None,
) -> list[PerStep]:
    """Rows gather, quantise, reduce, clip and optimizer, those that the run has. A collective of
    all ranks of the run; the same on all of them. `tell` hears after each step how many there were
    and what that one took with its pipeline."""
    if config.optim.apply_in_backward:
        raise ProjectionError(
            "optim.apply_in_backward = true updates weights in the backward, so nothing comes once "
            "a step that could be timed; leave it out"
        )
    pipeline = build_pipeline(config, ranks)
    try:
        seconds = _Step(config, ranks, pipeline).timed(samples, tell)
    finally:
        pipeline.transport.close()
    layout = ranks.layout
    plan = cut(
        config.model.dims,
        make_order(config).computations.stage_to_rank,
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )
    grid = f"pp {layout.pp} x dp {layout.dp} x ep {layout.ep}"
    where = f"{layout.world} ranks, {grid}, on {ranks.device.type}"
    rows = []
    for name, values in seconds.items():
        middle, p95 = median_and_p95(values)
        rows.append(
            PerStep(
                name=name,
                seconds=middle,
                p95_s=p95,
                origin="measured",
                source=f"slowest of {where}; {_WHAT[name]}",
                samples=len(values),
                data_ranks=None if name == "quantise" else layout.num_data_ranks,
                optimizer=config.optim.type if name == "optimizer" else None,
                parameters=round(piece_parameters(config, plan, name)),
            )
        )
    return rows


_WHAT = {
    "gather": "weights over the data ranks, in the compute dtype",
    "quantise": "low-precision copies of weights",
    "reduce": "fp32 gradients over the data ranks, behind the last weight gradient",
    "clip": "the global norm and scaling by it",
    "optimizer": "the update of this rank's masters",
}


class _Step:
    """One rank's step in pieces."""

    def __init__(self, config: Config, ranks: Ranks, pipeline: Pipeline) -> None:
        self._config, self._ranks, self._pipeline = config, ranks, pipeline
        self._units = [unit for _, unit in pipeline.units]
        self._optimizer = make_optimizer(config, pipeline.units)
        mesh = ranks.stage_mesh
        self._split = dict.fromkeys(pipeline.split, mesh.get_group("ep")) if mesh else None
        modules = [module for unit in self._units for module in unit.modules()]
        self._gathered = [module for module in modules if isinstance(module, FSDPModule)]
        absent = {"pipeline"}
        if not _on_any_rank(any(map(_makes_copies, modules))):
            absent.add("quantise")
        if not self._gathered:  # on all ranks or on none
            absent |= {"gather", "reduce"}
        self._absent = frozenset(absent)
        self._norm = torch.zeros(())

    def timed(self, samples: int, tell: Callable[[int, float], None]) -> dict[str, list[float]]:
        """Seconds of each piece on the slowest rank, in every step after the first ones."""
        data = open_data(self._config)
        found: defaultdict[str, list[float]] = defaultdict(list)
        for step in range(_WARM_UP + samples):
            batches = [
                on_device(data.micro_batch(step, m, self._ranks.data_rank), self._ranks.device)
                for m in range(self._config.train.num_micro_batches)
            ]
            took = self._run(batches)
            tell(step + 1, sum(took.values()))
            if step >= _WARM_UP:
                for name in took.keys() - self._absent:
                    found[name].append(took[name])
        return {name: found[name] for name in _WHAT if name in found}

    def _run(self, batches: list[MicroBatch]) -> dict[str, float]:
        one = torch.ones((), device=self._ranks.device)
        for stage in self._pipeline.stages.values():
            stage.reset(loss_seed=one, balance_seed=one)
        hold_gradients(self._units)
        pieces: dict[str, Callable[[], None]] = {
            "gather": self._gather,
            "quantise": self._quantise,
            "pipeline": lambda: self._pipeline.training.run(batches),
            "reduce": self._reduce,
            "clip": self._clip,
            "optimizer": self._update,
        }
        mine = [self._seconds(piece) for piece in pieces.values()]
        check_waits(self._pipeline.dispatchers)
        slowest = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return dict(zip(pieces, slowest.tolist(), strict=True))

    def _seconds(self, piece: Callable[[], None]) -> float:
        _settle(self._ranks.device)
        dist.barrier()
        start = time.perf_counter()
        piece()
        _settle(self._ranks.device)
        return time.perf_counter() - start

    def _gather(self) -> None:
        for module in self._gathered:
            module.unshard()

    def _quantise(self) -> None:
        for unit in self._units:
            renew_copies(unit)

    def _reduce(self) -> None:
        for stage in self._pipeline.stages.values():
            stage.flush_weight_grads()
        reduce_grads(self._units, self._ranks.data_group)

    def _clip(self) -> None:
        pipeline = self._pipeline
        self._norm = global_norm(
            pipeline.params,
            pipeline.param_order,
            pp_group=self._ranks.pipeline_group,
            split=self._split,
            device=self._ranks.device,
        )
        if not float(self._norm):
            raise ProjectionError(
                "all gradients are zeros, on which kernels run too fast; use real data"
            )
        if (limit := self._config.optim.clip_norm) is not None:
            clip_(pipeline.params.values(), limit, self._norm)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for stage in self._pipeline.stages.values():
            stage.weights_changed()


def _makes_copies(module: nn.Module) -> bool:
    return (
        isinstance(module, WeightCopies)
        and type(module).renew_copies is not WeightCopies.renew_copies
    )


def _on_any_rank(mine: bool) -> bool:
    found = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
