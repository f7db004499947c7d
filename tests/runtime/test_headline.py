"""The projection from kernel records: what is measured stays so, the published rows come out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ppruntime.config import load
from ppruntime.launch.cli import main
from ppruntime.models.dims import UnitKind, preset, unit_specs
from ppruntime.projection.calibrate_kernels import (
    kernel_calibration,
    per_step_rows,
    remote_copies,
    unit_pieces,
)
from ppruntime.projection.headline import (
    H200_BYTES,
    RESERVED_BYTES,
    exchanges,
    job_of,
    project_plan,
    stage_shares,
)
from ppruntime.projection.kernel_records import read_kernels
from ppruntime.projection.pipeline import Piece, StageCost
from ppruntime.projection.planner import uniform_plan
from ppruntime.projection.planner_inputs import expert_variants, task_of
from ppruntime.projection.projector import Origin, ProjectionError

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "docs" / "bench"
FULL = ROOT / "launch" / "configs" / "v41-flash-pp16.toml"
KERNELS = read_kernels(BENCH)


def run(*overrides: str):
    return load([FULL], ["parallel.dp=12", "train.num_micro_batches=48", *overrides])


def test_measured_pieces_are_the_benches_rows_and_the_rest_says_what_it_is():
    config = run()
    specs = {spec.name: spec for spec in unit_specs(config.model.dims)}
    by_parts = replace(KERNELS, moe_half=None)
    moe = {p.name: p for p in unit_pieces(config, specs["layers.5.moe"], "none", by_parts)}
    rows = {(r["shape"], r["phase"], r["variant"]): r["median_ms"] for r in _moe()["rows"]}
    experts = moe["experts"]
    assert experts.origin is Origin.MEASURED
    whole = 1e3 * (experts.forward_s + experts.input_grad_s + experts.weight_grad_s)
    names = [v for s, p, v in rows if s == "ep8" and p == "fwd + bwd" and "(1 micro" in v]
    assert whole == pytest.approx(min(rows["ep8", "fwd + bwd", name] for name in names))
    assert moe["dense"].origin is Origin.MODELLED
    assert moe["dispatch"].origin is Origin.MODELLED
    assert moe["streams and norms"].origin is Origin.MEASURED
    attention = unit_pieces(config, specs["layers.24.attn"], "full_moe", KERNELS)
    assert [(p.name, p.origin) for p in attention] == [
        ("attention half", Origin.MEASURED),
        ("attention half, again", Origin.MEASURED),
    ]
    lines = json.loads((BENCH / "layers-halves.json").read_text())["lines"]
    sums: dict[str, float] = {}
    for line in lines:
        if (line["part"], line["kind"]) == ("attention half", "Reindex"):
            sums[line["backend"]] = sums.get(line["backend"], 0.0) + line["median"]
    half = attention[0]
    assert 1e3 * (half.forward_s + half.input_grad_s + half.weight_grad_s) == pytest.approx(
        min(sums.values())
    )
    assert half.source.endswith(min(sums, key=lambda name: sums[name]))


def test_a_half_that_was_measured_at_another_ratio_is_modelled_and_says_so():
    config = run()
    specs = {spec.name: spec for spec in unit_specs(config.model.dims)}
    (reuse,) = unit_pieces(config, specs["layers.3.attn"], "none", KERNELS)
    assert reuse.origin is Origin.MODELLED
    assert reuse.source.endswith("taken for ratio 2")
    found = unit_pieces(config, specs["layers.14.attn"], "none", KERNELS)
    assert {p.name: p.origin for p in found} == {
        "attention half": Origin.MEASURED,
        "engram lookups": Origin.ASSUMED,
        "engram projection": Origin.MODELLED,
        "engram gate": Origin.MEASURED,
    }
    by_parts = replace(KERNELS, head=None)
    (head,) = unit_pieces(config, specs["head"], "none", by_parts)
    assert head.origin is Origin.MODELLED
    assert head.source == "layer-parts.json, head, x 0.5 by tokens"


def test_a_head_that_was_timed_whole_at_these_tokens_is_measured(tmp_path):
    """Its row is the calibration's, of a model of fewer layers whose head is the same; with final
    norm and loss it takes a little longer than the record of its products at half their tokens."""
    config = run()
    head = unit_specs(config.model.dims)[-1]
    (whole,) = unit_pieces(config, head, "none", KERNELS)
    (part,) = unit_pieces(config, head, "none", replace(KERNELS, head=None))
    assert whole.origin is Origin.MEASURED
    assert whole.source == "calibration.json, head alone, bf16, no transfer in flight, 100 samples"
    times = [sum((p.forward_s, p.input_grad_s, p.weight_grad_s)) for p in (whole, part)]
    assert 1 < times[0] / times[1] < 1.05
    (longer,) = unit_pieces(run("train.seq_len=16384"), head, "none", KERNELS)
    assert (longer.origin, longer.source) == (Origin.MEASURED, "layer-parts.json, head")
    for record in BENCH.glob("*.json"):
        (tmp_path / record.name).write_bytes(record.read_bytes())
    path = tmp_path / "calibration.json"
    known = json.loads(path.read_text())
    for change in ({"device": "B200"}, {"sizes": {"vocab_size": "8"}}, {"model": "tiny"}):
        path.write_text(json.dumps(known | change))
        assert read_kernels(tmp_path).head is None


def test_what_fusing_saves_is_no_work_that_was_measured():
    """A stage of 10 s measured and 10 s modelled, of which fusing saves 2 s measured."""
    stage = StageCost(
        (
            Piece("experts", 2.0, 4.0, 4.0, Origin.MEASURED, ""),
            Piece("head", 10.0, 0.0, 0.0, Origin.MODELLED, ""),
            Piece("fused", 0.0, 0.0, -2.0, Origin.MEASURED, ""),
        )
    )
    found = stage_shares(stage)
    assert found[Origin.MEASURED] == pytest.approx(8 / 18)
    assert found[Origin.MODELLED] == pytest.approx(10 / 18)


def _moe():
    return json.loads((BENCH / "moe-experts.json").read_text())


def test_another_length_is_no_measurement():
    config = run("train.seq_len=4096")
    specs = {spec.name: spec for spec in unit_specs(config.model.dims)}
    moe = {p.name: p.origin for p in unit_pieces(config, specs["layers.5.moe"], "none", KERNELS)}
    assert moe["experts"] is Origin.MODELLED
    found = unit_pieces(config, specs["layers.24.attn"], "full_moe", KERNELS)
    origins = {p.name: p.origin for p in found}
    assert origins["attention"] is origins["attention, again"] is Origin.MODELLED
    assert origins["indexer"] is Origin.ASSUMED


@pytest.mark.parametrize("words", ["v4-flash.toml", "v41-flash-pp16.toml parallel.ep=16"])
def test_another_model_or_more_expert_ranks_is_no_measurement(words):
    """V4-Flash is 4,096 wide with experts of 2,048, where the records are of 5,120 and 2,304; on
    16 expert ranks each has 24 experts, not 48. Its window-only attention is no other's either."""
    name, *overrides = words.split()
    config = load([FULL.with_name(name)], overrides)
    dims = config.model.dims
    is_v4 = name.startswith("v4-")
    for spec in unit_specs(dims):
        for p in unit_pieces(config, spec, "none", KERNELS):
            if is_v4 or p.name == "experts":
                assert p.origin is not Origin.MEASURED or p.name == "attention", (spec.name, p)
    specs = {spec.name: spec for spec in unit_specs(dims)}
    experts = unit_pieces(config, specs["layers.5.moe"], "none", KERNELS)[0]
    size = dims.hidden_size * dims.expert_width / (5120 * 2304)
    assert experts.forward_s == pytest.approx(size * KERNELS.experts.forward_s)
    variants = {v.name: v for v in expert_variants(config, KERNELS)}
    turned = variants["bf16 kept, FP8 turned on demand"].input_grad_s
    held = dims.num_experts / config.parallel.ep / 48
    assert turned == pytest.approx(size * held * KERNELS.experts.turn_s)
    fused = variants["bf16 kept, fused wgrad n 2"].weight_grad_s
    assert fused == pytest.approx(-size * KERNELS.experts.fused_gain_s[2])


