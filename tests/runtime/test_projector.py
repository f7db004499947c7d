"""The arithmetic of projection: closed forms, round trips, and every published row to be met."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.metrics import mfu as measured_mfu
from ppruntime.models.dims import counts, preset
from ppruntime.projection.projector import (
    Interruptions,
    Job,
    Origin,
    ProjectionError,
    mtbf_s,
    training_flops_per_token,
    weakest,
)

ACTIVE = counts(preset("v41-flash")).active_matmul_parameters
RECORD = {  # PP16 x EP8, 320 micro-batches of 8,192 tokens a GPU, on 12 and 8 pipelines
    1536: 320 * 8192 * 8 * 12,
    1024: 320 * 8192 * 8 * 8,
}


def job(gpus: int, batch: float, tokens: float = 20e12) -> Job:
    return Job(
        flops_per_token=training_flops_per_token(ACTIVE),
        total_tokens=tokens,
        num_gpus=gpus,
        gpu_flops=989e12,
        global_batch_tokens=batch,
    )


def interval(printed: str, scale: float = 1.0) -> tuple[float, float]:
    """The values that round to what is printed."""
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return (float(printed) - half) * scale, (float(printed) + half) * scale


def common(*intervals: tuple[float, float]) -> tuple[float, float]:
    """What lies in all of them; an end may come first."""
    low = max(min(pair) for pair in intervals)
    high = min(max(pair) for pair in intervals)
    assert low < high, f"no value lies in all of {intervals}"
    return low, high


# Closed forms


def test_the_active_parameters_are_the_published_ones():
    assert round(ACTIVE / 1e9, 2) == 16.13


def test_days_step_and_gpu_hours_are_the_formulas():
    pace = job(1536, RECORD[1536]).at_mfu(0.2894)
    flops = 6 * ACTIVE
    assert pace.days == pytest.approx(flops * 20e12 / (0.2894 * 989e12 * 1536) / 86400, rel=1e-14)
    assert pace.step_s == pytest.approx(flops * RECORD[1536] / (0.2894 * 989e12 * 1536), rel=1e-14)
    assert pace.gpu_hours == pytest.approx(pace.days * 24 * 1536, rel=1e-14)
    assert f"{pace.days:.1f}" == "51.0"


def test_mfu_is_what_a_run_measures():
    pace = job(1536, RECORD[1536]).at_step_s(47.2)
    run = measured_mfu(
        pace.tokens_per_s, flops_per_token=6 * ACTIVE, num_devices=1536, device_flops=989e12
    )
    assert pace.mfu == pytest.approx(run, rel=1e-14)


@given(
    mfu=st.floats(1e-3, 2.0),
    gpus=st.integers(1, 100_000),
    batch=st.floats(1e3, 1e10),
    tokens=st.floats(1e6, 1e15),
    active=st.floats(1e6, 1e13),
    peak=st.floats(1e10, 1e16),
)
def test_every_direction_leads_back(mfu, gpus, batch, tokens, active, peak):
    here = Job(
        flops_per_token=training_flops_per_token(active),
        total_tokens=tokens,
        num_gpus=gpus,
        gpu_flops=peak,
        global_batch_tokens=batch,
    )
    pace = here.at_mfu(mfu)
    again = (
        here.at_mfu(pace.mfu),
        here.at_step_s(pace.step_s),
        here.at_days(pace.days),
        here.at_tokens_per_s(pace.tokens_per_s),
    )
    for other in again:
        assert other.mfu == pytest.approx(mfu, rel=1e-12)
        assert other.days == pytest.approx(pace.days, rel=1e-12)
        assert other.step_s == pytest.approx(pace.step_s, rel=1e-12)


@given(active=st.floats(1e6, 1e13), frozen=st.floats(0, 1), adapters=st.floats(0, 1e9))
def test_frozen_parameters_count_four_and_adapters_six(active, frozen, adapters):
    cost = training_flops_per_token(active, frozen=frozen * active, adapters=adapters)
    expected = 6 * active * (1 - frozen) + 4 * active * frozen + 6 * adapters
    assert cost == pytest.approx(expected, rel=1e-12)


def test_lora_on_a_frozen_model_is_two_thirds_and_its_adapters():
    assert training_flops_per_token(3e9, frozen=3e9, adapters=1e8) == 4 * 3e9 + 6 * 1e8
    assert training_flops_per_token(3e9) == 18e9


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: training_flops_per_token(0), "active parameters is 0; give a number above 0"),
        (
            lambda: training_flops_per_token(1e9, frozen=2e9),
            "2e+09 frozen of 1e+09 active parameters is not a share of them; give 0 to 1e+09",
        ),
        (
            lambda: training_flops_per_token(1e9, adapters=-1),
            "-1 adapter parameters is no count; give 0 or more",
        ),
        (lambda: job(0, 1e6), "num_gpus is 0; give a number above 0"),
        (lambda: job(8, 1e6).at_mfu(math.nan), "MFU is nan; give a number above 0"),
        (lambda: job(8, 1e6).at_days(-1), "days is -1; give a number above 0"),
        (lambda: mtbf_s(0, 8), "failures per GPU-hour is 0; give a number above 0"),
    ],
)
def test_what_is_no_number_is_refused_with_the_remedy(call, text):
    with pytest.raises(ProjectionError) as caught:
        call()
    assert str(caught.value) == text


def test_the_weakest_origin_wins():
    assert weakest(Origin.MEASURED, Origin.MODELLED) is Origin.MODELLED
    assert weakest(Origin.ASSUMED, Origin.MEASURED, Origin.MODELLED) is Origin.ASSUMED


# Published rows: emulated PP16


EMULATED = [  # MFU, days on 1,536 and on 1,024 GPUs
    ("28.9", "51.0", "76.4"),
    ("34.0", "43.4", "65.1"),
    ("31.6", "46.7", "70.0"),
    ("31.6", "46.7", "70.0"),
]


def emulated_mfu(mfu: str, days_1536: str, days_1024: str) -> tuple[float, float]:
    """The unrounded MFUs from which all three printed numbers come, as shares."""
    return common(
        interval(mfu, 0.01),
        *(
            tuple(job(gpus, RECORD[gpus]).at_days(end).mfu for end in interval(days))
            for gpus, days in ((1536, days_1536), (1024, days_1024))
        ),
    )


@pytest.mark.parametrize("row", EMULATED)
def test_an_unrounded_mfu_gives_both_columns_of_the_emulated_table(row):
    low, high = emulated_mfu(*row)
    mfu = (low + high) / 2
    assert f"{100 * mfu:.1f}" == row[0]
    for gpus, days in zip((1536, 1024), row[1:], strict=True):
        assert f"{job(gpus, RECORD[gpus]).at_mfu(mfu).days:.1f}" == days


def test_the_printed_mfu_alone_misses_one_day_figure():
    """So the published days come from MFUs that were not rounded."""
    missed = [
        (mfu, gpus)
        for mfu, *days in EMULATED
        for gpus, printed in zip((1536, 1024), days, strict=True)
        if f"{job(gpus, RECORD[gpus]).at_mfu(float(mfu) / 100).days:.1f}" != printed
    ]
    assert missed == [("28.9", 1024)]


def test_two_decimals_of_the_unrounded_mfus():
    assert [f"{100 * sum(emulated_mfu(*row)) / 2:.2f}" for row in EMULATED[:3]] == [
        "28.94",
        "33.98",
        "31.60",
    ]


def test_cycles_of_the_emulated_rows_are_those_of_their_difference():
    """24.3 ms are 14.9 % of a cycle; M + P - 1 cycles and a constant make the step of both rows."""
    constants = {}
    lost, share = interval("24.3", 1e-3), interval("14.9", 0.01)
    nccl = (lost[0] / share[1], lost[1] / share[0])
    for name, row, cycle in (
        ("nccl", EMULATED[0], nccl),
        ("put", EMULATED[1], (nccl[0] - lost[0], nccl[1] - lost[1])),
    ):
        mfus = emulated_mfu(*row)
        steps = sorted(job(1536, RECORD[1536]).at_mfu(mfu).step_s for mfu in mfus)
        constants[name] = (steps[0] - 335 * cycle[1], steps[1] - 335 * cycle[0])
    low, high = common(*constants.values())
    assert 0.3 < low < 0.6 < high < 1.1


def test_the_projected_baseline_of_the_80_gb_row():
    """31.6 % is printed as 1.2 points over 30.4 %."""
    common(interval("31.6"), tuple(30.4 + end for end in interval("1.2")))
    gain = job(1536, 1e6).at_mfu(0.304).step_s / job(1536, 1e6).at_mfu(0.316).step_s
    assert round(100 * (gain - 1), 1) == 3.9


# Published rows: spread routing, 16,384 tokens a GPU, one micro-batch


def spread(gpus: int) -> Job:
    return job(gpus, 16384 * gpus)


def test_the_ideal_row_is_exact():
    low, high = common(
        interval("47.3", 0.01), tuple(spread(1000).at_step_s(end).mfu for end in interval("3.39"))
    )
    assert f"{spread(1000).at_mfu((low + high) / 2).step_s:.2f}" == "3.39"


SPREAD = [  # MFU, days; about
    (37.0, 62.0),
    (39.4, 57.6),
    (47.3, 48.0),
]


@pytest.mark.parametrize(("mfu", "days"), SPREAD)
def test_the_spread_rows_are_within_two_percent_on_a_thousand_gpus(mfu, days):
    assert spread(1000).at_mfu(mfu / 100).days == pytest.approx(days, rel=0.02)
    assert spread(1000).at_days(days).mfu == pytest.approx(mfu / 100, rel=0.02)


@pytest.mark.parametrize(("mfu", "days"), SPREAD)
def test_1k_gpus_are_not_1024(mfu, days):
    assert abs(spread(1024).at_mfu(mfu / 100).days / days - 1) > 0.02


def test_the_ep64_row_is_within_two_percent():
    assert spread(1000).at_step_s(4.3).mfu == pytest.approx(0.37, rel=0.02)


def test_what_is_not_a_layer_takes_the_same_in_every_spread_row():
    """Step minus 40 marginal layers: head, embedding, optimizer. The EP48 row prints no step."""
    steps = [4.3, spread(1000).at_mfu(0.394).step_s, 3.39]
    rest = [step - 40 * layer for step, layer in zip(steps, (0.104, 0.0967, 0.0803), strict=True)]
    assert all(0.13 < seconds < 0.21 for seconds in rest)


# Published rows: 12 x 8 H200, 16,384 tokens a GPU


TWELVE_NODES = [
    ("9.3", "170"),
    ("5.65", "278"),
    ("5.1", "308"),
    ("4.9", "321"),
    ("4.8", "327"),
    ("4.7", "334"),
]


@pytest.mark.parametrize(("step", "thousands"), TWELVE_NODES)
def test_an_unrounded_step_gives_both_columns_of_the_twelve_node_table(step, thousands):
    here = job(96, 16384 * 96)
    low, high = common(
        interval(step),
        tuple(here.at_tokens_per_s(end).step_s for end in interval(thousands, 1e3)),
    )
    pace = here.at_step_s((low + high) / 2)
    assert f"{pace.step_s:.{len(step.partition('.')[2])}f}" == step
    assert f"{pace.tokens_per_s / 1e3:.0f}" == thousands
    back = here.at_mfu(pace.mfu)
    assert f"{back.tokens_per_s / 1e3:.0f}" == thousands
    assert here.at_days(pace.days).step_s == pytest.approx(pace.step_s, rel=1e-12)


def test_three_printed_steps_of_the_twelve_node_table_are_rounded():
    here = job(96, 16384 * 96)
    missed = [
        (step, f"{here.at_step_s(float(step)).tokens_per_s / 1e3:.0f}")
        for step, thousands in TWELVE_NODES
        if f"{here.at_step_s(float(step)).tokens_per_s / 1e3:.0f}" != thousands
    ]
    assert missed == [("9.3", "169"), ("4.8", "328"), ("4.7", "335")]


# Failures


def simulated_share(model: Interruptions, segments: int, seed: int) -> float:
    """Plays training with failures, second by second of its own model."""
    draw = random.Random(seed)
    assert model.interval_s is not None
    spent = 0.0
    for _ in range(segments):
        while (
            failure := draw.expovariate(1 / model.mtbf_s)
        ) < model.interval_s + model.checkpoint_s:
            spent += failure
            while (failure := draw.expovariate(1 / model.mtbf_s)) < model.restart_s:
                spent += failure
            spent += model.restart_s
        spent += model.interval_s + model.checkpoint_s
    return segments * model.interval_s / spent


@pytest.mark.parametrize(
    ("mtbf", "save", "restart", "every"),
    [(1000.0, 10.0, 60.0, 200.0), (100.0, 20.0, 50.0, 80.0), (1e5, 30.0, 900.0, 3600.0)],
)
def test_the_useful_share_is_what_random_failures_leave(mtbf, save, restart, every):
    model = Interruptions(mtbf_s=mtbf, checkpoint_s=save, restart_s=restart, interval_s=every)
    assert model.useful_share == pytest.approx(simulated_share(model, 20_000, seed=3), rel=0.02)


@given(
    mtbf=st.floats(1e2, 1e7),
    save=st.floats(0.1, 1e3),
    restart=st.floats(0, 1e3),
    factor=st.floats(0.05, 20),
)
def test_no_interval_beats_the_best_one(mtbf, save, restart, factor):
    best = Interruptions(mtbf_s=mtbf, checkpoint_s=save, restart_s=restart)
    every = best.best_interval_s
    assert 0 < every < mtbf
    try:
        other = Interruptions(
            mtbf_s=mtbf, checkpoint_s=save, restart_s=restart, interval_s=factor * every
        ).useful_share
    except ProjectionError:
        return
    assert other <= best.useful_share * (1 + 1e-12)


def test_rare_failures_give_the_first_order_formulas():
    model = Interruptions(mtbf_s=1e7, checkpoint_s=10, restart_s=900)
    best = math.sqrt(2 * 10 * 1e7)
    assert model.best_interval_s == pytest.approx(best, rel=2e-3)
    first_order = 1 - 10 / best - best / 2e7 - 900 / 1e7
    assert model.useful_share == pytest.approx(first_order, abs=1e-5)


@pytest.mark.parametrize(("gpus", "percent"), [(1024, 98.4), (1536, 97.9), (10240, 91.6)])
def test_useful_time_at_the_failure_rate_of_llama_3(gpus, percent):
    """419 interruptions in 54 days on 16,384 GPUs; 10 s a save, 15 minutes a restart. The expected
    figures are of first order, which is off by half a point where a tenth is lost."""
    rate = 419 / (54 * 24 * 16384)
    model = Interruptions(mtbf_s=mtbf_s(rate, gpus), checkpoint_s=10, restart_s=900)
    assert 100 * model.useful_share == pytest.approx(percent, abs=0.5 if gpus > 9999 else 0.1)


def test_a_cluster_that_never_gets_anything_done_is_said_to_be_one():
    model = Interruptions(mtbf_s=10, checkpoint_s=10, restart_s=900, interval_s=9000)
    with pytest.raises(ProjectionError, match="never succeed; save more often or restart faster"):
        _ = model.useful_share
