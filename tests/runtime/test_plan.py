"""Plans: where the model is cut, what each stage holds and sends, how they are printed."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_activations import bytes_left_behind
from torch.distributed.fsdp import FSDPModule

from ppruntime import memory
from ppruntime.build import build_stage
from ppruntime.config import Config, load
from ppruntime.ledger import predict
from ppruntime.memory import (
    activation_bytes,
    gradient_bytes,
    lookup_bytes,
    recompute_bytes,
    state_bytes,
)
from ppruntime.models.activation_bytes import kept_results, put_off_operands, saved_bytes
from ppruntime.models.carry import DIFFERENTIABLE, MicroBatch
from ppruntime.models.dims import boundary_bytes, preset, unit_parameters, unit_specs
from ppruntime.models.init import init_parameters
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.units import build_unit
from ppruntime.optim.adamw import make_adamw
from ppruntime.order import make_order
from ppruntime.plan import StagePlan, balanced_layers, cut, train_flops_per_token
from ppruntime.plan_report import plan_json, plan_text, report
from ppruntime.ranks import Layout, join, leave
from ppruntime.recompute import kept_points
from ppruntime.schedules.ops import Kind
from ppruntime.stage import Stage
from ppruntime.text_table import short, short_bytes, text_table
from ppruntime.wrap import hold_gradients, wrap_units

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "launch" / "configs").glob("*.toml"))
TINY = ROOT / "launch" / "configs" / "tiny.toml"


def names_of(stages) -> list[str]:
    return [unit.name for stage in stages for unit in stage.units]


# Cuts


@st.composite
def layer_cuts(draw):
    """Layers per stage of an 8-layer model, in halves, any of them 0."""
    ends = sorted(draw(st.lists(st.integers(0, 16), max_size=7)))
    return tuple((b - a) / 2 for a, b in itertools.pairwise([0, *ends, 16]))


@given(layer_cuts(), st.sampled_from(["tiny", "tiny-v4"]))
def test_stages_are_the_model_in_order_and_join_at_their_boundaries(layers, name):
    dims = preset(name)
    stages = cut(dims, range(len(layers)), layers, seq_len=64)
    assert names_of(stages) == [unit.name for unit in unit_specs(dims)]
    assert tuple(stage.num_layers for stage in stages) == layers
    assert stages[0].units[0].name == "embed"
    assert stages[-1].units[-1].name == "head"
    assert stages[0].inputs == stages[-1].outputs == ()
    for here, there in itertools.pairwise(stages):
        assert here.outputs == there.inputs
        assert "streams" in here.outputs


def test_a_stage_without_units_passes_on_what_it_gets():
    stages = cut(preset("tiny"), (0, 1, 2, 3), (4.5, 0, 0, 3.5), seq_len=64)
    assert [len(stage.units) for stage in stages] == [10, 0, 0, 8]
    for stage in stages[1:3]:
        assert stage.inputs == stage.outputs == stages[0].outputs
        assert stage.num_layers == 0


def test_ranks_take_several_stages_by_the_order_s_placement():
    in_v = cut(preset("tiny"), (0, 1, 2, 2, 1, 0), (1, 2, 0.5, 1.5, 2, 1), seq_len=64)
    assert [(stage.index, stage.rank) for stage in in_v] == list(enumerate((0, 1, 2, 2, 1, 0)))
    assert names_of(s for s in in_v if s.rank == 2) == [
        *("layers.3.attn", "layers.3.moe", "layers.4.attn", "layers.4.moe")
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "seq_len"), [("tiny", 64), ("tiny-v4", 512), ("tiny", 4096)])
def test_balanced_layers_are_the_best_of_all_cuts(name, seq_len, num_stages):
    dims = preset(name)
    costs = [train_flops_per_token(dims, unit, seq_len) for unit in unit_specs(dims)]
    halves = len(costs) - 2

    def badness(ends: tuple[int, ...]) -> tuple[float, float]:
        bounds = [0, *(end + 1 for end in ends), len(costs)]
        work = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        return max(work), sum(w * w for w in work)

    best = min(
        map(badness, itertools.combinations_with_replacement(range(halves + 1), num_stages - 1))
    )
    layers = balanced_layers(dims, num_stages, seq_len=seq_len)
    ends = tuple(round(2 * upto) for upto in itertools.accumulate(layers))[:-1]
    assert sum(layers) == dims.num_layers
    assert badness(ends) == pytest.approx(best, rel=1e-12)


# What crosses


STREAMS_AND_MIX = 8192 * 4 * 5120 * 2 + 8192 * 4 * 4
SLOTS = 8192 * (128 + 512) * 4
KV, INDEX_KEYS = 8192 * 512 * 2, 8192 * 128 * 2
LIVENESS = {
    STREAMS_AND_MIX: [*range(4), 14, 15, 26, 27, 38, 39, 78, 79],
    STREAMS_AND_MIX + KV // 2 + SLOTS: [*range(4, 14), *range(16, 26), *range(28, 38)],
    STREAMS_AND_MIX + KV + INDEX_KEYS + SLOTS: [
        *(*range(40, 46), *range(48, 54), *range(56, 62), *range(64, 70))
    ],
    STREAMS_AND_MIX + KV + INDEX_KEYS: [46, 47, 54, 55, 62, 63, 70, 71],
    STREAMS_AND_MIX + KV + SLOTS: [*range(72, 78)],
}
"""What is alive after which halves of the full model, at 8,192 tokens in bf16. Ratio 2 up to layer
19, so half as many keys there; index keys die with the last layer that selects anew."""


def test_the_full_model_sends_what_is_alive_at_each_boundary():
    dims = preset("v41-flash")
    embed, *halves, _ = unit_specs(dims)
    assert STREAMS_AND_MIX == 335_675_392
    assert sorted(itertools.chain(*LIVENESS.values())) == list(range(80))
    for size, places in LIVENESS.items():
        assert {boundary_bytes(dims, halves[place], 1, 8192) for place in places} == {size}
    assert boundary_bytes(dims, embed, 1, 8192) == STREAMS_AND_MIX


def test_gradients_come_back_for_what_differentiates_alone():
    assert memory._DIFFERENTIABLE == DIFFERENTIABLE
    config = load([CONFIGS[0].with_name("v41-flash-pp16.toml")])
    halves = unit_specs(config.model.dims)[1:-1]
    assert gradient_bytes(config, halves[78]) == STREAMS_AND_MIX
    assert gradient_bytes(config, halves[5]) == STREAMS_AND_MIX + KV // 2
    assert gradient_bytes(config, halves[41]) == STREAMS_AND_MIX + KV


# What is held


def tiny(*overrides: str) -> Config:
    return load([TINY], ["train.seq_len=32", *overrides])


def random_tokens(config: Config) -> MicroBatch:
    shape = (config.train.micro_batch_size, config.train.seq_len)
    ids = torch.randint(config.model.dims.vocab_size, shape, generator=torch.Generator())
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    return MicroBatch(ids, ids.roll(-1, 1), positions)


MODES = {
    "none": ["ac.mode=none"],
    "full": ["ac.mode=full"],
    "full_moe, Engram too": ["ac.mode=full_moe", "ac.recompute_engram=true"],
    "projections": ["ac.mode=projections"],
    "attention": ["ac.mode=attention"],
    "matmul": ["ac.mode=matmul"],
    "products": ["ac.mode=selective", 'ac.save=["projections"]'],
    "two": ["ac.mode=selective", 'ac.save=["attention", "experts"]'],
    "ops": ["ac.mode=selective", 'ac.save=["mm", "sparse_attention", "expert_rows"]'],
    "selective pairs": [
        "ac.mode=full",
        'ac.save=["experts", "engram"]',
        'ac.layer_modes={"0" = ["none", "selective"], "1" = "selective"}',
    ],
    "pairs": [
        "ac.mode=full_moe",
        'ac.layer_modes={"0" = ["none", "matmul"], "2" = ["attention", "none"], "5" = "full"}',
    ],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "precision"), [("tiny", "fp32"), ("tiny-v4", "bf16")])
def test_a_micro_batch_in_flight_holds_the_planned_bytes(model, precision, mode):
    # V4 has no Engram.
    is_for_both = MODES[mode][0] == "ac.mode=selective"
    overrides = MODES[mode] if model == "tiny" or is_for_both else MODES[mode][:1]
    config = tiny(f"model.name={model}", f"train.precision={precision}", *overrides)
    dims, tokens = config.model.dims, random_tokens(config)
    # A stage that ends in the middle of shared keys, one without units, one that only reads.
    plan = cut(dims, range(4), (2.5, 0, 3.5, 2), seq_len=32)
    received: tuple[torch.Tensor, ...] = ()
    for planned in plan:
        units = [
            build_unit(dims, spec, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
            for spec in planned.units
        ]
        for spec, unit in zip(planned.units, units, strict=True):
            init_parameters(unit, spec.name, seed=0)
        kept = [kept_points(config, spec) for spec in planned.units]
        wrap_units(
            units,
            recompute=kept,
            sharding=None,
            fp32_names=[()] * len(units),
        )
        stage = Stage(
            planned.index,
            units,
            inputs=planned.inputs,
            outputs=planned.outputs,
            queue=WeightGradQueue(),
        )
        sent: list[torch.Tensor] = []

        def forward(stage=stage, received=received, sent=sent) -> None:
            sent += [output.clone() for output in stage.forward(0, received, tokens)]
            stage.losses.clear()
            stage.balance_losses.clear()
            stage.loads.clear()

        left = bytes_left_behind(forward) - sum(t.nbytes for t in sent)
        # The carry that recomputed halves keep has a few counters in it, too.
        last = max((i for i, points in enumerate(kept) if points is not None), default=0)
        num_moe = sum(spec.kind == "moe" for spec in planned.units[:last])
        left -= num_moe * (8 * dims.num_experts + 4)
        held = activation_bytes(config, planned)
        assert left == held, planned.index
        assert (held > 0) == bool(units)
        received = tuple(sent)


@pytest.mark.parametrize("mode", ["none", "full_moe"])
@pytest.mark.parametrize(
    ("model", "precision"), [("tiny", "bf16"), ("tiny", "fp32"), ("tiny-v4", "bf16")]
)
def test_put_off_weight_gradients_hold_the_planned_bytes_whatever_was_kept(model, precision, mode):
    config = tiny(f"model.name={model}", f"train.precision={precision}", f"ac.mode={mode}")
    dims, tokens = config.model.dims, random_tokens(config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    specs = unit_specs(dims)
    carry: dict[str, torch.Tensor] = {}
    for spec, before in zip(specs, (None, *specs), strict=False):
        plan = StagePlan(index=0, rank=0, units=(spec,), before=before, after=spec)
        unit = build_unit(dims, spec, dtype=dtype)
        init_parameters(unit, spec.name, seed=0)
        wrap_units([unit], recompute=[kept_points(config, spec)], sharding=None, fp32_names=[()])
        queue = WeightGradQueue()
        set_queue(unit, queue)
        ends = {"inputs": plan.inputs, "outputs": plan.outputs}
        stage, sent = Stage(0, [unit], **ends, queue=queue), dict[str, torch.Tensor]()

        def up_to_put_off(stage=stage, plan=plan, sent=sent, given=carry) -> None:
            # Clones, so that what the unit was given counts, too, if it is held.
            out = stage.forward(0, [given[name].clone() for name in plan.inputs], tokens)
            sent |= {name: x.clone() for name, x in zip(plan.outputs, out, strict=True)}
            grads = [torch.ones_like(x) for name, x in sent.items() if name in DIFFERENTIABLE]
            stage.backward_input(0, grads)
            stage.losses.clear()
            stage.balance_losses.clear()
            stage.loads.clear()

        left = bytes_left_behind(up_to_put_off) - sum(x.nbytes for x in sent.values())
        sums = sum(p.grad.nbytes for p in unit.parameters() if p.grad is not None)
        shape = config.train.micro_batch_size, config.train.seq_len
        planned = put_off_operands(dims, spec, *shape, str(dtype).removeprefix("torch."))
        streams = carry["streams"].nbytes if planned.reads_streams else 0
        assert left - sums == planned.num_bytes + streams, spec.name
        carry = sent


def test_the_largest_recomputed_half_is_made_again():
    config = tiny("ac.mode=full")
    dims = config.model.dims
    (stage,) = cut(dims, (0,), None, seq_len=32)
    shape = config.train.micro_batch_size, 32, "float32"
    sizes = [
        saved_bytes(dims, spec, *shape)
        - kept_results(dims, spec, kept_points(config, spec), *shape).saved_again
        for spec in stage.units[1:-1]
    ]
    assert recompute_bytes(config, stage) == max(sizes)
    assert recompute_bytes(tiny("ac.mode=none"), stage) == 0


def fsdp_params(unit) -> list:
    """FSDP's own record of each parameter that it shards in the unit."""
    if not isinstance(unit, FSDPModule):
        return []
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # one group in older releases
    groups = [state._fsdp_param_group] if groups is None else groups
    return [p for group in groups if group is not None for p in group.fsdp_params]


