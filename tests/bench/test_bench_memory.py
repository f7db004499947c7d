"""The bench of memory knobs: its rows can be run and fit, what it concludes, runs over gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from memory_knobs import SHALLOW
from small_runs import CONFIG

from ppruntime.config import ConfigError, load
from ppruntime.launch import bench_memory
from ppruntime.launch.memory_bars import bars, line, notes, planned_ratios
from ppruntime.launch.memory_cases import (
    H200_BYTES,
    KNOBS,
    ONE_IN_TWO,
    cases_of,
    layout_sizes,
    plan_of,
    planned_peak,
    refusal,
    runs_of,
)
from ppruntime.launch.memory_worker import Training, Workers, WorkersLost
from ppruntime.plan_report import report

PROXY = str(Path(bench_memory.__file__).parent / "configs" / "v41-proxy-8.toml")
BASE = ("pp.size=1", "pp.schedule=async_1f1b", "pp.warmup_step=[5]", "train.num_micro_batches=12")


@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_of_the_bench_can_be_run_and_the_plan_says_what_it_saves(knob):
    base = (*BASE, "moe.compute.backend=triton")
    off = report(load([PROXY], base)).ranks[0]
    plan = report(load([PROXY], [*base, *KNOBS[knob]])).ranks[0]
    goes_to_host = any(word in knob for word in ("offload", "masters", "one in two"))
    assert (plan.host_bytes > 0) == (goes_to_host and "FP8" not in knob)
    keeps_more = ("no recomputation", "of two")  # instead of the time of another forward, of sums
    if any(word in knob for word in keeps_more):
        assert plan.total_bytes > off.total_bytes or "offload" in knob
    elif knob not in ("off", "offload", "weight gradients apart"):
        assert plan.total_bytes < off.total_bytes


@pytest.mark.parametrize("layout", ["one", "pp2", "dp2"])
def test_without_knobs_8k_tokens_fit_an_h200_and_more_do_not(layout):
    cases = cases_of(layout)
    assert [case.seq_len for case in cases] == [8192, 16384, 24576]
    for case in cases:
        off, *others = runs_of(case, [PROXY])
        plan = plan_of(off.config)
        if case.seq_len == 8192:
            assert not refusal(plan, H200_BYTES)
        else:
            assert planned_peak(plan) > H200_BYTES, "off might run after all"
            assert "GB" in refusal(plan, H200_BYTES)
        for run in others:
            fits = plan_of(run.config)
            assert not refusal(fits, H200_BYTES), run.name
            assert planned_peak(fits) <= planned_peak(plan)
    assert any(run.is_exact for case in cases for run in runs_of(case, [PROXY])[1:])


def test_a_knob_is_exact_unless_it_rounds_or_changes_the_optimizer():
    (case,) = cases_of("pp2", [8192])
    exact = {run.knob: run.is_exact for run in runs_of(case, [PROXY], only=tuple(KNOBS))}
    assert {knob for knob, is_exact in exact.items() if not is_exact} == {
        "offload as FP8",
        "SignSGD",
        "SignSGD in the backward",
    }
    (case,) = cases_of("one", [8192])  # whose off is SignSGD's
    exact = {run.knob: run.is_exact for run in runs_of(case, [PROXY], only=tuple(KNOBS))}
    assert [knob for knob, is_exact in exact.items() if not is_exact] == ["offload as FP8"]


@pytest.mark.parametrize("layout", ["two", "pp1", "dp", "pp2dp2"])
def test_a_layout_of_another_name_is_refused(layout):
    with pytest.raises(ConfigError, match="one, ppN or dpN"):
        layout_sizes(layout)


def test_bigger_layouts_have_the_same_rows_over_more_ranks():
    for layout, sizes in (("pp4", (4, 1)), ("dp8", (1, 8))):
        assert layout_sizes(layout) == sizes
        for case in cases_of(layout):
            for run in runs_of(case, [PROXY]):
                assert run.num_ranks == max(sizes)


# What the record says.


def _rank(rank, peak, *, pp_rank=0, reserved=None):
    return {
        "rank": rank,
        "pp_rank": pp_rank,
        "peak_bytes": peak,
        "peak_op": "0B0",
        "reserved_bytes": reserved or peak + 10,
        "slack_bytes": 10,
        "host_bytes": 0,
        "resting_parameters": 400,
        "optimizer": 800,
        "left_over_bytes": 0,
    }


def _row(knob, *, seconds=1.0, planned=1000, ranks=None, losses=(2.0, 1.5), exact=True, **more):
    plan = {"rank": 0, "peak_bytes": planned, "resting_parameters": 404, "optimizer": 800}
    return {
        "name": f"dp2, {knob}",
        "case": "dp2",
        "knob": knob,
        "is_exact": exact,
        "plan": {
            "ranks": [plan],
            "offload": "offload: all of it",
            "flops_per_step": 100e12,
            "hidden_up_to_flops_per_s": 200e12,
        },
        "refused": "",
        "failure": "",
        "step_seconds": [seconds, seconds],
        "losses": list(losses),
        "grad_norms": [1.0] * len(losses),
        "ranks": ranks or [_rank(0, 1000), _rank(1, 1000)],
    } | more


def _verdicts(rows, copies=None):
    return {bar.what: bar.is_met for bar in bars(rows, copies or {})}


def test_a_plan_that_is_off_by_more_than_3_percent_on_any_rank_misses_its_bar():
    row = _row("off", ranks=[_rank(0, 1029), _rank(1, 960)])
    assert planned_ratios(row) == [1000 / 1029, 1000 / 960]
    found = _verdicts([row])
    what = "dp2, off, rank {}: planned over measured peak, off by"
    assert (found[what.format(0)], found[what.format(1)]) == (True, False)
    assert found["parameters between steps: planned over measured, worst row off by"]


def test_an_exact_knob_with_one_other_bit_misses_its_bar_and_an_inexact_one_has_none():
    told = "dp2, {}: steps with other losses or norms than off"
    rows = [_row("off"), _row("masters", losses=(2.0, 1.5000000001)), _row("offload")]
    found = _verdicts([*rows, _row("SignSGD", losses=(2.0, 1.4), exact=False)])
    assert (found[told.format("masters")], found[told.format("offload")]) == (False, True)
    assert told.format("SignSGD") not in found
    assert "other losses" in line(rows[1], rows)


def test_one_in_two_costs_at_most_3_percent_where_the_link_is_fast_enough_by_the_plan():
    off = _row("off")
    what = f"dp2, {ONE_IN_TWO}: step beyond off's"
    for seconds, met in ((1.029, True), (1.031, False)):
        assert _verdicts([off, _row(ONE_IN_TWO, seconds=seconds)])[what] == met
    slow = _row(ONE_IN_TWO, seconds=1.5)
    slow["plan"] |= {"hidden_up_to_flops_per_s": 99e12}
    assert what not in _verdicts([off, slow])
    assert (
        any("the link does not hide it: offload: all of it" in text for text in notes([slow]))
        is False
    )
    assert any("the link does not hide it: offload: all" in text for text in notes([off, slow]))


def test_copies_beside_a_matmul_are_asked_for_45_gb_per_second():
    rates = {
        "GB/s to the host, alone": 20.0,
        "GB/s to the host, beside a matmul": 54.0,
        "GB/s both at once, each, beside a matmul": 44.9,
        "matmuls beside both copies, % of alone": 100.5,
    }
    assert _verdicts([], rates) == {
        "GB/s to the host, beside a matmul": True,
        "GB/s both at once, each, beside a matmul": False,
    }
    assert "at least 45" in str(bars([], rates)[0])


def test_a_row_that_runs_where_off_does_not_is_told_and_has_no_bar_of_bits():
    off = _row("off", refused="does not fit: planned with 153.0 GB", ranks=[], step_seconds=[])
    rows = [off, _row("masters")]
    assert notes(rows) == [
        "dp2, masters: runs where off does not (does not fit: planned with 153.0 GB)"
    ]
    assert not any("losses" in what for what in _verdicts(rows))
    assert "does not fit: planned with 153.0 GB" in line(off, rows)
    left = _rank(0, 1000) | {"left_over_bytes": 1 << 30}
    assert notes([_row("off", ranks=[left])]) == [
        "dp2, off: 1.07 GB of earlier rows were still there"
    ]


def _measurements():
    """docs/make_measurements.py, which no package holds."""
    path = Path(__file__).resolve().parents[2] / "docs" / "make_measurements.py"
    spec = importlib.util.spec_from_file_location("make_measurements", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_measurements_page_has_a_row_a_knob_with_ratios_and_what_missed():
    about = {"num_experts": 8, "num_micro_batches": 5, "in_flight": 4, "optimizer": "adamw"}
    ranks = [_rank(0, 1_000_000_000), _rank(1, 800_000_000)]
    off = _row("off", planned=1_010_000_000, ranks=ranks, **about)
    rows = [off, _row("masters", seconds=1.2, planned=1_000_000_000, ranks=ranks, **about)]
    rows.append(_row("offload", failure="rank 1: OutOfMemoryError: none left\nmore", **about))
    copies = {"GB/s back, beside a matmul": 40.0}
    found = [dataclasses.asdict(bar) for bar in bars(rows, copies)]
    record = {"model": "m", "rows": rows, "copies": copies, "bars": found, "notes": ["a note"]}
    page = _measurements().memory(record)
    for text in (
        "dp2: 8 experts, 5 micro-batches, 4 in flight, adamw",
        "| off | 1,000.0 | 1.000 | 1.0, 0.8 | 1.010, 1.262 | 0.0, 0.0 | 0.0, 0.0 |",
        "| masters | 1,200.0 | 1.200 | 1.0, 0.8 | 1.000, 1.250 | 0.0, 0.0 | 0.0, 0.0 |",
        "| offload | rank 1: OutOfMemoryError: none left | - |",
        "- 2 of 4 peaks within 3 % of the plan",
        "- MISSED: dp2, off, rank 1: planned over measured peak, off by: 0.2625, at most 0.03",
        "- MISSED: GB/s back, beside a matmul: 40, at least 45",
        "- met: dp2, masters: steps with other losses or norms than off: 0, at most 0",
        "- a note",
    ):
        assert text in page, text


# Whole runs over gloo.

TINY = (
    "model.num_experts=8",
    "train.seq_len=16",
    "train.micro_batch_size=1",
    "train.precision=bf16",
    "data.type=counting",
    "optim.warmup_steps=1",
)
ON_CPU = (str(CONFIG), "--device", "cpu", "--tokens", "8192", "--steps", "1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_of_several_layouts_run_one_after_another_and_have_what_is_planned(tmp_path):
    out = tmp_path / "memory.json"
    knobs = ["--only", "masters", "--only", "SignSGD in the backward"]
    asked = [*ON_CPU, *TINY, "--layouts", "pp2,dp2", *knobs, "--out", str(out)]
    assert bench_memory.main(asked) == 0
    record = json.loads(out.read_text())
    assert record["complete"]
    rows = {row["name"]: row for row in record["rows"]}
    assert len(rows) == 6
    for row in rows.values():
        assert len(row["ranks"]) == 2
        assert len(row["losses"]) == 2
        assert len(row["step_seconds"]) == 1
        last = row["ranks"][0]["ops"][-2:]
        assert ", planned" in last[0]
        assert last[1].startswith("update: live")
        assert (row["ranks"][0]["host_bytes"] > 0) == (row["knob"] == "masters")
    assert [r["pp_rank"] for r in rows["pp2, 16 tokens, off"]["ranks"]] == [0, 1]
    assert [r["pp_rank"] for r in rows["dp2, 16 tokens, off"]["ranks"]] == [0, 0]
    found = {bar["what"]: bar for bar in record["bars"]}
    assert sum("planned over measured peak" in what for what in found) == 12
    assert sum("than off" in what for what in found) == 2
    page = _measurements().memory(record)
    assert page.count("| masters |") == 2
    assert "- 12 of 12 peaks within 3 % of the plan" in page
    assert all(bar["is_met"] for bar in found.values()), record["bars"]


def _training(number, *overrides):
    (case,) = cases_of("pp2", [8192])
    run = runs_of(
        case, [str(CONFIG)], [*TINY, *SHALLOW, *overrides], device="cpu", only=["masters"]
    )[0]
    return Training(run.name, number, 2, 1, (str(CONFIG),), run.overrides, 1, draw_on_device=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_fails_or_dies_ends_the_others_although_they_wait_for_it(tmp_path):
    workers = Workers(2, use_cuda=False)
    assert len(workers.train(_training(0), 100)) == 2
    doomed = threading.Timer(1.5, lambda: os.kill(workers._processes[1].pid, signal.SIGKILL))
    doomed.start()
    start = time.monotonic()
    with pytest.raises(WorkersLost, match="rank 1: it died, exit code -9"):
        workers.train(_training(1, "train.num_micro_batches=400"), 100)
    assert time.monotonic() - start < 30, "it waited for the limit"
    assert not any(process.is_alive() for process in workers._processes)
    with pytest.raises(WorkersLost, match="ended before it was asked"):
        workers.train(_training(2), 10)
    workers = Workers(2, use_cuda=False)
    with pytest.raises(WorkersLost, match="gave no answer in time"):
        workers.train(_training(3, "train.num_micro_batches=4000"), 4)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_row_that_fails_says_why_and_the_next_one_goes_on(tmp_path):
    out = tmp_path / "memory.json"
    nowhere = ["data.type=tokens", f"data.path={tmp_path / 'none'}"]
    words = [*ON_CPU, *TINY, *SHALLOW]
    asked = [*words, *nowhere, "--layouts", "one", "--only", "masters", "--out", str(out)]
    assert bench_memory.main(asked) == 1
    record = json.loads(out.read_text())
    assert [row["knob"] for row in record["rows"]] == ["off", "masters"]
    assert all("none" in row["failure"] for row in record["rows"])
    assert record["bars"] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bench_that_is_told_to_end_leaves_its_record_and_no_process(tmp_path):
    out = tmp_path / "memory.json"
    command = [sys.executable, "-m", "ppruntime.launch.bench_memory", *ON_CPU, *TINY, *SHALLOW]
    with subprocess.Popen(
        [*command, "--layouts", "pp2", "--only", "masters", "--out", str(out)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("pp2, 16 tokens, off")
        os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does: to all of them
        process.communicate(timeout=60)
    record = json.loads(out.read_text())
    assert record["rows"][0]["losses"]
    assert not record["complete"]
    deadline = time.monotonic() + 20
    while alive := _living(process.pid):
        assert time.monotonic() < deadline, f"processes {alive} go on"
        time.sleep(0.05)


def _living(group):
    """Processes of a process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def test_no_row_is_begun_after_the_limit(tmp_path):
    out = tmp_path / "memory.json"
    asked = [*ON_CPU, *TINY, "--layouts", "one", "--only", "masters", "--limit-seconds", "0"]
    assert bench_memory.main([*asked, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert not record["complete"]
    assert all("the limit was over" in row["refused"] for row in record["rows"])
    assert "not run, as the limit was over: one" in record["notes"][-1]
