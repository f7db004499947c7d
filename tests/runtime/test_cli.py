"""The command: quick to answer, exit codes that mean something, mistakes without tracebacks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ppruntime import __version__
from ppruntime.launch.cli import main

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "launch" / "configs"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command(*arguments)` -> exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_mistake_in_a_config_is_printed_once_and_exits_2(command):
    for verb in ("plan", "train", "config"):
        assert command(verb, CONFIGS / "tiny.toml", "pp.siez=2") == (
            2,
            "",
            'command line: pp.siez is not a key; did you mean "size"?\n',
        )


def test_a_config_is_printed_with_every_key(command):
    code, out, err = command("config", CONFIGS / "tiny.toml", "train.steps=7")
    assert (code, err) == (0, "")
    assert "steps = 7\n" in out
    assert "recompute_engram = false\n" in out
    Path("resolved.toml").write_text(out)
    assert command("config", "resolved.toml") == (0, out, "")


def test_a_plan_is_a_table_or_one_json_object(command):
    code, out, err = command("plan", CONFIGS / "tiny.toml", "--json", "pp.size=2")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert [stage["rank"] for stage in plan["stages"]] == [0, 1]
    assert plan["stages"][-1]["boundary_bytes"] == 0
    code, out, err = command("plan", CONFIGS / "tiny.toml")
    assert (code, err) == (0, "")
    assert out.startswith("tiny: ")


def test_train_says_how_to_start_the_processes_of_a_pipeline(command):
    code, out, err = command("train", CONFIGS / "tiny.toml", "pp.size=2", "run.dir=a b")
    assert code == 2
    assert out == (
        f"torchrun --nproc-per-node 2 -m ppruntime.launch.train {CONFIGS}/tiny.toml pp.size=2 "
        "'run.dir=a b'\n"
    )
    assert "2 processes" in err
    assert "nothing was started" in err


def test_keys_are_explained(command):
    code, out, _ = command("keys", "pp.size", "parallel")
    assert code == 0
    assert out.startswith("pp.size: an integer from 1 to 1024 (default 1)\n    Pipeline ranks. ")
    assert "\nparallel.dp: " in out
    assert command("keys")[1].count("\n    ") > 100
    assert command("keys", "pp.siez") == (
        2,
        "",
        'pp.siez is neither a key nor a section; did you mean "pp.size"?\n',
    )


def test_token_files_are_built_and_checked(command):
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("hello")
    Path("texts/b.txt").write_text("world!")
    summary = "out: 11 tokens in 2 documents, uint8, tokenizer bytes\n"
    assert command("data", "build", "--out", "out", "texts") == (0, summary, "")
    assert command("data", "check", "out") == (0, summary, "")
    code, out, err = command("data", "check", "out", "--vocab-size", "100")
    assert (code, out) == (16, "")
    assert err == (
        "out.bin: token 104 at byte 0, the vocabulary has ids 0 to 99; build the file with the "
        "model's tokenizer\n"
    )
    code, _, err = command("data", "build", "--out", "out", "texts")
    assert (code, err) == (16, "out.idx exists; remove it or choose another prefix\n")
    assert command("data", "build", "--out", "out", "texts/a.txt", "--force", "--eod", "0") == (
        0,
        "out: 6 tokens in 1 documents, uint8, tokenizer bytes\n",
        "",
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "x"], "nothing to read, or two things; give either paths or --corpus stdlib"),
        (["--out", "x", "a.txt", "--corpus", "stdlib"], "nothing to read, or two things; give"),
        (["--out", "x", "--corpus", "web"], "there is no corpus 'web'; leave --corpus out or use"),
        (["--out", "x", "nix"], "nix: no such file or folder"),
        (["--out", "x", "nix", "--tokenizer", "t.json"], "t.json: cannot be read (No such file"),
    ],
)
def test_what_cannot_be_built_exits_16_and_leaves_nothing(arguments, text, command):
    code, out, err = command("data", "build", *arguments)
    assert (code, out) == (16, "")
    assert err.startswith(text)
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_a_mistyped_command_or_option_is_corrected_and_exits_2(command):
    for arguments, meant in ((["dta", "check"], "data"), (["plan", "--jsn", "x"], "--json")):
        code, out, err = command(*arguments)
        assert code == 2
        assert f"Did you mean {meant}?" in (out + err).replace('"', "")
    assert command("data", "check")[0] == 2


def test_versions_of_what_is_installed_are_printed(command):
    code, out, _ = command("version")
    assert code == 0
    assert out.startswith(f"ppruntime {__version__}\npython 3.")
    assert "\nnumpy " in out
    assert command("--version")[1] == f"{__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "--help"],
        ["data", "build", "--help"],
        ["version"],
        ["config", "launch/configs/v41-flash-pp16.toml"],
        ["plan", "launch/configs/tiny.toml", "pp.siez=1"],
    ],
)
def test_the_command_answers_in_half_a_second_without_torch(arguments):
    """CPU time, the best of three: the machine may be busy with something else."""
    code = (
        "import sys; from ppruntime.launch.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'torch or numpy was loaded';"
        "sys.exit(code)"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode in (0, 2), done.stderr
        assert "Traceback" not in done.stderr
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 0.5:
            return
    assert min(seconds) < 0.5


def test_importing_the_package_loads_nothing():
    code = (
        "import sys; before = set(sys.modules); import ppruntime;"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['ppruntime']\n"
