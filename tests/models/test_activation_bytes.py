"""Activation bytes: every formula against what autograd saves, on the meta device and for real."""

from __future__ import annotations

import measured_activations
import pytest
import torch
from measured_activations import one_of_each_kind
from msgspec.structs import replace

from ppruntime.models import kernel_limits
from ppruntime.models.activation_bytes import kept_fields, kept_results, saved_bytes
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import ModelDims, UnitSpec, changed, preset, unit_specs
from ppruntime.models.init import init_parameters
from ppruntime.models.units import build_unit

DTYPES = ("float32", "bfloat16")


def assert_formula_is_exact(
    dims: ModelDims, specs: tuple[UnitSpec, ...], batch: int, seq_len: int, dtype: str
) -> None:
    for spec in specs:
        measured = measured_activations.measure_on_meta(dims, spec, batch, seq_len, dtype)
        place = f"{spec.name} ({spec.role}) of {batch} x {seq_len} in {dtype}"
        assert saved_bytes(dims, spec, batch, seq_len, dtype) == measured.own_bytes, place
        assert kept_fields(dims, spec, batch, seq_len, dtype) == measured.kept_fields, place
        if spec.layer is not None:
            for point, kept in measured.results.items():
                ours = kept_results(dims, spec, frozenset({point}), batch, seq_len, dtype)
                assert ours == kept, f"{place}: {point}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "seq_len"), [(1, 64), (2, 37), (3, 5)])
@pytest.mark.parametrize("name", ["tiny", "tiny-v4"])
def test_the_formula_is_what_autograd_saves_in_every_unit(name, batch, seq_len, dtype):
    # Few Sinkhorn steps where the full number is tested anyway: on the meta device they take long.
    dims = preset(name) if batch == 2 else replace(preset(name), sinkhorn_iters=3)
    assert_formula_is_exact(dims, unit_specs(dims), batch, seq_len, dtype)


OTHER_DIMS = [
    ("tiny", {"balance_loss_weight": 0.0}),
    ("tiny", {"quantize_cache": True}),
    ("tiny", {"force_balanced_routing": True, "num_shared_experts": 3}),
    ("tiny", {"num_streams": 3, "sinkhorn_iters": 1, "rope_dim": 8, "o_groups": 1}),
    ("tiny", {"index_sources": (2, 4, 6, 7), "engram_layers": (0,), "engram_max_order": 3}),
    ("tiny", {"candidate_source": None, "compress_ratios": (0, 0, 3, 3, 5, 5, 5, 5)}),
    ("tiny", {"indexer_loss_weight": 0.5, "engram_layers": ()}),
    ("tiny-v4", {"indexer_loss_weight": 0.5, "residual_type": "gated"}),
    ("tiny", {"residual_type": "gated"}),
    ("tiny", {"residual_type": "layerscale"}),
    ("tiny-v4", {"balance_loss_weight": 0.0, "num_hash_layers": 0}),
    ("tiny-v4", {"force_balanced_routing": True, "head_dim": 48, "experts_per_token": 3}),
    ("tiny-v4", {"num_streams": 2, "sinkhorn_iters": 2, "num_shared_experts": 2, "window": 5}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "changes"), OTHER_DIMS)
def test_the_formula_follows_every_size(name, changes, dtype):
    dims = changed(preset(name), **{"sinkhorn_iters": 3, **changes})
    assert_formula_is_exact(dims, one_of_each_kind(dims), 2, 61, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["v41-flash", "v4-flash"])
def test_the_formula_holds_in_each_kind_of_unit_of_the_full_models(name, dtype):
    dims = preset(name)
    assert_formula_is_exact(dims, one_of_each_kind(dims), 1, 8192, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_blocks_keeps_what_it_keeps_at_once(monkeypatch, dtype):
    monkeypatch.setattr(kernel_limits, "_MAX_GATHERED", 1 << 14)
    for name in ("tiny", "tiny-v4"):
        dims = replace(preset(name), sinkhorn_iters=3)
        assert_formula_is_exact(dims, one_of_each_kind(dims), 2, 61, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["tiny", "tiny-v4"])
def test_the_meta_device_saves_what_a_real_run_saves(name, dtype):
    dims, batch, seq_len = replace(preset(name), sinkhorn_iters=3), 2, 37
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(dims.vocab_size, (batch, seq_len), generator=generator)
    tokens = MicroBatch(ids, ids.roll(-1, 1), torch.arange(seq_len).expand(batch, -1).contiguous())
    carry = Carry()
    for spec in unit_specs(dims):
        unit = build_unit(dims, spec, dtype=getattr(torch, dtype))
        init_parameters(unit, spec.name, seed=0)
        real = measured_activations.measure([unit], carry, tokens)
        on_meta = measured_activations.measure_on_meta(dims, spec, batch, seq_len, dtype)
        assert real == on_meta, spec.name
        carry = unit(carry, tokens)
