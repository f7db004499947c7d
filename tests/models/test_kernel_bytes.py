"""Bytes that kernels save instead of the reference, FP8 first: formulas against what autograd
saves, at full width on the meta device and of real runs in torch."""

from __future__ import annotations

from dataclasses import replace as replace_form
from functools import partial

import measured_activations
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_activations import Measured, one_of_each_kind
from msgspec.structs import replace

from ppruntime.models.activation_bytes import Kept, kept_fields, kept_results, saved_bytes
from ppruntime.models.attention_kernels import set_kernels
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import ModelDims, UnitKind, UnitSpec, changed, preset, unit_specs
from ppruntime.models.engram_kernels import engram_kernels
from ppruntime.models.expert_bytes import HERE, ExpertForm
from ppruntime.models.experts import Experts, SharedExpert
from ppruntime.models.fp8_experts import Fp8Options
from ppruntime.models.fp8_linear import Fp8LinearOptions, convert_linears
from ppruntime.models.init import init_parameters
from ppruntime.models.kernel_limits import BACKENDS, AttentionOp
from ppruntime.models.kernels.attention_backends import Choice, attention_kernels
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.kernels.fp8_linear_backends import LinearBackend
from ppruntime.models.kernels.shared_swiglu import swiglu
from ppruntime.models.moe import MoEOptions
from ppruntime.models.moe_kernels import moe_kernels
from ppruntime.models.residual import residual
from ppruntime.models.row_slices import token_slices
from ppruntime.models.save_points import SAVE_NAMES
from ppruntime.models.units import build_unit

IN_TORCH = Fp8LinearOptions(backend=LinearBackend.REFERENCE)
FP8 = Fp8Options(backend=ExpertBackend.REFERENCE)
LEAN = Fp8Options(backend=ExpertBackend.REFERENCE, keep_expert_activations=False)


def wide(name: str, **changes: object) -> ModelDims:
    """A small model whose widths FP8 takes."""
    sizes = {"hidden_size": 256, "expert_width": 128, "q_lora_rank": 128, "o_lora_rank": 64}
    return replace(preset(name), sinkhorn_iters=2, **{**sizes, **changes})


def assert_planned(
    found: Measured,
    dims: ModelDims,
    spec: UnitSpec,
    shape: tuple[int, int, str],
    *,
    kernels: frozenset[AttentionOp] = frozenset(),
    fp8_linears: bool = False,
    experts: ExpertForm = HERE,
    around: str = "reference",
) -> None:
    """`around`: mHC or the one stream, the router and Engram's gate by the kernel of that name."""
    options = {"fp8_linears": fp8_linears, "experts": experts}
    options |= {"mhc": around, "engram": around, "router": around}
    planned = saved_bytes(
        *(dims, spec, *shape),
        attention_kernel=AttentionOp.ATTENTION in kernels,
        wide_products=AttentionOp.COMPRESSOR in kernels,
        **options,
    )
    assert planned == found.own_bytes, f"{spec.name}: {planned - found.own_bytes:+}"
    fields = kept_fields(dims, spec, *shape, engram=around)
    assert fields == found.kept_fields, spec.name
    for name, kept in found.results.items():
        ours = kept_results(dims, spec, frozenset({name}), *shape, kernels=kernels, **options)
        assert ours == kept, f"{spec.name}: {name}"


def halves(dims: ModelDims) -> list[UnitSpec]:
    return [spec for spec in one_of_each_kind(dims) if spec.layer is not None]