def held_state(rank: int, overrides: list[str]) -> tuple[int, int, int]:
    """Bytes of weights, gradient sums and optimizer of the whole model on one rank, after a forward
    and a backward."""
    config = tiny(*overrides)
    layout = Layout(1, config.parallel.dp, 1)
    ranks = join(layout, use_cuda=False, timeout_seconds=60)
    (planned,) = cut(config.model.dims, (0,), None, seq_len=32)
    stage = build_stage(config, planned, ranks)
    params = {
        f"{spec.name}.{name}": parameter
        for spec, unit in zip(planned.units, stage.units, strict=True)
        for name, parameter in unit.named_parameters()
    }
    optimizer = make_adamw(params, lr=1e-3)
    moments = [
        value for state in optimizer.state.values() for key, value in state.items() if key != "step"
    ]
    seed = torch.ones(())
    stage.reset(loss_seed=seed, balance_seed=seed)
    hold_gradients(stage.units)
    stage.forward(0, (), random_tokens(config))
    sharded = [p for unit in stage.units for p in fsdp_params(unit)]
    masters = [p.sharded_param.to_local() for p in sharded]
    weights = [p.unsharded_param for p in sharded]
    gathered = {id(weight) for weight in weights}
    whole = [p for unit in stage.units for p in unit.parameters() if id(p) not in gathered]
    stage.backward(0, ())
    stage.flush_weight_grads()
    gradients = [p.grad for p in whole]
    for p in sharded:
        gradients += [p.unsharded_accumulated_grad, p.unsharded_param.grad]
    sizes = (
        sum(getattr(t, "_local_tensor", t).nbytes for t in [*weights, *whole]),
        sum(getattr(t, "_local_tensor", t).nbytes for t in gradients if t is not None),
        sum(getattr(t, "_local_tensor", t).nbytes for t in [*masters, *moments]),
    )
    leave()
    return sizes


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (1, ["train.precision=fp32"]),
        (1, ["train.precision=bf16"]),
        (2, ["train.precision=bf16", "parallel.dp=2"]),
        (2, ["train.precision=fp32", "parallel.dp=2", "model.engram_bucket_floor=98"]),
    ],
)
def test_state_is_the_planned_bytes(run_ranks, num_ranks, overrides):
    config = tiny(*overrides)
    (planned,) = cut(config.model.dims, (0,), None, seq_len=32)
    state = state_bytes(config, planned)
    first, *_ = run_ranks(num_ranks, held_state, overrides)
    assert first == (state.weights, state.gradients, state.optimizer)


