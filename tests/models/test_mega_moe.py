"""The fused MoE layer: ranks played by one process against the readable experts, fp64, and one
rank alone."""

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU, distance
from mega_cases import make_ranks, run_together
from msgspec.structs import replace

from ppruntime.models.dims import preset
from ppruntime.models.dispatch import AllHere
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options, MicroBatch
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.mega_moe import bf16_weight_grads
from ppruntime.models.mega_moe_arena import ArenaShape
from ppruntime.models.router import Routing

pytestmark = pytest.mark.gpu if ON_GPU else []
HIDDEN, WIDTH, PER_TOKEN, EXPERTS = 128, 128, 2, 4
DIMS = replace(
    preset("tiny"),
    hidden_size=HIDDEN,
    expert_width=WIDTH,
    num_experts=EXPERTS,
    experts_per_token=PER_TOKEN,
)
NAMES = ("y", "dx", "dp", "dW13", "dW2")
CASES = {
    "uneven": (9, 4),
    "all to the first experts": (6, 5),
    "a rank without tokens": (7, 0),
    "four ranks, most rows to one": (5, 3, 0, 8),
    "no tokens at all": (0, 0),
}
MOST_TOKENS = 9


def shape_of(most_tokens=MOST_TOKENS):
    return ArenaShape(
        most_tokens=most_tokens, per_token=PER_TOKEN, num_experts=EXPERTS, hidden=HIDDEN
    )


def batches(case, sizes):
    """Tokens, experts, weights and gradients of each rank."""
    generator = torch.Generator().manual_seed(len(case))
    made = []
    for num in sizes:
        experts = torch.rand(num, EXPERTS, generator=generator).argsort(-1)[:, :PER_TOKEN]
        if case == "all to the first experts":
            experts = torch.arange(PER_TOKEN).expand(num, -1).clone()
        if case.endswith("to one"):
            experts = torch.stack([torch.full((num,), 3), torch.arange(num) % 3], 1)
        made.append(
            (
                torch.randn(num, HIDDEN, generator=generator).bfloat16().to(DEVICE),
                experts.to(DEVICE),
                (torch.rand(num, PER_TOKEN, generator=generator) + 0.2).to(DEVICE),
                torch.randn(num, HIDDEN, generator=generator).to(DEVICE),
            )
        )
    return made


def make_experts(kind, held=None, **options):
    whole = range(EXPERTS)
    if kind == "bf16":
        experts = Experts(DIMS, held=held, device=DEVICE, dtype=torch.bfloat16)
    else:
        backend = ExpertBackend.TRITON if ON_GPU else ExpertBackend.REFERENCE
        options = Fp8Options(backend=backend, **options)
        experts = Fp8Experts(DIMS, options, held=held, device=DEVICE, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in experts.parameters():
            values = torch.randn(EXPERTS, *weight.shape[1:], generator=generator) * 0.06
            held = held or whole
            weight.copy_(values[held.start : held.stop])
    return experts


def alone(kind, batch, dtype=None):
    """All experts in one process, whose tokens are all ranks' one after another."""
    x, experts_NK, weights, grad = (torch.cat(parts) for parts in zip(*batch, strict=True))
    experts = make_experts(kind)
    if dtype is not None:
        experts = experts.to(dtype)
        x, weights, grad = (t.to(dtype) for t in (x, weights, grad))
    x, weights = x.requires_grad_(), weights.requires_grad_()
    counts = torch.bincount(experts_NK.flatten(), minlength=EXPERTS)
    y = AllHere().routed(experts, x, Routing(experts_NK, weights, weights), counts)
    y.backward(grad)
    return [y.detach(), x.grad, weights.grad, *(w.grad for w in experts.parameters())]


def together(kind, batch, mega=None, **options):
    """The same of ranks that each have a part of the experts."""
    ranks = make_ranks(len(batch), shape_of(), mega)
    layers = [make_experts(kind, rank.held(EXPERTS), **options) for rank in ranks]
    fp8 = kind == "FP8"
    forwards, copies = [], []
    for rank, layer, (x, experts_NK, weights, _) in zip(ranks, layers, batch, strict=True):
        copy = layer.quantized() if fp8 else (layer.gate_up.weight, layer.down.weight)
        copies.append(copy)
        matrices = (copy.gate_up, copy.down) if fp8 else copy
        forwards.append(
            rank.forward_steps(
                x, experts_NK, weights, matrices, float(layer.limit), power_of_two=fp8
            )
        )
    with torch.no_grad():
        results = run_together(ranks, forwards)
        backwards = []
        for rank, layer, copy, (_, kept), (*_, grad) in zip(
            ranks, layers, copies, results, batch, strict=True
        ):
            if options.get("keep_expert_activations") is False:
                kept = kept._replace(z_RC=None)
            if fp8:
                grad = grad.bfloat16()
            backwards.append(
                rank.backward_steps(
                    grad, kept, copy, float(layer.limit), dtype=torch.bfloat16, tile_scales=False
                )
            )
        grads = run_together(ranks, backwards)
    for layer, one in zip(layers, grads, strict=True):
        if isinstance(one.operands, MicroBatch):
            layer.put_weight_grads(one.operands)
        else:
            weights = layer.gate_up.weight, layer.down.weight
            found = bf16_weight_grads(layer, one.operands, *weights)
            for weight, grad in zip(weights, found, strict=True):
                weight.grad = grad
    return [
        torch.cat([y.float() for y, _ in results]),
        torch.cat([one.x_ND for one in grads]),
        torch.cat([one.weights_NK for one in grads]),
        torch.cat([layer.gate_up.weight.grad for layer in layers]),
        torch.cat([layer.down.weight.grad for layer in layers]),
    ]


@pytest.mark.parametrize(("case", "sizes"), CASES.items(), ids=CASES.keys())
def test_bf16_ranks_compute_what_the_readable_experts_do(case, sizes):
    batch = batches(case, sizes)
    got, readable = together("bf16", batch), alone("bf16", batch)
    exact = alone("bf16", batch, torch.float64)
    for name, a, b, true in zip(NAMES, got, readable, exact, strict=True):
        assert a.shape == b.shape, name
        if true.numel() == 0 or not true.any():
            assert not a.any(), name
            continue
        assert distance(a, true) < 8e-3, name
        assert distance(a, true) < 1.5 * distance(b, true) + 1e-3, name


@pytest.mark.parametrize(("case", "sizes"), list(CASES.items())[:4], ids=list(CASES)[:4])
def test_fp8_ranks_compute_bitwise_what_one_process_makes_of_their_tokens(case, sizes):
    """On a GPU. In the interpreter the GEMMs round the same sums to bf16 from another order."""
    batch = batches(case, sizes)
    got, expected = together("FP8", batch), alone("FP8", batch)
    for name, a, b in zip(NAMES, got, expected, strict=True):
        if ON_GPU:
            assert torch.equal(a, b.to(a.dtype)), name
        else:
            assert distance(a, b) < 2e-2, name
