"""The Gluon kernels of the FP8 experts, simulated: the same bytes as the Triton kernels'."""

from types import ModuleType

import numpy as np
import pytest
import torch
from fp8_cases import ON_GPU, needed, random_routing
from simulated_gluon import simulated

from ppruntime.models.kernels import moe_layout, quantize, swiglu
from ppruntime.models.kernels.fp8_linear_backends import dense_layout
from ppruntime.models.kernels.quantize import Quantized
from ppruntime.models.quantize import power_of_two_ceiling

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernels themselves")
KINDS = pytest.mark.parametrize("power_of_two", [False, True], ids=["amax / 448", "power of two"])
CASES = pytest.mark.parametrize(
    "routing",
    [
        random_routing(50, 3, 5, unrouted=0.1, experts=[0, 1, 4]),
        random_routing(200, 2, 4, seed=1),
        random_routing(1, 1, 4, seed=2),
        torch.full((3, 2), -1),
    ],
    ids=["idle experts", "several blocks", "one token", "nothing routed"],
)


def _to_e4m3(x):
    return x.as_subclass(torch.Tensor).clamp(-448, 448).to(torch.float8_e4m3fn)


def _words(*parts):
    found = torch.stack([_to_e4m3(x).view(torch.uint8) for x in parts], -1)
    return found.contiguous().view(torch.int32).squeeze(-1)


def _sigmoid(x):
    # By numpy like the interpreter: torch's exp has other last bits.
    return torch.from_numpy(1 / (1 + np.exp(-x.as_subclass(torch.Tensor).numpy()))).as_subclass(
        type(x)
    )


def _scale(largest, power_of_two):
    scale = largest.clamp_min(1e-10) * (1 / 448)
    return power_of_two_ceiling(scale) if power_of_two else scale


NAMES = {
    "group_scale": _scale,
    "reciprocal_of_scale": torch.reciprocal,
    "sigmoid": _sigmoid,
    "to_e4m3": _to_e4m3,
    "e4m3_words": _words,
}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    for module, name in ((quantize, "quantize_routed"), (swiglu, "swiglu_backward")):
        name += "_kernel"
        kernel = ModuleType("simulated")
        setattr(kernel, name, simulated(getattr(module._hopper(), name), **NAMES))
        monkeypatch.setattr(module, "_hopper", lambda kernel=kernel: kernel)


def same(a, b):
    return torch.equal(a.data.float(), b.data.float()) and torch.equal(a.scale, b.scale)


def used_rows(rows, layout):
    used = int(layout.start_E1[-1])
    return Quantized(rows.data[:used], rows.scale[:, :used])


def wide_range(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
    x[0] = 0.0
    x[-1, :128] *= 1e-20
    x[-1, 128:] *= 1e20
    return x.bfloat16()


@KINDS
@CASES
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_routed_rows_and_columns_have_the_triton_kernels_bytes(routing, fp8, power_of_two):
    layout = moe_layout.expert_layout_reference(routing, 5)
    x = wide_range(len(routing), 256)
    if fp8:
        x = quantize.quantize_rows(x, power_of_two=power_of_two)
    for tile in (quantize.HOPPER_ROUTED, quantize.RoutedTile(hopper=True)):
        found = [
            quantize.quantize_routed(x, layout, with_rows=True, power_of_two=power_of_two, tile=one)
            for one in (tile, quantize.TRITON_ROUTED)
        ]
        assert same(*(used_rows(rows, layout) for rows, _ in found))
        assert same(*(needed(columns, layout) for _, columns in found))
    none, columns = quantize.quantize_routed(
        x, layout, with_rows=False, power_of_two=power_of_two, tile=quantize.HOPPER_ROUTED
    )
    assert none is None
    assert same(needed(columns, layout), needed(found[0][1], layout))


def test_columns_as_one_matrix_have_the_triton_kernels_bytes_too():
    layout = dense_layout(300, torch.device("cpu"))
    x = wide_range(300, 256)
    found = [
        quantize.quantize_routed(
            x, layout, with_rows=True, power_of_two=False, dense=True, tile=tile
        )
        for tile in (quantize.HOPPER_ROUTED, quantize.TRITON_ROUTED)
    ]
    assert same(*(rows for rows, _ in found))
    assert same(*(columns for _, columns in found))
    assert all(quantize.is_dense(columns) for _, columns in found)


def test_scales_of_whole_tiles_are_refused_by_the_gluon_kernel():
    layout = moe_layout.expert_layout_reference(random_routing(4, 1, 2), 2)
    with pytest.raises(ValueError, match="whole tiles"):
        quantize.quantize_routed(
            wide_range(4, 128), layout, with_rows=False, power_of_two=False, tile_scales=True,
            tile=quantize.HOPPER_ROUTED,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@KINDS
@CASES
@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_the_swiglus_gradients_have_the_triton_kernels_bytes(routing, limit, power_of_two):
    layout = moe_layout.expert_layout_reference(routing, 5)
    z, grad = wide_range(layout.num_rows, 512, seed=1), wide_range(layout.num_rows, 256, seed=2)
    z[layout.pair_P < 0] = torch.nan
    grad[layout.pair_P < 0] = torch.nan
    weight = torch.rand(routing.shape, generator=torch.Generator().manual_seed(4))
    tiles = swiglu.BACKWARD_TO_TRY
    found = [
        swiglu.swiglu_backward(z, grad, weight, layout, limit, power_of_two=power_of_two, tile=tile)
        for tile in {t._replace(num_warps=16 if t.hopper else 8) for t in tiles}
    ]
    for one in found[1:]:
        assert same(used_rows(one.rows, layout), used_rows(found[0].rows, layout))
        for name in ("columns", "inner_columns"):
            assert same(*(needed(getattr(of, name), layout) for of in (one, found[0])))
        # Sums in another order, of terms over many binades.
        close = 1e-6 * found[0].weight_NK.abs().max().item()
        torch.testing.assert_close(one.weight_NK, found[0].weight_NK, rtol=1e-5, atol=close)
