"""A run directory is made once, used by one run at a time, and never mistaken for another's."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppruntime.run_dir import (
    ExitCode,
    RunDirError,
    Status,
    new_run_dir,
    open_run,
    read_status,
)


def test_new_runs_are_numbered_above_all_that_are_there(tmp_path):
    root = tmp_path / "deep" / "runs"
    assert new_run_dir(root, "tiny").name == "tiny-01"
    assert new_run_dir(root, "tiny").name == "tiny-02"
    assert new_run_dir(root, "tiny-02").name == "tiny-02-01"
    (root / "tiny-41").mkdir()
    assert new_run_dir(root, "tiny").name == "tiny-42"
    (root / "tiny-99").mkdir()
    assert new_run_dir(root, "tiny").name == "tiny-100"


def test_starts_at_the_same_time_get_directories_of_their_own(tmp_path):
    barrier = threading.Barrier(8)

    def start(_):
        barrier.wait()
        return new_run_dir(tmp_path, "tiny")

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(start, range(8)))
    assert len(set(paths)) == 8


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../x", "/etc", "a b", "a\nb", "x" * 65, "-rf"]
)
def test_names_that_could_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(RunDirError, match="cannot name a run"):
        new_run_dir(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_directories_are_closed_to_others(tmp_path):
    path = new_run_dir(tmp_path / "runs", "tiny")
    with open_run(path) as run:
        run.add_config("a = 1\n")
        run.write_status(Status(None, "running", 0, None, True))
        assert path.stat().st_mode & 0o777 == 0o700
        assert {f.stat().st_mode & 0o777 for f in path.iterdir()} == {0o600}


def test_a_directory_in_use_is_refused_and_names_its_user(tmp_path):
    path = tmp_path / "run"
    with (
        open_run(path),
        pytest.raises(
            RunDirError, match=f"in use by pid {os.getpid()} on {socket.gethostname()} since"
        ),
    ):
        open_run(path)
    with open_run(path):
        pass


def _open_and_die(rank, path):
    open_run(path)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_of_a_killed_process_is_taken_over(rank_outcomes, tmp_path):
    path = tmp_path / "run"
    (outcome,) = rank_outcomes(1, _open_and_die, path)
    assert outcome.exit_code == -signal.SIGKILL
    assert json.loads((path / "lock").read_text())["pid"] != os.getpid()
    with open_run(path):
        assert json.loads((path / "lock").read_text())["pid"] == os.getpid()
    assert (path / "lock").read_text() == ""


def test_a_lock_of_another_host_is_left_to_the_user(tmp_path):
    path = tmp_path / "run"
    open_run(path).close()
    (path / "lock").write_text('{"pid": 7, "host": "elsewhere", "since": "yesterday"}')
    with pytest.raises(RunDirError, match=r"pid 7 on elsewhere since yesterday.*delete .*lock"):
        open_run(path)
    (path / "lock").unlink()
    open_run(path).close()


def test_a_folder_that_is_not_a_runs_is_refused_and_left_alone(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirError, match=r"not a run directory and holds thesis\.tex"):
        open_run(home)
    assert [f.name for f in home.iterdir()] == ["thesis.tex"]


def test_links_are_refused(tmp_path):
    open_run(tmp_path / "run").close()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(RunDirError, match="is a link"):
        open_run(tmp_path / "link")
    (tmp_path / "run" / "lock").unlink()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(RunDirError, match=r"lock cannot be used: .*symbolic link"):
        open_run(tmp_path / "run")
    assert not (tmp_path / "victim").exists()


def test_a_place_where_nothing_can_be_written_is_said_to_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    for act in (lambda p: open_run(p), lambda p: new_run_dir(p, "tiny")):
        with pytest.raises(
            RunDirError, match=r"file.* cannot be used: Not a directory; set run\.dir"
        ):
            act(tmp_path / "file" / "runs")


def test_every_start_keeps_its_configuration(tmp_path):
    for text in ("a = 1\n", "a = 2\n"):
        with open_run(tmp_path / "run") as run:
            run.add_config(text)
    assert (tmp_path / "run" / "config-01.toml").read_text() == "a = 1\n"
    assert (tmp_path / "run" / "config-02.toml").read_text() == "a = 2\n"


def test_the_status_reads_back_and_is_never_half_written(tmp_path):
    status = Status(ExitCode.STOPPED, "SIGTERM", 31, "step-00000031", True, culprit_rank=2)
    with open_run(tmp_path / "run") as run:
        assert run.read_status() is None
        run.write_status(Status(None, "running", 0, None, True))
        before = (run.path / "status.json").stat().st_ino
        run.write_status(status)
        # A new file took the place of the old one; the old one was not written to.
        assert (run.path / "status.json").stat().st_ino != before
    assert read_status(tmp_path / "run") == status
    content = json.loads((tmp_path / "run" / "status.json").read_text())
    assert content["exit"] == 75
    assert content["last_checkpoint"] == "step-00000031"
    (tmp_path / "run" / "status.json").write_text('{"exit": ')
    assert read_status(tmp_path / "run") is None
