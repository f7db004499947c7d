"""`ppruntime project`: exact outputs, one labelled source a number, mistakes with their remedy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ppruntime.launch.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command("--mfu 30 ...")` -> exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(arguments, name="project"):
        code = main([name, *arguments.split()])
        out, err = capsys.readouterr()
        return code, out, err

    return run


HEADLINE = """\
51.0 days for 20.00T tokens on 1,536 GPUs at 28.94 % MFU: steps of 55.40 s with 251.7M tokens each
of the step, 0.00 % is measured, 0.00 % modelled, 100.00 % assumed

days                       51.0 days        modelled  total_tokens / tokens_per_s
step_s                    55.40 s           modelled  global_batch_tokens / tokens_per_s
mfu                       28.94 %           assumed   --mfu
tokens_per_s             4.543M tokens/s    modelled  mfu x gpus x peak_flops / flops_per_token
tokens_per_s_per_gpu     2.957k tokens/s    modelled  tokens_per_s / gpus
steps                    79,473 steps       modelled  total_tokens / global_batch_tokens
gpu_hours             1,878,529 GPU-hours   modelled  24 x days x gpus
measured_share             0.00 %           modelled  of the step, all of which follows from --mfu
modelled_share             0.00 %           modelled  of the step, all of which follows from --mfu
assumed_share            100.00 %           modelled  of the step, all of which follows from --mfu
gpus                      1,536 GPUs        assumed   --gpus
global_batch_tokens      251.7M tokens      modelled  \
320 micro-batches x 1 x 8,192 tokens x dp 12 x ep 8, pp 16; v41-flash-pp16.toml
total_tokens             20.00T tokens      assumed   --tokens
active_parameters        16.13B parameters  modelled  the matmul sizes of v41-flash
flops_per_token          96.78B FLOP        modelled  6 x active_parameters
peak_flops               989.0T FLOP/s      assumed   --peak-flops, of one GPU
"""


def test_the_published_nccl_row_is_printed_with_batch_and_gpus(command):
    assert command("--mfu 28.94 --gpus 1536") == (0, HEADLINE, "")


def test_json_has_the_five_plain_numbers_and_every_number_labelled(command):
    code, out, err = command("--mfu 28.94 --gpus 1536 --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    numbers = found.pop("numbers")
    assert found == {
        "days": pytest.approx(50.95835, abs=1e-5),
        "step_s": pytest.approx(55.40006, abs=1e-5),
        "mfu": 28.94,
        "gpus": 1536,
        "global_batch_tokens": 251658240,
    }
    for name, number in numbers.items():
        assert number["origin"] in ("measured", "modelled", "assumed"), name
        assert number["source"], name
        assert set(number) == {"value", "unit", "origin", "source"}
    assert {name: numbers[name]["value"] for name in found} == found


@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("--days 50.95835086408659", "days"),
        ("--step-s 55.40006401239676", "step_s"),
        ("--tokens-per-s 4542562.26", "tokens_per_s"),
    ],
)
def test_any_of_them_leads_to_the_others(command, start, name):
    found = json.loads(command(f"{start} --gpus 1536 --json")[1])
    assert found["mfu"] == pytest.approx(28.94, rel=1e-6)
    assert found["numbers"][name]["origin"] == "assumed"
    assert found["numbers"][name]["value"] == float(start.split()[1])


def test_a_batch_and_a_model_may_be_given_as_numbers(command):
    found = json.loads(
        command(
            "--mfu 40 --gpus 1000 --global-batch-tokens 16384000 --active-parameters 1e9 "
            "--frozen-parameters 1e9 --adapter-parameters 1e7 --tokens 1e12 --peak-flops 1e15 "
            "--json"
        )[1]
    )
    assert found["numbers"]["flops_per_token"]["value"] == 4e9 + 6e7
    assert found["numbers"]["flops_per_token"]["source"] == (
        "6 x active_parameters - 2 x 1e+09 frozen + 6 x 1e+07 in adapters"
    )
    assert found["step_s"] == pytest.approx(16384000 * 4.06e9 / (0.4 * 1e15 * 1000))
    assert found["days"] == pytest.approx(1e12 * 4.06e9 / (0.4 * 1e15 * 1000) / 86400)


def test_another_run_brings_its_model_and_batch(command):
    tiny = ROOT / "launch" / "configs" / "tiny.toml"
    found = json.loads(command(f"{tiny} train.num_micro_batches=16 --step-s 2 --json")[1])
    source = found["numbers"]["global_batch_tokens"]["source"]
    assert source.startswith("16 micro-batches x ")
    assert source.endswith("; tiny.toml, train.num_micro_batches=16")
    assert found["numbers"]["active_parameters"]["source"] == "the matmul sizes of tiny"


def test_failures_and_price_come_on_top(command):
    found = json.loads(
        command(
            "--mfu 33.98 --gpus 1536 --failures-per-gpu-hour 1.97e-5 --checkpoint-s 10 "
            "--restart-s 900 --price-per-gpu-hour 2.5 --json"
        )[1]
    )
    numbers = {name: number["value"] for name, number in found["numbers"].items()}
    assert numbers["goodput"] == pytest.approx(97.9, abs=0.1)
    assert numbers["goodput_days"] == pytest.approx(found["days"] / numbers["goodput"] * 100)
    assert numbers["cost"] == pytest.approx(2.5 * 24 * 1536 * numbers["goodput_days"])
    assert numbers["mtbf_s"] / 3600 == pytest.approx(33.0, abs=0.1)


PIPELINE = (
    "pp.size=4 pp.layers_per_stage=[10,10,10,10] pp.schedule=1f1b pp.warmup_step=default "
    "train.num_micro_batches=4 train.seq_len=16384"
)


MEASURED_OPS = {
    **{"origin": "measured", "source": "run 7", "samples": 100},
    **{"forward_s": 0.3, "input_grad_s": 0.4, "weight_grad_s": 0.3},
}


def calibrate(**rows):
    """Writes c.json: the document's example with these rows, for `PIPELINE`."""
    document = (ROOT / "docs" / "projection.md").read_text()
    example = json.loads(document.split("```json\n")[1].split("```")[0])
    example |= {"seq_len": 16384, "layers_per_stage": [10, 10, 10, 10], "units": []}
    Path("c.json").write_text(json.dumps(example | {"transfers": [], "per_step": []} | rows))


