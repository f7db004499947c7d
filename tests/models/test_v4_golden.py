"""V4 gives the numbers of an independent implementation (`make oracle` wrote them)."""

from __future__ import annotations

import msgspec
import pytest
import torch
from v4_cases import CASES, GOLDEN, Case, Golden
from whole_model import mean_loss, named_grads, run_to_logits

GOLDEN_VALUES = msgspec.json.decode(GOLDEN.read_bytes(), type=dict[str, Golden])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_logits_and_gradients_are_those_of_transformers(case: Case):
    golden = GOLDEN_VALUES[case.name]
    units, batch = case.units(), case.batch()
    with torch.no_grad():
        logits = run_to_logits(units, batch)
    assert logits.norm().item() == pytest.approx(golden.logits_norm, rel=1e-5)
    expected = torch.tensor(golden.logits)
    assert (logits[-1, -1, :8] - expected).norm() <= 1e-5 * expected.norm()

    loss = mean_loss(units, batch)
    loss.backward()
    assert loss.item() == pytest.approx(golden.loss, rel=1e-5)
    norms = {name: grad.norm().item() for name, grad in named_grads(units).items()}
    assert norms == pytest.approx(golden.grad_norms, rel=1e-4)


def test_the_cases_have_every_kind_of_layer_and_golden_values_for_each():
    roles = {unit.spec.role for case in CASES for unit in case.units()}
    assert roles == {"", "swa", "csa", "hca", "routed", "hash"}
    assert GOLDEN_VALUES.keys() == {case.name for case in CASES}
