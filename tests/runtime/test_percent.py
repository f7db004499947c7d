"""A percentage means the same wherever it is typed, and what could be a share is refused."""

from __future__ import annotations

import json

import pytest

from ppruntime.launch.cli import main

PARTS = "pp.size=4 pp.layers_per_stage=default train.num_micro_batches=16"
COMMANDS = {
    "project": f"project {PARTS} --costs 1,1,1 --transfer-s 0 --per-step-s 0 --json",
    "simulate": f"simulate {PARTS} --costs 1,1,1 --transfer-s 0 --per-step-s 0 --json",
    "schedule": "schedule show 1f1b --ranks 4 --micro-batches 16 --json",
}


@pytest.fixture
def ask(capsys):
    def run(command: str, jitter: str) -> tuple[int, str, str]:
        code = main([*COMMANDS[command].split(), "--jitter", jitter])
        return (code, *capsys.readouterr())

    return run


def test_jitter_is_the_same_number_in_every_command(ask):
    steps = {name: json.loads(ask(name, "7")[1]) for name in COMMANDS}
    assert steps["project"]["step_s"] == pytest.approx(steps["simulate"]["step_s"])
    assert steps["project"]["numbers"]["jitter"]["value"] == pytest.approx(7)
    assert "jitter 7 %" in " ".join(steps["simulate"]["conditions"])
    for name in COMMANDS:
        seven, signed, calm = (ask(name, text)[1] for text in ("7", "7%", "0"))
        assert seven == signed != calm
        assert ask(name, "0.5%")[0] == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.07", '"0.07" is under 1 %; it is in percent, so write 7 if a share was meant, else 0.'),
        ("-1", '"-1" is out of range; give a percentage, 0 or more'),
        ("inf", '"inf" is out of range'),
        ("x", '"x" is no percentage; write such as 2 or 2%'),
    ],
)
def test_what_is_no_percentage_is_refused_everywhere_alike(ask, command, text, said):
    code, out, err = ask(command, text)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert "--jitter" in err
