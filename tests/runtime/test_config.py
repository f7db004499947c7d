"""Files and overrides give one config, or every mistake with the place that made it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from ppruntime.config import ConfigError, check_world_size, digest, dumps, flatten, load
from ppruntime.config.help import kernels_left_to_auto, key_helps
from ppruntime.config.keys import Kernels

CONFIGS = sorted((Path(__file__).parents[2] / "launch" / "configs").glob("*.toml"))
FULL_WIDTH = [path for path in CONFIGS if not path.name.startswith("tiny")]

MINIMAL = '[model]\nname = "tiny"\n\n[data]\ntype = "stdlib"\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(text, name="run.toml")` -> a file name for `load`, relative as users write them."""
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="run.toml"):
        Path(name).write_text(text)
        return name

    return write_file


def mistakes(paths, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(paths, overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_is_a_whole_run(path):
    config = load([path])
    assert config.pp.num_stages <= 2 * config.model.dims.num_layers + 2


def test_the_configs_that_others_rely_on_are_there():
    assert {
        "tiny.toml",
        "tiny-v4.toml",
        "v41-flash-pp16.toml",
        "v4-flash.toml",
        "v41-proxy-8.toml",
        "v4-proxy-8.toml",
    } <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", FULL_WIDTH, ids=lambda path: path.name)
def test_the_file_of_fast_kernels_lies_on_top_of_any_and_leaves_no_choice_out(path):
    config = load([path, path.parent / "on_top" / "fast.toml"])
    types = get_type_hints(Kernels)
    choices = {name for name in Kernels.__struct_fields__ if "auto" in get_args(types[name])}
    assert len(choices) >= 12
    assert {name for name in choices if getattr(config.kernels, name) != "auto"} == set()
    assert config.moe.compute.backend == "auto"
    assert load([path], kernels_left_to_auto()).kernels == config.kernels
    assert load([path], kernels_left_to_auto(but=("linear",))).kernels.linear == "reference"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_printed_config_loads_as_the_same_config(path, write):
    config = load([path])
    again = load([write(dumps(config))])
    assert again == config
    assert digest(again) == digest(config)


def test_later_files_win_key_by_key_and_overrides_win_over_all(write):
    base = write(MINIMAL + "[pp]\nsize = 2\nlayers_per_stage = [4, 4]\n[train]\nsteps = 5\n")
    overlay = write("[pp]\nlayers_per_stage = [3.5, 4.5]\n[train]\nsteps = 6\n", "overlay.toml")
    assert load([base]).pp.layers_per_stage == (4.0, 4.0)
    config = load([base, overlay], ["train.steps=7"])
    assert config.pp.size == 2
    assert config.pp.layers_per_stage == (3.5, 4.5)
    assert config.train.steps == 7


def test_default_takes_back_what_a_file_set(write):
    base = write(MINIMAL + "[pp]\nsize = 2\nlayers_per_stage = [4, 4]\n")
    assert load([base], ["pp.layers_per_stage=default", "pp.size=1"]).pp.layers_per_stage is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run.dir=runs/a b", "runs/a b"),
        ("run.dir = runs/a", "runs/a"),
        ('run.dir="runs/a=b"', "runs/a=b"),
        ("run.dir=123", "123"),
        ("run.dir=2024-01-01", "2024-01-01"),
        ("run.dir=x\ny", None),
    ],
)
def test_a_text_needs_no_quotes_on_the_command_line(text, value, write):
    base = write(MINIMAL)
    if value is None:
        assert mistakes([base], text) == [
            'command line: run.dir = "x\\ny" is not a path; it is empty or has unprintable '
            "characters"
        ]
    else:
        assert load([base], [text]).run.dir == value


def test_a_preset_s_fields_are_keys_of_the_model_section(write):
    config = load([write(MINIMAL)], ["model.hidden_size=32", "train.balance_loss_weight=0.5"])
    assert config.model.dims.hidden_size == 32
    assert config.model.dims.balance_loss_weight == 0.5


def test_world_and_batch_are_products_of_the_axes(write):
    config = load(
        [write(MINIMAL)],
        ["pp.size=4", "parallel.dp=3", "parallel.ep=2", "train.micro_batch_size=5"],
    )
    assert config.world_size == 24
    assert config.global_batch_size == 8 * 5 * 6


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("dualpipe_v", 2), ("zb_h1", 1)]
)
def test_a_schedule_brings_its_own_number_of_stages_per_rank(schedule, chunks, write):
    assert load([write(MINIMAL)], [f"pp.schedule={schedule}"]).pp.num_chunks == chunks


def test_digests_differ_just_when_a_value_does(write):
    base = write(MINIMAL)
    digests = {
        digest(load([base], overrides))
        for overrides in (
            [],
            ["train.steps=100"],  # the default
            ["train.steps=101"],
            ["model.swiglu_limit=9.0"],
            ["train.force_balanced_routing=true"],
            ["pp.schedule=gpipe"],
        )
    }
    assert len(digests) == 5


def test_every_key_says_what_it_means_and_what_it_does_to_the_numbers(write):
    helps = {help.name: help.text for help in key_helps()}
    assert set(helps) == set(flatten(load([write(MINIMAL)])))
    classes = ("bitwise", "summation order", "changes numerics", "no numerics")
    for name, text in helps.items():
        assert text.endswith("."), name
        assert len(text) > 8, name
        if not name.startswith("model."):  # a size always changes numerics
            assert any(text.lower().count(word) for word in classes), name


def test_flatten_names_every_key_once(write):
    flat = flatten(load([write(MINIMAL)]))
    assert flat["pp.size"] == 1
    assert flat["moe.compute.backend"] == "torch"
    assert flat["model.num_layers"] == 8
    assert "train.balance_loss_weight" in flat
    assert "model.balance_loss_weight" not in flat


def test_a_wrong_world_size_says_what_would_work(write):
    config = load([write(MINIMAL)], ["pp.size=4"])
    check_world_size(config, 4)
    with pytest.raises(ConfigError) as caught:
        check_world_size(config, 3)
    assert str(caught.value) == (
        "pp.size 4 x parallel.dp 1 x parallel.ep 1 needs 4 processes, but 3 were started; "
        "use torchrun --nproc-per-node 4, or change pp.size"
    )
