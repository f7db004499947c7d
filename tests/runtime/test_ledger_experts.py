"""The ledger and experts: copies in FP8, and what exchanges give and a mode keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import measured_activations
import pytest
import torch
from mirror_exchange import Mirror
from small_runs import CONFIG, SMALL
from torch import Tensor

from ppruntime.config import Config, load
from ppruntime.ledger import predict
from ppruntime.memory import state_bytes
from ppruntime.models.activation_bytes import kept_results
from ppruntime.models.all_to_all import AllToAll
from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import UnitKind, unit_parameters, unit_specs
from ppruntime.models.dispatch import Finish
from ppruntime.models.expert_bytes import ExpertForm
from ppruntime.models.moe import MoEOptions
from ppruntime.models.parameters import Part
from ppruntime.models.save_points import SavePoint
from ppruntime.models.units import build_unit
from ppruntime.plan import cut
from ppruntime.recompute import kept_points
from ppruntime.wrap import wrap_units

WIDE = ("model.hidden_size=128", "model.expert_width=128", "train.precision=bf16")


def tiny(*overrides: str) -> Config:
    return load([CONFIG], [*SMALL, *overrides])


def test_what_exchanges_give_is_kept_as_planned():
    dims = tiny("train.force_balanced_routing=true").model.dims
    spec = next(s for s in unit_specs(dims) if s.kind is UnitKind.MOE)
    before = unit_specs(dims)[unit_specs(dims).index(spec) - 1]
    unit = build_unit(dims, spec, moe=MoEOptions(dispatcher=AllToAll(Mirror())))
    carry = measured_activations.blank_carry(dims, before, 1, 16, "float32")
    real = {
        name: torch.ones(each.shape, dtype=each.dtype, requires_grad=each.requires_grad)
        for name, each in carry._asdict().items()
        if isinstance(each, Tensor)
    }
    ids = torch.arange(16).unsqueeze(0)
    found = measured_activations.measure([unit], carry._replace(**real), MicroBatch(ids, ids, ids))
    planned = kept_results(
        *(dims, spec, frozenset({SavePoint.EXPERTS}), 1, 16, "float32"),
        experts=ExpertForm(num_ranks=2, dispatcher="torch"),
    )
    kept = found.results[SavePoint.EXPERTS]
    counts = 8 * dims.num_experts  # one number for each rank and expert here
    assert kept.num_bytes - counts == planned.num_bytes
    assert kept.saved_again == planned.saved_again
    alone = kept_results(dims, spec, frozenset({SavePoint.EXPERTS}), 1, 16, "float32")
    assert planned.num_bytes > alone.num_bytes


@dataclass(frozen=True)
class Counting(Mirror):
    """Also says what was exchanged."""

    told: list[str] = field(default_factory=list)

    def begin(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], what: str) -> Finish:
        self.told.append(what)
        return super().begin(outgoing, incoming, what)


def test_a_list_with_experts_exchanges_nothing_again_and_one_without_all():
    def exchanges(*overrides: str) -> tuple[list[str], list[str]]:
        """In a forward and in its backward."""
        config = tiny("train.force_balanced_routing=true", *overrides)
        dims, peer = config.model.dims, Counting()
        specs = unit_specs(dims)
        spec = next(s for s in specs if s.kind is UnitKind.MOE)
        unit = build_unit(dims, spec, moe=MoEOptions(dispatcher=AllToAll(peer)))
        wrap_units([unit], recompute=[kept_points(config, spec)], sharding=None, fp32_names=[()])
        before = specs[specs.index(spec) - 1]
        blank = measured_activations.blank_carry(dims, before, 1, 16, "float32")
        given = {
            name: torch.ones(each.shape, dtype=each.dtype, requires_grad=each.requires_grad)
            for name, each in blank._asdict().items()
            if isinstance(each, Tensor)
        }
        ids = torch.arange(16).unsqueeze(0)
        carry = unit(blank._replace(**given), MicroBatch(ids, ids, ids))
        forward = [*peer.told]
        carry.streams.sum().backward()
        return forward, peer.told[len(forward) :]

    selective = "ac.mode=selective"
    forward, own = exchanges("ac.mode=none")
    assert own
    for names in ('["experts"]', '["experts", "projections"]'):
        assert exchanges(selective, f"ac.save={names}") == (forward, own)
    again = exchanges(selective, 'ac.save=["projections"]')
    assert again[0] == forward
    assert sorted(again[1]) == sorted([*forward, *own])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("freed", [False, True])
def test_fp8_copies_of_experts_have_a_row_and_freed_weights_none(turned, freed):
    fp8 = (
        "moe.compute.backend=triton",
        f"moe.compute.fp8_transposed_on_demand={str(turned).lower()}",
        f"moe.compute.free_bf16_expert_weights={str(freed).lower()}",
    )
    plain, config = tiny(*WIDE, "pp.size=1"), tiny(*WIDE, "pp.size=1", *fp8)
    (before,), (after,) = predict(plain), predict(config)
    num_weights = sum(
        p.numel
        for spec in unit_specs(config.model.dims)
        for p in unit_parameters(config.model.dims, spec)
        if p.part is Part.EXPERTS
    )
    assert after.copies == (1 if turned else 2) * (num_weights + 4 * num_weights // 128**2)
    assert before.weights - after.weights == 2 * num_weights * freed
    assert before.copies == 0


def test_weight_gradients_that_wait_are_among_the_sums():
    fp8 = (*WIDE, "pp.size=1", "moe.compute.backend=triton")
    configs = [tiny(*fp8, f"moe.compute.fused_wgrad_micro_batches={n}") for n in (1, 2, 3)]
    (stage,) = cut(configs[0].model.dims, (0,), None, seq_len=16)
    one, two, three = (state_bytes(config, stage).gradients for config in configs)
    assert three - two == two - one > 0


def test_sums_of_gradients_are_there_from_a_stages_first_backward_on():
    for ledger in predict(tiny("pp.size=2", "pp.schedule=gpipe")):
        first = next(i for i, m in enumerate(ledger.moments) if "B" in m.op)
        assert all(m.sums_to_come == ledger.accumulators for m in ledger.moments[:first])
        assert ledger.moments[first].sums_to_come < ledger.accumulators
        assert all(m.sums_to_come == 0 for m in ledger.moments[first + 1 :])
        assert ledger.peak.op == ledger.moments[first].op