def form_of(options: Fp8Options | None) -> ExpertForm:
    return ExpertForm(fp8=options is not None, keeps_z=options is None or options is FP8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny", "tiny-v4"])
@pytest.mark.parametrize("experts", [None, FP8, LEAN])
@pytest.mark.parametrize("linears", [False, True])
def test_what_fp8_saves_of_a_real_run_is_planned(name, dtype, experts, linears):
    dims, batch, seq_len = wide(name, num_shared_experts=2), 2, 70
    ids = torch.arange(batch * seq_len).view(batch, seq_len) * 7 % dims.vocab_size
    tokens = MicroBatch(ids, ids.roll(-1, 1), torch.arange(seq_len).expand(batch, -1).contiguous())
    carry = Carry()
    for spec in unit_specs(dims):
        moe = MoEOptions(fp8=experts)
        unit = build_unit(dims, spec, moe=moe, dtype=getattr(torch, dtype))
        init_parameters(unit, spec.name, seed=0)
        if linears:
            convert_linears(unit, IN_TORCH)
        if spec.layer is not None:
            real = measured_activations.measure([unit], carry, tokens)
            shape = batch, seq_len, dtype
            assert_planned(real, dims, spec, shape, fp8_linears=linears, experts=form_of(experts))
        carry = unit(carry, tokens)


@pytest.mark.parametrize("name", ["v41-flash", "v4-flash"])
@pytest.mark.parametrize("experts", [None, FP8, LEAN])
def test_what_fp8_saves_at_full_width_is_planned(name, experts):
    dims, dtype = replace(preset(name), num_experts=64), "bfloat16"
    for spec in halves(dims):
        found = measured_activations.measure_on_meta(
            *(dims, spec, 1, 8192, dtype),
            moe=MoEOptions(fp8=experts),
            change=partial(convert_linears, options=IN_TORCH),
        )
        shape = 1, 8192, dtype
        assert_planned(found, dims, spec, shape, fp8_linears=True, experts=form_of(experts))


def everyones_kernels(unit: torch.nn.Module, *, linears: bool, around: bool = False) -> None:
    """All kernels of attention, SwiGLU and FP8 linears that there are, as a GPU has them; `around`
    them also those of mHC or the one stream, of the router and of Engram's gate."""
    if around:
        kind = unit.dims.residual_type
        unit.residual = residual("triton", torch.device("meta"), kind)
        if getattr(unit, "engram", None) is not None:
            unit.engram.kernels = engram_kernels("triton", torch.device("meta"))
    chosen = {op.value: BACKENDS[op][0] for op in AttentionOp}
    set_kernels(unit, attention_kernels(Choice(**chosen)))
    if isinstance(shared := getattr(getattr(unit, "moe", None), "shared", None), SharedExpert):
        shared.swiglu = swiglu
        if isinstance(unit.moe.experts, Experts):
            unit.moe.experts.swiglu = swiglu
    if linears:
        convert_linears(unit, IN_TORCH)


@pytest.mark.parametrize("linears", [False, True])
@pytest.mark.parametrize("name", ["v41-flash", "v4-flash"])
def test_other_kernels_save_at_full_width_what_the_reference_does(name, linears):
    dims, shape = replace(preset(name), num_experts=64), (1, 8192, "bfloat16")
    for spec in halves(dims):
        found = measured_activations.measure_on_meta(
            *(dims, spec, *shape), change=partial(everyones_kernels, linears=linears)
        )
        assert_planned(
            *(found, dims, spec, shape),
            kernels=frozenset(AttentionOp),
            fp8_linears=linears,
            experts=ExpertForm(fused_swiglu=True),
        )


KINDS = [
    ("v41-flash", {}),
    ("v4-flash", {}),
    ("v41-flash", {"quantize_cache": True, "balance_loss_weight": 0.0}),
    ("v41-flash", {"indexer_loss_weight": 0.5}),
    ("v4-flash", {"indexer_loss_weight": 0.5}),
    ("v41-flash", {"residual_type": "gated"}),
    ("v41-flash", {"residual_type": "layerscale"}),
]


@pytest.mark.parametrize("linears", [False, True])
@pytest.mark.parametrize("fp8_experts", [False, True])
@pytest.mark.parametrize(("name", "changes"), KINDS)
def test_every_op_that_a_run_may_name_keeps_what_is_planned(name, changes, fp8_experts, linears):
    dims = changed(preset(name), num_experts=64, **changes)
    shape, experts = (1, 4096, "bfloat16"), FP8 if fp8_experts else None
    kernels = moe_kernels("triton", "triton", torch.device("cpu"), torch.bfloat16)
    found_names = set()
    for spec in halves(dims):
        found = measured_activations.measure_on_meta(
            *(dims, spec, *shape),
            moe=MoEOptions(fp8=experts, kernels=kernels),
            change=partial(everyones_kernels, linears=linears, around=True),
        )
        assert_planned(
            *(found, dims, spec, shape),
            kernels=frozenset(AttentionOp),
            fp8_linears=linears,
            experts=replace_form(form_of(experts), fused_swiglu=True),
            around="triton",
        )
        found_names |= {op for op, kept in found.results.items() if kept != Kept(0, 0)}
    # Those of other ranks' experts are held by test_expert_bytes and test_ledger_experts.
    elsewhere = {name for name in SAVE_NAMES if name.startswith("expert_")} - {"expert_linear"}
    if name == "v41-flash" and not changes:
        ran_not = {"one_stream_read", "one_stream_write", "expert_linear", "fp8_experts"}
        ran_not |= {"fp8_linear", "fp8_swiglu_linear", "shared_swiglu", "mm"}
        assert found_names | ran_not | elsewhere == set(SAVE_NAMES)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(2, 300),
    experts=st.sampled_from([2, 3, 8, 40]),
    per_token=st.integers(1, 2),
    keeps=st.booleans(),
)
def test_pools_of_any_size_are_planned(tokens, experts, per_token, keeps):
    dims = wide("tiny", num_experts=experts, experts_per_token=per_token)
    spec = next(s for s in unit_specs(dims) if s.kind is UnitKind.MOE)
    options = FP8 if keeps else LEAN
    found = measured_activations.measure_on_meta(
        *(dims, spec, 1, tokens, "bfloat16"), moe=MoEOptions(fp8=options)
    )
    assert_planned(found, dims, spec, (1, tokens, "bfloat16"), experts=form_of(options))


def test_a_micro_batch_in_parts_has_a_pool_for_each():
    dims, shape = preset("v41-flash"), (1, 65536, "bfloat16")
    spec = next(s for s in unit_specs(dims) if s.kind is UnitKind.MOE)
    assert len(token_slices(65536, dims.experts_per_token, dims.num_experts, 5120)) > 1
    found = measured_activations.measure_on_meta(dims, spec, *shape, moe=MoEOptions(fp8=FP8))
    assert_planned(found, dims, spec, shape, experts=form_of(FP8))
