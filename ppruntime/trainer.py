"""One optimizer step over a pipeline, and a validation loss. `session.py` calls them in a loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ppruntime.apply_in_backward import ApplyInBackward
from ppruntime.build import Pipeline
from ppruntime.config import Config
from ppruntime.connect import compute_dtype
from ppruntime.data.batches import Batches
from ppruntime.memory_watch import MemoryWatch
from ppruntime.messages import any_rank
from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import UnitKind, UnitSpec, unit_parameters, unit_specs
from ppruntime.models.dispatch import check_waits
from ppruntime.models.router import Router, updated_bias
from ppruntime.models.update_rules import update_rule
from ppruntime.nonfinite import Skips, is_finite
from ppruntime.optim import clip_, global_norm, lr_at, make_adamw, set_lr, state_tensors
from ppruntime.optim.muon_optimizer import make_muon
from ppruntime.optim.sign_sgd import SignSGD, make_sign_sgd
from ppruntime.ranks import Ranks
from ppruntime.wrap import hold_gradients, reduce_grads

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum")
"""The optimizer's tensors that have their parameter's shape."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, the same on every rank."""

    loss: float
    """Cross-entropy per valid token of the whole batch."""
    balance_loss: float | None
    """Weighted sequence balance losses of all layers, mean over sequences; None without any."""
    index_loss: float | None
    """Weighted losses of all indexers, mean over sequences; None while they are frozen."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    max_loads: tuple[float, ...]
    """The busiest expert's tokens over the mean, by MoE layer of the whole model; 1 is balanced."""
    skipped_in_a_row: int = 0
    """Steps up to this one whose update was skipped, see `fault.nonfinite`; 0: it was updated."""

    @property
    def max_load(self) -> float:
        """The worst layer's; 0 without experts."""
        return max(self.max_loads, default=0.0)


