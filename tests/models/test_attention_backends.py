"""Attention's operations by kernels in place of the reference: a unit's numbers, and refusals."""

from __future__ import annotations

import dataclasses
from functools import partial

import measured_activations
import pytest
import torch
from msgspec.structs import replace
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from whole_model import build_units, named_grads, random_batch

from ppruntime.models.activation_bytes import kept_fields, kept_results, saved_bytes
from ppruntime.models.attention_kernels import REFERENCE, set_kernels
from ppruntime.models.carry import Carry
from ppruntime.models.dims import UnitKind, preset, unit_specs
from ppruntime.models.kernel_limits import AttentionOp, Backend, misfit
from ppruntime.models.kernels import grouped_output, rope  # noqa: F401 (they register ops)
from ppruntime.models.kernels import sparse_attention as attention_op
from ppruntime.models.kernels.attention_backends import (
    Choice,
    Target,
    attention_kernels,
    fastest,
    unavailable_reason,
)
from ppruntime.models.linear import GroupedLinear, Linear, WeightGradQueue, set_queue
from ppruntime.models.rope import Rotation

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="small shapes, for the interpreter"
)
ALL = Choice(
    Backend.TRITON,
    Backend.TRITON,
    Backend.TRITON,
    Backend.LIBRARY,
    norm=Backend.TRITON,
    compressor=Backend.LIBRARY,
)
CPU = torch.device("cpu")


def small_dims(name: str):
    """A tiny model that the kernels take, in which six tokens make entries of every kind."""
    ratios = {"tiny": (0, 0, 2, 2, 1, 1, 1, 1), "tiny-v4": (0, 0, 2, 4, 2, 4, 2, 0)}[name]
    sizes = {"num_heads": 16, "head_dim": 32, "index_heads": 2, "index_head_dim": 16}
    few = {"index_topk": 3, "window": 4, "candidate_blocks": 1, "candidate_block_size": 2}
    return replace(
        preset(name),
        compress_ratios=ratios,
        hca_ratio=4,
        sinkhorn_iters=2,
        **sizes,
        **(few if name == "tiny" else {"index_topk": 3, "window": 4}),
    )


def attention_halves(dims):
    """The embedding and one attention half of each kind; what lies between is left out."""
    layers = (2, 3, 4, 6) if dims.family == "v41" else (0, 2, 3)
    units = [
        unit
        for unit in build_units(dims, 3)
        if unit.spec.kind is UnitKind.EMBED
        or (unit.spec.kind is UnitKind.ATTENTION and unit.spec.layer in layers)
    ]
    for unit in units:  # so that what a left out unit would have made or dropped is not missed
        everything = frozenset({"streams", "mix", "kv", "index_keys", "slots", "candidates"})
        unit.spec = dataclasses.replace(unit.spec, live_after=everything)
    return units


def gradients(units, batch, call=lambda unit, *arguments: unit(*arguments)):
    """Streams, and all parameters' gradients, of a run through the units."""
    for unit in units:
        unit.zero_grad()
    carry = Carry()
    for unit in units:
        carry = call(unit, carry, batch)
    seed = torch.randn(carry.streams.shape, generator=torch.Generator().manual_seed(5))
    (carry.streams * seed).sum().backward()
    return carry.streams.detach()


