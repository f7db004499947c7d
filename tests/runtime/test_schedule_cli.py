"""`ppruntime schedule`: what each subcommand prints, writes and refuses."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from ppruntime.launch.cli import main
from ppruntime.schedules import NAMES, formats, make
from ppruntime.schedules.check import check
from ppruntime.schedules.costs import Costs, Hops
from ppruntime.schedules.timeline import simulate


def run(capsys, *arguments: str) -> str:
    """What the command prints; it has to succeed in silence on stderr."""
    assert main(["schedule", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refuse(capsys, *arguments: str) -> str:
    """What the command says on stderr; it has to exit with 2 and print nothing else."""
    assert main(["schedule", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_list_has_every_order(capsys):
    text = run(capsys, "list")
    assert [line.split()[0] for line in text.splitlines()[1 : len(NAMES) + 1]] == list(NAMES)
    assert [entry["name"] for entry in json.loads(run(capsys, "list", "--json"))] == list(NAMES)


def test_show_json_is_the_timeline(capsys):
    shown = json.loads(
        run(capsys, "show", "zb_v", "--ranks", "8", "--micro-batches", "32", "--costs", "1,1.5,0.5",
            "--transfer", "0.1", "--json")
    )  # fmt: skip
    schedule = make("zb_v", 8, 32)
    timeline = simulate(schedule, Costs.even(1, 1.5, 0.5, schedule.stage_to_rank), Hops.both(0.1))
    assert shown["makespan"] == timeline.makespan
    assert shown["makespan_bubble"] == timeline.makespan_bubble
    assert shown["span_bubble"] == timeline.span_bubble
    assert shown["bubble_fraction"] == timeline.bubble_fraction
    assert shown["peak_in_flight"] == [16] * 8
    assert shown["transfers"] == 896
    assert shown["slots"] == 1
    assert shown["stage_to_rank"] == list(schedule.stage_to_rank)
    assert formats.from_json(json.dumps(shown)).orders == schedule.orders


def test_show_draws_and_explains(capsys):
    text = run(capsys, "show", "1f1b", "--ranks", "2", "--micro-batches", "2", "--width", "80")
    assert text.splitlines() == [
        "1f1b: 2 ranks, 2 stages, 2 micro-batches",
        "F,I,W 1,1,1; transfer 0; makespan 9, bubble 3 (33.3%), span bubble 3, 4 transfers, "
        "slots per channel 1",
        "",
        "time    0",
        "rank 0  F0 F1 ..... B0--- .. B1---",
        "rank 1  .. F0 B0--- F1 B1--- .....",
        "",
        "rank  busy  fill  drain  dependency  transfer  peak in flight",
        "0        6     0      0           3         0               2",
        "1        6     1      2           0         0               1",
    ]


def test_show_plans_the_warmup_for_a_stall_budget(capsys):
    ranks = ("--ranks", "16", "--micro-batches", "64", "--transfer", "0.0495", "--json")
    for budget, in_flight in (("0%", 31), ("2%", 23), ("0.05", 16)):
        shown = json.loads(run(capsys, "show", "async_1f1b", "--stall-budget", budget, *ranks))
        assert shown["peak_in_flight"][0] == in_flight
    shown = json.loads(run(capsys, "show", "async_1f1b", "--memory-budget", "20", *ranks))
    assert max(shown["peak_in_flight"]) <= 20


def test_show_takes_a_warmup_per_rank(capsys):
    shown = run(capsys, "show", "1f1b_w", "--ranks", "3", "--warmup-step", "4,2,0", "--json")
    assert json.loads(shown)["peak_in_flight"] == [5, 3, 1]


def test_show_writes_svg_csv_and_trace_and_reads_the_csv_back(capsys, tmp_path):
    files = [tmp_path / name for name in ("a.svg", "a.csv", "a.json")]
    flags = ("--svg", str(files[0]), "--csv", str(files[1]), "--trace", str(files[2]))
    shown = json.loads(run(capsys, "show", "dualpipe_v", "--json", *flags))
    ElementTree.parse(files[0])
    assert json.loads(files[2].read_text())["traceEvents"]
    again = json.loads(run(capsys, "show", str(files[1]), "--json"))
    assert {**again, "name": shown["name"]} == shown


def test_show_refuses_a_file_whose_order_is_not_whole(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0B0\n")
    for command in ("show", "compare", "check"):
        assert "0B1" in refuse(capsys, command, str(file))


def test_costs_of_zero_are_no_trouble(capsys):
    assert "(nothing runs)" in run(capsys, "show", "zb_v", "--costs", "0,0,0")
    assert "(nothing runs)" in run(capsys, "search", "--costs", "0,0,0", "--effort", "1000")


def test_show_lowered_has_the_offloads(capsys):
    text = run(capsys, "show", "1f1b", "--lowered", "--offload", "1", "--paced")
    assert "0OFFLOAD1" in text
    assert text.index("0OFFLOADED1") < text.index("0F3") < text.index("0RELOAD2")
    assert "add --lowered" in refuse(capsys, "show", "1f1b", "--offload", "1")
    assert "add --offload 1" in refuse(capsys, "show", "1f1b", "--lowered", "--paced")


def test_show_lowered_has_the_transfers(capsys):
    text = run(capsys, "show", "1f1b", "--ranks", "2", "--micro-batches", "1", "--lowered")
    for op in ("0SEND_F0", "1RECV_F0", "1FREE_F0", "1SEND_B0", "0RECV_B0"):
        assert op in text


def test_fused_pairs_wait_for_both_inputs(capsys):
    request = ("show", "dualpipe_v", "--ranks", "8", "--micro-batches", "32", "--json")
    assert json.loads(run(capsys, *request))["makespan_bubble"] == 3.5
    assert json.loads(run(capsys, *request, "--fuse-pairs"))["makespan_bubble"] == 7.0


def test_compare_sets_orders_side_by_side(capsys):
    request = ("compare", "1f1b", "1f1b_w", "interleaved_1f1b", "--ranks", "8", "--micro-batches",
               "32", "--transfer", "0.5")  # fmt: skip
    rows = json.loads(run(capsys, *request, "--json"))
    assert [row["name"] for row in rows] == ["1f1b", "1f1b_w", "interleaved_1f1b"]
    assert [row["peak_in_flight"][0] for row in rows] == [8, 8, 23]
    assert rows[0]["stall_per_micro_batch"] == pytest.approx(0.875)
    assert rows[1]["stall_per_micro_batch"] == pytest.approx(0)
    table = run(capsys, *request).splitlines()
    assert len(table) == 4
    assert table[1].split()[:3] == ["1f1b", "151", "55"]


def test_compare_without_names_takes_all(capsys):
    assert len(run(capsys, "compare", "--micro-batches", "3").splitlines()) == 1 + len(NAMES)


def test_search_json_holds_a_legal_order_within_the_cap(capsys):
    found = json.loads(
        run(capsys, "search", "--ranks", "4", "--micro-batches", "8", "--costs", "1,1.5,0.5",
            "--transfer", "0.1", "--memory-cap", "1.25", "--effort", "20000", "--json")
    )  # fmt: skip
    schedule = formats.from_json(json.dumps(found))
    check(schedule, max_in_flight=5)
    timeline = simulate(schedule, Costs.even(1, 1.5, 0.5, schedule.stage_to_rank), Hops.both(0.1))
    assert found["makespan"] == timeline.makespan <= found["handmade_makespan"]
    assert found["gap"] == pytest.approx(found["makespan"] / found["lower_bound"] - 1)


def test_search_says_how_far_from_the_best_it_may_be(capsys):
    text = run(capsys, "search", "--memory-cap", "2,2,2,2", "--effort", "5000")
    assert "above the best possible: no order is under" in text
    assert "no order known by name fits the cap" in text


def test_check_accepts_a_legal_file_and_prints_its_facts(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(formats.to_csv(make("zb_h1", 4, 8)))
    assert "is a legal order: 4 ranks, 4 stages, 8 micro-batches" in run(capsys, "check", str(file))
    facts = json.loads(run(capsys, "check", str(file), "--json"))
    assert facts["legal"] is True
    assert facts["peak_in_flight"] == [4, 4, 4, 4]


def test_check_refuses_a_deadlock_with_the_waits(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    message = refuse(capsys, "check", str(file))
    assert "rank 0 waits at 0B0 for 1B0" in message
    assert "rank 1 waits at 1F1 for 0F1" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "nosuch"), "there is no order 'nosuch'"),
        (("show", "1f1b", "--ranks", "0"), "0 ranks"),
        (("show", "1f1b", "--costs", "1,1"), "not three numbers; write F,I,W"),
        (("show", "1f1b", "--costs", "1,1,1;1,1,1"), "costs name 2 stages, the schedule has 4"),
        (("show", "1f1b", "--transfer", "x"), "--transfer 'x' is not a number"),
        (("show", "1f1b", "--transfer", "-1"), "latency -1.0"),
        (("show", "1f1b", "--transfer", "1,2"), "2 forward latencies for 3 stage hops"),
        (("show", "1f1b", "--stall-budget", "1%"), "a budget is for async_1f1b or 1f1b_w"),
        (("show", "1f1b", "--warmup-step", "2"), "warmup_step has no effect on 1f1b"),
        (("show", "async_1f1b", "--warmup-step", "1.5"), "is not a whole number"),
        (("show", "async_1f1b", "--warmup-step", "2", "--stall-budget", "1%"), "exclude"),
        (("show", "async_1f1b", "--stall-budget=-1%"), "the stall budget is -0.01"),
        (("show", "1f1b", "--overlap-gain", "0.8"), "add --fuse-pairs"),
        (("show", "1f1b", "--stages-per-rank", "2"), "the nearest is 1"),
        (("show", "missing.csv"), "missing.csv cannot be read"),
        (("show", "1f1b", "--svg", "no/such/folder/a.svg"), "a.svg cannot be written"),
        (("search", "--memory-cap", "0.1"), "a step needs 1 at least"),
        (("show", "1f1b", "--jitter", "-0.1"), '"-0.1" is out of range; give'),
        (("search", "--memory-cap", "inf"), "leave it out for no cap"),
        (("search", "--memory-cap", "1,1"), "names 2 ranks of 4"),
        (("search", "--ranks", "0"), "--ranks is 0"),
        (("search", "--micro-batches", "0"), "--micro-batches is 0"),
        (("check", "missing.csv"), "missing.csv cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, arguments, said):
    message = refuse(capsys, *arguments)
    assert said in message
    assert len(message.splitlines()) == 1


def test_no_torch_is_loaded():
    code = (
        "import sys; from ppruntime.launch.cli import main; "
        "main(['schedule', 'show', 'zb_v', '--json']); "
        "main(['schedule', 'search', '--effort', '1000', '--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
