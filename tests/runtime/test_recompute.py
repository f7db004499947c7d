"""Activation checkpointing: the bits of every mode, what runs again, and what a config may say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import run_local
from torch.utils._python_dispatch import TorchDispatchMode
from whole_model import build_units, named_grads, random_batch, run

from ppruntime.config import Config, ConfigError, dumps, load
from ppruntime.config.help import key_helps
from ppruntime.ledger import predict
from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import UnitKind
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.save_points import (
    ALIASES,
    SAVE_NAMES,
    SavePoint,
    names_in,
    op_name,
    point_of,
)
from ppruntime.models.units import Unit
from ppruntime.order import make_order
from ppruntime.plan import cut
from ppruntime.plan_report import plan_text, report
from ppruntime.recompute import (
    in_mode,
    is_mode_name,
    kept_points,
    mode_name,
    mode_of,
    mode_overrides,
    repeated_flops,
)
from ppruntime.stage import Stage
from ppruntime.wrap import wrap_units

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny.toml"
MODES = ("full_moe", "full", "projections", "attention", "matmul")
PAIRS = (
    'ac.layer_modes={"0" = "matmul", "1" = ["full", "none"], "2" = ["none", "full_moe"],'
    ' "3" = ["projections", "matmul"], "4" = "attention", "5" = ["full_moe", "projections"]}'
)
MIXED = ("ac.mode=full", "ac.recompute_engram=true", PAIRS)
LISTS = {
    "full": ("experts", "engram"),
    "projections": ("projections", "experts", "engram"),
    "attention": ("attention", "experts", "engram"),
    "matmul": ("experts", "engram", "projections", "attention"),
}
"""What modes keep, as lists of a user's own."""


def saving(*names: str) -> tuple[str, str]:
    """Overrides that put all layers into the mode that keeps what is named."""
    return "ac.mode=selective", f"ac.save={json.dumps(names)}"


def tiny(*overrides: str) -> Config:
    short = ("train.seq_len=12", "train.micro_batch_size=1", "model.sinkhorn_iters=2")
    return load([TINY], [*short, *overrides])


def wrapped_units(config: Config) -> list[Unit]:
    units = build_units(config.model.dims, 2)
    wrap_units(
        units,
        recompute=[kept_points(config, unit.spec) for unit in units],
        sharding=None,
        fp32_names=[()] * len(units),
    )
    return units


# Bits


@pytest.fixture(scope="module")
def plain() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return loss_and_grads(tiny())