def distance(found, expected):
    """||found - expected|| / ||expected||"""
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@interpreted
@pytest.mark.parametrize("name", ["tiny", "tiny-v4"])
def test_units_with_all_kernels_have_the_references_numbers(name, monkeypatch):
    dims = small_dims(name)
    batch = random_batch(dims, 2, [(5, 1)])
    units = attention_halves(dims)
    streams = gradients(units, batch)
    expected = {name: grad.clone() for name, grad in named_grads(units).items()}
    for unit in units:
        set_kernels(unit, attention_kernels(ALL))
    kernel_streams = gradients(units, batch)
    plain = {name: grad.clone() for name, grad in named_grads(units).items()}
    assert plain.keys() == expected.keys()
    assert distance(kernel_streams, streams) < 1e-5
    assert max(distance(plain[name], expected[name]) for name in expected) < 1e-4

    # Computed again in the backward but for attention, which is saved by name, and with weight
    # gradients that wait: the same bits.
    num_attended = 0
    run_forward = attention_op.run_forward

    def counted(*arguments):
        nonlocal num_attended
        num_attended += 1
        return run_forward(*arguments)

    monkeypatch.setattr(attention_op, "run_forward", counted)
    saved = {torch.ops.ppruntime.sparse_attention.default, torch.ops.ppruntime.index_select.default}

    def policy(_, op, *arguments, **options):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def recomputed(unit, *arguments):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(unit, *arguments, use_reentrant=False, context_fn=contexts)

    queue = WeightGradQueue()
    for unit in units:
        set_queue(unit, queue)
    queue.deferring = True
    assert torch.equal(gradients(units, batch, recomputed), kernel_streams)
    assert num_attended == len(units) - 1
    tasks = queue.pop()
    assert len(tasks) >= 5 * (len(units) - 1)
    for task in tasks:
        task()
    found = named_grads(units)
    assert found.keys() == plain.keys()
    assert not [name for name, grad in found.items() if not torch.equal(grad, plain[name])]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_and_grouped_products_are_bitwise_the_plain_ones(dtype):
    kernels, generator = attention_kernels(ALL), torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    angles = 9 * normal(2, 5, 8).float()
    rotation = Rotation(angles.cos(), angles.sin())
    linear, grouped = Linear(24, 3 * 40, dtype=dtype), GroupedLinear(2, 48, 20, dtype=dtype)
    for module in (linear, grouped):
        module.weight.data = normal(*module.weight.shape)
    calls = {
        "vectors": lambda k, x: k.rotate(x, rotation),
        "heads": lambda k, x: k.rotate(x, rotation),
        "projected": lambda k, x: k.project_rotated(linear, x, rotation, 3),
        "grouped": lambda k, x: k.grouped(grouped, x),
    }
    shapes = ((2, 5, 40), (2, 5, 3, 40), (2, 5, 24), (2, 5, 2, 48))
    for (name, call), shape in zip(calls.items(), shapes, strict=True):
        x = normal(*shape).transpose(0, 1).contiguous().transpose(0, 1)
        results = []
        for k in (REFERENCE, kernels):
            leaf = x.clone().requires_grad_()
            y = call(k, leaf)
            linear.weight.grad = grouped.weight.grad = None
            y.backward(torch.ones_like(y) * 0.3 + y.detach())
            weights = [m.weight.grad for m in (linear, grouped) if m.weight.grad is not None]
            results.append([y.detach(), leaf.grad, *weights])
        assert len(results[0]) == len(results[1]), name
        assert all(map(torch.equal, *results)), name


def test_rotation_and_grouped_products_refuse_what_they_do_not_take():
    rotate = attention_kernels(ALL).rotate
    for x, pairs, message in (
        (torch.zeros(1, 2, 8), 3, "a power of two up to 4"),
        (torch.zeros(1, 2, 8), 8, "8 pairs of 8 channels"),
        (torch.zeros(1, 2, 8, dtype=torch.float64), 2, "float64"),
        (torch.zeros(2, 8), 2, "they are"),
    ):
        with pytest.raises(ValueError, match=message):
            rotate(x, Rotation(torch.zeros(1, 2, pairs), torch.zeros(1, 2, pairs)))


