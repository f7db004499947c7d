"""V4's units can be cut apart, computed again and told to wait, without a bit of difference."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch.utils.checkpoint import checkpoint
from whole_model import build_units, mean_loss, named_grads, random_batch, run, run_to_logits

from ppruntime.models.carry import CROSSING, Carry
from ppruntime.models.dims import Role, UnitKind, preset, unit_parameters, unit_specs
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.mhc import collapse
from ppruntime.models.units import build_unit

DIMS = preset("tiny-v4")
BATCH = random_batch(DIMS, 0, [(37, 1, 12), (50,), (3, 30, 17)])


def whole_run():
    units = build_units(DIMS, 0)
    carry = run(units, BATCH)
    (carry.loss + carry.balance_loss).backward()
    return carry, named_grads(units)


def assert_same_bits(grads, expected):
    assert grads.keys() == expected.keys()
    different = [name for name, grad in grads.items() if not torch.equal(grad, expected[name])]
    assert not different


def test_only_the_streams_pass_between_units():
    units = build_units(DIMS, 0)
    carry = Carry()
    for unit in units[:-1]:
        carry = unit(carry, BATCH)
        present = tuple(field for field in CROSSING if getattr(carry, field) is not None)
        assert present == unit.spec.live_after == ("streams",)
    last = units[-1](carry, BATCH)
    assert all(getattr(last, field) is None for field in CROSSING)


def test_cut_at_every_boundary_the_gradients_are_bitwise_those_of_the_whole():
    whole, expected = whole_run()
    units = build_units(DIMS, 0)
    received, sent = [], []
    streams = None
    for unit in units:
        if streams is not None:
            streams = streams.detach().requires_grad_()
        received.append(streams)
        sent.append(unit(Carry(streams=streams), BATCH))
        streams = sent[-1].streams
    last = sent[-1]
    assert torch.equal(last.loss, whole.loss)
    grad = None
    for leaf, carry in zip(reversed(received), reversed(sent), strict=True):
        roots = [x for x in (carry.balance_loss, carry.loss) if x is not None]
        seeds = [torch.ones(()) for _ in roots]
        if grad is not None:
            roots, seeds = [*roots, carry.streams], [*seeds, grad]
        torch.autograd.backward(roots, seeds)
        grad = None if leaf is None else leaf.grad
    assert_same_bits(named_grads(units), expected)


def test_computed_again_in_the_backward_the_gradients_are_bitwise_the_same():
    whole, expected = whole_run()
    units = build_units(DIMS, 0)
    carry = Carry()
    for unit in units:
        carry = checkpoint(unit, carry, BATCH, use_reentrant=False)
    assert torch.equal(carry.loss, whole.loss)
    (carry.loss + carry.balance_loss).backward()
    assert_same_bits(named_grads(units), expected)


def test_weight_gradients_that_wait_are_bitwise_those_that_do_not():
    _, expected = whole_run()
    units = build_units(DIMS, 0)
    queue = WeightGradQueue()
    for unit in units:
        set_queue(unit, queue)
    carry = run(units, BATCH)
    queue.deferring = True
    (carry.loss + carry.balance_loss).backward()
    put_off = expected.keys() - named_grads(units).keys()
    tasks = queue.pop()
    assert len(tasks) == len(put_off)
    with torch.no_grad():
        for task in tasks:
            task()
    assert_same_bits(named_grads(units), expected)

    # What does not wait is small: all matrices of a layer do.
    shapes = {
        f"{unit.spec.name}.{parameter.name}": parameter.shape
        for unit in units
        for parameter in unit_parameters(DIMS, unit.spec)
    }
    at_once = {name for name in expected if name not in put_off and name != "embed.weight"}
    assert all(len(shapes[name]) == 1 or name.endswith("position_bias") for name in at_once)


def test_the_indexer_alone_gets_no_gradient():
    _, grads = whole_run()
    names = {
        f"{spec.name}.{parameter.name}": parameter.frozen
        for spec in unit_specs(DIMS)
        for parameter in unit_parameters(DIMS, spec)
    }
    assert grads.keys() == {name for name, frozen in names.items() if not frozen}
    assert all("indexer" in name for name, frozen in names.items() if frozen)
    assert all(grad.any() for grad in grads.values())


def test_a_hash_layer_sends_a_token_where_its_table_says_whatever_its_state():
    dims = replace(DIMS, num_hash_layers=2)
    units = build_units(dims, 0)
    hashed = [unit for unit in units if unit.spec.role is Role.HASH]
    assert [unit.spec.layer for unit in hashed] == [0, 1]
    loads = run(units, BATCH).loads
    for layer, unit in enumerate(hashed):
        experts = unit.moe.router.experts_of_token[BATCH.ids].flatten()
        assert torch.equal(loads[layer], experts.bincount(minlength=dims.num_experts))
        chosen = unit.moe.router.experts_of_token
        assert all(len(set(row)) == dims.experts_per_token for row in chosen.tolist())


def test_the_head_collapses_the_streams_with_weights_of_its_own():
    units = build_units(DIMS, 0)
    streams = run(units[:-1], BATCH).streams
    head = units[-1]
    flat = streams.flatten(2)
    flat = flat / (flat.square().mean(-1, keepdim=True) + DIMS.norm_eps).sqrt()
    weights = head.collapse
    logits = flat @ weights.projection.weight.T * weights.scale + weights.base
    mix = logits.sigmoid() + DIMS.mhc_eps
    torch.testing.assert_close(weights(streams), mix, rtol=1e-5, atol=1e-6)
    expected = head.projection(head.norm((mix.unsqueeze(-1) * streams).sum(2)))
    torch.testing.assert_close(head.logits(Carry(streams=streams)), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        collapse(streams, mix), (mix.unsqueeze(-1) * streams).sum(2), rtol=1e-5, atol=1e-6
    )


def test_in_bf16_what_needs_fp32_keeps_it_and_the_loss_is_near():
    exact = mean_loss(build_units(DIMS, 0), BATCH)
    units = build_units(DIMS, 0, torch.bfloat16)
    for unit in units:
        wide = {p.name for p in unit_parameters(DIMS, unit.spec) if p.fp32}
        found = {n for n, p in unit.named_parameters() if p.dtype is torch.float32}
        assert found == wide
    loss = mean_loss(units, BATCH)
    loss.backward()
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    assert all(grad.isfinite().all() for grad in named_grads(units).values())
    assert run_to_logits(units, BATCH).dtype is torch.float32


def test_rows_shorter_than_a_group_have_only_their_window():
    units = build_units(DIMS, 0)
    short = random_batch(DIMS, 0, [(3,), (3,)])
    assert all(ratio == 0 or ratio > 3 for ratio in DIMS.compress_ratios)
    loss = mean_loss(units, short)
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("name", ["v4-proxy-8", "v4-flash"])
def test_the_full_models_modules_have_the_parameters_of_the_plan(name):
    """On the meta device: names, shapes, and the numbers of the published models."""
    dims = preset(name)
    total = 0
    for spec in unit_specs(dims):
        unit = build_unit(dims, spec, device="meta", dtype=torch.bfloat16)
        found = {
            name: (tuple(parameter.shape), parameter.dtype is torch.float32)
            for name, parameter in unit.named_parameters()
        }
        assert found == {p.name: (p.shape, p.fp32) for p in unit_parameters(dims, spec)}
        total += sum(parameter.numel() for parameter in unit.parameters())
        assert spec.kind is not UnitKind.ATTENTION or unit.attention.role is spec.role
    if name == "v4-flash":
        assert round(total / 1e9, 2) == 284.33
