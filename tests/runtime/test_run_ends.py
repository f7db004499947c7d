"""How runs end and begin again: what is told, by whom, and what status.json keeps of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import train

from ppruntime.compare import compare_metrics
from ppruntime.run_dir import Status, open_run, read_status
from ppruntime.termination import InterruptedTwiceError, Termination

STEPS = ("pp.size=2", "train.steps=4", "checkpoint.interval=1")


def status_of(run_dir: Path) -> Status:
    status = read_status(run_dir)
    assert status is not None
    return status


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, run_ranks):
    """Metrics of four steps in one process."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    run_ranks(1, train, str(run_dir), (*STEPS, "pp.size=1"))
    return run_dir / "metrics.jsonl"


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory, run_ranks):
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    run_ranks(2, train, str(run_dir), STEPS)
    return run_dir


@pytest.fixture
def finished(tmp_path, finished_once):
    """A run of four steps on two ranks that has its checkpoints of steps 3 and 4, a copy of its
    own."""
    return Path(shutil.copytree(finished_once, tmp_path / "run"))


def test_a_finished_run_says_so_once_and_changes_nothing(finished, run_ranks):
    before = (finished / "metrics.jsonl").read_bytes()
    (code, told, errors), silence = run_ranks(2, train, str(finished), STEPS)
    assert (code, silence) == (0, (0, "", ""))
    assert told == f"{finished}: nothing to do, step 4 of 4 is done\n"
    assert errors == ""
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert status_of(finished) == Status(0, "done", 4, "step-00000004", resumable=False)


def test_a_run_whose_weights_nobody_wants_ends_without_saving_them(tmp_path, run_ranks):
    wanted = ("pp.size=1", "train.steps=3", "checkpoint.save_last=false")
    ((code, said, _),) = run_ranks(1, train, str(tmp_path / "run"), wanted)
    assert code == 0
    assert "step 3 done, no checkpoint" in said
    assert not list((tmp_path / "run").glob("ckpt/*"))
    # Those of an interval are.
    wanted = (*wanted, "checkpoint.interval=2")
    ((code, said, _),) = run_ranks(1, train, str(tmp_path / "other"), wanted)
    assert code == 0
    assert "step 3 done, checkpoint of step 2 saved" in said


def test_a_directory_in_use_is_refused_on_all_ranks_and_left_alone(finished, run_ranks):
    before = (finished / "status.json").read_bytes()
    with open_run(finished):
        (code, told, errors), silence = run_ranks(2, train, str(finished), STEPS)
    assert (code, told) == (3, "")
    assert silence == (3, "", "")
    assert errors.startswith(f"error: {finished} is in use by pid {os.getpid()} on ")
    assert (finished / "status.json").read_bytes() == before