@interpreted
def test_the_registrations_are_consistent():
    x, angles = torch.randn(1, 3, 2, 16), torch.randn(1, 3, 4)
    ops = torch.ops.ppruntime
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.rotate.default, (x, angles, angles, True), test_utils=tests)
    arguments = (torch.randn(1, 3, 8), torch.randn(32, 8), angles, angles, 2)
    torch.library.opcheck(ops.rotated_linear.default, arguments, test_utils=tests)
    arguments = (torch.randn(5, 2, 8), torch.randn(2, 8, 3))
    torch.library.opcheck(ops.grouped_columns_linear.default, arguments, test_utils=tests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny", "tiny-v4"])
def test_the_plan_counts_what_autograd_saves_with_the_kernels(name, dtype, monkeypatch):
    build = measured_activations.build_unit

    def with_kernels(*arguments, **options):
        unit = build(*arguments, **options)
        set_kernels(unit, attention_kernels(ALL))
        return unit

    monkeypatch.setattr(measured_activations, "build_unit", with_kernels)
    dims = small_dims(name)
    for spec in unit_specs(dims):
        if spec.kind is UnitKind.ATTENTION:
            found = measured_activations.measure_on_meta(dims, spec, 2, 17, dtype)
            planned = saved_bytes(
                dims, spec, 2, 17, dtype, attention_kernel=True, wide_products=True
            )
            assert planned == found.own_bytes, spec.name
            assert kept_fields(dims, spec, 2, 17, dtype) == found.kept_fields, spec.name
            for point, kept in found.results.items():
                points, every = frozenset({point}), frozenset(AttentionOp)
                ours = kept_results(dims, spec, points, 2, 17, dtype, kernels=every)
                assert ours == kept, f"{spec.name}: {point}"


# What runs where


def test_auto_takes_the_reference_on_a_cpu_and_products_without_copies_anywhere():
    target = Target(preset("v41-flash"), torch.bfloat16, CPU)
    chosen = {op: fastest(op, target) for op in AttentionOp}
    assert chosen.pop(AttentionOp.GROUPED_OUTPUT) is Backend.LIBRARY
    assert set(chosen.values()) == {Backend.REFERENCE}


@pytest.mark.parametrize(
    ("op", "backend", "changes", "text"),
    [
        ("attention", "triton", {"num_heads": 4}, "powers of two from 16 heads and 32 channels"),
        ("attention", "triton", {"head_dim": 96}, "the model has 64 heads of 96"),
        ("attention", "triton", {"head_dim": 64}, "at most half of a head's 64 channels"),
        ("attention", "library", {"num_heads": 32}, "64 heads of 512 channels, the model has 32"),
        ("indexer", "triton", {"index_head_dim": 96}, "the model's have 96"),
        ("indexer", "library", {"index_heads": 8}, "the model has 8 of 128 and 512"),
        ("indexer", "library", {"index_topk": 4096}, "2048 picks at most"),
        ("rope", "triton", {"rope_dim": 48}, "the model 48"),
    ],
)
def test_sizes_that_kernels_do_not_take_are_named(op, backend, changes, text):
    dims = preset("v41-flash")
    assert misfit(AttentionOp(op), Backend(backend), dims) is None
    assert text in misfit(AttentionOp(op), Backend(backend), replace(dims, **changes))


@interpreted
def test_what_cannot_run_says_what_is_missing_and_what_would_work(monkeypatch):
    target = Target(preset("v41-flash"), torch.bfloat16, CPU)
    attention, triton = AttentionOp.ATTENTION, Backend.TRITON
    reason = unavailable_reason(attention, Backend.LIBRARY, target)
    assert "need a Hopper GPU" in reason
    assert "kernels.attention" in reason
    reason = unavailable_reason(AttentionOp.INDEXER, Backend.LIBRARY, target)
    assert reason == 'cuDNN\'s indexer needs a Hopper GPU (sm_90); use kernels.indexer = "triton"'
    assert unavailable_reason(attention, triton, target) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in unavailable_reason(attention, triton, target)
    with pytest.raises(ValueError, match="rope has no backend library; there are: triton"):
        unavailable_reason(AttentionOp.ROPE, Backend.LIBRARY, target)
