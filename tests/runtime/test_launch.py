"""What a user starts from a shell: torchrun, the demo. Each start loads torch once per process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import CONFIG, SMALL, train

from ppruntime.compare import compare_metrics
from ppruntime.metrics import read_metrics
from ppruntime.run_dir import read_status

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 200
"""For a start on a machine that is busy with other things; it takes about ten seconds."""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "120"}


def start(folder: Path, num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node NUM_RANKS -m ppruntime.launch.train ARGUMENTS` in `folder`."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", "ppruntime.launch.train", *arguments],
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def process_of_rank(launcher: subprocess.Popen[str], rank: int) -> int:
    """Process id of one rank, among the launcher's children."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    wanted = f"RANK={rank}".encode()
    return next(
        int(child)
        for child in children
        if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    )


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (
            "size = 4",
            "error: pp.size 4 x parallel.dp 1 x parallel.ep 1 needs 4 processes, 2 started; use"
            " torchrun --nproc-per-node 4 or change one of the three",
        ),
        ("sise = 2", 'mine.toml:5: pp.sise is not a key; did you mean "size"?'),
    ],
)
def test_a_mistake_is_one_sentence_before_the_launchers_own_report(key, sentence, tmp_path):
    text = CONFIG.read_text().replace("# A tiny", "# My tiny")
    head, _, tail = text.partition("[pp]\nsize = 4\n")
    (tmp_path / "mine.toml").write_text(f'[model]\nname = "tiny"\n\n[pp]\n{key}\n{tail}')
    assert "[model]" in head
    code, out, err = finish(start(tmp_path, 2, "mine.toml"))
    assert code != 0
    assert out == ""
    told, _, launchers = err.partition("\n")
    assert told == sentence
    assert sentence not in launchers
    assert not (tmp_path / "runs").exists(), "something was started"


@pytest.mark.slow
def test_after_a_kill_all_end_in_seconds_and_the_same_command_goes_on_bitwise(tmp_path, run_ranks):
    steps = ("train.steps=10", "checkpoint.interval=2", "checkpoint.keep_last=20")
    command = (str(CONFIG), *SMALL, *steps, "pp.size=2", "run.dir=run")
    run_dir = tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"

    launcher = start(tmp_path, 2, *command)
    wait_until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) >= 3)
    os.kill(process_of_rank(launcher, 1), signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = finish(launcher)
    assert code != 0
    assert time.monotonic() - killed < 60
    told = err[err.index("error: ") :].splitlines()
    assert "rank 1 is lost" in told[0]
    places = r"  rank 0 was in (step \d+|the (records|checkpoint) of step \d+|\d+[FB]\d+)"
    assert any(re.fullmatch(places, note) for note in told[1:]), told
    status = read_status(run_dir)
    assert status is not None
    assert (status.exit, status.culprit_rank, status.resumable) == (10, 1, True)

    code, out, err = finish(start(tmp_path, 2, *command))
    assert code == 0, err
    assert err == ""
    after = int(status.last_checkpoint[-2:])
    first, took, *lines, end = out.splitlines()
    assert first == f"run: goes on after step {after}"
    assert took == 'pp.transport = "auto" took shared_memory'
    assert len(lines) == 10 - after
    for step, line in enumerate(lines, after + 1):
        assert re.fullmatch(rf"step {step:2}/10  loss \d\.\d{{4}}  .*tok/s  .*", line)
    assert end == "run: step 10 done, checkpoint of step 10 saved"
    status = read_status(run_dir)
    assert status is not None
    assert (status.exit, status.reason, status.step) == (0, "done", 10)
    assert [line.step for line in read_metrics(metrics)] == list(range(1, 11))
    straight = tmp_path / "straight"
    run_ranks(1, train, str(straight), (*steps[:1], "pp.size=1"))
    assert compare_metrics(metrics, straight / "metrics.jsonl").equal


@pytest.mark.long
@pytest.mark.slow
def test_the_demo_runs_both_prints_a_verdict_and_the_paths_it_wrote(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ppruntime.launch.demo", *SMALL, "train.steps=2"],
        cwd=tmp_path,
        env={k: v for k, v in environment().items() if k != "OMP_NUM_THREADS"},
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "warnings"
    assert done.stdout.count("step 2/2") == 2
    *_, verdict, empty, metrics, picture, trace, checkpoint = done.stdout.splitlines()
    assert verdict.startswith("EQUAL: all 2 losses and gradient norms of the pipeline are bitwise ")
    assert empty == ""
    for line in (metrics, picture, trace, checkpoint):
        assert (tmp_path / line.split()[-1]).exists(), line
    assert (tmp_path / "runs").is_dir(), "not a new directory under runs/"


def test_the_demo_fails_with_the_first_difference(tmp_path, capfd):
    from ppruntime.launch import demo

    line = '{"step":1,"loss":2.5,"grad_norm":1.0,"lr":0.1,"tokens_per_s":1,"mfu":null,'
    line += '"step_seconds":1,"tokens":1}\n'
    for run, loss in (("pipeline", "2.5"), ("other", "2.5000000000000004"), ("empty", None)):
        (tmp_path / run).mkdir()
        text = "" if loss is None else line.replace("2.5", loss)
        (tmp_path / run / "metrics.jsonl").write_text(text)
    assert demo.report(tmp_path / "pipeline", tmp_path / "pipeline") == 0
    assert "EQUAL: all 1 losses" in capfd.readouterr().out
    assert demo.report(tmp_path / "pipeline", tmp_path / "other") == 1
    assert (
        "NOT EQUAL: pipeline and single-process run differ: step 1 has loss 2.5 and"
        " 2.5000000000000004.\n" in capfd.readouterr().out
    )
    assert demo.report(tmp_path / "empty", tmp_path / "empty") == 1
    assert "neither has a step" in capfd.readouterr().out


def test_the_demo_fails_with_a_part_that_fails(tmp_path, monkeypatch, capfd):
    from ppruntime.launch import demo

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    assert demo.main(["train.steps=none"]) == 1
    errors = capfd.readouterr().err
    assert "train.steps" in errors
    assert "exit code 2" in errors
