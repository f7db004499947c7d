import torch
from torch.nn import functional

from ppruntime.models.dims import preset
from ppruntime.models.expert_rows import expert_layout
from ppruntime.models.experts import ExpertLinear, clamped_swiglu
from ppruntime.models.init import init_parameters
from ppruntime.models.linear import (
    GroupedLinear,
    Linear,
    WeightGradQueue,
    set_queue,
)
from ppruntime.models.moe import MoE

TINY = preset("tiny")


def make_moe(dtype=torch.float64):
    moe = MoE(TINY, dtype=dtype)
    init_parameters(moe, "moe", 1, std=0.3)
    return moe


def plain_expert(x, gate_up, down):
    gate, up = (gate_up @ x).chunk(2)
    return down @ (functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10))


def plain_moe(moe, x, routing):
    rows = []
    for n, token in enumerate(x):
        y = plain_expert(token, moe.shared.gate_up.weight, moe.shared.down.weight)
        for expert, weight in zip(routing.experts_NK[n], routing.weights_NK[n], strict=True):
            gate_up, down = moe.experts.gate_up.weight[expert], moe.experts.down.weight[expert]
            y = y + weight * plain_expert(token, gate_up, down)
        rows.append(y)
    return torch.stack(rows)


def test_moe_equals_a_loop_over_tokens_and_so_do_its_gradients():
    moe = make_moe()
    x = torch.randn(2, 7, 64, dtype=torch.float64, requires_grad=True)
    ids = torch.zeros(2, 7, dtype=torch.int64)
    out = moe(x, ids)
    plain = plain_moe(moe, x.flatten(0, 1), moe.router(x.flatten(0, 1), ids.flatten()))
    torch.testing.assert_close(out.y_BTD.flatten(0, 1), plain)
    wanted = [x, *moe.parameters()]
    weights = torch.randn_like(plain)
    ours = torch.autograd.grad((out.y_BTD.flatten(0, 1) * weights).sum(), wanted)
    theirs = torch.autograd.grad((plain * weights).sum(), wanted)
    for grad, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, expected)
    assert out.loads_E.sum() == 2 * 7 * 2


def test_swiglu_clamps_the_gate_above_and_the_up_part_on_both_sides():
    gate_up = torch.tensor([20.0, -20, 1, 1, 30, -30])
    expected = functional.silu(torch.tensor([10.0, -20, 1])) * torch.tensor([1.0, 10, -10])
    assert torch.equal(clamped_swiglu(gate_up, 10.0), expected)


def test_layout_is_a_permutation_in_expert_then_token_order():
    experts = torch.tensor([[2, 0], [0, 1], [2, 1]])
    layout = expert_layout(experts)
    assert layout.token_R.tolist() == [0, 1, 1, 2, 0, 2]
    assert experts.flatten()[layout.row_NK.flatten().argsort()].tolist() == [0, 0, 1, 1, 2, 2]


def test_experts_without_rows_get_zero_gradients():
    layer = ExpertLinear(4, 3, 5, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    layer(x, [0, 4, 0, 2]).sum().backward()
    assert (layer.weight.grad[[0, 2]] == 0).all()
    torch.testing.assert_close(layer.weight.grad[1], x[:4].sum(0).expand(5, 3))


def test_layers_pass_the_gradient_check():
    torch.manual_seed(0)
    layers = [
        (Linear(3, 4, dtype=torch.float64), torch.randn(2, 5, 3)),
        (GroupedLinear(2, 3, 4, dtype=torch.float64), torch.randn(5, 2, 3)),
    ]
    for layer, x in layers:
        torch.nn.init.normal_(layer.weight)
        x = x.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, w, layer=layer: layer(x), (x, layer.weight))
    expert = ExpertLinear(3, 3, 4, dtype=torch.float64)
    torch.nn.init.normal_(expert.weight)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: expert(x, [2, 0, 3]), (x, expert.weight))


def test_fp32_output_of_a_bf16_layer_is_not_rounded():
    layer = Linear(64, 32, dtype=torch.bfloat16, fp32_output=True)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, x.float() @ layer.weight.float().T)
    y.sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert layer.weight.grad.dtype is torch.float32


def test_put_off_weight_gradients_have_the_same_bits():
    at_once, later = make_moe(torch.float32), make_moe(torch.float32)
    queue = WeightGradQueue()
    set_queue(later, queue)
    queue.deferring = True
    torch.manual_seed(0)
    for _ in range(3):
        x = torch.randn(2, 9, 64)
        ids = torch.zeros(2, 9, dtype=torch.int64)
        for moe in (at_once, later):
            out = moe(x, ids)
            (out.y_BTD.square().sum() + out.balance_loss).backward()
        assert len(queue) == 5
        for task in queue.pop():
            task()
    for (name, p), q in zip(at_once.named_parameters(), later.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_nothing_waits_while_the_queue_does_not_defer():
    moe = make_moe()
    queue = WeightGradQueue()
    set_queue(moe, queue)
    x = torch.randn(1, 4, 64).double()
    moe(x, torch.zeros(1, 4, dtype=torch.int64)).y_BTD.sum().backward()
    assert len(queue) == 0
    assert all(p.grad is not None for p in moe.parameters())
