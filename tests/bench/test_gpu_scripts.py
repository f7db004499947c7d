"""The commands of tests/gpu_pair_benches.sh are ones that the program takes; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppruntime.config import load
from ppruntime.launch.run_files import files_and_overrides

ROOT = Path(__file__).parents[2]
STUB = """#!{python}
import sys
if sys.argv[1:2] == ["-c"]:
    print(2)  # GPUs
else:
    with open({log!r}, "a") as log:
        log.write("\\x00".join(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def commands(tmp_path):
    """What the script starts, argument by argument, with programs that only note it."""
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    for name in ("python3", "torchrun"):
        (programs / name).write_text(STUB.format(python=sys.executable, log=str(log)))
        (programs / name).chmod(0o755)

    def run(**environment):
        log.write_text("")
        subprocess.run(
            ["bash", ROOT / "tests" / "gpu_pair_benches.sh", tmp_path / "out", "/lib/libnccl.so.2"],
            env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"} | environment,
            check=True,
            capture_output=True,
        )
        return [line.split("\0") for line in log.read_text().splitlines()]

    return run


def test_every_run_of_the_script_is_one_that_a_config_takes(commands, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = commands()
    assert len({command[-1] for command in found}) > 10
    for command in found:
        assert "ppruntime.launch.cli" in command
        keys = [a for a in command if a.endswith(".toml") or ("." in a.split("=")[0] and "=" in a)]
        files, overrides = files_and_overrides([k for k in keys if " " not in k])
        if files:
            load(files, overrides)
        if "--calibrate-with" in command:
            others = command[command.index("--calibrate-with") + 1].split()
            load(files, [*overrides, *others])


def test_runs_are_picked_by_name(commands):
    found = commands(ONLY="validation-run moe-ep2")
    assert sorted(Path(command[-1]).stem for command in found) == ["moe-ep2", "validation-run"]
