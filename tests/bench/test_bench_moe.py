"""The bench of experts over ranks: its variants are configs that load, and it runs without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from fp8_cases import DEVICE

from ppruntime.config import ConfigError, load
from ppruntime.launch.bench_moe_pairs import USUAL, splits
from ppruntime.launch.bench_moe_ranks import _BASE, chosen, variants
from ppruntime.launch.bench_moe_shapes import SHAPES, gemm_shapes, kernel_runs, routings

SMALL = (
    "model.hidden_size=128",
    "model.expert_width=128",
    "model.num_experts=8",
    "train.seq_len=32",
)


def test_every_variant_is_a_config_of_its_own_and_the_first_is_the_yardstick():
    found = list(variants(132))
    assert len({v.name for v in found}) == len(found)
    assert found[0].name == "bf16 grouped + all-to-all"
    assert {"deep_gemm + deep_ep, FP8 rows, n=2", "bf16 grouped + deep_ep"} <= {
        v.name for v in found
    }
    base = ("pp.size=1", "parallel.ep=2", "model.name=v41-flash", "model.num_experts=96")
    for variant in found:
        if "mega_moe" in variant.name:
            continue
        try:
            config = load([_BASE], [*base, *variant.overrides])
        except ConfigError as error:
            raise AssertionError(f"{variant.name}: {error}") from error
        assert config.model.dims.num_experts == 96


def test_shapes_have_the_rows_and_experts_that_a_rank_of_so_many_gets():
    made = routings("cpu")
    assert tuple(made) == SHAPES
    rows = {
        name: torch.bincount(shape.experts_NK.flatten(), minlength=shape.num_experts).tolist()
        for name, shape in made.items()
    }
    assert rows["balanced"] == rows["ep8"] == [1024] * 48
    assert rows["ep48"] == [12_288] * 8
    assert rows["ep96"] == [24_576] * 4
    assert len(rows["random"]) == 48
    assert sum(rows["random"]) == 49_152


def _compiled(shapes):
    """What is run beforehand, by kind: sizes, numbers of experts, and for weight gradients of how
    many micro-batches."""
    gemms, grads, layers = [], [], []
    for run in kernel_runs(shapes, DEVICE):
        if run.func.__name__ == "_run_gemm":
            _, shape, layout = run.args
            gemms.append((shape, len(layout.count_E)))
        elif run.func.__name__ == "_run_weight_grads":
            _, shape, layout, counts, *_ = run.args
            grads += [(shape, len(layout.count_E), count) for count in counts]
        elif run.func.__name__ == "_run_layer":
            layers.append(run.args)
    return gemms, grads, layers


@pytest.mark.skipif(DEVICE == "cuda", reason="deep_gemm's runs would be among them")
def test_kernels_are_compiled_beforehand_for_the_shapes_asked_for_and_for_these_alone():
    """Triton has another kernel where 16 does not divide the number of experts."""
    gemms, grads, layers = _compiled(["ep48", "ep96"])
    assert sorted(shape for shape, _ in gemms) == sorted(gemm_shapes().values())
    assert {num % 16 == 0 for _, num in gemms} == {num % 16 == 0 for _, num, _ in grads} == {False}
    assert {count for *_, count in grads} == {1, 2, 4}
    assert [tiles for _, tiles in layers] == [False, True]
    of_all = _compiled(SHAPES)
    assert {num % 16 == 0 for _, num in of_all[0]} == {True, False}
    assert len(of_all[1]) > 2 * len(grads)
    assert len(of_all[2]) == 4


@pytest.mark.long
def test_it_runs_on_two_processes_without_gpus_and_notes_what_it_leaves_out(tmp_path):
    out = tmp_path / "moe.json"
    command = [sys.executable, "-m", "ppruntime.launch.bench_moe", "--ranks", "2"]
    run = subprocess.run(
        [*command, "--repetitions", "1", "--out", str(out), *SMALL],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        # Other tests interpret kernels; here that would be a bench of the interpreter.
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert run.returncode == 0, run.stderr
    record = json.loads(out.read_text())
    assert record["complete"]
    assert all(check["passed"] for check in record["checks"])
    again = "bf16 grouped + all-to-all: dW differs in a second run"
    assert again in [check["check"] for check in record["checks"]]
    rows = {(row["phase"], row["variant"]): row for row in record["rows"]}
    assert rows["fwd + bwd", "bf16 grouped + all-to-all (1 micro-batches)"]["median_ms"] > 0
    assert rows["dispatch", "torch, bf16 rows"]["num_bytes"] > 0
    assert any("deep_ep" in note for note in record["notes"])


@pytest.mark.long
def test_pairs_run_on_two_processes_without_gpus_in_turn(tmp_path):
    out, variant = tmp_path / "moe.json", "bf16 grouped + all-to-all"
    command = [sys.executable, "-m", "ppruntime.launch.bench_moe", "--ranks", "2"]
    options = ["--repetitions", "1", "--pairs", "--only", variant, "--out", str(out)]
    run = subprocess.run(
        [*command, *options, *SMALL], capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stderr
    record = json.loads(out.read_text())
    assert record["complete"]
    phases = [row["phase"] for row in record["rows"]]
    assert phases == ["in turn", "132/132", "66/66", "88/44", "44/88"]
    assert len(record["checks"]) == 2 * 4
    assert all(check["passed"] for check in record["checks"])
    assert f"{variant}, pairs on 66/66: " in "".join(record["notes"])


def test_halves_that_must_share_the_gpu_are_never_given_more_than_it_has():
    assert splits(132, must_share=False)[0] == (132, 132)
    for way in splits(132, must_share=True):
        assert sum(way) <= 132
    assert {variant.name for variant in chosen(132, USUAL)} == set(USUAL)


def test_variants_are_chosen_by_name_and_a_wrong_name_is_refused():
    assert chosen(132, ()) == list(variants(132))
    (found,) = chosen(132, ["triton, mega_moe"])
    assert found.name == "triton, mega_moe"
    with pytest.raises(SystemExit, match=r"no variant is called \['mega_moe'\]; there are\nbf16"):
        chosen(132, ["triton, mega_moe", "mega_moe"])