def test_a_damaged_checkpoint_is_refused_with_the_older_one_and_how_to_use_it(
    finished, uninterrupted, run_ranks
):
    newest = finished / "ckpt" / "step-00000004"
    file = next(newest.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (code, _, errors), silence = run_ranks(2, train, str(finished), STEPS)
    assert (code, silence) == (13, (13, "", ""))
    sentence, remedy = errors.splitlines()
    assert sentence.startswith(f"error: {file} is damaged: its sha256 is ")
    assert remedy == (
        f"  step-00000003 is older; to go on from it, move {newest} out of the folder"
    )
    status = status_of(finished)
    assert (status.exit, status.step, status.last_checkpoint) == (13, 4, "step-00000004")

    newest.rename(finished / "damaged")
    (code, told, _), _ = run_ranks(2, train, str(finished), STEPS)
    assert code == 0
    assert told.startswith(f"{finished}: goes on after step 3\n")
    assert compare_metrics(finished / "metrics.jsonl", uninterrupted).equal


def test_what_an_unfinished_save_left_is_named_and_not_used(finished, run_ranks):
    litter = finished / "ckpt" / ".tmp-step-5-0123456789ab"
    litter.mkdir()
    (_, told, _), _ = run_ranks(2, train, str(finished), STEPS)
    assert told.splitlines()[0] == (
        f"{litter} is ignored: its save did not finish; it can be deleted"
    )
    assert litter.is_dir()


def train_until_killed(rank: int, run_dir: str, victim: int, place: str, call: int):
    from ppruntime import checkpoint
    from ppruntime.stage import Stage
    from ppruntime.trainer import Trainer

    owner = next(one for one in (Stage, Trainer, checkpoint) if hasattr(one, place))
    act = getattr(owner, place)
    calls: list[int] = []

    def maybe_die(*args, **options):
        calls.append(1)
        if len(calls) == call:
            if rank != victim:
                Path(f"{run_dir}.{rank}").touch()
            else:
                who_speaks = Path(f"{run_dir}.{1 if victim == 0 else 0}")
                while not who_speaks.exists():  # else it may still be in the step before
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        return act(*args, **options)

    setattr(owner, place, maybe_die)
    return train(rank, run_dir, (*STEPS, "pp.size=4", "checkpoint.interval=1"))


# A step has three micro-batches: call 7 of a stage's forward or backward is in step 3.
@pytest.mark.parametrize(
    ("victim", "place", "call", "where"),
    [
        (2, "forward", 7, "step 3"),
        pytest.param(0, "backward", 7, "step 3", marks=pytest.mark.long),
        (0, "_mean_losses", 3, "step 3"),
        pytest.param(2, "_settle_routing", 3, "step 3", marks=pytest.mark.long),
        pytest.param(1, "save", 3, "the checkpoint of step 3", marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_is_named_once_wherever_it_ends_and_the_run_goes_on_bitwise(
    victim, place, call, where, tmp_path, rank_outcomes, run_ranks, uninterrupted
):
    run_dir = tmp_path / "run"
    outcomes = rank_outcomes(4, train_until_killed, str(run_dir), victim, place, call)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    living = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [outcome.error_text for outcome in living] == [None] * 3
    assert [outcome.value[0] for outcome in living] == [10] * 3
    told = [outcome.value[2] for outcome in living]
    assert told[1:] == ["", ""], "not only the lowest living rank speaks"
    sentence, *notes = told[0].splitlines()
    assert sentence.startswith("error: ")
    assert f"rank {victim} is lost" in sentence
    speaker = 1 if victim == 0 else 0
    assert f"  rank {speaker} was in {where}" in notes
    assert notes[-1] == (f"  start it again with run.dir={run_dir}: it goes on from step-00000002")
    status = status_of(run_dir)
    assert (status.exit, status.culprit_rank, status.resumable) == (10, victim, True)
    assert status.last_checkpoint == "step-00000002"

    assert run_ranks(2, train, str(run_dir), STEPS)[0][0] == 0
    assert compare_metrics(run_dir / "metrics.jsonl", uninterrupted).equal


def train_and_ask_to_stop(rank: int, run_dir: str, asked: int, request: int):
    from ppruntime.trainer import Trainer

    step = Trainer.step

    def ask_in_step_3(self, index, *args):
        if index == 2 and rank == asked:
            os.kill(os.getpid(), request)
        return step(self, index, *args)

    Trainer.step = ask_in_step_3
    return train(rank, run_dir, (*STEPS, "checkpoint.interval=100"))


@pytest.mark.parametrize(
    ("asked", "request_", "by"),
    [(0, signal.SIGINT, "Ctrl-C"), (1, signal.SIGTERM, "a signal to another rank")],
)
def test_a_request_to_stop_ends_all_ranks_after_the_step_and_loses_nothing(
    asked, request_, by, tmp_path, run_ranks, rank_outcomes, uninterrupted
):
    run_dir = tmp_path / "run"
    first, other = rank_outcomes(2, train_and_ask_to_stop, str(run_dir), asked, request_)
    code, _, errors = first.value
    status = status_of(run_dir)
    assert code == status.exit == 75
    sentence, note = errors.splitlines()
    assert sentence == f"error: stopped by {by} after step 3, which is saved"
    assert note.endswith("it goes on from step-00000003")
    assert status.resumable
    # Only who was asked ends by the signal that its launcher sent.
    assert other.exit_code == (-signal.SIGTERM if asked == 1 else 0)

    assert run_ranks(2, train, str(run_dir), STEPS)[0][0] == 0
    assert compare_metrics(run_dir / "metrics.jsonl", uninterrupted).equal


def train_in_a_step_without_end(rank: int, run_dir: str):
    from ppruntime.trainer import Trainer

    def never_ends(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)

    Trainer.step = never_ends
    return train(rank, run_dir, (*STEPS, "fault.stop_grace_seconds=0.5"))


def test_a_step_that_does_not_end_in_time_is_given_up_and_rank_0_says_so(tmp_path, rank_outcomes):
    first, other = rank_outcomes(2, train_in_a_step_without_end, str(tmp_path / "run"))
    code, _, errors = first.value
    assert code == 75
    assert errors.startswith(
        "error: stopped by SIGTERM, 0.5 s after it came; the step under way is lost"
    )
    assert other.exit_code == -signal.SIGTERM


def train_with_a_broken_unit(rank: int, run_dir: str):
    from ppruntime.stage import Stage

    def fail(*_):
        raise ValueError("a unit broke")

    if rank == 1:
        Stage.backward = fail
    return train(rank, run_dir, STEPS)


def test_an_unforeseen_error_keeps_its_traceback_and_rank_0_says_where_it_was(
    tmp_path, rank_outcomes
):
    run_dir = tmp_path / "run"
    first, failed = rank_outcomes(2, train_with_a_broken_unit, str(run_dir))
    assert "ValueError: a unit broke" in failed.error_text
    assert "rank 1 was in 1B0" in failed.error_text
    code, _, errors = first.value
    assert code == 10
    assert "rank 1 failed in 1B0: a unit broke" in errors
    status = status_of(run_dir)
    assert (status.exit, status.culprit_rank, status.resumable) == (10, 1, False)


def test_a_second_ctrl_c_stops_at_once():
    with Termination(grace_seconds=60, ends_by_signal=False) as termination:
        signal.raise_signal(signal.SIGINT)
        assert termination.asked == "Ctrl-C"
        signal.raise_signal(signal.SIGTERM)  # a launcher passes its own on: the same request
        with pytest.raises(InterruptedTwiceError, match="a second Ctrl-C"):
            signal.raise_signal(signal.SIGINT)


def test_sigterm_kills_at_once_outside_a_run():
    program = (
        "import os, signal\n"
        "from ppruntime.termination import Termination\n"
        "with Termination(grace_seconds=60, ends_by_signal=True):\n"
        "    pass\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "signal.pause()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=20, check=False)
    assert done.returncode == -signal.SIGTERM