def test_a_pipeline_from_given_seconds(command):
    """Four equal stages of 1 s, 4 micro-batches, hops of 0.1 s exposed: 7 s and 6 hops."""
    found = json.loads(
        command(
            f"{PIPELINE} --gpus 64 --costs 0.3,0.4,0.3 --transfer-s 0.1 "
            "--per-step-s optimizer=0.15,reduce=0.35 --json"
        )[1]
    )
    numbers = found["numbers"]
    assert found["global_batch_tokens"] == 4 * 16384 * 16
    parts = ["even_work_s", "imbalance_s", "fill_s", "drain_s", "dependency_s", "transfer_s"]
    total = sum(numbers[name]["value"] for name in [*parts, "per_step_s"])
    assert total == pytest.approx(found["step_s"], rel=1e-12)
    assert found["step_s"] > 7 + 0.5
    assert numbers["per_step.reduce_s"] == {
        "value": 0.35,
        "unit": "s",
        "origin": "assumed",
        "source": "--per-step-s",
        "low": pytest.approx(0.21),
        "high": pytest.approx(0.49),
    }
    assert numbers["assumed_share"]["value"] == pytest.approx(100)
    assert numbers["peak_in_flight"]["value"] == [4, 3, 2, 1]


def test_a_pipeline_from_a_calibration_says_what_share_is_measured(command):
    row = {"origin": "measured", "source": "run 7", "samples": 100}
    ops = {"forward_s": 0.3, "input_grad_s": 0.4, "weight_grad_s": 0.3} | row
    document = (ROOT / "docs" / "projection.md").read_text()
    example = json.loads(document.split("```json\n")[1].split("```")[0])
    example |= {
        "seq_len": 16384,
        "layers_per_stage": [10, 10, 10, 10],
        "stages": [ops | {"stage": stage} for stage in range(4)],
        "units": [],
        "per_step": [row | {"name": "optimizer", "seconds": 0.15}],
    }
    Path("c.json").write_text(json.dumps(example))
    start = f"{PIPELINE} --gpus 64 --calibration c.json"
    code, out, err = command(f"{start} --transfer-s 0 --per-step-s reduce=0.35")
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == (
        "of the step, 95.33 % is measured, 0.00 % modelled, 4.67 % assumed"
    )
    assert "    0     0.3000        0.4000         0.3000  measured: run 7\n" in out
    found = json.loads(command(f"{start} --transfer-s 0 --per-step-s optimizer=0.5 --json")[1])
    assert found["step_s"] == pytest.approx(7.5)
    assert found["numbers"]["per_step.optimizer_s"]["origin"] == "assumed"
    found = json.loads(command(f"{start} --json")[1])  # hops from the file
    assert found["numbers"]["hop0.forward_s"]["source"].startswith("ib: ")