def test_a_row_has_batch_gpus_shares_and_an_interval_that_holds_it():
    config = run()
    task = task_of(
        config,
        kernel_calibration(config, KERNELS, "put"),
        memory_bytes=H200_BYTES,
        reserved_bytes=RESERVED_BYTES,
        host_bytes_per_s=0.0,
        link=None,
    )
    plan, why = uniform_plan(task)
    assert plan is not None, why
    rows = [project_plan(config, KERNELS, plan, kind, plan.name) for kind in ("nccl", "put")]
    for row in rows:
        assert row.job == job_of(config)
        assert row.job.num_gpus == 1536
        assert row.job.global_batch_tokens == 48 * 8192 * 96
        assert sum(row.shares.values()) == pytest.approx(1)
        assert 0.4 < row.shares[Origin.MEASURED] < 0.9
        assert row.low_s < row.simulation.pace.step_s < row.high_s
    assert rows[0].simulation.pace.mfu < rows[1].simulation.pace.mfu  # nccl slows compute down


def test_what_fusing_saves_of_modelled_experts_is_modelled():
    """At twice the bench's rows experts are a model, and so is what is saved of them."""
    config = run("train.seq_len=16384", "pp.size=4", "pp.layers_per_stage=[10, 10, 10, 10]")
    task = task_of(
        config,
        kernel_calibration(config, KERNELS, "put"),
        memory_bytes=float("inf"),
        reserved_bytes=RESERVED_BYTES,
        host_bytes_per_s=0.0,
        link=None,
        variants=expert_variants(config, KERNELS),
    )
    plan, why = uniform_plan(task)
    assert plan is not None, why
    assert "fused wgrad" in plan.stages[0].variant
    row = project_plan(config, KERNELS, plan, "put", "uniform")
    assert all(0 <= share <= 1 for stage in row.stages for share in stage.values())


