"""What waits between an input gradient and its put-off weight gradients where kernels compute them:
counted bytes against those that are really alive."""

from __future__ import annotations

import gc

import pytest
import torch
from kernel_units import WIDE, in_fp8, in_triton, small
from measured_activations import bytes_left_behind
from whole_model import random_batch

from ppruntime.models.activation_bytes import put_off_operands
from ppruntime.models.carry import DIFFERENTIABLE
from ppruntime.models.expert_bytes import ExpertForm
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.units import Unit
from ppruntime.models.weight_copies import renew_copies
from ppruntime.plan import StagePlan
from ppruntime.stage import Stage

FP8 = {
    "wide_products": True,
    "router": "library",
    "fp8_linears": True,
    "experts": ExpertForm(fp8=True),
}
TRITON = {"mhc": "triton", "router": "triton"}
CASES = {
    "fp8": (in_fp8, small(**WIDE), FP8),
    "fp8 of V4": (in_fp8, small("tiny-v4", **WIDE), FP8),
    "fp8, two shared experts": (in_fp8, small(**WIDE, num_shared_experts=2), FP8),
    "kernels": (lambda dims: in_triton(dims, torch.bfloat16), small(), TRITON),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.long] * (c == "kernels")) for c in CASES]
)
def test_put_off_weight_gradients_by_kernels_hold_the_planned_bytes(case):
    build, dims, options = CASES[case]
    units = build(dims)
    tokens = random_batch(dims, 2, [(30, 40)])
    batch, seq_len = tokens.ids.shape
    carry: dict[str, torch.Tensor] = {}
    for unit, before in zip(units, (None, *units), strict=False):
        sent, left = put_off(unit, before, carry, tokens)
        sums = sum(p.grad.nbytes for p in unit.parameters() if p.grad is not None)
        planned = put_off_operands(dims, unit.spec, batch, seq_len, "bfloat16", **options)
        streams = carry["streams"].nbytes if planned.reads_streams else 0
        assert left - sums == planned.num_bytes + streams, unit.spec.name
        carry = sent


def put_off(unit: Unit, before: Unit | None, given: dict[str, torch.Tensor], tokens):
    """What the unit sends, and the bytes that live once its input gradient is there."""
    spec = unit.spec
    plan = StagePlan(
        index=0, rank=0, units=(spec,), before=None if before is None else before.spec, after=spec
    )
    queue = WeightGradQueue()
    set_queue(unit, queue)
    stage = Stage(0, [unit], inputs=plan.inputs, outputs=plan.outputs, queue=queue)
    renew_copies(unit)  # which are the stage's for good
    sent: dict[str, torch.Tensor] = {}

    def up_to_put_off() -> None:
        # Clones, so that what the unit was given counts, too, if it is held.
        out = stage.forward(0, [given[name].clone() for name in plan.inputs], tokens)
        sent.update({name: x.clone() for name, x in zip(plan.outputs, out, strict=True)})
        grads = [torch.ones_like(x) for name, x in sent.items() if name in DIFFERENTIABLE]
        stage.backward_input(0, grads)
        stage.balance_losses.clear()
        stage.loads.clear()
        del out, grads
        gc.collect()  # the interpreter leaves what it launched last in a cycle

    left = bytes_left_behind(up_to_put_off)
    return sent, left - sum(x.nbytes for x in sent.values())
