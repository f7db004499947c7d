"""`ppruntime simulate`: what it prints adds up, and names what it rests on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ppruntime.config import load
from ppruntime.launch.cli import main
from ppruntime.plan import cut
from ppruntime.projection.simulate import CAUSES, collective_seconds

FULL = Path(__file__).parents[2] / "launch" / "configs" / "v41-flash-pp16.toml"
BASE = "simulate --gpus 1536 train.num_micro_batches=40 --transfer-s 0.0073 --per-step-s opt=0.15 "
COSTS = "--costs 0.0416,0.0625,0.0347 "


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command("simulate ...")` -> exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(arguments):
        code = main(arguments.split())
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_report_adds_up_in_text_json_and_page(command, tmp_path):
    noisy = (
        BASE
        + COSTS
        + "--interference 3,12 --jitter 2 --stragglers 1 --replicas 2 --stall 0.1,0.05 "
        "--data-bandwidth 46e9 --memory --offload-every 2 --host-bandwidth 50e9 "
        "--failures-per-gpu-hour 1.97e-5 --checkpoint-s 10 --restart-s 900 "
    )
    code, out, err = command(noisy + "--json --html page.html --trace trace.json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["gpus"] == 1536
    assert found["global_batch_tokens"] == 40 * 8192 * 96
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["shares"]["measured"] == 0
    pipeline = {sum(rank[f"{c}_s"] for c in ("work", *CAUSES)) for rank in found["ranks"]}
    assert len({round(seconds, 9) for seconds in pipeline}) == 1
    assert sum(found["critical_path_s"].values()) == pytest.approx(next(iter(pipeline)))
    rungs = [rung["step_s"] for rung in found["waterfall"]]
    assert rungs[-1] == found["step_s"] == max(found["replica_step_s"])
    assert rungs[:3] == sorted(rungs[:3])
    assert found["goodput"]["goodput_days"] > found["days"]
    low, high = found["interval"]["step_s"]
    assert low < found["step_s"] < high
    assert found["interval"]["days"] == pytest.approx(
        [found["days"] * end / found["step_s"] for end in (low, high)]
    )
    legs = found["critical_path"]
    assert sum(leg["finish_s"] - leg["start_s"] for leg in legs) == pytest.approx(
        sum(found["critical_path_s"].values())
    )
    assert legs[-1]["finish_s"] == pytest.approx(next(iter(pipeline)))
    assert [max(held for _, held in points) for points in found["memory"]] == found["peak_bytes"]
    busiest = max(found["ranks"], key=lambda rank: rank["work_s"])
    idle = sum(busiest[f"{c}_s"] for c in CAUSES if c not in ("noise", "interference"))
    assert found["bubble_share"] == pytest.approx(idle / found["step_s"])
    for text in (command(noisy)[1], (tmp_path / "page.html").read_text()):
        assert "1,536 GPUs" in text
        assert "31.46M tokens each" in text
        assert "0.00 % is measured" in text
        assert "interval: " in text
        assert "intervals: times may be off" in text
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=|@import|url\(", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_on_an_ideal_cluster_simulate_and_project_say_the_same(command):
    arguments = BASE.removeprefix("simulate") + COSTS + "--json"
    simulated = json.loads(command("simulate" + arguments)[1])
    projected = json.loads(command("project" + arguments)[1])
    assert simulated["step_s"] == pytest.approx(projected["step_s"], rel=1e-9)
    assert simulated["mfu"] == pytest.approx(projected["mfu"], rel=1e-9)


def test_a_reduction_that_was_timed_hides_in_the_drain_and_keeps_its_origin(command, tmp_path):
    """Equal stages: rank 0 ends last, so its reduction alone is exposed, and the gather."""
    times = {"origin": "measured", "source": "run 1", "samples": 100}
    ops = {"forward_s": 0.0416, "input_grad_s": 0.0625, "weight_grad_s": 0.0347}
    pieces = {"reduce": 0.4, "gather": 0.2, "optimizer": 0.1}
    known = {
        **{"schema": 1, "command": "", "device": "", "versions": {}, "date": ""},
        **{"model": "v41-flash", "seq_len": 8192, "micro_batch_size": 1, "ep": 8, "seeds": [0]},
        **{"transport": "idle", "routing": "", "zero_weights": False, "profiled": False},
        "layers_per_stage": [2.5] * 16,
        "stages": [{**times, **ops, "stage": stage} for stage in range(16)],
        "per_step": [
            {**times, "name": n, "seconds": s, "data_ranks": 96} for n, s in pieces.items()
        ],
    }
    path = tmp_path / "c.json"
    path.write_text(json.dumps(known))
    rest = " --gpus 1536 train.num_micro_batches=40 --transfer-s 0.0073 --json"
    rest += f" --calibration {path}"
    code, out, err = command("simulate" + rest)
    assert (code, err) == (0, "")
    found, project = json.loads(out), json.loads(command("project" + rest)[1])
    assert found["exposed_reduce_s"] == pytest.approx(0.4)
    assert found["step_s"] == pytest.approx(project["step_s"])
    assert found["shares"]["measured"] > 0.9
    assert "(measured: reduce: run 1; gather: run 1)" in " ".join(found["conditions"])
    with_rate = json.loads(command("simulate" + rest + " --data-bandwidth 46e9")[1])
    assert "(modelled: --data-bandwidth)" in " ".join(with_rate["conditions"])
    assert with_rate["step_s"] != found["step_s"]


def test_the_slow_down_of_the_runs_transport_counts_once(command, tmp_path):
    """From the calibration if it has it, said to be left out if it does not count, and refused if
    ops were timed beside the transport."""
    proxy = FULL.with_name("v41-proxy-8.toml")
    records = FULL.parents[2] / "docs" / "bench"
    run = f"simulate {proxy} ac.mode=none pp.schedule=1f1b_w --gpus 2 --json --calibration "
    put, other, asked = (
        json.loads(command(f"{run}{records}/calibration.json {more}")[1])
        for more in ("pp.transport=put", "", "--transport put")
    )
    assert put["step_s"] == asked["step_s"] > other["step_s"]
    assert "compute by 19.3 % one way" in put["conditions"][0]
    left_out = "not counted: the calibration says what transfers do to compute (put 19.3 %"
    assert any(left_out in fact for fact in other["conditions"])
    assert not any(left_out in fact for fact in put["conditions"])
    twice = f"{run}{records}/calibration-put.json --per-step-s 0 --transfer-s 0.001 --transport put"
    code, out, err = command(twice)
    assert (code, out) == (2, "")
    assert "--transport put: the calibration's ops were timed beside put already; leave" in err
    page = tmp_path / "page.html"
    command(f"{run}{records}/calibration.json pp.transport=put --html {page}")
    text = page.read_text()
    assert "bubble: the busiest rank, 0, waits " in text
    for row in ("hop 0", "optimizer", "put: half a round trip between pp ranks 0 and 1"):
        assert row in text, "what a step rests on is on its page"
    assert not re.search(r"-\d[.\d]*e-\d+ s", text), "rounding is no time"


def test_data_ranks_move_the_bytes_of_the_published_estimate():
    """fp32 gradients of three MoE blocks' experts over 12 replicas: 18.7 GB, 0.41 s at 46 GB/s;
    beside them the dense parts of two attention and three MoE halves over 96 ranks."""
    config = load([FULL], ["parallel.dp=12"])
    plan = cut(config.model.dims, range(16), config.pp.layers_per_stage, seq_len=8192)
    reduce, gather = collective_seconds(config, plan, 16, 46e9)
    experts = 3 * 384 * 3 * 5120 * 2304 / 8 * 4 * 11 / 12 / 46e9
    assert experts == pytest.approx(0.406, abs=0.001)
    dense = (2 * 126.6e6 + 3 * 37.4e6) * 4 * 95 / 96 / 46e9
    stages = [r for r, s in enumerate(plan) if sum(unit.kind == "moe" for unit in s.units) == 3]
    assert reduce[stages[3]] == pytest.approx(experts + dense, abs=0.002)
    assert gather[stages[3]] == pytest.approx(reduce[stages[3]] / 2)


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [
        ("", "a simulation needs the parts' times from one place"),
        (COSTS + "--efficiency 40", "a simulation needs the parts' times from one place"),
        (COSTS + "--interference 3", "is not ONE,BOTH[,BLOCKING] in percent"),
        (COSTS + "--interference 3,12 --transport put", "say the same thing twice"),
        (COSTS + "--transport put", "no calibration says what transport put does to compute"),
        (COSTS + "--offload-every 2", "give both or neither"),
        (COSTS + "--host-bandwidth x --offload-every 1", "--host-bandwidth 'x' is not numbers"),
        (COSTS + "--stall 3", "is not PERCENT,SECONDS"),
        (COSTS + "--replicas 0", "--replicas 0 is no count"),
        (COSTS + "--replicas 2", "--replicas has no effect without noise; leave it out, or add"),
        (COSTS + "--seed 3", "--seed has no effect without noise; leave it out, or add"),
        (COSTS + "--jitter 0.02", '"0.02" is under 1 %; it is in percent, so write 2 if'),
        (COSTS + "--stragglers -1", '"-1" is out of range; give a percentage, 0 or more'),
        (COSTS + "--stall 150,1", "--stall '150,1' holds up 150 % of ops; give at most 100"),
        (COSTS + "--interference 1,2,500", "500 % of an op cannot stand still; give at most 100"),
        (COSTS + "--data-bandwidth 0", "--data-bandwidth is 0; give a number above 0"),
        (
            COSTS + "--offload-every 0 --host-bandwidth 1e9",
            "--offload-every 0 is no count; give 1 (every micro-batch) or more",
        ),
        (COSTS + "--html no/page.html", "--html no/page.html: there is no folder no; make it"),
        (COSTS + "--spread 1,2,100", "is not MEASURED,MODELLED,ASSUMED in percent under 100"),
    ],
)
def test_wrong_uses_are_refused_with_the_remedy(command, rest, complaint):
    code, out, err = command(BASE + rest)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
