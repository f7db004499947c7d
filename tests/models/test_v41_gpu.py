"""V4.1 on a GPU: the CPU's numbers, the same bits twice, and a full-width layer within memory."""

import pytest
import torch
from msgspec.structs import replace
from whole_model import build_units, named_grads, random_batch, run

from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import preset, unit_specs
from ppruntime.models.init import init_parameters
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
