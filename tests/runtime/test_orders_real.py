"""Every order in real processes, over gloo: the bits of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipelines import BALANCE_SEED, LOSS_SEED, toy_boundaries, toy_stages
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from toy_units import micro_batches, toy_units

from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock
from ppruntime.executor import Executor
from ppruntime.models.carry import Carry
from ppruntime.schedules import NAMES, make
from ppruntime.schedules.check import check
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.transports import open_transport

NUM_HALVES, SEED = 12, 7


def one_process(num_micro_batches: int) -> tuple[list, list]:
    """Losses, and gradients of all parameters in model order, by plain autograd."""
    units, losses = toy_units(NUM_HALVES, SEED), []
    for batch in micro_batches(num_micro_batches, 1, 4, seed=3):
        carry = Carry()
        for unit in units:
            carry = unit(carry, batch)
        torch.autograd.backward((carry.balance_loss, carry.loss), (BALANCE_SEED, LOSS_SEED))
        losses.append(carry.loss.detach())
    grads = [p.grad for unit in units for p in unit.parameters()]
    assert all(grad is not None for grad in grads)
    return losses, grads


def two_steps_of_each(rank: int, names: list[str], num_ranks: int, num_micro_batches: int) -> list:
    """One rank: per order (losses, {stage: gradients}) of its second step. There are two, as what a
    step left behind would show in the next."""
    dist.init_process_group("gloo")
    results = [run_order(rank, name, num_ranks, num_micro_batches) for name in names]
    dist.barrier()
    dist.destroy_process_group()
    return results


def run_order(rank: int, name: str, num_ranks: int, num_micro_batches: int) -> tuple[list, dict]:
    schedule = make(name, num_ranks, num_micro_batches)
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    check(lowered, slots=slots)
    # As even as it gets; of 16 stages the second has no unit at all.
    ends = [(s + 1) * (NUM_HALVES + 2) // schedule.num_stages for s in range(schedule.num_stages)]
    cuts = [max(end, 1) - 1 for end in ends]
    stages = toy_stages(NUM_HALVES, cuts[:-1], SEED)
    batches = micro_batches(num_micro_batches, 1, 4, seed=3)
    for stage in stages:
        stage.reset(loss_seed=LOSS_SEED, balance_seed=BALANCE_SEED)
    channels = make_channels(toy_boundaries(stages, batches[0]), schedule.stage_to_rank, slots)
    transport = open_transport(
        "gloo",
        channels,
        rank,
        device=torch.device("cpu"),
        timeout_seconds=60,
        store=PrefixStore(name, _get_default_store()),
    )
    own = {s: stages[s] for s in schedule.stages_of(rank)}
    executor = Executor(lowered, rank, own, channels, transport, clock=HostClock())
    for _ in range(2):
        for stage in own.values():
            stage.reset(loss_seed=LOSS_SEED, balance_seed=BALANCE_SEED)
            stage.units.zero_grad()
        executor.run(batches)
    dist.barrier()  # no rank takes another's end for a loss
    transport.close()
    grads = {s: [p.grad for p in stage.units.parameters()] for s, stage in own.items()}
    return stages[-1].losses, grads


def differing(names: list[str], results: list, reference: tuple[list, list]) -> list[str]:
    """The orders whose losses or gradients are not the reference's, bit for bit."""
    losses, grads = reference
    wrong = []
    for i, name in enumerate(names):
        loss_of_ranks = [rank[i][0] for rank in results if rank[i][0]]
        by_stage = dict(item for rank in results for item in rank[i][1].items())
        found = [g for stage in sorted(by_stage) for g in by_stage[stage]]
        same = (
            len(loss_of_ranks) == 1
            and len(loss_of_ranks[0]) == len(losses)
            and all(map(torch.equal, loss_of_ranks[0], losses))
            and len(found) == len(grads)
            and all(map(torch.equal, found, grads))
        )
        wrong += [] if same else [name]
    return wrong


@pytest.mark.slow
def test_every_order_on_four_processes_has_the_bits_of_one(run_ranks):
    names = list(NAMES)
    results = run_ranks(4, two_steps_of_each, names, 4, 8, timeout_seconds=200)
    assert differing(names, results, one_process(8)) == []


@pytest.mark.slow
def test_orders_on_eight_processes_have_the_bits_of_one(run_ranks):
    # One of each kind: plain, interleaved with weight gradients put off, V, V in fused pairs; with
    # fewer micro-batches than stages, and not a multiple of the ranks.
    names = ["1f1b", "interleaved_zb1p", "zb_v", "dualpipe_v"]
    results = run_ranks(8, two_steps_of_each, names, 8, 6, timeout_seconds=200)
    assert differing(names, results, one_process(6)) == []


def test_the_comparison_sees_one_wrong_bit():
    losses, grads = one_process(2)
    right = ([*losses], {0: [*grads]})
    assert differing(["1f1b"], [[right]], (losses, grads)) == []
    flipped = [*grads[:-1], grads[-1].clone()]
    flipped[-1].view(-1)[0] = torch.nextafter(flipped[-1].view(-1)[0], torch.tensor(1e9))
    assert differing(["1f1b"], [[(losses, {0: flipped})]], (losses, grads)) == ["1f1b"]
    assert differing(["1f1b"], [[(losses[:1], {0: grads})]], (losses, grads)) == ["1f1b"]
