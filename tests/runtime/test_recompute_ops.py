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
from measured_activations import bytes_left_behind
from torch.utils._python_dispatch import TorchDispatchMode
from whole_model import build_units, named_grads, random_batch, run

from ppruntime.config import load
from ppruntime.memory import activation_bytes
from ppruntime.models.attention_kernels import set_kernels
from ppruntime.models.carry import Carry
from ppruntime.models.dims import ModelDims, changed, preset
from ppruntime.models.engram_kernels import engram_kernels
from ppruntime.models.fp8_experts import Fp8Options
from ppruntime.models.fp8_linear import Fp8LinearOptions, convert_linears
from ppruntime.models.kernel_limits import Backend
from ppruntime.models.kernels.attention_backends import Choice, attention_kernels
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.kernels.fp8_linear_backends import LinearBackend
from ppruntime.models.linear import WeightGradQueue
from ppruntime.models.moe import MoEOptions
from ppruntime.models.moe_kernels import moe_kernels
from ppruntime.models.residual import residual
from ppruntime.models.save_points import SAVE_NAMES, SavePoint, is_kept, op_name
from ppruntime.models.units import Unit
from ppruntime.plan import StagePlan
from ppruntime.recompute import kept_points
from ppruntime.stage import Stage
from ppruntime.wrap import wrap_units

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny.toml"
HALVES = ("layers.1.attn", "layers.1.moe", "layers.2.attn")
"""Of V4.1: a window with Engram, experts, and keys compressed and selected."""
V4_HALVES = ("layers.2.attn", "layers.2.moe", "layers.3.attn")
"""Of V4: keys compressed and selected, experts by token, keys compressed."""
CPU = torch.device("cpu")
TRITON = Choice(
    attention=Backend.TRITON,
    indexer=Backend.TRITON,
    rope=Backend.TRITON,
    grouped_output=Backend.LIBRARY,
    norm=Backend.TRITON,
)


def small(name: str = "tiny", **changes: object) -> ModelDims:
    return changed(preset(name), **{**_SIZES, **changes})


_SIZES = {
    **{"num_heads": 16, "head_dim": 32, "rope_dim": 8, "sinkhorn_iters": 1},
    **{"hidden_size": 32, "num_streams": 2, "q_lora_rank": 16, "expert_width": 16},
}


def some_units(dims: ModelDims, dtype: torch.dtype = torch.float32, **options) -> list[Unit]:
    """The embedding and three halves, which the interpreter runs in seconds."""
    names = {"embed", *(V4_HALVES if dims.family == "v4" else HALVES)}
    units = build_units(dims, 3, dtype, **options)
    return [unit for unit in units if unit.spec.name in names]


def kernels(dims: ModelDims, dtype: torch.dtype = torch.float32) -> list[Unit]:
    """All that Triton's interpreter runs."""
    moe = MoEOptions(kernels=moe_kernels("triton", "triton", CPU, dtype))
    units = some_units(dims, dtype, moe=moe)
    for unit in units[1:]:
        set_kernels(unit, attention_kernels(TRITON))
        unit.residual = residual("triton", CPU, dims.residual_type)
        if getattr(unit, "engram", None) is not None:
            unit.engram.kernels = engram_kernels("triton", CPU)
    return units


def in_fp8(dims: ModelDims) -> list[Unit]:
    """FP8 experts and linears as plain PyTorch has them, bf16 products of compressors and routers
    by BLAS, and turned queries."""
    moe = MoEOptions(
        fp8=Fp8Options(backend=ExpertBackend.REFERENCE),
        kernels=moe_kernels("reference", "library", CPU, torch.bfloat16),
    )
    units = some_units(dims, torch.bfloat16, moe=moe)
    for unit in units[1:]:
        chosen = Choice(rope=Backend.TRITON, compressor=Backend.LIBRARY)
        set_kernels(unit, attention_kernels(chosen))
        convert_linears(unit, Fp8LinearOptions(backend=LinearBackend.REFERENCE))
    return units


WIDE = {"hidden_size": 256, "expert_width": 128, "q_lora_rank": 128, "o_lora_rank": 64}
CASES = {
    "reference": (some_units, small()),
    "kernels": (kernels, small()),
    "one stream": (kernels, small(residual_type="gated", num_streams=1)),
    "v4": (kernels, small("tiny-v4")),
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


@pytest.mark.slow
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
            *(f"model.{field}={value}" for field, value in _SIZES.items()),
            *(f"kernels.{key}={name}" for key, name in ALL_IN_TRITON.items()),
            *("train.seq_len=16", "train.micro_batch_size=1", "train.precision=bf16"),
            "ac.mode=selective",
            f'ac.layer_modes={{"1" = {json.dumps(modes)}}}',
            f"ac.save={json.dumps([*known])}",
        ],
    )
    dims, units = config.model.dims, kernels(small(), torch.bfloat16)
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
