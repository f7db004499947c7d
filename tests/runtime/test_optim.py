"""AdamW and the learning rate: same bits at every cut, decay on matrices, nothing to restore."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ppruntime.models.dims import PRESETS, Part, preset, unit_parameters, unit_specs
from ppruntime.optim import decays, lr_at, make_adamw, set_lr, state_tensors

SHAPES = {
    "embed.weight": (11, 4),
    "layers.0.attn.norm.weight": (4,),
    "layers.0.attn.q_a.weight": (6, 4),
    "layers.0.attn.sinks": (3,),
    "layers.1.moe.experts.down.weight": (2, 5, 4),
    "head.projection.weight": (11, 4),
}
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _params(names=tuple(SHAPES)):
    params = {}
    for i, name in enumerate(SHAPES):
        torch.manual_seed(i)
        value = torch.randn(SHAPES[name])
        if name in names:
            params[name] = nn.Parameter(value)
    return params


def _set_grads(params, step):
    for i, (name, shape) in enumerate(SHAPES.items()):
        torch.manual_seed(1000 * step + i)
        grad = torch.randn(shape)
        if name in params:
            params[name].grad = grad


def _train(params, first, last, optimizer=None):
    optimizer = optimizer or make_adamw(params, **HYPER)
    for step in range(first, last + 1):
        _set_grads(params, step)
        set_lr(optimizer, lr_at(step, peak=1e-2, final=1e-3, num_warmup_steps=2, num_steps=6))
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("num_ranks", [2, 3, 6])
def test_the_update_is_bitwise_the_same_however_parameters_are_spread_over_ranks(num_ranks):
    whole = _params()
    _train(whole, 1, 5)
    for rank in range(num_ranks):
        part = _params(tuple(SHAPES)[rank::num_ranks])
        _train(part, 1, 5)
        for name, param in part.items():
            assert torch.equal(param, whole[name]), name


def test_two_steps_equal_the_update_rule_written_out():
    params = _params(("layers.0.attn.q_a.weight", "layers.0.attn.norm.weight"))
    by_hand = {name: param.detach().double().clone() for name, param in params.items()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in by_hand.items()}
    optimizer = make_adamw(params, **HYPER)
    for step in (1, 2):
        _set_grads(params, step)
        optimizer.step()
        for name, w in by_hand.items():
            grad = params[name].grad.double()
            m = 0.9 * moments[name][0] + 0.1 * grad
            v = 0.95 * moments[name][1] + 0.05 * grad**2
            moments[name] = (m, v)
            if w.dim() == 2:
                w -= 1e-2 * 0.1 * w
            w -= 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    for name, param in params.items():
        torch.testing.assert_close(param.detach().double(), by_hand[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("preset_name", sorted(PRESETS))
def test_decay_is_for_matrices_that_multiply_activations_in_every_model(preset_name):
    dims = preset(preset_name)
    seen = {True: set(), False: set()}
    for unit in unit_specs(dims):
        for spec in unit_parameters(dims, unit):
            name = f"{unit.name}.{spec.name}"
            matrix = spec.part in (Part.MATRIX, Part.EXPERTS, Part.ENGRAM_MATRIX)
            wanted = matrix and name != "head.projection.weight"
            assert decays(name, spec.shape) is wanted, name
            seen[wanted].add(spec.part)
    assert {Part.MATRIX, Part.EXPERTS} <= seen[True]
    assert {Part.MATRIX, Part.VECTOR, Part.LOOKUP} <= seen[False]


def test_a_zero_gradient_moves_only_what_decays():
    params = _params()
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = make_adamw(params, **HYPER)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    moved = {name for name, param in params.items() if not torch.equal(param, before[name])}
    assert moved == {"layers.0.attn.q_a.weight", "layers.1.moe.experts.down.weight"}


def test_state_is_there_before_the_first_step_and_goes_on_bitwise_from_a_copy():
    straight = _params()
    _train(straight, 1, 6)

    params = _params()
    optimizer = make_adamw(params, **HYPER)
    names_at_start = set(state_tensors(optimizer, params))
    _train(params, 1, 3, optimizer)
    saved = {name: tensor.clone() for name, tensor in state_tensors(optimizer, params).items()}
    assert set(saved) == names_at_start
    assert "optim.exp_avg.layers.0.attn.q_a.weight" in saved

    resumed = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    optimizer = make_adamw(resumed, **HYPER)
    for name, tensor in state_tensors(optimizer, resumed).items():
        tensor.copy_(saved[name])
    _train(resumed, 4, 6, optimizer)
    for name, param in resumed.items():
        assert torch.equal(param, straight[name]), name


def test_a_rank_whose_groups_are_empty_trains_like_any_other():
    for names in ((), ("layers.0.attn.sinks",), ("layers.0.attn.q_a.weight",)):
        params = _params(names)
        optimizer = _train(params, 1, 2)
        assert len(optimizer.param_groups) == 2
        assert len(state_tensors(optimizer, params)) == 3 * len(names)


def test_frozen_parameters_have_no_state_and_stay():
    params = _params()
    params["layers.0.attn.q_a.weight"].requires_grad_(False)
    before = params["layers.0.attn.q_a.weight"].clone()
    optimizer = make_adamw(params, **HYPER)
    assert not [name for name in state_tensors(optimizer, params) if "q_a" in name]
    optimizer.step()
    assert torch.equal(params["layers.0.attn.q_a.weight"], before)


def test_a_parameter_that_is_not_fp32_is_refused_by_name():
    params = {"layers.0.w": nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))}
    with pytest.raises(ValueError, match=r"layers\.0\.w in torch\.bfloat16.*torch\.float32"):
        make_adamw(params, lr=1e-3)


@given(
    st.integers(0, 50),
    st.integers(1, 200),
    st.floats(1e-6, 1),
    st.floats(0, 1),
)
def test_the_rate_rises_to_its_peak_and_falls_to_its_end(warmup, more, peak, share):
    num_steps, final = warmup + more, share * peak
    rates = [
        lr_at(step, peak=peak, final=final, num_warmup_steps=warmup, num_steps=num_steps)
        for step in range(1, num_steps + 3)
    ]
    rising, falling = rates[:warmup], rates[max(warmup - 1, 0) :]
    assert all(a < b for a, b in pairwise(rising))
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(falling))
    if warmup:
        assert rates[warmup - 1] == peak
        assert math.isclose(rates[0], peak / warmup)
    assert rates[num_steps - 1 :] == [final] * 3


def test_halfway_down_the_rate_is_the_mean_of_peak_and_end():
    rate = lr_at(15, peak=1.0, final=0.2, num_warmup_steps=10, num_steps=20)
    assert math.isclose(rate, 0.6)


def test_steps_are_counted_from_one():
    with pytest.raises(ValueError, match="counted from 1"):
        lr_at(0, peak=1.0, final=0.0, num_warmup_steps=1, num_steps=2)
