"""Lists of ops by name: with kernels in the interpreter and FP8 in torch, the bits of no recompute,
and of each op that is named no second run."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_units import SIZES, WIDE, in_fp8, in_triton, small, some_units
from measured_activations import bytes_left_behind
from torch.utils._python_dispatch import TorchDispatchMode
from whole_model import named_grads, random_batch, run

from ppruntime.config import load
from ppruntime.memory import activation_bytes
from ppruntime.models.carry import Carry
from ppruntime.models.linear import WeightGradQueue
from ppruntime.models.save_points import SAVE_NAMES, SavePoint, is_kept, op_name
from ppruntime.plan import StagePlan
from ppruntime.recompute import kept_points
from ppruntime.stage import Stage
from ppruntime.wrap import wrap_units

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny.toml"
CASES = {
    "reference": (some_units, small()),
    "kernels": (in_triton, small()),
    "one stream": (in_triton, small(residual_type="gated", num_streams=1)),
    "v4": (in_triton, small("tiny-v4")),
    "fp8": (in_fp8, small(**WIDE)),
}


class Count(TorchDispatchMode):
    """Counts the ops that really run, by the name that a list has."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_kept(_ANY, func.name()):
            self.runs[op_name(func.name())] += 1
        return func(*args, **(kwargs or {}))


_ANY = frozenset(SAVE_NAMES)


def step(
    case: str, kept: frozenset[str] | None
) -> tuple[dict[str, torch.Tensor], Counter, Counter]:
    """Gradients, and how often ops ran in the forward and in the backward. None: no recompute."""
    build, dims = CASES[case]
    units = build(dims)
    wrap_units(
        units,
        recompute=[None, *[kept] * (len(units) - 1)],
        sharding=None,
        fp32_names=[()] * len(units),
    )
    with Count() as forward:
        carry = run(units, random_batch(dims, 2, [(7, 9)]))
        weights = torch.linspace(-1, 1, carry.streams.numel()).view_as(carry.streams)
        loss = (carry.streams.float() * weights).sum() + carry.balance_loss
    with Count() as backward:
        loss.backward()
    return {"loss": loss.detach(), **named_grads(units)}, forward.runs, backward.runs


@pytest.fixture(scope="module")
def plain():
    """Of each case, a step without recompute."""
    return {case: step(case, None) for case in CASES}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("case", CASES)
def test_an_op_that_is_named_does_not_run_again_and_all_others_do(case, plain):
    expected, ran, by_itself = plain[case]
    for kept in (frozenset(sorted(ran)[::2]), frozenset(sorted(ran)[1::2])):
        grads, forward, backward = step(case, kept)
        assert forward == ran
        assert_same_bits(grads, expected)
        for name, number in ran.items():
            again = backward[name] - by_itself[name]
            assert again == (0 if name in kept else number), f"{name}, with {kept} kept"


LISTS = st.frozensets(st.sampled_from(SAVE_NAMES), min_size=1)


@settings(max_examples=20, deadline=None)
@given(case=st.sampled_from(["reference", "fp8"]), names=LISTS)
def test_any_list_has_the_bits_of_no_recompute(case, names, plain):
    assert_same_bits(step(case, names)[0], plain[case][0])


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(case=st.sampled_from(["kernels", "one stream", "v4"]), names=LISTS)
def test_any_list_has_the_bits_of_no_recompute_in_the_interpreter(case, names, plain):
    assert_same_bits(step(case, names)[0], plain[case][0])


def test_every_op_but_those_of_several_ranks_and_of_packages_is_tested_here(plain):
    ran = {name for _, forward, _ in plain.values() for name in forward}
    of_ranks = {
        f"expert_{name}" for name in ("counts", "dispatch", "combine", "tokens", "mega_moe")
    }
    assert ran == {*SAVE_NAMES} - {*SavePoint} - of_ranks


OPS = tuple(name for name in SAVE_NAMES if name not in [*SavePoint])
ALL_IN_TRITON = {
    **dict.fromkeys(("attention", "indexer", "mhc", "rope", "norm"), "triton"),
    **dict.fromkeys(("router", "swiglu", "engram"), "triton"),
    "grouped_output": "library",
}


@pytest.mark.parametrize(
    ("names", "modes"),
    [
        (("mhc_write",), ("selective", "selective")),
        (("mhc_write", "mhc_read", "rotate"), ("selective", "none")),
        (("gate_engram", "rms_norm", "route"), ("selective", "selective")),
        (OPS, ("none", "selective")),
        (OPS, ("selective", "selective")),
    ],
)
def test_a_micro_batch_with_kernels_holds_the_planned_bytes(names, modes):
    """Streams that an op wrote are the next half's too, and count once; the last half's are kept
    though they were sent."""
    known = (name for name in names if name not in ("one_stream_read", "one_stream_write"))
    config = load(
        [TINY],
        [
            *(f"model.{field}={value}" for field, value in SIZES.items()),
            *(f"kernels.{key}={name}" for key, name in ALL_IN_TRITON.items()),
            *("train.seq_len=16", "train.micro_batch_size=1", "train.precision=bf16"),
            "ac.mode=selective",
            f'ac.layer_modes={{"1" = {json.dumps(modes)}}}',
            f"ac.save={json.dumps([*known])}",
        ],
    )
    dims, units = config.model.dims, in_triton(small(), torch.bfloat16)
    assert dims == small()
    embedding, *halves = units
    specs = tuple(unit.spec for unit in halves)
    planned = StagePlan(index=1, rank=0, units=specs, before=embedding.spec, after=specs[-1])
    kept = [kept_points(config, spec) for spec in specs]
    wrap_units(halves, recompute=kept, sharding=None, fp32_names=[()] * len(halves))
    ends = {"inputs": planned.inputs, "outputs": planned.outputs}
    stage = Stage(1, halves, **ends, queue=WeightGradQueue())
    tokens = random_batch(dims, 2, [(16,)])
    first = embedding(Carry(), tokens)
    received = [getattr(first, name).detach() for name in planned.inputs]
    sent: list[torch.Tensor] = []

    def forward() -> None:
        sent.extend(output.clone() for output in stage.forward(0, received, tokens))
        stage.balance_losses.clear()
        stage.loads.clear()
        gc.collect()  # the interpreter leaves what it launched last in a cycle

    left = bytes_left_behind(forward) - sum(output.nbytes for output in sent)
    # What a recomputed half behind the experts was given has their loads and loss in it.
    left -= 8 * dims.num_experts + 4
    assert left == activation_bytes(config, planned)