def test_every_number_of_a_pipeline_that_times_go_into_has_an_interval(command):
    """Equal stages and hops of no time: the step is as far off as what it is made of."""
    start = f"{PIPELINE} --gpus 64 --costs 0.3,0.4,0.3 --transfer-s 0 --per-step-s 1 "
    start += "--price-per-gpu-hour 2 --spread 1,5,25 "
    found = json.loads(command(f"{start} --json")[1])
    numbers = found["numbers"]
    for name in ("days", "step_s", "gpu_hours", "cost", "stage2.forward_s", "per_step.rest_s"):
        number = numbers[name]
        assert number["low"] == pytest.approx(0.75 * number["value"]), name
        assert number["high"] == pytest.approx(1.25 * number["value"]), name
    assert numbers["mfu"]["low"] == pytest.approx(found["mfu"] / 1.25)
    assert numbers["mfu"]["high"] == pytest.approx(found["mfu"] / 0.75)
    assert len(numbers["rank_busy_s"]["low"]) == 4
    for name in ("gpus", "global_batch_tokens", "steps", "bubble_share", "peak_in_flight"):
        assert "low" not in numbers[name], name
    text = command(start)[1].splitlines()
    low, high = numbers["days"]["low"], numbers["days"]["high"]
    assert text[2].startswith(f"interval: {low:,.1f} to {high:,.1f} days, ")
    assert text[3] == (
        "intervals: times may be off, measured by 1 %, modelled by 5 %, assumed by 25 %, all the "
        "same way (assumed)"
    )
    assert found["conditions"] == text[3:4]


def test_a_measured_pipeline_has_a_narrow_interval_and_says_what_was_timed(command):
    calibrate(stages=[MEASURED_OPS | {"stage": stage} for stage in range(4)])
    start = f"{PIPELINE} --gpus 64 --calibration c.json --transfer-s 0 --per-step-s 0"
    numbers = json.loads(command(f"{start} --json")[1])["numbers"]
    assert numbers["step_s"]["high"] == pytest.approx(1.02 * numbers["step_s"]["value"])
    assert (
        "calibration: of 2026-01-01 on none, ops timed with transport idle, routing spread, ep 8; "
        in command(start)[1]
    )


