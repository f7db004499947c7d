"""V4.1 on a GPU: the CPU's numbers, the same bits twice, and a full-width layer within memory."""

import pytest
import torch
from msgspec.structs import replace
from whole_model import build_units, named_grads, random_batch, run

from ppruntime.models.attention_kernels import REFERENCE, set_kernels
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import preset, unit_specs
from ppruntime.models.init import init_parameters
from ppruntime.models.kernel_limits import AttentionOp, Backend
from ppruntime.models.kernels.attention_backends import (
    Choice,
    Target,
    attention_kernels,
    unavailable_reason,
)
from ppruntime.models.units import build_unit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TINY = preset("tiny")


def on_gpu(batch):
    return MicroBatch(*(t.cuda() for t in batch[:3]))


def gradients(units, batch):
    for unit in units:
        unit.zero_grad()
    carry = run(units, batch)
    (carry.loss + carry.balance_loss).backward()
    return carry, {name: grad.clone() for name, grad in named_grads(units).items()}


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "cache quantised"])
def test_a_gpu_gives_the_cpus_numbers_in_fp64(quantize):
    dims = replace(TINY, quantize_cache=quantize)
    batch = random_batch(dims, 8, [(20, 29, 15), (64,)])
    carry, expected = gradients(build_units(dims, 8, torch.float64), batch)
    units = [unit.cuda() for unit in build_units(dims, 8, torch.float64)]
    there, grads = gradients(units, on_gpu(batch))
    torch.testing.assert_close(there.loss.cpu(), carry.loss, rtol=1e-10, atol=0)
    for name, grad in grads.items():
        distance = (grad.cpu() - expected[name]).norm() / expected[name].norm()
        # Angles, mix and routing bias are fp32 in every model, and sines differ by device.
        assert distance < 1e-4, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_gives_the_same_bits_twice(dtype):
    batch = on_gpu(random_batch(TINY, 1, [(20, 29, 15), (64,)]))
    units = [unit.cuda() for unit in build_units(TINY, 1, dtype)]
    first, grads = gradients(units, batch)
    second, again = gradients(units, batch)
    assert torch.equal(first.loss, second.loss)
    for name, grad in grads.items():
        assert torch.equal(grad, again[name]), name
        assert grad.isfinite().all(), name


def test_full_width_attention_at_8192_tokens_fits():
    dims = replace(preset("v41-flash"), engram_layers=(), candidate_blocks=64)
    specs = {spec.name: spec for spec in unit_specs(dims)}
    positions = torch.arange(8192, device="cuda").unsqueeze(0)
    batch = MicroBatch(positions % dims.vocab_size, positions, positions)
    streams = torch.randn(1, 8192, 4, 5120, device="cuda", dtype=torch.bfloat16)
    mix = torch.rand(1, 8192, 4, device="cuda")
    carry = Carry(streams=streams.requires_grad_(), mix=mix.requires_grad_())
    for name in ("layers.20.attn", "layers.21.attn", "layers.24.attn"):
        unit = build_unit(dims, specs[name], device="cuda", dtype=torch.bfloat16)
        init_parameters(unit, name, 0)
        carry = unit(carry, batch)
    carry.streams.float().square().mean().backward()
    assert streams.grad.isfinite().all()
    assert (streams.grad != 0).any()
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.LIBRARY], ids=lambda b: b.value)
def test_full_width_halves_with_kernels_have_the_references_numbers(backend):
    dims = replace(preset("v41-flash"), engram_layers=())
    target = Target(dims, torch.bfloat16, torch.device("cuda"))
    reason = unavailable_reason(AttentionOp.ATTENTION, backend, target)
    if reason is not None:
        pytest.skip(reason)
    own = Backend.TRITON
    kernels = attention_kernels(Choice(backend, own, own, Backend.LIBRARY))
    specs = {spec.name: spec for spec in unit_specs(dims)}
    # Two documents of at most 512 entries: all that is visible is picked, however scores round.
    positions = torch.cat((torch.arange(400), torch.arange(77))).cuda().unsqueeze(0)
    batch = MicroBatch(positions % dims.vocab_size, positions, positions)
    units = []
    for name in ("layers.20.attn", "layers.21.attn", "layers.24.attn", "layers.0.attn"):
        units.append(build_unit(dims, specs[name], device="cuda", dtype=torch.bfloat16))
        init_parameters(units[-1], name, 0)
    start = torch.randn(1, 477, 4, 5120, device="cuda", dtype=torch.bfloat16)
    results = []
    for record in (REFERENCE, kernels):
        streams = start.clone().requires_grad_()
        carry = Carry(streams=streams, mix=torch.full((1, 477, 4), 0.25, device="cuda"))
        for unit in units:
            unit.zero_grad()
            set_kernels(unit, record)
            carry = unit(carry, batch)
        carry.streams.float().square().mean().backward()
        named = {
            f"{unit.spec.name}.{name}": parameter.grad.float().clone()
            for unit in units
            for name, parameter in unit.named_parameters()
            if parameter.grad is not None
        }
        results.append(
            {"streams": carry.streams.detach().float(), "start": streams.grad.float(), **named}
        )
    expected, found = results
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        distance = (found[name] - tensor).norm() / tensor.norm().clamp_min(1e-30)
        assert distance < 4e-2, f"{name}: {distance:.1e}"