def test_expert_ranks_share_experts_and_tables():
    alone, spread = tiny("train.precision=bf16"), tiny("train.precision=bf16", "parallel.ep=4")
    (stage,) = cut(alone.model.dims, (0,), None, seq_len=32)
    sizes = {
        part: sum(
            p.numel
            for unit in stage.units
            for p in unit_parameters(alone.model.dims, unit)
            if (p.part.name == "EXPERTS") == (part == "experts")
            and (p.part.name == "ENGRAM_TABLE") == (part == "tables")
        )
        for part in ("experts", "tables", "rest")
    }
    less = state_bytes(alone, stage).weights - state_bytes(spread, stage).weights
    tables_here = sum(
        -(-p.shape[0] // 4) * p.shape[1]
        for unit in stage.units
        for p in unit_parameters(alone.model.dims, unit)
        if p.part.name == "ENGRAM_TABLE"
    )
    assert less == 2 * sizes["experts"] * 3 // 4 + 4 * (sizes["tables"] - tables_here)


# The report


@pytest.mark.parametrize("schedule", ["zb_v", "v_half", "v_min", "dualpipe_v", "interleaved_1f1b"])
def test_a_rank_holds_its_stages_at_the_moment_when_they_weigh_most(schedule):
    config = tiny("pp.size=2", f"pp.schedule={schedule}", "train.num_micro_batches=6")
    plan, order = report(config), make_order(config).computations
    for rank in plan.ranks:
        own = [plan.stages[s] for s in rank.stages]
        assert [s.rank for s in own] == [rank.rank, rank.rank]
        each = {s.stage: s.activation_bytes // s.in_flight for s in own}
        ops = list(order.ops(rank.rank))
        held = [
            sum(
                each[op.stage] * ((op.kind is Kind.F) - (op.kind in (Kind.B, Kind.W)))
                for op in ops[: end + 1]
            )
            for end in range(len(ops))
        ]
        assert rank.activation_bytes == max(held) <= sum(s.activation_bytes for s in own)
        assert held[-1] == 0
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes", "slot_bytes"):
            assert getattr(rank, name) == sum(getattr(s, name) for s in own)


def test_what_a_rank_hands_itself_takes_no_receive_buffer():
    config = tiny("pp.size=2", "pp.schedule=zb_v")
    plan = report(config)
    (first,) = report(tiny("pp.size=1", "model.engram_layers=[]")).stages
    assert first.slot_bytes == 0
    # In the V, stages 1 and 2 are both on rank 1: only 0 -> 1 and 2 -> 3 cross, either way.
    order = make_order(config)
    stages = cut(config.model.dims, (0, 1, 1, 0), None, seq_len=32)
    dims, batch = config.model.dims, config.train.micro_batch_size
    for s in (1, 3):
        sent = boundary_bytes(dims, stages[s - 1].after, batch, 32, dtype="float32")
        slots = {(e.src_stage, e.dst_stage): n for e, n in order.slots.items()}
        buffers = [
            plan.stages[i].slot_bytes - lookup_bytes(config, stages[i]) for i in range(len(stages))
        ]
        assert buffers[s] == slots[s - 1, s] * sent
        back = gradient_bytes(config, stages[s - 1].after)
        assert buffers[s - 1] == slots[s, s - 1] * back
    handed = boundary_bytes(dims, stages[1].after, batch, 32, dtype="float32")
    held = activation_bytes(config, stages[2]) + handed
    assert plan.stages[2].activation_bytes == plan.stages[2].in_flight * held


def test_the_plan_of_the_full_model_has_the_published_counts():
    config = load([TINY.with_name("v41-flash-pp16.toml")])
    plan = json.loads(plan_json(config))
    assert plan["parameters"] == 551_566_149_744
    assert plan["active_matmul_parameters"] == 16_129_982_464
    assert plan["flops_per_token"] == 6 * plan["active_matmul_parameters"]
    stages = plan["stages"]
    assert [stage["rank"] for stage in stages] == list(range(16))
    assert [name for stage in stages for name in stage["units"]] == [
        unit.name for unit in unit_specs(config.model.dims)
    ]
    total = sum(stage["parameters"] for stage in stages)
    assert total == plan["parameters"] + plan["engram_parameters"]
    assert [stage["boundary_bytes"] for stage in stages[:-1]] == [
        boundary_bytes(config.model.dims, stage.after, 1, 8192)
        for stage in cut(config.model.dims, range(16), config.pp.layers_per_stage, seq_len=8192)[
            :-1
        ]
    ]
    assert stages[-1]["boundary_bytes"] == 0
    assert max(stage["share_of_slowest"] for stage in stages) == 1


def test_one_residual_stream_makes_the_full_plans_boundaries_84_mb_instead_of_335():
    path = TINY.with_name("v41-flash-pp16.toml")
    config = load([path], ["model.residual_type=gated"])
    one_stream = [stage["boundary_bytes"] for stage in json.loads(plan_json(config))["stages"][:-1]]
    with_mhc = [
        boundary_bytes(preset("v41-flash"), stage.after, 1, 8192)
        for stage in cut(preset("v41-flash"), range(16), config.pp.layers_per_stage, seq_len=8192)
    ][:-1]
    assert (min(with_mhc), min(one_stream)) == (335_675_392, 83_886_080)
    # What attention shares across layers crosses in any case.
    assert {a - b for a, b in zip(with_mhc, one_stream, strict=True)} == {335_675_392 - 83_886_080}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_prints_fast_in_140_columns_without_torch(path):
    code = (
        "import sys; from ppruntime.launch.cli import main; status = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules, 'torch was loaded'; sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", str(path)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    # CPU time, as a busy machine stretches the wall clock: it is about 1.2 s.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 140
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout
    assert "\n\n\n" not in done.stdout
    config = load([path])
    assert f"ac.mode {config.ac.mode}: " in lines[2]
    cells = lines[4].split()
    assert cells[:4] == ["stage", "rank", "layers", "units"]
    assert cells[-1] == "total"
    rows = lines[6 : 6 + config.pp.num_stages]
    assert [int(row.split()[0]) for row in rows] == list(range(config.pp.num_stages))
    assert lines[6 + config.pp.num_stages] == ""


def test_ranks_with_several_stages_get_a_table_of_their_own():
    one = plan_text(tiny("pp.size=2"))
    assert "stages" not in one
    several = plan_text(tiny("pp.size=2", "pp.schedule=zb_v"))
    tables = several.split("\n\n")
    assert len(tables) == 4
    heading, _, *rows = tables[2].splitlines()
    assert heading.split()[:2] == ["rank", "stages"]
    assert [row.split()[:3] for row in rows] == [["0", "0,", "3"], ["1", "1,", "2"]]
    assert max(map(len, several.splitlines())) <= 140


@given(st.floats(1, 9e14))
@settings(max_examples=200)
def test_short_numbers_are_right_to_their_digits_and_never_longer_than_seven(number):
    factors = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
    text = short(number)
    digits = text.rstrip("kMBT")
    assert float(digits) * factors[text[len(digits) :]] == pytest.approx(number, rel=6e-4)
    size = round(number)
    value, unit = short_bytes(size).split()
    assert float(value) * factors[unit.removesuffix("B")] == pytest.approx(size, rel=6e-3)
    assert len(text) <= 6
    assert len(short_bytes(size)) <= 7


def test_a_table_is_as_wide_as_its_longest_cells():
    assert text_table(("a", "name", "b"), [("1", "x", "1234"), ("22", "longer", "5")], "name") == [
        " a  name       b",
        "--  ------  ----",
        " 1  x       1234",
        "22  longer     5",
    ]
    assert short_bytes(0) == "-"
    assert short_bytes(999_999_999) == "1.00 GB"


def test_offload_takes_from_the_device_what_the_order_moves():
    base = ["pp.schedule=1f1b", "train.num_micro_batches=8"]
    off = report(load([TINY], base))
    paced = ["pp.activation_offload=true", "pp.offload_paced=true"]
    on = report(load([TINY], [*base, *paced]))
    # Rank 0 of 4 holds 4 micro-batches without; paced: one computing, one leaving, one coming back.
    assert [s.in_flight for s in on.stages] == [s.in_flight for s in off.stages] == [4, 3, 2, 1]
    assert on.stages[0].activation_bytes * 4 == off.stages[0].activation_bytes * 3
    assert on.stages[0].host_bytes > 0
    assert on.ranks[0].total_bytes < off.ranks[0].total_bytes
    for before, after in zip(off.stages[2:], on.stages[2:], strict=True):
        assert after.activation_bytes == before.activation_bytes
        assert after.host_bytes == 0
    assert "offload: up to" in plan_text(load([TINY], [*base, *paced]))
    fp8 = load([TINY], [*base, "pp.activation_offload=true", "pp.offload_target=fp8"])
    assert report(fp8).ranks[0].total_bytes < off.ranks[0].total_bytes
    assert report(fp8).ranks[0].host_bytes == 0
    assert "changes numerics" in plan_text(fp8)


def test_masters_that_are_away_at_the_peak_do_not_count():
    base = ["pp.schedule=1f1b", "train.num_micro_batches=8", "train.precision=bf16"]
    off, on = (report(load([TINY], [*base, f"pp.offload_masters={b}"])) for b in ("false", "true"))
    for before, after in zip(off.ranks, on.ranks, strict=True):
        assert after.host_bytes > 0 == before.host_bytes
        assert after.activation_bytes <= before.activation_bytes
        # The last rank holds the most in its first forward, before which nothing is gathered.
        is_last = before.rank == 3
        assert (after.total_bytes < before.total_bytes) is not is_last
    # One micro-batch's activations of rank 0 are less than its masters: they are home at the peak.
    gained = off.ranks[0].total_bytes - on.ranks[0].total_bytes
    in_flight = off.stages[0].in_flight
    assert gained == min(on.ranks[0].host_bytes, off.ranks[0].activation_bytes // in_flight)
    assert "offload: masters" in plan_text(load([TINY], [*base, "pp.offload_masters=true"]))


@pytest.mark.parametrize(
    "knobs",
    [
        (),
        ("pp.activation_offload=true", "pp.offload_paced=true"),
        ("pp.activation_offload=true", "pp.offload_every=2", "pp.schedule=dualpipe_v"),
        ("pp.offload_masters=true",),
        ("pp.offload_masters=true", "pp.activation_offload=true", "pp.offload_target=fp8"),
        ("optim.type=sign_sgd", "optim.clip_norm=default"),
    ],
)
def test_the_ledger_has_the_plan_s_peak_with_every_knob(knobs):
    config = load([TINY], ["train.precision=bf16", "train.num_micro_batches=12", *knobs])
    for ledger, rank in zip(predict(config), report(config).ranks, strict=True):
        # The plan counts all gradient sums throughout, the ledger from the first backward on; until
        # then masters that leave are in their place.
        first, *others = ledger.moments
        leaving = ledger.masters if config.pp.offload_masters else 0
        most = max(
            first.total + first.sums_to_come,
            *(
                m.total
                + max(0, m.sums_to_come - (leaving - m.masters_away if m.sums_to_come else 0))
                for m in others
            ),
        )
        # It takes a backward's workspace for there at the start, the ledger when some are freed.
        assert 0 <= rank.total_bytes - (ledger.through_the_step + most) < rank.workspace_bytes
        assert ledger.peak_bytes <= rank.total_bytes
        assert sum(num_bytes for _, num_bytes in ledger.rows()) == ledger.peak_bytes


def test_the_plan_says_what_weight_gradients_of_several_do_to_whole_backwards():
    wide = ("model.hidden_size=128", "model.expert_width=128", "moe.compute.backend=triton")
    base = [*wide, "moe.compute.fused_wgrad_micro_batches=2", "pp.schedule=1f1b"]
    told = "one backward in 2 has the experts' weight gradients of all"
    assert told in plan_text(load([TINY], base))
    assert told not in plan_text(load([TINY], [*base, "pp.defer_weight_grads=true"]))
    assert told not in plan_text(load([TINY], [*base[:-2], "pp.schedule=1f1b"]))