def test_a_pipelines_ranks_have_their_memory_and_what_was_measured_of_it(command):
    row = {"origin": "measured", "source": "run 7"}
    calibrate(
        stages=[MEASURED_OPS | {"stage": stage} for stage in range(4)],
        peaks=[row | {"stage": 2, "allocated_bytes": 91 * 10**9, "reserved_bytes": 10**11}],
    )
    start = f"{PIPELINE} --gpus 64 --calibration c.json --transfer-s 0 --per-step-s 0"
    numbers = json.loads(command(f"{start} --json")[1])["numbers"]
    simulated = json.loads(command(f"{start} --json --memory", "simulate")[1])
    held = numbers["rank_peak_bytes"]
    assert held["value"] == pytest.approx(simulated["peak_bytes"])
    assert (held["origin"], held["unit"]) == ("modelled", "bytes")
    assert all(a < b < c for a, b, c in zip(held["low"], held["value"], held["high"], strict=True))
    assert numbers["measured_peak.stage2"] == row | {"value": 91 * 10**9, "unit": "bytes"}
    assert "measured_peak is an emulation's, which has no optimizer" in held["source"]
    assert held["source"].startswith("the memory ledger of the run (`ppruntime plan --ledger`)")
    assert "without context, communication's own buffers" in held["source"]
    text = command(start)[1]
    assert "rank_peak_bytes\n" in text
    assert re.search(r"^measured_peak.stage2 +91.0 GB +measured +run 7$", text, re.MULTILINE)


def test_each_hop_may_go_over_a_link_of_its_own(command):
    row = {"origin": "measured", "source": "run 7", "samples": 100}
    calibrate(
        stages=[MEASURED_OPS | {"stage": stage} for stage in range(4)],
        transfers=[
            row | {"link": link, "num_bytes": 10**9, "seconds": s}
            for link, s in (("ib", 0.1), ("nvlink", 0.01))
        ],
    )
    start = f"{PIPELINE} --gpus 64 --calibration c.json --per-step-s 0"
    numbers = json.loads(command(f"{start} --link nvlink,ib,nvlink --json")[1])["numbers"]
    hops = [numbers[f"hop{hop}.forward_s"]["value"] for hop in range(3)]
    assert hops == pytest.approx([0.01, 0.1, 0.01])
    for links, text in (
        ("ib,nvlink", "--link names 2 links, the pipeline has 3 hops; give one for all or one per"),
        ("ib,ether,ib", "the calibration has no link ether; it has ib, nvlink"),
    ):
        code, out, err = command(f"{start} --link {links}")
        assert (code, out) == (2, "")
        assert err.startswith(text)


def test_the_documents_commands_print_what_it_says(command):
    """The same pipeline at two batches; the first command's own line stands in the document."""
    document = (ROOT / "docs" / "projection.md").read_text()
    assert HEADLINE.splitlines()[0] in document
    commands = re.findall(r"^ppruntime project ((?:.*\\\n)*.*)", document, re.MULTILINE)
    heads = [command(text.replace("\\", ""))[1].splitlines()[0] for text in commands]
    assert [head.split(" days")[0] for head in heads] == ["43.6", "51.9"]
    for head in heads:
        batch = head.split("with ")[1].split(" tokens")[0]
        assert f"{head.split(' days')[0]} days at {batch} tokens" in " ".join(document.split())


def test_the_documents_calibration_can_be_projected_from(command):
    document = (ROOT / "docs" / "projection.md").read_text()
    Path("c.json").write_text(document.split("```json\n")[1].split("```")[0])
    code, out, err = command(
        "--gpus 128 --calibration c.json --efficiency 50 train.num_micro_batches=32"
    )
    assert (code, err) == (0, "")
    assert "\nof the step, 0.00 % is measured, 0.00 % modelled, 100.00 % assumed\n" in out


def test_one_stage_has_no_hops_and_a_v_has_one_for_free(command):
    alone = "pp.size=1 pp.layers_per_stage=default pp.schedule=1f1b pp.warmup_step=default"
    start = f"{alone} train.num_micro_batches=4 --gpus 8 --costs 1,1,1 --per-step-s 0.5"
    assert json.loads(command(f"{start} --json")[1])["step_s"] == 12.5
    text = "--transfer-s has no effect on one stage; leave it out\n"
    assert command(f"{start} --transfer-s 0") == (2, "", text)
    v_shape = "pp.size=2 pp.layers_per_stage=default pp.schedule=zb_v pp.warmup_step=default"
    start = f"{v_shape} train.num_micro_batches=4 --gpus 16 --costs 1,1,1 --per-step-s 0"
    numbers = json.loads(command(f"{start} --transfer-s 0.1 --json")[1])["numbers"]
    assert [numbers[f"hop{hop}.forward_s"]["value"] for hop in range(3)] == [0.1, 0, 0.1]
    assert numbers["hop1.forward_s"]["source"] == "both stages are on one rank"


