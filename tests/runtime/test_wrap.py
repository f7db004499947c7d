"""Checkpointing and FSDP around a unit: in that order, with the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from toy_units import Half, micro_batches

from ppruntime.models.carry import Carry
from ppruntime.models.linear import WeightGradQueue, set_queue
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


def _bf16_gradients_under_fsdp(
    rank: int, kept: frozenset[SavePoint] | None, put_off: bool
) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    unit, queue = half(), WeightGradQueue()
    sharding = Sharding(mesh, torch.bfloat16)
    wrap_units([unit], recompute=[kept], sharding=sharding, fp32_names=[frozenset({"norm"})])
    set_queue(unit, queue)
    hold_gradients([unit])
    queue.deferring = put_off
    for _ in range(3):
        run(unit)
    tasks = queue.pop()
    assert len(tasks) == (9 if put_off else 0)
    for task in tasks:
        task()
    reduce_grads([unit], mesh.get_group())
    release_gathered([unit])
    grads = {name: p.grad for name, p in unit.named_parameters()}
    dist.destroy_process_group()
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("kept", [None, NOTHING])
def test_bf16_linears_under_fsdp_have_the_fp32_sums_of_their_products_to_the_bit(
    kept, put_off, run_ranks
):
    plain = half()
    for linear in (plain.up, plain.down, plain.mixer):
        linear.to(torch.bfloat16)
    for _ in range(3):
        run(plain)
    [found] = run_ranks(1, _bf16_gradients_under_fsdp, kept, put_off)
    for name, p in plain.named_parameters():
        assert p.grad.dtype is torch.float32
        assert torch.equal(found[name], p.grad), name
    # Three times one gradient has more bits than bf16 holds.
    assert not torch.equal(found["up.weight"], found["up.weight"].bfloat16().float())
