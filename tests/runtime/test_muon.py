"""Muon and the Sinkhorn-balanced update: against loops in fp64, over ranks, for every parameter."""

from __future__ import annotations

import math

import naive_muon
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ppruntime.models.dims import (
    PRESETS,
    ParameterSpec,
    Part,
    changed,
    preset,
    unit_parameters,
    unit_specs,
)
from ppruntime.models.update_rules import Update, UpdateRule, newton_schulz_flops, update_rule
from ppruntime.optim import state_tensors
from ppruntime.optim.matrix_owners import rounds_of, rows_of
from ppruntime.optim.muon import newton_schulz, orthogonal_update
from ppruntime.optim.muon_optimizer import make_muon
from ppruntime.optim.sinkhorn import sinkhorn_step_

SHAPES = [(1, 7), (4, 4), (5, 3), (24, 256), (256, 24), (48, 64), (1, 1)]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- Newton-Schulz --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_within_a_thousandth_of_one(shape):
    for dtype, bound in ((torch.float64, 6e-4), (torch.float32, 6e-4), (torch.bfloat16, 0.04)):
        values = torch.linalg.svdvals(newton_schulz(drawn(*shape), dtype).double())
        assert (values - 1).abs().max() < bound, dtype


def test_singular_values_of_a_thousandth_of_the_norm_come_near_one_too():
    u, _ = torch.linalg.qr(drawn(16, 16).double())
    v, _ = torch.linalg.qr(drawn(40, 16, seed=1).double())
    values = torch.logspace(-3, 0, 16, dtype=torch.float64)
    values *= 1 / values.norm()
    found = torch.linalg.svdvals(newton_schulz(u @ torch.diag(values) @ v.T, torch.float64))
    assert (found - 1).abs().max() < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_the_loop_in_fp64_and_a_batch_is_its_matrices(shape):
    batch = drawn(3, *shape)
    found = newton_schulz(batch, torch.float32)
    for matrix, result in zip(batch, found, strict=True):
        assert (result - naive_muon.newton_schulz(matrix)).norm() < 1e-5 * math.sqrt(min(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_a_gradient_does_not_matter_and_zeros_stay(dtype):
    matrix = drawn(6, 9)
    plain = newton_schulz(matrix, dtype)
    for scale in (2.0**-100, 2.0**100):
        assert torch.equal(newton_schulz(matrix * scale, dtype), plain)
    assert not newton_schulz(torch.zeros(6, 9), dtype).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heights", "width"), [((16,) * 4, 32), ((8,) * 4, 5), ((4, 4, 16), 256)])
def test_an_update_is_a_loop_over_blocks_of_rms_018_and_not_that_of_the_whole(
    heights, width, dtype
):
    matrix = drawn(sum(heights), width)
    found = orthogonal_update(matrix, heights, dtype)
    assert found.dtype is dtype
    found = found.double()
    tolerance = 2e-4 if dtype is torch.float32 else 0.04
    start = 0
    for height in heights:
        rows = slice(start, start := start + height)
        expected = 0.18 * math.sqrt(max(height, width)) * naive_muon.newton_schulz(matrix[rows])
        assert (found[rows] - expected).norm() < tolerance * expected.norm()
        # An orthogonal matrix has min(rows, columns) as its sum of squares.
        assert found[rows].square().mean().sqrt() == pytest.approx(0.18, rel=2e-2)
    whole = orthogonal_update(matrix, (sum(heights),), dtype).double()
    assert (whole - found).norm() > 0.05 * found.norm()


# --- which rule, which matrices -------------------------------------------------------------------

BLOCKS = {
    "v41-flash": {
        "attention.q_a.weight": (1280,),
        "attention.q_b.weight": (512,) * 64,
        "attention.kv.weight": (512,),
        "attention.o_a.weight": (1024,),
        "attention.o_b.weight": (5120,),
        "attention.compressor.value.weight": (512,),
        "attention.compressor.gate.weight": (512,),
        "attention.indexer.query.weight": (128,) * 32,
        "attention.indexer.head_weights.weight": (32,),
        "attention.indexer.key.weight": (128,),
        "engram.projection.weight": (5120,) * 5,
        "mhc.projection.weight": (4, 4, 16),
        "moe.router.gate.weight": (384,),
        "moe.experts.gate_up.weight": (2304, 2304),
        "moe.experts.down.weight": (5120,),
        "moe.shared.gate_up.weight": (2304, 2304),
        "moe.shared.down.weight": (5120,),
    },
    "v4-flash": {
        "attention.q_a.weight": (1024,),
        "attention.q_b.weight": (512,) * 64,
        "attention.kv.weight": (512,),
        "attention.o_a.weight": (1024,),
        "attention.o_b.weight": (4096,),
        "attention.compressor.value.weight": None,  # as wide as the layer's ratio has it
        "attention.compressor.gate.weight": None,
        "attention.indexer.query.weight": (128,) * 64,
        "attention.indexer.head_weights.weight": (64,),
        "attention.indexer.compressor.value.weight": (256,),
        "attention.indexer.compressor.gate.weight": (256,),
        "collapse.projection.weight": (4,),
        "mhc.projection.weight": (4, 4, 16),
        "moe.router.gate.weight": (256,),
        "moe.experts.gate_up.weight": (2048, 2048),
        "moe.experts.down.weight": (4096,),
        "moe.shared.gate_up.weight": (2048, 2048),
        "moe.shared.down.weight": (4096,),
    },
}
"""Heights of the matrices of all that Muon updates."""

DECAYING = {
    *("norm.weight", "attention.q_norm.weight", "attention.kv_norm.weight"),
    *("attention.compressor.norm.weight", "attention.indexer.key_norm.weight"),
    *("attention.indexer.compressor.norm.weight", "engram.query", "engram.key"),
}
REST = {
    *("attention.sink", "mhc.base", "mhc.scale", "collapse.base", "collapse.scale"),
    *("attention.compressor.position_bias", "attention.indexer.compressor.position_bias"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_parameter_has_the_rule_and_the_matrices_of_the_reports(name):
    dims = preset(name)
    expected = {n: UpdateRule(Update.ADAMW, decays=True) for n in DECAYING}
    expected |= {n: UpdateRule(Update.ADAMW, decays=False) for n in REST}
    rows = UpdateRule(Update.SINKHORN if name == "v41-flash" else Update.ADAMW, decays=False)
    expected |= {"weight": rows, "projection.weight": rows}
    expected["engram.table"] = UpdateRule(Update.SINKHORN, decays=False, lr_factor=5.0)
    seen = set()
    for unit in unit_specs(dims):
        for parameter in unit_parameters(dims, unit):
            rule, heights = update_rule(dims, parameter), BLOCKS[name].get(parameter.name, ())
            if parameter.name in BLOCKS[name]:
                heights = (parameter.shape[0],) if heights is None else heights
                assert rule == UpdateRule(Update.MUON, decays=True, heights=heights), parameter
            else:
                assert rule == expected[parameter.name], parameter
            seen.add(parameter.name)
    assert seen >= BLOCKS[name].keys()


@pytest.mark.parametrize("residual", ["mhc", "gated", "layerscale"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_blocks_fill_their_parameter_in_every_model(name, residual):
    dims = changed(preset(name), residual_type=residual)
    for unit in unit_specs(dims):
        for parameter in unit_parameters(dims, unit):
            rule = update_rule(dims, parameter)
            is_muon = rule.update is Update.MUON
            assert sum(rule.heights) == (parameter.shape[-2] if is_muon else 0), parameter
            assert is_muon or rule.update is Update.SINKHORN or rule.num_moments == 2


def test_flops_are_counted_matrix_by_matrix():
    rule = UpdateRule(Update.MUON, decays=True, heights=(3, 7))
    assert newton_schulz_flops(rule, 5) == 10 * (4 * 9 * 5 + 2 * 27) + 10 * (4 * 25 * 7 + 2 * 125)


# --- who orthogonalises what ----------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64])
def test_each_matrix_has_one_owner_and_none_has_a_matrix_more_than_its_share(num_ranks):
    costs = [float(c) for c in torch.randint(1, 1000, (30,), generator=torch.Generator())]
    rounds = rounds_of(costs, num_ranks)
    assert all(len(owned) == num_ranks for owned in rounds)
    assert sorted(n for owned in rounds for n in owned if n is not None) == list(range(30))
    loads = [sum(costs[n] for n in mine if n is not None) for mine in zip(*rounds, strict=True)]
    assert max(loads) <= sum(costs) / num_ranks + max(costs)
    assert rounds_of([], num_ranks) == ()


def test_rows_are_cut_as_torch_cuts_them():
    for num_rows in (1, 5, 8, 9):
        for num_ranks in (1, 2, 3, 4):
            found = [len(piece) for piece in torch.arange(num_rows).chunk(num_ranks)]
            assert rows_of(num_rows, num_ranks) == (*found, *[0] * (num_ranks - len(found)))


# --- balanced tables ------------------------------------------------------------------------------


def balanced(grad: torch.Tensor) -> torch.Tensor:
    """The step of zero weights from zero momentum, whose N is a multiple of the gradient."""
    weight = torch.zeros_like(grad)
    sinkhorn_step_(
        weight, torch.zeros_like(grad), grad,
        num_rows=len(grad), lr=1.0, beta=0.95, add_up=lambda _: None,
    )  # fmt: skip
    return weight / -0.18


def test_the_balanced_step_has_the_golden_values():
    n = torch.tensor([[1, 2, -1], [3, 4, 0.5], [0, 0, 0], [-2, 1, 5]])
    expected = torch.tensor(
        [
            [0.91515724, 1.25828078, -0.76106287],
            [1.27020344, 1.16429725, 0.17605439],
            [0, 0, 0],
            [-0.74256975, 0.25524609, 1.54383924],
        ],
        dtype=torch.float64,
    )
    assert (naive_muon.balanced(n) - expected).abs().max() < 1e-8
    assert (balanced(n) - expected).abs().max() < 1e-6


def test_rows_are_balanced_and_faint_ones_stay(monkeypatch):
    monkeypatch.setattr("ppruntime.optim.sinkhorn._NUMBERS_PER_PIECE", 100)
    grad = drawn(50, 24) * torch.logspace(-2, 0, 50).unsqueeze(1)
    grad[7] = 0
    grad[9] *= 1e-3 * grad.norm(dim=1).mean() / grad[9].norm() * 0.9
    found = balanced(grad)
    still = torch.zeros(50, dtype=torch.bool)
    still[[7, 9]] = True
    assert torch.equal(found.eq(0).all(1), still)
    torch.testing.assert_close(found[~still].norm(dim=1), torch.full((48,), math.sqrt(24.0)))
    columns = found.norm(dim=0)
    assert columns.max() < 1.02 * columns.min()
    assert torch.allclose(found.double(), naive_muon.balanced(grad), rtol=1e-5, atol=1e-7)
    assert torch.allclose(balanced(grad * 1e-10), found, rtol=1e-5, atol=1e-7)
    assert not balanced(torch.zeros(3, 4)).any()


# --- the optimizer against a loop -----------------------------------------------------------------

DIMS = preset("tiny")
HYPER = {"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LRS = (1e-2, 2e-2, 5e-3)


def tiny_specs() -> dict[str, ParameterSpec]:
    """One parameter of each name in a unit."""
    return {
        p.name: p
        for unit in unit_specs(DIMS)
        for p in unit_parameters(DIMS, unit)
        if not p.frozen and p.part is not Part.LOOKUP
    }


SPECS = tiny_specs()
RULES = {name: update_rule(DIMS, spec) for name, spec in SPECS.items()}


def tiny_params() -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(drawn(*s.shape, seed=i)) for i, (n, s) in enumerate(SPECS.items())}


def gradient(name: str, step: int) -> torch.Tensor:
    index = list(SPECS).index(name)
    grad = 1e-3 * drawn(*SPECS[name].shape, seed=1000 * (step + 1) + index)
    if name == "engram.table":
        grad[::3] = 0
    if name == "moe.experts.down.weight" and step < 2:
        grad[1] = 0
    return grad


def run_steps(params, *, first=0, last=3, optimizer=None, dtype=torch.float32, mesh=None):
    optimizer = optimizer or make_muon(params, RULES, lr=1.0, dtype=dtype, **HYPER)
    for step in range(first, last):
        for name, param in params.items():
            grad = gradient(name, step)
            if mesh is not None:
                grad = distribute_tensor(grad, mesh, param.placements)
            param.grad = grad
        for group in optimizer.param_groups:
            group["lr"] = LRS[step]
        optimizer.step()
    return optimizer


def test_three_steps_are_those_of_a_loop_in_fp64():
    params, start = tiny_params(), tiny_params()
    run_steps(params)
    assert len({RULES[name].update for name in params}) == 3
    for name, param in params.items():
        grads = [gradient(name, step) for step in range(3)]
        expected = naive_muon.trained(start[name].detach(), grads, RULES[name], LRS)
        assert (param - expected).abs().max() < 1e-5, name


def test_a_missing_gradient_is_zeros_to_muon_and_tables():
    params, others = tiny_params(), tiny_params()
    names = ("attention.q_a.weight", "moe.experts.down.weight", "engram.table")
    optimizer, other = run_steps(params, last=1), run_steps(others, last=1)
    for name in params:
        params[name].grad = None
        others[name].grad = torch.zeros_like(others[name]) if name in names else None
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step()
    other.step()
    for name in names:
        assert torch.equal(params[name], others[name])
        assert not torch.equal(params[name], before[name])
    assert torch.equal(params["norm.weight"], before["norm.weight"])


def test_state_is_there_at_once_and_goes_on_bitwise_from_a_copy():
    straight = tiny_params()
    run_steps(straight)
    params = tiny_params()
    optimizer = run_steps(params, last=1)
    saved = {name: t.clone() for name, t in state_tensors(optimizer, params).items()}
    kinds = {name: {k.split(".")[1] for k in saved if k.endswith(f".{name}")} for name in params}
    assert kinds["attention.q_b.weight"] == kinds["engram.table"] == {"momentum"}
    assert kinds["attention.sink"] == {"exp_avg", "exp_avg_sq", "step"}
    resumed = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    optimizer = make_muon(resumed, RULES, lr=1.0, **HYPER)
    there = state_tensors(optimizer, resumed)
    assert there.keys() == saved.keys()
    for name, tensor in there.items():
        tensor.copy_(saved[name])
    run_steps(resumed, first=1, optimizer=optimizer)
    for name, param in resumed.items():
        assert torch.equal(param, straight[name]), name


def test_a_rank_without_parameters_and_a_bf16_parameter():
    run_steps({})
    params = {"norm.weight": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))}
    with pytest.raises(ValueError, match=r"Muon got norm\.weight in torch\.bfloat16"):
        make_muon(params, RULES, lr=1.0)


# --- over ranks -----------------------------------------------------------------------------------


def sharded_steps(rank: int, num_ranks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Three steps with every parameter cut along its first axis; all weights, whole."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (num_ranks,))
    params = {
        name: nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
        for name, param in tiny_params().items()
    }
    run_steps(params, dtype=dtype, mesh=mesh)
    found = {name: param.full_tensor().detach().clone() for name, param in params.items()}
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (3, torch.float32)]
)
def test_parameters_cut_over_ranks_get_the_bits_of_one_rank(num_ranks, dtype, run_ranks):
    alone = tiny_params()
    run_steps(alone, dtype=dtype)
    for found in run_ranks(num_ranks, sharded_steps, num_ranks, dtype):
        for name, weight in found.items():
            assert torch.equal(weight, alone[name]), name