def test_what_a_projection_leaves_out_is_said_above_its_numbers(command):
    """The share that was measured is of what is counted, and that may lack a transport's slow-down
    and all that data ranks send each other."""
    known = json.loads((ROOT / "docs" / "bench" / "calibration.json").read_text())
    calibration = Path("without.json")
    rest = [row for row in known["per_step"] if row["name"] not in ("reduce", "gather")]
    calibration.write_text(json.dumps(known | {"per_step": rest}))
    run = f"{ROOT}/launch/configs/v41-proxy-8.toml ac.mode=none pp.size=2 "
    run += f"--calibration {calibration} --gpus "
    slowed = "not counted: the calibration says what transfers do to compute (put 19.3 % while"
    collectives = "not counted: reduce and gather over 8 data ranks, of which no per-step piece"
    alone, several = (command(run + gpus)[1] for gpus in ("2", "16"))
    assert slowed in alone
    assert slowed in several
    assert collectives not in alone
    assert collectives in several
    said = command(run + "16 --per-step-s reduce=0.1,gather=0.1")[1]
    assert collectives.partition(":")[0] in said
    assert "over 8 data ranks" not in said
    assert "; made by: ppruntime calibrate launch/configs/v41-proxy-8.toml launch/" in alone
    assert any(slowed in fact for fact in json.loads(command(run + "16 --json")[1])["conditions"])