def loss_and_grads(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    units = wrapped_units(config)
    carry = run(units, random_batch(config.model.dims, 2, [(13, 18)]))
    (carry.loss + carry.balance_loss).backward()
    return carry.loss, named_grads(units)


@pytest.mark.parametrize("overrides", [*((f"ac.mode={mode}",) for mode in MODES), MIXED])
def test_every_mode_has_the_loss_and_the_gradients_of_none(overrides, plain):
    assert_same(loss_and_grads(tiny(*overrides)), plain)


def one_each(names: list[str]) -> list[str]:
    """Without ops whose group is named too, and without names for the same."""
    once = {op_name(name): name for name in names}
    return [name for op, name in once.items() if op in [*SavePoint] or point_of(op) not in names]


IN_TINY = sorted(
    names_in(is_moe=False, has_engram=True) | names_in(is_moe=True, has_engram=False) | {*ALIASES}
)
NAMES = st.lists(st.sampled_from(IN_TINY), min_size=1, unique=True).map(one_each)
HALF = st.sampled_from(["selective", "none", "full_moe"])


@settings(max_examples=16, deadline=None)
@given(names=NAMES, halves=st.lists(st.tuples(HALF, HALF), min_size=1, max_size=6))
def test_every_list_in_any_halves_has_the_loss_and_the_gradients_of_none(names, halves, plain):
    others = [layer for layer in range(8) if layer not in tiny().model.dims.engram_layers]
    pairs = zip(others, halves, strict=False)
    some = ", ".join(f'"{layer}" = {json.dumps(pair)}' for layer, pair in pairs)
    config = tiny(*saving(*names), f"ac.layer_modes={{{some}}}")
    assert_same(loss_and_grads(config), plain)


def assert_same(found, plain):
    loss, grads = found
    assert torch.equal(loss, plain[0])
    assert grads.keys() == plain[1].keys()
    for name, grad in grads.items():
        assert torch.equal(grad, plain[1][name]), name


def step_grads(config: Config, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """Gradients of one pipeline step."""
    order, units = make_order(config), wrapped_units(config)
    plan = cut(
        config.model.dims,
        order.computations.stage_to_rank,
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )
    stages, rest = [], iter(units)
    for planned in plan:
        own, queue = [next(rest) for _ in planned.units], WeightGradQueue()
        for unit in own:
            set_queue(unit, queue)
        ends = {"inputs": planned.inputs, "outputs": planned.outputs}
        stages.append(Stage(planned.index, own, **ends, queue=queue))
    run_local(order.lowered, stages, batches, order.slots, timeout_seconds=120)
    return named_grads(units)


def test_every_order_has_the_gradients_of_none_under_a_mixture_of_modes():
    batches = [random_batch(tiny().model.dims, seed, [(5, 7)]) for seed in range(2)]
    few = "train.num_micro_batches=2"
    none = step_grads(tiny("pp.size=2", "pp.schedule=1f1b", few), batches)
    # Layers 2, 3 and 5 are cut in the middle.
    halves = "pp.layers_per_stage=[2.5, 1, 2, 2.5]"
    for name, cuts in (
        ("1f1b", "pp.layers_per_stage=[2.5, 5.5]"),
        ("1f1b_w", "pp.layers_per_stage=[3.5, 4.5]"),
        ("dualpipe_v", halves),
        ("zb_v", halves),
    ):
        modes = saving("projections", "engram") if name == "zb_v" else MIXED
        grads = step_grads(tiny("pp.size=2", f"pp.schedule={name}", few, cuts, *modes), batches)
        assert grads.keys() == none.keys()
        for parameter, grad in grads.items():
            assert torch.equal(grad, none[parameter]), f"{name}: {parameter}"


# What runs again


class Count(TorchDispatchMode):
    """Counts the ops that really run, by save point."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[SavePoint | None] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs[point_of(func.name())] += 1
        return func(*args, **(kwargs or {}))


def times_run(config: Config) -> dict[SavePoint, int]:
    """How often the backward of the first two layers, recompute included, runs the ops of each save
    point. Ops of the backward itself are of no save point, or counted in every mode alike."""
    units = wrapped_units(config)[: 1 + 2 * LAYERS]
    carry = run(units, random_batch(config.model.dims, 2, [(9,)]))
    with Count() as count:
        (carry.streams.sum() + carry.balance_loss).backward()
    return {point: count.runs[point] for point in SavePoint}


LAYERS = 2
ENGRAM = "model.engram_layers=[1]"


def test_a_recompute_repeats_what_the_mode_says_and_no_more():
    by_itself = times_run(tiny(ENGRAM))
    whole = {
        SavePoint.EXPERTS: 3 * LAYERS,  # rows, and two products
        SavePoint.ENGRAM: 2,
        SavePoint.ATTENTION: LAYERS,
    }
    kept = {
        ("ac.mode=full_moe", "ac.recompute_engram=true"): (),
        ("ac.mode=full_moe",): (SavePoint.ENGRAM,),
        ("ac.mode=full",): (SavePoint.ENGRAM, SavePoint.EXPERTS),
        ("ac.mode=projections",): (SavePoint.ENGRAM, SavePoint.EXPERTS, SavePoint.PROJECTIONS),
        ("ac.mode=attention",): (SavePoint.ENGRAM, SavePoint.EXPERTS, SavePoint.ATTENTION),
        ("ac.mode=matmul",): tuple(SavePoint),
        saving("experts"): (SavePoint.EXPERTS,),
        saving("engram"): (SavePoint.ENGRAM,),
        saving("attention", "projections"): (SavePoint.ATTENTION, SavePoint.PROJECTIONS),
        saving("attention", "engram", "experts"): tuple({*SavePoint} - {SavePoint.PROJECTIONS}),
    }
    for overrides, points in kept.items():
        again = times_run(tiny(ENGRAM, *overrides))
        for point, number in whole.items():
            repeated = again[point] - by_itself[point]
            assert repeated == (0 if point in points else number), (overrides, point)
        products = again[SavePoint.PROJECTIONS] - by_itself[SavePoint.PROJECTIONS]
        assert (products > 0) == (SavePoint.PROJECTIONS not in points), overrides


@pytest.mark.parametrize("mode", LISTS)
def test_a_list_that_is_a_mode_s_own_keeps_and_repeats_what_the_mode_does(mode):
    own, of_mode = tiny(*saving(*LISTS[mode])), tiny(f"ac.mode={mode}")
    for spec in cut(own.model.dims, (0,), None, seq_len=12)[0].units:
        assert kept_points(own, spec) == kept_points(of_mode, spec)
        assert repeated_flops(own, spec) == repeated_flops(of_mode, spec)
    assert report(own).stages == report(of_mode).stages
    assert predict(own) == predict(of_mode)


def test_every_list_has_a_name_of_its_own_and_is_found_again_by_it():
    names = {mode: mode_name(tiny(f"ac.mode={mode}")) for mode in ("none", *MODES)}
    assert list(names) == list(names.values())
    one, other = (tiny(*saving(*s)) for s in (("attention", "experts"), ("attention",)))
    assert mode_name(one) == mode_name(tiny(*saving("experts", "attention")))
    assert mode_name(one) == "selective:experts+attention" != mode_name(other)
    ops = tiny(*saving("rotate", "sparse_attention_reference", "experts"))
    assert mode_name(ops) == "selective:experts+sparse_attention+rotate"
    units = cut(one.model.dims, (0,), None, seq_len=12)[0].units
    for config in (one, other, ops, tiny("ac.mode=full", "ac.recompute_engram=true"), tiny()):
        name = mode_name(config)
        assert is_mode_name(name)
        again = in_mode(config, name)
        assert [kept_points(again, s) for s in units] == [kept_points(config, s) for s in units]
        assert mode_name(tiny(*saving("projections"), *mode_overrides(name))) == name
    unknown = ("selective", "selective:", "selective:attention+experts", "full:experts", "some")
    assert not any(map(is_mode_name, unknown))


def test_a_list_holds_for_the_halves_that_are_selective():
    halves = 'ac.layer_modes={"1" = ["selective", "none"], "2" = ["full", "selective"]}'
    config = tiny(halves, 'ac.save=["experts", "attention"]')
    (stage,) = cut(config.model.dims, (0,), None, seq_len=12)
    kept = {(s.layer, s.kind): kept_points(config, s) for s in stage.units}
    attention, moe = UnitKind.ATTENTION, UnitKind.MOE
    assert kept.pop((1, attention)) == {SavePoint.ATTENTION}, "its Engram is not named"
    assert kept.pop((2, moe)) == {SavePoint.EXPERTS}
    assert kept.pop((2, attention)) == frozenset()
    assert set(kept.values()) == {None}


def test_modes_are_those_of_layers_and_halves():
    config = tiny(*MIXED)
    (stage,) = cut(config.model.dims, (0,), None, seq_len=12)
    modes = {(s.layer, s.kind): mode_of(config, s) for s in stage.units if s.layer is not None}
    attention, moe = UnitKind.ATTENTION, UnitKind.MOE
    assert modes[0, attention] == modes[0, moe] == "matmul"
    assert (modes[2, attention], modes[2, moe]) == ("none", "full_moe")
    assert modes[6, attention] == modes[7, moe] == "full"
    assert kept_points(config, stage.units[0]) is kept_points(config, stage.units[-1]) is None


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_knows_what_a_mode_costs_and_holds(mode):
    none, wanted = (report(tiny(f"ac.mode={m}")) for m in ("none", mode))
    assert wanted.stages[0].activation_bytes < none.stages[0].activation_bytes
    for spec in cut(tiny().model.dims, (0,), None, seq_len=12)[0].units:
        again = repeated_flops(tiny(f"ac.mode={mode}"), spec)
        assert min(again.matmul, again.attention, again.index_scores) >= 0
        if mode == "matmul":
            assert again.matmul == again.attention == 0


# Configs


@pytest.mark.parametrize("overrides", [MIXED, saving("experts", "attention")])
def test_modes_survive_being_written_and_read(tmp_path, overrides):
    config = tiny(*overrides)
    (tmp_path / "again.toml").write_text(dumps(config))
    assert load([tmp_path / "again.toml"]) == config


REFUSED = [
    ('ac.layer_modes={"8" = "full"}', 'names "8", which is no layer; layers are numbered 0 to 7'),
    ('ac.layer_modes={"01" = "full"}', 'names "01", which is no layer'),
    ("ac.layer_modes={}", "names no layer; leave it out"),
    ('ac.layer_modes={"1" = "fill"}', "fill"),
    ('ac.layer_modes={"1" = ["full", "none", "none"]}', "ac.layer_modes"),
    ("ac.mode=everything", "everything"),
    ("ac.recompute_engram=true", 'has no effect on layers whose mode is "none"'),
    (
        'ac.mode=selective ac.save=["expert"]',
        'names "expert", which is no group and no op that can be kept; did you mean "experts"? name'
        ' some of "experts", "engram", "projections", "attention" and of the ops that `ppruntime'
        " keys ac.save` lists",
    ),
    ('ac.mode=selective ac.save=["mhc_reed", "rotate"]', 'did you mean "mhc_read"?'),
    ('ac.mode=selective ac.save=["rotate_backward"]', "is no group and no op that can be kept"),
    ('ac.mode=selective ac.save=["softmax"]', '"softmax", which is no group and no op'),
    ('ac.mode=selective ac.save=["one_stream_read"]', 'which no half-layer in mode "selective"'),
    ('ac.mode=selective ac.save=["mm", "projections"]', 'names "mm" and "projections", which has'),
    (
        'ac.mode=selective ac.save=["fp8_rotated_linear", "rotated_linear"]',
        'names "fp8_rotated_linear", which is "rotated_linear"; name it once',
    ),
    (
        'ac.layer_modes={"1" = ["none", "selective"]} ac.save=["rotate"]',
        'names "rotate", which no half-layer in mode "selective" has',
    ),
    ('ac.mode=selective ac.save=["gate_engram"] model.name=tiny-v4', "which no half-layer"),
    ('ac.save=["experts"]', 'has no effect without the mode "selective"'),
    ("ac.mode=selective", 'set it to a list of some of "experts", "engram", "projections"'),
    ('ac.layer_modes={"1" = ["full", "selective"]}', 'some of "experts", "projections"'),
    ("ac.mode=selective ac.save=[]", 'names nothing; name some of "experts", "engram"'),
    (
        'ac.layer_modes={"1" = ["full", "selective"]} ac.save=["attention"]',
        'names "attention", which no half-layer in mode "selective" has; name some of "experts"',
    ),
    ('ac.mode=selective ac.save=["engram"] model.name=tiny-v4', 'names "engram", which no half'),
    ('ac.mode=selective ac.save=["engram","engram"]', 'names "engram" 2 times'),
    (
        'ac.mode=selective ac.save=["experts"] ac.recompute_engram=true',
        'no effect on layers whose mode is "selective"',
    ),
]


@pytest.mark.parametrize(("override", "words"), REFUSED)
def test_a_wrong_mode_is_refused_with_its_remedy(override, words):
    with pytest.raises(ConfigError) as refusal:
        tiny(*re.split(" (?=[a-z]+[.])", override))
    assert words in str(refusal.value)


def test_a_wrong_list_in_a_file_is_refused_with_its_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "tiny"\n[ac]\nmode = "selective"\nsave = ["moe"]\n')
    with pytest.raises(
        ConfigError, match=r"run\.toml:5: ac\.save names \"moe\", which is no group"
    ):
        load([path])


def test_the_help_of_the_list_names_all_that_it_may_name():
    (help_,) = (key for key in key_helps() if key.name == "ac.save")
    words = set(re.findall(r"\w+", help_.text))
    assert set(SAVE_NAMES) <= words


def test_recomputing_an_engram_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="the model has no Engram"):
        tiny("model.name=tiny-v4", "ac.mode=full", "ac.recompute_engram=true")


def test_a_plan_says_what_a_list_keeps():
    text = plan_text(tiny(*saving("attention", "experts")))
    assert "selective: half-layers keep inputs and the results of attention, experts" in text
