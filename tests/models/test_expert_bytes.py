"""Bytes of experts over several ranks: formulas against what autograd saves, by each dispatcher."""

from __future__ import annotations

import measured_activations
import mega_cases  # before any kernel
import pytest
import torch
from measured_activations import Measured
from mirror_exchange import Mirror
from msgspec.structs import replace
from torch import Tensor

from ppruntime.models.activation_bytes import kept_results, saved_bytes
from ppruntime.models.all_to_all import AllToAll
from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import ModelDims, UnitKind, UnitSpec, preset, unit_specs
from ppruntime.models.dispatch import Dispatcher, WireOptions
from ppruntime.models.expert_bytes import HERE, ExpertForm, experts_workspace, tokens_received
from ppruntime.models.fp8_experts import Fp8Options
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.mega_moe_rules import ArenaShape
from ppruntime.models.moe import MoEOptions
from ppruntime.models.save_points import SavePoint
from ppruntime.models.token_buffer import ExchangeBuffer
from ppruntime.models.token_dispatch import TokenDispatcher
from ppruntime.models.units import build_unit

TOKENS = 140
_INT64 = 8


def case(num_experts: int) -> tuple[ModelDims, UnitSpec]:
    """Two experts a token, spread evenly."""
    sizes = {"hidden_size": 128, "expert_width": 128, "sinkhorn_iters": 2}
    even = {"force_balanced_routing": True, "num_experts": num_experts}
    dims = replace(preset("tiny"), **sizes, **even)
    return dims, next(spec for spec in unit_specs(dims) if spec.kind is UnitKind.MOE)


def options(form: ExpertForm) -> Fp8Options | None:
    kept = {"keep_expert_activations": form.keeps_z}
    return Fp8Options(backend=ExpertBackend.REFERENCE, **kept) if form.fp8 else None


def run(dims: ModelDims, spec: UnitSpec, form: ExpertForm, dispatcher: Dispatcher) -> Measured:
    unit = build_unit(dims, spec, moe=MoEOptions(options(form), dispatcher), dtype=torch.bfloat16)
    init_parameters(unit, spec.name, seed=0)
    specs = unit_specs(dims)
    before = specs[specs.index(spec) - 1]
    blank = measured_activations.blank_carry(dims, before, 1, TOKENS, "bfloat16")
    given = {
        name: torch.ones(each.shape, dtype=each.dtype, requires_grad=each.requires_grad)
        for name, each in blank._asdict().items()
        if isinstance(each, Tensor)
    }
    ids = torch.arange(TOKENS).unsqueeze(0)
    return measured_activations.measure([unit], blank._replace(**given), MicroBatch(ids, ids, ids))


def assert_planned(
    found: Measured, dims: ModelDims, spec: UnitSpec, form: ExpertForm, *, kept: int, saved: int
) -> None:
    """`kept`, `saved`: bytes that are not counted, of op's results and of what autograd saves."""
    shape = 1, TOKENS, "bfloat16"
    result, points = found.results[SavePoint.EXPERTS], frozenset({SavePoint.EXPERTS})
    planned = kept_results(dims, spec, points, *shape, experts=form)
    assert planned.num_bytes == result.num_bytes - kept
    assert planned.saved_again == result.saved_again - saved
    assert saved_bytes(dims, spec, *shape, experts=form) == found.own_bytes - saved


FORMS = [
    {"fp8": fp8, "keeps_z": keeps, "fp8_wire": wire}
    for fp8, keeps, wire in [
        *((False, True, wire) for wire in (False, True)),
        *((True, keeps, wire) for keeps in (False, True) for wire in (False, True)),
    ]
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_experts", [2, 4, 8])
def test_rows_by_torch_are_planned_to_the_byte(form, num_experts):
    dims, spec = case(num_experts)
    form = ExpertForm(**form, num_ranks=2, dispatcher="torch")
    found = run(dims, spec, form, AllToAll(Mirror(), WireOptions(fp8=form.fp8_wire)))
    assert_planned(found, dims, spec, form, kept=_INT64 * num_experts, saved=0)


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_by_deep_ep_are_planned_but_for_its_handle(form, num_chunks):
    dims, spec = case(2)  # every token goes to both ranks, as the plan's random ones do
    form = ExpertForm(**form, num_ranks=2, dispatcher="deep_ep", num_chunks=num_chunks)
    wire = WireOptions(fp8=form.fp8_wire)
    buffer = ExchangeBuffer(Mirror())
    found = run(dims, spec, form, TokenDispatcher(buffer, wire, num_chunks=num_chunks))
    # The readable buffer's handle: two words a token and rank, two a rank, the number of tokens; of
    # each chunk the handle's size and the expert's count.
    handle = _INT64 * (2 * 2 * TOKENS + num_chunks * (2 * 2 + 1 + 1 + 1))
    assert_planned(found, dims, spec, form, kept=handle, saved=handle)


def test_a_token_reaches_all_ranks_if_it_has_experts_on_all_and_else_fewer():
    assert tokens_received(case(2)[0], 2, 100) == 200
    assert 100 < tokens_received(case(8)[0], 2, 100) < 200
    assert tokens_received(preset("v41-flash"), 8, 8192) == pytest.approx(8192 * 4.42, rel=0.01)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[4]])
def test_the_fused_layers_pool_is_planned_to_the_byte(form):
    dims, spec = case(8)
    form = ExpertForm(**form, dispatcher="mega_moe")
    shape = ArenaShape(most_tokens=TOKENS, per_token=2, num_experts=8, hidden=dims.hidden_size)
    (rank,) = mega_cases.make_ranks(1, shape)
    found = run(dims, spec, form, rank)
    of_experts = _INT64 * dims.num_experts  # rows of each, on the host
    assert_planned(found, dims, spec, form, kept=of_experts, saved=of_experts)


def test_a_backward_in_fp8_holds_more_than_one_in_bf16_and_most_with_z_to_make():
    dims, tokens, item = preset("v41-flash"), 8192, 2
    forms = (HERE, ExpertForm(fp8=True), ExpertForm(fp8=True, keeps_z=False))
    plain, kept, again = (experts_workspace(dims, form, tokens, item) for form in forms)
    assert plain < kept < again