def test_jitter_slows_the_step_down_and_is_labelled(command):
    start = f"{PIPELINE} --gpus 64 --costs 0.3,0.4,0.3 --transfer-s 0 --per-step-s 0 --json"
    calm, shaken = (json.loads(command(start + extra)[1]) for extra in ("", " --jitter 10"))
    assert calm["step_s"] == pytest.approx(7)
    assert shaken["step_s"] != pytest.approx(7, rel=1e-3)
    assert shaken["numbers"]["jitter"]["source"] == "--jitter, one draw with seed 0"
    assert calm["numbers"]["jitter"] == {
        "value": 0.0,
        "unit": "%",
        "origin": "assumed",
        "source": "no --jitter given",
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "",
            "a projection starts from one number, and none was given; give one of --mfu, --step-s",
        ),
        ("--mfu 30 --days 3", "a projection starts from one number, and --mfu, --days was given;"),
        ("--mfu 0.2894", "--mfu 0.2894 is under 1 %; it is in percent, so write 28.94 if that was"),
        ("--mfu -3", "--mfu is -3; give a number above 0"),
        (
            "--mfu 2894 --gpus 1536",
            "--mfu 2894 is 2894 % MFU on 1,536 GPUs at 251,658,240 tokens a step, over 200 % of a "
            "peak of 9.89e+14 FLOP/s, which no GPU does; correct one of them",
        ),
        ("--step-s 0.01 --gpus 1536", "--step-s 0.01 is 1.603e+05 % MFU on 1,536 GPUs at"),
        (
            "--efficiency 450 --transfer-s 0 --per-step-s 0",
            "--efficiency 450 is over 200 % of the peak, which no GPU does; give a percentage of",
        ),
        ("--step-s 0", "--step-s is 0; give a number above 0"),
        ("--mfu 30 --gpus 0", "--gpus is 0; give a number above 0"),
        (
            "--mfu 30 --gpus 1000",
            "1,000 GPUs are not whole pipelines of pp.size 16 x parallel.ep 8 = 128; use 896 or "
            "1,024, change pp.size",
        ),
        (
            "--mfu 30 --gpus 64",
            "64 GPUs are not whole pipelines of pp.size 16 x parallel.ep 8 = 12",
        ),
        ("--mfu 30 --gpus 128 parallel.dp=1", "--gpus and parallel.dp say the same thing twice;"),
        ("--mfu 30 --jitter 10", "--jitter has no effect with --mfu; leave it out, or start from"),
        ("--days 3 --link ib", "--link has no effect with --days; leave it out, or start from"),
        ("--efficiency 45", "nothing says how long a transfer takes; give --transfer-s, or"),
        (
            "--efficiency 45 --transfer-s 0",
            "nothing says what a step takes beside its pipeline (optimizer, gradient reduction); "
            "give --per-step-s",
        ),
        ("--efficiency 0.45", "--efficiency 0.45 is under 1 %; it is in percent, so write 45 if"),
        (
            "--efficiency 45 --transfer-s 1,2 --per-step-s 0",
            "--transfer-s has 2 numbers, the pipeline 15 hops; give one for all or one per hop",
        ),
        (
            "--efficiency 45 --transfer-s x --per-step-s 0",
            "--transfer-s 'x' is not seconds, 0 or more; write such as 0.0073",
        ),
        (
            "--efficiency 45 --transfer-s 0 --link ib --per-step-s 0",
            "--link has no effect beside --transfer-s; leave one of them out",
        ),
        (
            "--efficiency 45 --transfer-s 0 --per-step-s a=-1",
            "--per-step-s '-1' is not seconds, 0 or more; write such as",
        ),
        (
            "--efficiency 45 --transfer-s 0 --per-step-s 0 --seed 1",
            "--seed has an effect with --jitter only; add it or leave --seed out",
        ),
        (
            "--efficiency 45 --global-batch-tokens 1e6",
            "--global-batch-tokens does not say how a pipeline makes its batch; set train.num_mi",
        ),
        ("--costs 1,1 --transfer-s 0 --per-step-s 0", "costs '1,1' are not three numbers; write F"),
        (
            "--mfu 30 --restart-s 9",
            "days with failures need --failures-per-gpu-hour, --checkpoint-s",
        ),
        (
            "--calibration no.json",
            "no.json cannot be read (No such file or directory); name a file",
        ),
        ("--mfu 30 model.name=tini", "command line: "),
        ("--mfu 30 --tokens 0", "--tokens is 0; give a number above 0"),
        ("--mfu 30 --peak-flops -1", "--peak-flops is -1; give a number above 0"),
        ("--mfu 30 --global-batch-tokens 0", "--global-batch-tokens is 0; give a number above 0"),
        ("--mfu 30 --spread 1,2,3", "--spread has no effect with --mfu; leave it out, or start"),
        (
            "--efficiency 45 --transfer-s 0 --per-step-s 0 --spread 2,15",
            "--spread '2,15' is not MEASURED,MODELLED,ASSUMED in percent under 100; write such as",
        ),
        (
            "--efficiency 45 --transfer-s 0 --per-step-s 0 --jitter 0.05",
            'Invalid value for --jitter: "0.05" is under 1 %; it is in percent, so write 5 if',
        ),
        (
            "--efficiency 45 --transfer-s 0 --per-step-s a=1,a=2",
            "--per-step-s names a twice; say it once",
        ),
        (
            "--efficiency 45 --transfer-s 0 --per-step-s =1",
            "--per-step-s '=1' has no name before '='; write such as optimizer=0.15",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(command, arguments, text):
    if "--transfer-s" in arguments:
        arguments += " train.num_micro_batches=16"  # a short order, quickly made
    code, out, err = command(arguments)
    assert (code, out) == (2, "")
    assert err.startswith(text)
    assert err.count("\n") == 1


def test_a_run_config_that_is_its_own_cluster_needs_no_gpus(command):
    found = json.loads(command("--mfu 30 parallel.dp=3 --json")[1])
    assert (found["gpus"], found["global_batch_tokens"]) == (384, 320 * 8192 * 24)
    assert found["numbers"]["gpus"]["source"] == "v41-flash-pp16.toml, parallel.dp=3"


# Output that nobody reads to its end


def test_output_into_head_ends_quietly():
    """A reader that leaves after the first bytes; the output is longer than a pipe holds."""
    code = "from ppruntime.launch.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    arguments = ["schedule", "show", "1f1b", "--ranks", "8", "--micro-batches", "1000", "--json"]
    for reads_first in (True, False):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "" if reads_first else "1"},
        )
        assert process.stdout is not None
        assert process.stderr is not None
        if reads_first:
            process.stdout.read(10)
        process.stdout.close()
        error = process.stderr.read()
        process.stderr.close()
        assert (process.wait(timeout=60), error) == (141, b"")