def test_tokens_reach_as_many_places_as_drawing_experts_evenly_gives():
    dims = preset("v41-flash")
    assert remote_copies(dims, 8, 1) == pytest.approx(8 * (1 - (7 / 8) ** 6) * 7 / 8)
    assert remote_copies(dims, 64, 8) == pytest.approx(remote_copies(dims, 8, 1))
    assert remote_copies(dims, 1, 1) == 0


def test_the_published_ep64_row_is_infiniband_bound():
    """150 GB a GPU and step lie between a copy per node and a copy per rank, exchange repeated."""
    found = {(e.ep, e.copies, e.again): e for e in exchanges(run(), KERNELS, (8, 64), 16384)}
    node, rank = found[64, "node", True], found[64, "rank", True]
    assert node.ib_bytes < 150e9 < rank.ib_bytes
    assert rank.bound_by == "InfiniBand"
    assert rank.ib_s > 20 * rank.nvlink_s
    assert found[8, "rank", True].ib_bytes == 0
    assert found[8, "rank", True].bound_by == "compute"


def test_no_table_of_the_headline_hides_its_batch_or_what_was_measured(tmp_path, capsys):
    out = tmp_path / "headline.md"
    assert main(["headline", "--micro-batches", "24", "--out", str(out)]) == 0
    assert capsys.readouterr().out == out.read_text()
    sections = [
        part.splitlines() for part in re.split(r"^#+ ", out.read_text(), flags=re.M) if part
    ]
    told = 0
    for title, *lines in sections:
        headings = [line for line in lines if line.startswith("|") and "MFU %" in line]
        about = " ".join([title, *headings, *(line for line in lines if line[:1] != "|")])
        if headings:
            told += 1
            assert "tokens a step" in about, title
            assert "GPUs" in about, title
            assert "easured / modelled / assumed" in about, title
    assert told == 3


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ProjectionError, match="has no complete kernel records"):
        read_kernels(tmp_path)


def test_a_measured_moe_half_takes_the_place_of_modelled_products_around_the_experts(tmp_path):
    for name in ("moe-experts", "layers-attention", "layers-halves", "layer-parts", "transports"):
        (tmp_path / f"{name}.json").write_text((BENCH / f"{name}.json").read_text())
    without = read_kernels(tmp_path)
    assert without.moe_half is None
    experts = without.experts
    line = {"part": "MoE half", "kind": "routed", "backend": "x"}
    phases = {
        "forward": experts.forward_s + 0.002,
        "input gradient": experts.input_grad_s + 0.003,
        "weight gradients": experts.weight_grad_s + 0.001,
    }
    half = {
        "date": "2026-11-30",
        "tokens": 8192,
        "lines": [line | {"phase": phase, "median": 1e3 * s} for phase, s in phases.items()],
    }
    (tmp_path / "layers-moe.json").write_text(json.dumps(half))
    kernels = read_kernels(tmp_path)
    config = run()
    spec = next(s for s in unit_specs(config.model.dims) if s.kind is UnitKind.MOE)
    pieces = {p.name: p for p in unit_pieces(config, spec, "none", kernels)}
    assert set(pieces) == {"experts", "dispatch", "around the experts"}
    around = pieces["around the experts"]
    found = (around.forward_s, around.input_grad_s, around.weight_grad_s)
    assert found == pytest.approx((0.002, 0.003, 0.001))
    assert around.origin is Origin.MEASURED
    names = {p.name for p in unit_pieces(config, spec, "none", without)}
    assert names == {"experts", "dispatch", "dense", "streams and norms"}


def test_the_update_is_counted_by_its_rule_and_muon_s_products_outweigh_its_bytes():
    kinds = {"adamw": (), "muon": (), "sign_sgd": ("optim.clip_norm=default",)}
    rows = {
        kind: per_step_rows(run(f"optim.type={kind}", *more), KERNELS)[1]
        for kind, more in kinds.items()
    }
    assert {row.name for row in rows.values()} == {"optimizer"}
    assert rows["adamw"].seconds / rows["sign_sgd"].seconds == pytest.approx(28 / 12)
    by_bytes = rows["adamw"].seconds * 100 / 28
    # Three layers of an expert rank's experts, three matrices each, over the data ranks.
    config = run()
    dims, parallel = config.model.dims, config.parallel
    small, large = dims.expert_width, dims.hidden_size
    flops = 3 * 3 * dims.num_experts * 10 * (4 * small**2 * large + 2 * small**3)
    flops /= parallel.dp * parallel.ep
    assert rows["muon"].seconds == pytest.approx(by_bytes + flops / KERNELS.bf16_flops)
    assert flops / KERNELS.bf16_flops > 3 * by_bytes
