"""The pipeline bench: whole runs over gloo, what it concludes, and its stand-ins."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest
import simulated_cuda
import torch
from small_runs import CONFIG
from torch.distributed import HashStore
from transport_cases import assert_same_bits, payload

from ppruntime.launch import bench_pipeline
from ppruntime.launch.pipeline_bars import bars, cycle_seconds, line
from ppruntime.launch.pipeline_variants import parsed_kind, without_pairs
from ppruntime.launch.stand_ins import (
    HollowTransport,
    ObservedTransport,
    PacedTransport,
    Pacer,
    hollow_channels,
)
from ppruntime.profiling import MeasuredOp, MeasuredStep
from ppruntime.schedules import make
from ppruntime.schedules.costs import Costs
from ppruntime.schedules.timeline import simulate
from ppruntime.transports import copy_engine, local
from ppruntime.transports.base import Boundary, Channel, TensorSpec

RUN = (
    str(CONFIG),
    "pp.size=2",
    "train.seq_len=8",
    "train.micro_batch_size=1",
    "data.type=counting",
)


def _bench(rank, out):

    flags = ["--transports", "gloo,gloo+pairs", "--micro-batches", "4", "--more-micro-batches", ""]
    flags += ["--orders", "1f1b,dualpipe_v", "--steps", "1", "--out", out]
    assert bench_pipeline.main([*RUN, *flags]) == 0


@pytest.mark.long
@pytest.mark.slow
def test_every_transport_and_torchs_runtime_make_the_same_gradients(run_ranks, tmp_path):
    run_ranks(2, _bench, str(tmp_path / "out.json"), timeout_seconds=300)
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["complete"]
    texts = [bar["what"] for bar in record["bars"]]
    for order in ("1f1b", "dualpipe_v"):
        cases = {case["transport"]: case for case in record["cases"] if case["order"] == order}
        paired = ["gloo, pairs overlapped", "none, pairs overlapped"]
        own = [paired[0:1], paired[1:]] if order == "dualpipe_v" else [[], []]
        assert list(cases) == ["gloo", *own[0], "none", *own[1], "torch"]
        real, none, torchs = cases["gloo"], cases["none"], cases["torch"]
        if order == "1f1b":  # whose whole backwards torch runs in one piece too
            assert torchs["torch_gradient_digest"] == real["gradient_digest"]
        assert torchs["gradient_norm"] == pytest.approx(real["gradient_norm"], rel=1e-5)
        assert not none["gradient_digest"]
        for case in (real, none):
            assert sum(case["ranks"][0].values()) == pytest.approx(case["span_seconds_median"])
            assert line(case)
        assert f"{order}, M = 4, gloo: step over torch's" in texts
    bits = {bar["what"]: bar["is_met"] for bar in record["bars"] if "bits" in bar["what"]}
    assert list(bits.values()) == [True, True]  # losses and gradients, over orders too


FP8 = (
    *("model.name=tiny-v4", "model.num_layers=1", "model.compress_ratios=[0]"),
    *("model.num_hash_layers=0", "model.hidden_size=128", "model.expert_width=128"),
    *("model.num_experts=2", "model.experts_per_token=1", "pp.layers_per_stage=[0.5, 0.5]"),
    "moe.compute.backend=triton",
)


def _fp8_bench(rank, out):
    from ppruntime.experts.options import ExpertChoice
    from ppruntime.models.kernels.expert_backends import ExpertBackend

    # The recipe in torch: interpreted kernels take their time.
    bench_pipeline.choose_experts = lambda config: ExpertChoice(ExpertBackend.REFERENCE)
    flags = ["--transports", "gloo", "--micro-batches", "4", "--more-micro-batches", ""]
    flags += ["--orders", "1f1b,1f1b_w", "--steps", "1", "--fused-wgrads", "1,2"]
    assert bench_pipeline.main([*RUN, *FP8, *flags, "--no-torch", "--no-none", "--out", out]) == 0


@pytest.mark.long
@pytest.mark.slow
def test_weight_gradients_of_several_micro_batches_at_once_are_cases_with_the_same_bits(
    run_ranks, tmp_path
):
    run_ranks(2, _fp8_bench, str(tmp_path / "out.json"), timeout_seconds=300)
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["complete"]
    cases = {(case["order"], case["fused_wgrads"]): case for case in record["cases"]}
    assert list(cases) == [(o, n) for n in (1, 2) for o in ("1f1b", "1f1b_w")]
    for what in ("loss", "gradient"):
        digests = {c[f"{w}{what}_digest"] for c in cases.values() for w in ("first_", "")}
        assert len(digests) == 1
        assert "" not in digests
    assert cases["1f1b", 1]["peak_bytes"] == []  # nobody counts on a CPU
    assert "n 2" in line(cases["1f1b_w", 2])
    assert "1f1b_w, M = 4, n = 2, gloo: step over timeline" in {
        bar["what"] for bar in record["bars"]
    }


def test_overrides_stand_anywhere_and_the_run_file_may_be_left_out(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))

    args = bench_pipeline._parsed(["a.b=1", "--out", "x.json", "c.d=2", "--steps", "5", "e.f=3"])
    assert [Path(file).name for file in args.files] == ["v41-proxy-8.toml"]
    assert args.overrides == ["a.b=1", "c.d=2", "e.f=3"]
    args = bench_pipeline._parsed(["run.toml", "a.b=1", "--out", "x.json", "fast.toml"])
    assert (args.files, args.overrides, args.steps) == (["run.toml", "fast.toml"], ["a.b=1"], 3)
    assert args.fused_wgrads == [None]
    args = bench_pipeline._parsed(["--out", "x.json", "--fused-wgrads", "1,2"])
    assert args.fused_wgrads == [1, 2]


def _case(transport, *, cycle=0.01, step=0.2, order="1f1b", digest="a", ratio=1.0):
    return {
        "order": order,
        "transport": transport,
        "num_micro_batches": 16,
        "cycle_seconds": cycle,
        "step_seconds_median": step,
        "span_over_timeline": ratio,
        "gradient_digest": digest,
        "loss_digest": "l",
    }


def _values(cases):
    return {bar.what.removeprefix("1f1b, M = 16, "): bar for bar in bars(cases)}


def test_what_a_transport_loses_is_beyond_the_cycle_that_moves_nothing():
    none = _case("none", cycle=0.010, step=0.20, digest="")
    nccl, put = _case("nccl", cycle=0.013, step=0.26), _case("put", cycle=0.0115, step=0.22)
    torchs = {k: _case("torch", step=0.28)[k] for k in ("order", "transport", "num_micro_batches")}
    torchs |= {"step_seconds_median": 0.28}
    found = _values([nccl, put, none, torchs])
    lost = found["put: of the cycle that nccl loses to transfers"]
    assert (lost.value, lost.is_met) == (pytest.approx(0.5), False)
    assert found["put: step over torch's"].value == pytest.approx(0.22 / 0.28)
    exposed = found["put: exposed transfer over torch's"]
    assert (exposed.value, exposed.is_met) == (pytest.approx(0.25), True)
    assert not any("copy_engine" in what for what in found)  # what did not run has no bar


def test_a_slow_step_and_other_bits_miss_their_bars_and_refused_cases_say_nothing():
    refused = {"order": "1f1b", "transport": "put", "num_micro_batches": 16, "refused": "no NCCL"}
    found = _values([_case("nccl", ratio=1.03), _case("copy_engine", digest="b"), refused])
    assert not found["nccl: step over timeline"].is_met
    assert found["copy_engine: step over timeline"].is_met
    assert found["M = 16: different sets of gradient bits"].value == 2
    assert not found["M = 16: different sets of gradient bits"].is_met
    assert found["M = 16: different sets of loss bits"].is_met
    assert "refused: no NCCL" in line(refused)


def test_cases_by_number_of_fused_weight_gradients_have_bars_apart_and_one_set_of_bits():
    cases = [_case("put", cycle=0.011) | {"fused_wgrads": n} for n in (1, 2)]
    cases += [_case("none", cycle=0.010, digest="") | {"fused_wgrads": n} for n in (1, 2)]
    cases[1] |= {"first_gradient_digest": "other", "peak_bytes": [3 * 10**9, 2 * 10**9]}
    found = _values(cases)
    assert {"n = 1, put: step over timeline", "n = 2, put: step over timeline"} <= set(found)
    assert found["M = 16: different sets of gradient bits"].value == 2
    text = line(cases[1] | {"hop_ms": [0, 0], "bubble_fraction": 0, "host_seconds": 0})
    assert "n 2" in text
    assert "peak 3.00/2.00 GB" in text


def test_the_stand_in_compares_cycles_with_nccl_held_to_few_thread_blocks():
    found = _values([_case("nccl 2 CTAs", cycle=0.010), _case("put paced", cycle=0.0088)])
    assert found["put paced: cycle over that of nccl 2 CTAs"].value == pytest.approx(0.88)
    assert found["put paced: cycle over that of nccl 2 CTAs"].is_met


@pytest.mark.parametrize("name", ["1f1b", "1f1b_w", "dualpipe_v"])
def test_the_cycle_is_one_micro_batchs_time_in_the_middle_of_the_step(name):
    schedule = make(name, 2, 16)
    timeline = simulate(schedule, Costs.even(3, 4, 5, schedule.stage_to_rank))
    rows = [
        tuple(
            MeasuredOp(t.op, *(round(x * 1e6) for x in (t.start, t.start, t.finish))) for t in row
        )
        for row in timeline.rows
    ]
    assert cycle_seconds(MeasuredStep(schedule, tuple(rows))) == pytest.approx(12e-3, rel=0.05)


# Stand-ins


def _channel(id_, src, dst):
    boundary = Boundary(
        (TensorSpec("x", (5, 3), torch.float32), TensorSpec("i", (4,), torch.int32))
    )
    return Channel(id_, "forward", src, dst, id_, id_ + 1, boundary, slots=2)


def test_a_hollow_transport_hands_out_what_came_before_and_local_messages_as_they_are():
    channels = [_channel(0, 0, 1), _channel(1, 1, 1)]
    options = {"device": torch.device("cpu"), "timeout_seconds": 20}
    first, second = local.open_ranks(channels, 2, **options)
    observed = ObservedTransport(second)
    sent = payload(channels[0], 0, 1)
    first.send(channels[0], 0, sent)
    observed.post(channels[0], 0)
    observed.take(channels[0], 0)
    observed.release(channels[0], 0)
    first.step_end()
    observed.step_end()
    assert observed.enqueued_at > 0

    hollow = hollow_channels(channels)
    assert [c.boundary.num_bytes for c in hollow] == [0, channels[1].boundary.num_bytes]
    opened = local.open_ranks(hollow, 2, **options)
    first, second = (HollowTransport(t, channels, observed.contents) for t in opened)
    inside = payload(channels[1], 0, 2)
    second.send(channels[1], 0, inside)
    for channel, wanted in ((channels[0], sent), (channels[1], inside)):
        if channel.id == 0:
            first.send(channel, 0, payload(channel, 0, 99))  # its bytes go nowhere
        second.post(channel, 0)
        assert_same_bits(second.take(channel, 0), wanted, str(channel))
        second.release(channel, 0)
    first.step_end()
    second.step_end()


def test_a_paced_transport_carries_the_same_bits_in_order_later(monkeypatch):
    simulated_cuda.install(monkeypatch)
    channel = _channel(0, 0, 1)
    store, results, held = HashStore(), {}, []

    def work(rank):
        device = torch.device("cpu", rank)
        options = {"device": device, "timeout_seconds": 20.0, "store": store, "options": {}}
        inner = copy_engine.open([channel], rank, **options)

        def hold(seconds):
            stream = torch.cuda.current_stream()
            stream.do(lambda: held.append(seconds))

        transport = PacedTransport(inner, [channel], rank, device, seconds=0.25, hold=hold)
        for m in range(6):
            if rank == 0:
                transport.send(channel, m, payload(channel, m, 3))
            else:
                transport.post(channel, m)
                views = transport.take(channel, m)
                torch.cuda.current_stream().synchronize()
                assert_same_bits(views, payload(channel, m, 3), f"{m}")
                transport.release(channel, m)
        transport.step_end()
        transport.close()
        results[rank] = True

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: True, 1: True}
    assert held == [0.25] * 6


def test_a_pacer_copies_as_long_as_it_was_asked_to(monkeypatch):
    monkeypatch.setattr("ppruntime.launch.stand_ins._CALIBRATION_BYTES", 1 << 20)
    pacer = Pacer(torch.device("cpu"))
    assert pacer.bytes_per_second > 0
    copied, rng = [], random.Random(1)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other, **_: copied.append(len(other)))
    for seconds in (0.0, rng.uniform(1e-4, 1e-2)):
        copied.clear()
        pacer.hold(seconds)
        assert sum(copied) == int(seconds * pacer.bytes_per_second)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("put", "put", {}),
        ("nccl/4", "nccl 4 CTAs", {"transport_ctas": 4}),
        ("nccl@0", "nccl lead 0", {"recv_lead": 0}),
        ("nccl/16@2", "nccl 16 CTAs lead 2", {"transport_ctas": 16, "recv_lead": 2}),
    ],
)
def test_a_transport_may_come_with_its_thread_blocks_and_how_early_it_receives(kind, name, options):
    variant = parsed_kind(kind)
    assert (variant.full_name, variant.options) == (name, options)
    assert kind.startswith(variant.kind)
    assert without_pairs(name) == (name, "")


@pytest.mark.parametrize(
    ("kind", "name", "keys"),
    [
        ("put+pairs", "put, pairs overlapped", ["pp.overlap_pairs=true"]),
        (
            "nccl/4+pairs:88:44",
            "nccl 4 CTAs, pairs overlapped 88/44",
            ["pp.overlap_pairs=true", "pp.pair_gemm_sms=[88, 44]"],
        ),
    ],
)
def test_a_transport_may_come_with_pairs_that_overlap(kind, name, keys):
    variant = parsed_kind(kind)
    assert (variant.full_name, variant.pairs.keys) == (name, keys)
    plain, pairs = without_pairs(name)
    assert plain + pairs == name
    assert variant.standing_still().full_name == f"none{pairs}"


@pytest.mark.parametrize("kind", ["nccl/x", "put+pairs:88", "+pairs"])
def test_another_word_for_a_transport_is_refused(kind):
    with pytest.raises(SystemExit, match=r"write KIND, KIND/BLOCKS, KIND@LEAD or both, with \+pai"):
        parsed_kind(kind)


def test_pairs_that_overlap_are_held_against_halves_in_turn_and_against_their_own_rest():
    cases = [
        _case("put", cycle=0.012, step=0.2),
        _case("none", cycle=0.010),
        _case("put, pairs overlapped", cycle=0.009, step=0.21),
        _case("none, pairs overlapped", cycle=0.008),
        _case("put, pairs overlapped 66/66", cycle=0.015, step=0.3, digest="b"),
    ]
    found = {bar.what.removeprefix("1f1b, M = 16"): bar for bar in bars(cases)}
    ratio = found[", pairs overlapped, put: cycle over that of halves in turn"]
    assert (ratio.value, ratio.is_met) == (pytest.approx(0.75), True)
    step = found[", pairs overlapped, put: step over that of halves in turn"]
    assert (step.value, step.is_met) == (pytest.approx(1.05), False)
    slow = found[", pairs overlapped 66/66, put: cycle over that of halves in turn"]
    assert slow.value == pytest.approx(1.25)
    assert ", pairs overlapped, none: cycle over that of halves in turn" in found
    assert not found["M = 16: different sets of gradient bits"].is_met


def test_nccl_with_few_thread_blocks_stands_for_it_where_it_ran_no_other_way():
    cases = [
        _case("none", cycle=0.01),
        _case("put", cycle=0.011),
        _case("nccl 4 CTAs", cycle=0.014),
    ]
    found = _values(cases)
    assert found["put: of the cycle that nccl 4 CTAs loses to transfers"].value == pytest.approx(
        0.25
    )
    found = _values([*cases, _case("nccl", cycle=0.02)])
    assert found["put: of the cycle that nccl loses to transfers"].value == pytest.approx(0.1)
