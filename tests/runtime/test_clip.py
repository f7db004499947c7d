"""The global norm is the whole model's, bitwise the same on every rank of every cut."""

from __future__ import annotations

import struct

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from ppruntime.optim import clip_, global_norm

NAMES = tuple(f"layers.{i}.{part}" for i in range(6) for part in ("attn.w", "attn.norm", "mlp.w"))
WITHOUT_GRAD = "layers.3.attn.norm"


def _param(name):
    index = NAMES.index(name)
    torch.manual_seed(index)
    shape = (5,) if name.endswith("norm") else (7 + index, 13)
    param = nn.Parameter(torch.randn(shape))
    if name != WITHOUT_GRAD:
        # Sizes far apart, so that another order of summation shows in the last bit.
        param.grad = torch.randn(shape) * 10.0 ** (index % 5 - 2)
    return param


def _bits(norm):
    assert norm.dtype is torch.float32
    return struct.pack("f", norm.item())


def _one_rank():
    return global_norm({name: _param(name) for name in NAMES}, NAMES, pp_group=None)


def _loop_of_layers(rank, num_ranks):
    return [name for name in NAMES if int(name.split(".")[1]) % num_ranks == rank]


def _v_of_layers(rank, num_ranks):
    # Layers 0 .. 5 over ranks 0, 1, 2, 2, 1, 0 (or 0, 0, ..., 1, 1, 1).
    place = [*range(num_ranks), *reversed(range(num_ranks))] * 3
    layers = [layer for layer in range(6) if place[layer] == rank]
    return [name for name in NAMES if int(name.split(".")[1]) in layers]


def _half_layers(rank, num_ranks):
    return list(NAMES[rank * len(NAMES) // num_ranks : (rank + 1) * len(NAMES) // num_ranks])


CUTS = {"loop": _loop_of_layers, "v": _v_of_layers, "half": _half_layers}


def _norms_of_cuts(rank, num_ranks):
    dist.init_process_group("gloo")
    norms = {}
    for cut, names_of in CUTS.items():
        params = {name: _param(name) for name in reversed(names_of(rank, num_ranks))}
        norm = global_norm(params, NAMES, pp_group=dist.group.WORLD)
        clip_(params.values(), 1.0, norm)
        grads = {name: p.grad for name, p in params.items() if p.grad is not None}
        norms[cut] = (_bits(norm), grads)
    dist.destroy_process_group()
    return norms


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_norm_and_clipped_gradients_are_bitwise_those_of_one_rank(run_ranks, num_ranks):
    params = {name: _param(name) for name in NAMES}
    wanted = global_norm(params, NAMES, pp_group=None)
    clip_(params.values(), 1.0, wanted)
    for norms in run_ranks(num_ranks, _norms_of_cuts, num_ranks):
        for bits, grads in norms.values():
            assert bits == _bits(wanted)
            for name, grad in grads.items():
                assert torch.equal(grad, params[name].grad), name


def test_the_norm_is_torchs_own_within_rounding():
    grads = [p.grad for name in NAMES if (p := _param(name)).grad is not None]
    torch.testing.assert_close(_one_rank(), torch.nn.utils.get_total_norm(grads))


def test_clipping_scales_to_the_limit_and_leaves_a_smaller_norm_alone():
    params = {name: _param(name) for name in NAMES}
    norm = global_norm(params, NAMES, pp_group=None)
    before = {name: p.grad.clone() for name, p in params.items() if p.grad is not None}
    clip_(params.values(), float("inf"), norm)
    clip_(params.values(), 2 * norm.item(), norm)
    for name, grad in before.items():
        assert torch.equal(params[name].grad, grad)
    clip_(params.values(), norm.item() / 4, norm)
    clipped = global_norm(params, NAMES, pp_group=None)
    torch.testing.assert_close(clipped, norm / 4, rtol=1e-5, atol=0)


def test_one_value_that_is_not_finite_makes_the_norm_so_on_every_rank():
    for value in (float("inf"), float("nan")):
        params = {name: _param(name) for name in NAMES}
        params[NAMES[4]].grad[0] = value
        assert not torch.isfinite(global_norm(params, NAMES, pp_group=None))


def test_the_sum_of_squares_does_not_overflow_fp32():
    params = {"w": nn.Parameter(torch.zeros(3))}
    params["w"].grad = torch.full((3,), 1e30)
    norm = global_norm(params, ["w"], pp_group=None)
    assert norm.item() == pytest.approx(3**0.5 * 1e30, rel=1e-6)


def test_a_parameter_outside_the_models_order_is_refused():
    with pytest.raises(ValueError, match=r"extra\.w is not in the model's order of 18"):
        global_norm({"extra.w": nn.Parameter(torch.zeros(1))}, NAMES, pp_group=None)


def _norm_of_shards(rank):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    params = {}
    for name in NAMES[mesh.get_local_rank("pp") :: 2]:
        whole = _param(name)
        if not name.endswith("norm"):
            placement = [Shard(0)]
        elif name == NAMES[1]:
            placement = [Replicate()]
        else:
            placement = None
        param = whole
        if placement is not None:
            param = nn.Parameter(distribute_tensor(whole.detach(), mesh["dp"], placement))
            if whole.grad is not None:
                param.grad = distribute_tensor(whole.grad, mesh["dp"], placement)
        params[name] = param
    norm = global_norm(params, NAMES, pp_group=mesh.get_group("pp"))
    clip_(params.values(), 1.0, norm)
    clipped = global_norm(params, NAMES, pp_group=mesh.get_group("pp"))
    dist.destroy_process_group()
    return norm, clipped


def test_shards_over_data_ranks_and_whole_tensors_give_one_norm(run_ranks):
    wanted = _one_rank()
    results = run_ranks(4, _norm_of_shards)
    for norm, clipped in results:
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(clipped, torch.tensor(1.0), rtol=1e-5, atol=0)
    assert len({_bits(norm) for norm, _ in results}) == 1


def _norm_of_partial(rank):
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    try:
        global_norm({"w": param}, ["w"], pp_group=None)
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return None


def test_a_gradient_that_is_not_reduced_yet_is_refused(run_ranks):
    for text in run_ranks(2, _norm_of_partial):
        assert "the gradient of w is P" in text