class Trainer:
    """Optimizer and pipeline of one rank. Every method is a collective of all ranks."""

    def __init__(self, config: Config, ranks: Ranks, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.skips = Skips()
        """Of the run so far: whoever resumes it sets them."""
        self._config = config
        self._ranks = ranks
        stage_mesh = ranks.stage_mesh
        self._split = (
            dict.fromkeys(pipeline.split, stage_mesh.get_group("ep")) if stage_mesh else None
        )
        self._optimizer = make_optimizer(config, pipeline.units)

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensors of this rank that a checkpoint holds, by full name: weights, buffers such as
        routing biases, and the optimizer's. Loading writes into them, and calls `weights_changed`.

        This rank's part of a layer's experts stands there as a shard of the layer's: a checkpoint
        does not depend on how many ranks the experts lie over.
        """
        weights: dict[str, Tensor] = {**self.pipeline.params, **self.pipeline.buffers}
        tensors = weights | state_tensors(self._optimizer, self.pipeline.params)
        for name in self.pipeline.split:
            for full_name in (name, *(f"optim.{key}.{name}" for key in _MOMENTS)):
                if full_name in tensors:
                    tensors[full_name] = self._shard_of_layer(tensors[full_name])
        return tensors

    def weights_changed(self) -> None:
        """After an update, or after loading into `state_tensors`: copies of weights are stale."""
        for stage in self.pipeline.stages.values():
            stage.weights_changed()

    def _shard_of_layer(self, experts: Tensor) -> Tensor:
        """Shares the memory of this rank's shard. Whole layers are cut over ep, then over dp."""
        mesh, num = self._ranks.stage_mesh, self.pipeline.dims.num_experts
        assert mesh is not None, "experts are split over no mesh"
        shape = torch.Size((num, *experts.shape[1:]))
        return DTensor.from_local(
            experts.to_local() if isinstance(experts, DTensor) else experts.detach(),
            mesh,
            (Shard(0), Shard(0)),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def step(self, index: int, data: Batches, watch: MemoryWatch | None = None) -> StepResult:
        """Forward, backward and update of step `index`, counted from 0; `watch` counts memory.

        If loss or norm is not finite on some rank, every rank skips the update, or raises
        NonFiniteError before it (with updates in the backward, behind them).
        """
        pipeline, num_valid = self.pipeline, max(1, data.num_valid(index))
        units = [unit for _, unit in pipeline.units]
        # Gradients are averaged over the data ranks; a loss is a sum over all of them.
        self._reset_stages(loss_seed=self._ranks.layout.num_data_ranks / num_valid)
        hold_gradients(units)
        applied = None
        if self._config.optim.apply_in_backward:
            assert isinstance(self._optimizer, SignSGD), "the config's rules let no other through"
            set_lr(self._optimizer, self._lr(index))
            applied = ApplyInBackward(pipeline, self._optimizer, self._ranks.data_group)
        pipeline.training.run(self._batches(index, data), stage_done=applied, watch=watch)
        check_waits(pipeline.dispatchers)
        for stage in pipeline.stages.values():
            stage.flush_weight_grads()
        reduce_grads(units, self._ranks.data_group)
        loss, balance_loss, index_loss = self._mean_losses(num_valid)
        norm = global_norm(
            pipeline.params,
            pipeline.param_order,
            pp_group=self._ranks.pipeline_group,
            split=self._split,
            freed=applied.squares if applied else None,
            device=self._ranks.device,
        )
        skips = self._skips(index, loss, float(norm))
        if skips:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._update(index, norm)
        return StepResult(
            loss=loss,
            balance_loss=balance_loss,
            index_loss=index_loss,
            grad_norm=float(norm),
            lr=self._lr(index),
            max_loads=self._settle_routing(moves=not skips),
            skipped_in_a_row=self.skips.in_a_row,
        )

    def evaluate(self, data: Batches, num_steps: int) -> float:
        """Cross-entropy per valid token over `num_steps` global batches of `data`, no gradients."""
        total, num_valid = 0.0, 0
        for index in range(num_steps):
            self._reset_stages(loss_seed=0.0)
            self.pipeline.evaluation.run(self._batches(index, data))
            check_waits(self.pipeline.dispatchers)
            valid = data.num_valid(index)
            total += self._mean_losses(1)[0]
            num_valid += valid
        return total / max(1, num_valid)

    def _batches(self, step: int, data: Batches) -> list[MicroBatch]:
        """This data rank's micro-batches, on its device."""
        device = self._ranks.device
        read = (
            data.micro_batch(step, m, self._ranks.data_rank) for m in range(data.num_micro_batches)
        )
        return [_on(device, batch) for batch in read]

    def _reset_stages(self, *, loss_seed: float) -> None:
        def scalar(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float32, device=self._ranks.device)

        for stage in self.pipeline.stages.values():
            stage.reset(
                loss_seed=scalar(loss_seed), balance_seed=scalar(1 / self._sequences_per_rank)
            )

    @property
    def _sequences_per_rank(self) -> int:
        """Sequences of a step on one data rank. Layers' losses are summed over sequences."""
        return self._config.train.num_micro_batches * self._config.train.micro_batch_size

    def _mean_losses(self, num_valid: int) -> tuple[float, float | None, float | None]:
        """The step's loss per valid token, and per sequence the balance loss and the indexers',
        the same on every rank."""
        stages = self.pipeline.stages.values()
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for stage in stages:
            found = (stage.losses, stage.balance_losses, stage.index_losses)
            for i, values in enumerate(found):
                for value in values:
                    sums[i] += value
        # Ranks without a loss add exact zeros, so the sum over the pipeline is the owner's bits.
        dist.all_reduce(sums, group=self._ranks.pipeline_group)
        if (num_data_ranks := self._ranks.layout.num_data_ranks) > 1:
            dist.all_reduce(sums, group=self._ranks.data_group)
        loss, balance, index = sums.tolist()
        dims, num_sequences = self.pipeline.dims, self._sequences_per_rank * num_data_ranks
        return (
            loss / num_valid,
            balance / num_sequences if dims.balance_loss_weight else None,
            index / num_sequences if dims.indexer_learns else None,
        )

    def _skips(self, index: int, loss: float, norm: float) -> bool:
        """Whether the step is not finite and is to be skipped; raises where it may not be. Loss and
        norm are sums over all ranks; where ranks could go on with different weights they vote."""
        is_bad = not is_finite(loss, norm)
        if self._config.fault.nonfinite == "skip":
            is_bad = any_rank(is_bad, self._ranks.world_group)
        if is_bad:
            self.skips.note(self._config, index, loss, norm)
        else:
            self.skips.in_a_row = 0
        return is_bad

    def _update(self, index: int, norm: Tensor) -> None:
        """Clips and updates."""
        optim, params = self._config.optim, self.pipeline.params
        if optim.clip_norm is not None:
            clip_(params.values(), optim.clip_norm, norm)
        set_lr(self._optimizer, self._lr(index))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.weights_changed()

    def _lr(self, index: int) -> float:
        optim = self._config.optim
        return lr_at(
            index + 1,
            peak=optim.lr,
            final=optim.min_lr,
            num_warmup_steps=optim.warmup_steps,
            num_steps=self._config.train.steps,
        )

    def _settle_routing(self, *, moves: bool) -> tuple[float, ...]:
        """Moves the routing biases against the step's loads, if wanted and if the step `moves`
        anything; gives each layer's worst load."""
        rate, loads = self._config.train.routing_bias_rate, self._loads()
        names = [s.name for s in unit_specs(self.pipeline.dims) if s.kind is UnitKind.MOE]
        worst = torch.zeros(len(names), dtype=torch.float64, device=self._ranks.device)
        for spec, unit in self.pipeline.units:
            if spec.name in loads:
                load = loads[spec.name]
                worst[names.index(spec.name)] = load.max() / load.double().mean()
                router = _router(unit)
                if moves and rate and not router.by_token_id:
                    router.bias.copy_(updated_bias(router.bias, load, rate))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._ranks.pipeline_group)
        return tuple(worst.tolist())

    def _loads(self) -> Mapping[str, Tensor]:
        """Tokens of the step per expert, over all data ranks, by unit of this rank."""
        loads: dict[str, Tensor] = {}
        for index, stage in self.pipeline.stages.items():
            moes = [s.name for s in self.pipeline.plan[index].units if s.kind is UnitKind.MOE]
            if moes:
                per_unit = zip(*stage.loads, strict=True)
                loads |= {n: torch.stack(c).sum(0) for n, c in zip(moes, per_unit, strict=True)}
        if loads and self._ranks.layout.num_data_ranks > 1:
            together = torch.stack(list(loads.values()))
            dist.all_reduce(together, group=self._ranks.data_group)
            loads = dict(zip(loads, together, strict=True))
        return loads


def make_optimizer(
    config: Config, units: Iterable[tuple[UnitSpec, nn.Module]]
) -> torch.optim.Optimizer:
    """The run's optimizer over the parameters of this rank's units."""
    units, optim, dims = tuple(units), config.optim, config.model.dims
    params = {f"{spec.name}.{n}": p for spec, unit in units for n, p in unit.named_parameters()}
    if optim.type == "sign_sgd":
        return make_sign_sgd(params, lr=optim.lr, weight_decay=optim.weight_decay)
    if optim.type == "muon":
        rules = {
            f"{spec.name}.{parameter.name}": update_rule(dims, parameter)
            for spec, _ in units
            for parameter in unit_parameters(dims, spec)
        }
        return make_muon(
            params,
            rules,
            lr=optim.lr,
            momentum=optim.momentum,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            dtype=compute_dtype(config),
        )
    return make_adamw(
        params, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )


def _router(unit: nn.Module) -> Router:
    return next(module for module in unit.modules() if isinstance(module, Router))


def _on(device: torch.device, batch: MicroBatch) -> MicroBatch:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    masked = None if batch.masked is None else moved(batch.masked)
    return MicroBatch(moved(batch.ids), moved(batch.labels), moved(batch.positions), masked)
