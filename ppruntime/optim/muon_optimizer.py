"""DeepSeek's Muon recipe over one rank's parameters: Muon, Sinkhorn-balanced tables, AdamW.

Momentum lies as the masters do, so checkpoints know it by parameter like AdamW's moments. Matrices
of which ranks have some rows each are orthogonalised by one rank each (`matrix_owners`); experts
and groups are cut between whole matrices and stay, and what every rank has whole every rank
updates, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ppruntime.models.update_rules import Update, UpdateRule, newton_schulz_flops
from ppruntime.optim.adamw import make_adamw, trainable_in_fp32
from ppruntime.optim.matrix_owners import rounds_of, through_owners
from ppruntime.optim.muon import nesterov_, orthogonal_update, step_
from ppruntime.optim.sinkhorn import sinkhorn_step_


@dataclass(frozen=True, slots=True)
class _Spread:
    """Matrices whose rows lie over the ranks of a mesh, in rounds by owner."""

    mesh: DeviceMesh
    params: tuple[nn.Parameter, ...]
    rounds: tuple[tuple[int | None, ...], ...]


class Muon(torch.optim.Optimizer):
    """The three update rules in one optimizer; `step` is a collective of the data ranks.

    To Muon and to tables a missing gradient is zeros, so that all ranks take part alike; AdamW
    leaves such a parameter out.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        rules: Mapping[str, UpdateRule],
        adamw: torch.optim.AdamW,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        tables = [n for n in params if rules[n].update is Update.SINKHORN]
        matrices = [n for n in params if rules[n].update is Update.MUON]
        groups = [
            {"params": [params[n] for n in matrices], "weight_decay": weight_decay},
            {"params": [params[n] for n in tables], "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": lr})
        self._rules = {params[name]: rules[name] for name in (*matrices, *tables)}
        self._momentum, self._dtype = momentum, dtype
        for param in self._rules:
            self.state[param] = {
                "momentum": torch.zeros_like(param, memory_format=torch.preserve_format)
            }
        self._adamw = adamw
        self.param_groups += adamw.param_groups
        self.state.update(adamw.state)
        by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
        for name in matrices:
            if (mesh := _mesh_to_cross(params[name])) is not None:
                by_mesh.setdefault(mesh, []).append(params[name])
        self._spread = [self._plan(mesh, tuple(found)) for mesh, found in by_mesh.items()]

    def _plan(self, mesh: DeviceMesh, params: tuple[nn.Parameter, ...]) -> _Spread:
        costs = [newton_schulz_flops(self._rules[p], p.shape[1]) for p in params]
        return _Spread(mesh, params, rounds_of(costs, mesh.size()))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter."""
        assert closure is None, "Muon takes no closure"
        matrices, tables = self.param_groups[:2]
        for param in matrices["params"]:
            if _mesh_to_cross(param) is None:
                self._update_here(param, matrices["lr"], matrices["weight_decay"])
        for spread in self._spread:
            for owned in spread.rounds:
                self._update_spread(spread, owned, matrices["lr"], matrices["weight_decay"])
        for table in tables["params"]:
            self._update_table(table, tables["lr"])
        self._adamw.step()

    def _update_here(self, param: nn.Parameter, lr: float, decay: float) -> None:
        """A parameter of which this rank has whole matrices, one at a time."""
        weight, heights = _local(param), self._rules[param].heights
        momentum, grad = _local(self.state[param]["momentum"]), _local_grad(param)
        for index in range(len(weight)) if weight.dim() == 3 else (...,):
            n = nesterov_(momentum[index], grad[index], self._momentum)
            update = orthogonal_update(n, heights, self._dtype)
            step_(weight[index], update, lr=lr, decay=decay)

    def _update_spread(
        self, spread: _Spread, owned: tuple[int | None, ...], lr: float, decay: float
    ) -> None:
        """One round of matrices whose rows lie over ranks."""
        params = [None if number is None else spread.params[number] for number in owned]

        def whole_update(owner: int, matrix: Tensor) -> Tensor:
            param = params[owner]
            assert param is not None
            return orthogonal_update(matrix, self._rules[param].heights, self._dtype)

        def rows(param: nn.Parameter) -> Tensor:
            momentum = _local(self.state[param]["momentum"])
            return nesterov_(momentum, _local_grad(param), self._momentum).to(self._dtype)

        updates = through_owners(
            [None if param is None else rows(param) for param in params],
            [0 if param is None else param.shape[0] for param in params],
            whole_update,
            spread.mesh.get_group(),
        )
        for param, update in zip(params, updates, strict=True):
            if param is not None and update is not None:
                step_(_local(param), update, lr=lr, decay=decay)

    def _update_table(self, table: nn.Parameter, lr: float) -> None:
        mesh = table.device_mesh if isinstance(table, DTensor) else None
        sinkhorn_step_(
            _local(table),
            _local(self.state[table]["momentum"]),
            None if table.grad is None else _local(table.grad),
            num_rows=table.shape[0],
            lr=lr * self._rules[table].lr_factor,
            beta=self._momentum,
            add_up=_nothing if mesh is None else partial(_add_up, mesh.get_group()),
        )


def make_muon(
    params: Mapping[str, nn.Parameter],
    rules: Mapping[str, UpdateRule],
    *,
    lr: float,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> Muon:
    """The recipe over the parameters that need a gradient; `rules` has one for each by name.

    `dtype`: in which matrices are orthogonalised, and sent to who does. `betas` and `eps` are
    AdamW's. All state is made at once, as `make_adamw` does. A collective of nobody, but all data
    ranks have to make it over the same names.
    Raises ValueError for a parameter that is not fp32, as `make_adamw` does.
    """
    trainable = trainable_in_fp32(params, "Muon")
    adamw = make_adamw(
        {n: p for n, p in trainable.items() if rules[n].update is Update.ADAMW},
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decays=lambda name, _: rules[name].decays,
    )
    return Muon(
        trainable,
        rules,
        adamw,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        dtype=dtype,
    )


def _mesh_to_cross(param: nn.Parameter) -> DeviceMesh | None:
    """The ranks that have the other rows of a parameter's matrix; None: its matrices are here."""
    if not isinstance(param, DTensor) or param.dim() == 3 or param.device_mesh.size() == 1:
        return None
    assert param.placements == (Shard(0),), f"rows are cut by {param.placements}"
    return param.device_mesh


def _local(tensor: Tensor) -> Tensor:
    """This rank's part; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_grad(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(_local(param)) if param.grad is None else _local(param.grad)


def _nothing(_: Tensor) -> None:
    pass


def _add_up(group: dist.ProcessGroup, tensor: Tensor) -> None:
    dist.all_reduce(tensor, group=group)