def test_a_broken_pipe_that_is_not_the_output_is_not_hidden(monkeypatch):
    from ppruntime.launch import cli

    def breaks(*arguments, **options):
        raise BrokenPipeError("a rank has gone")

    monkeypatch.setattr(cli, "app", breaks)
    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w"))  # noqa: SIM115 (closed below)
    try:
        with pytest.raises(BrokenPipeError, match="a rank has gone"):
            main(["version"])
    finally:
        sys.stdout.close()


# Words that no command takes


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "project --mfu 30 --gpus 1536.5",
            'Invalid value for --gpus: "1536.5" is no whole number; `ppruntime project --help` '
            "says what it takes\n",
        ),
        ("validate --ranks 4 --ranks 8.5", '--ranks: "8.5" is no whole number; `ppruntime valid'),
        ("simulate --replicas x", 'Invalid value for --replicas: "x" is no whole number; `pprun'),
        ("schedule show 1f1b --ranks 2.5", 'Invalid value for --ranks: "2.5" is no whole numb'),
        ("project --mfu abc", 'Invalid value for --mfu: unable to convert "abc" into float; `pp'),
        ("project --mfoo 3", "Unknown option: --mfoo. Did you mean --mfu?; `ppruntime project --"),
        ("validate --only v9", 'Invalid value "v9" for --only. Choose from: "v0", "v1", "v2"; `p'),
        ("projct --mfu 3", 'Unknown command "projct". Did you mean "project"?'),
    ],
)
def test_words_that_cannot_be_read_are_one_sentence_and_exit_2(words, complaint, capsys):
    """1,536.5 GPUs were 1,536: the parser alone rounds."""
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(complaint)


def test_whole_numbers_may_be_written_with_a_point(command):
    assert json.loads(command("--mfu 30 --gpus 1536.0 --json")[1])["gpus"] == 1536


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("headline --out {}", "--out"),
        ("validate --only v0 --out {}", "--out"),
        ("validate --only v0 --out v.json --predictions {}", "--predictions"),
        ("simulate --costs 1,1,1 --html {}", "--html"),
        ("simulate --costs 1,1,1 --trace {}", "--trace"),
        ("calibrate {tiny} pp.size=1 --out {}", "--out"),
        ("emulate {tiny} --stages 0 --costs 1,1,1 --out {}", "--out"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    words, option, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tiny = ROOT / "launch" / "configs" / "tiny.toml"
    for path, complaint in (
        (tmp_path, f"{option} {tmp_path} is a folder; name a file in it\n"),
        ("/proc/no", f"{option} /proc/no: nothing can be written in /proc ("),
    ):
        assert main(words.format(path, tiny=tiny).split()) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(complaint)


def test_a_record_elsewhere_leaves_the_predictions_of_others_alone(tmp_path, monkeypatch):
    """They were emptied in docs/bench, wherever the record went."""
    monkeypatch.chdir(tmp_path)
    of_record = tmp_path / "docs" / "bench" / "validation-predictions.jsonl"
    of_record.parent.mkdir(parents=True)
    of_record.write_text("{}\n")
    assert main(["validate", "--only", "v0", "--out", "mine.json"]) == 0
    assert of_record.read_text() == "{}\n"
    assert json.loads((tmp_path / "mine.json").read_text())["predictions"] == (
        "mine-predictions.jsonl"
    )
    assert (tmp_path / "mine-predictions.jsonl").exists()
