"""Checkpointing, FSDP and compilation around a unit: in that order, with the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from toy_units import Half, micro_batches

from ppruntime.models.carry import Carry
from ppruntime.models.save_points import SavePoint
from ppruntime.wrap import Sharding, hold_gradients, reduce_grads, release_gathered, wrap_units


class CountedHalf(Half):
    """Counts how often its computation runs, recomputation included."""

    runs = 0

    def forward(self, carry, batch):
        self.runs += 1
        return super().forward(carry, batch)


def half() -> CountedHalf:
    torch.manual_seed(3)
    return CountedHalf(0)


def carry() -> Carry:
    torch.manual_seed(4)
    streams = torch.randn(2, 5, 2, 8, requires_grad=True)
    return Carry(streams=streams, mix=torch.rand(2, 5, 2, requires_grad=True))


def run(unit: torch.nn.Module) -> list[torch.Tensor]:
    given = carry()
    made = unit(given, micro_batches(1, 2, 5, seed=1)[0])
    (made.streams.square().sum() + made.mix.sum() + made.balance_loss).backward()
    return [made.streams.detach(), given.streams.grad, given.mix.grad]


NOTHING = frozenset[SavePoint]()


def wrap(unit: torch.nn.Module, *, sharding: Sharding | None) -> None:
    wrap_units([unit], recompute=[NOTHING], sharding=sharding, fp32_names=[frozenset()])


def test_a_recomputed_unit_runs_twice_and_has_the_same_bits():
    plain, recomputed = half(), half()
    wrap(recomputed, sharding=None)
    assert all(map(torch.equal, run(plain), run(recomputed)))
    assert (plain.runs, recomputed.runs) == (1, 2)
    for (name, p), (other, q) in zip(
        plain.named_parameters(), recomputed.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(p.grad, q.grad)


def _fsdp_stays_outside_the_recompute(rank: int) -> tuple[int, int, bool]:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    plain, wrapped = half(), half()
    wrap(wrapped, sharding=Sharding(mesh, torch.float32))
    calls: list[int] = []
    wrapped.register_forward_pre_hook(lambda *_: calls.append(1))
    hold_gradients([wrapped])
    same = all(map(torch.equal, run(plain), run(wrapped)))
    reduce_grads([wrapped], mesh.get_group())
    for p, q in zip(plain.parameters(), wrapped.parameters(), strict=True):
        same = same and torch.equal(p.grad, q.grad.full_tensor())
    runs = wrapped.runs
    dist.destroy_process_group()
    return runs, len(calls), same


def test_checkpointing_lies_inside_fsdp_so_its_hooks_run_once(run_ranks):
    [(runs, hook_calls, same)] = run_ranks(1, _fsdp_stays_outside_the_recompute)
    assert runs == 2, "the unit was not recomputed"
    assert hook_calls == 1, "a recompute ran FSDP's hooks again"
    assert same


def _gradients_over_two_ranks(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    unit = half()
    wrap_units(
        [unit],
        recompute=[None],
        sharding=Sharding(mesh, dtype),
        fp32_names=[frozenset({"norm"})],
    )
    for _ in range(3):  # accumulates over steps, reduces each once
        hold_gradients([unit])
        run(unit)
        run(unit)
        reduce_grads([unit], mesh.get_group())
    release_gathered([unit])
    grads = [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for p in unit.parameters()
    ]
    assert all(p.dtype is torch.float32 for p in unit.parameters())
    dist.destroy_process_group()
    return grads


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-2)])
def test_three_accumulated_steps_give_six_times_the_gradient_on_every_data_rank(
    dtype, tolerance, run_ranks
):
    plain = half()
    run(plain)
    for grads in run_ranks(2, _gradients_over_two_ranks, dtype):
        for p, grad in zip(plain.parameters(), grads, strict=True):
            error = (grad - 6 * p.grad).norm() / (6 * p.grad).norm()
            assert error < tolerance
