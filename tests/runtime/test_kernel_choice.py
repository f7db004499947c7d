"""`[kernels]` of attention: what is refused before and after devices are known; what auto is."""

from __future__ import annotations

import pytest
import torch
from small_runs import CONFIG

from ppruntime.config import ConfigError, load
from ppruntime.kernel_choice import choose_kernels
from ppruntime.models.kernel_limits import Backend

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["kernels.attention=triton"],
            'kernels.attention = "triton": the kernels take powers of two from 16 heads and 32 '
            'channels, the model has 4 heads of 64; use "reference" or "auto"',
        ),
        (
            ["kernels.attention=library"],
            'kernels.attention = "library": the packages take 64 heads of 512 channels, the model '
            'has 4 of 64; use "reference" or "auto"',
        ),
        (
            ["kernels.attention_deterministic=true"],
            "kernels.attention_deterministic = true has no effect on kernels.attention = "
            '"reference"; leave it out or use "triton"',
        ),
        (
            ["kernels.rope=triton", "model.rope_dim=24"],
            'kernels.rope = "triton": the kernel turns a power of two of channels, the model 24; '
            'use "reference" or "auto"',
        ),
    ],
)
def test_kernels_that_do_not_fit_the_model_are_refused_with_the_config(overrides, text):
    with pytest.raises(ConfigError) as refused:
        load([CONFIG], overrides)
    assert str(refused.value).endswith(f": {text}")


def test_kernels_that_cannot_run_on_the_device_are_refused_all_at_once(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = load([CONFIG], ["kernels.rope=triton", "kernels.indexer=triton"])
    with pytest.raises(ConfigError) as refused:
        choose_kernels(config, CPU)
    lines = str(refused.value).splitlines()
    assert [line.partition(" cannot run here: ")[0] for line in lines] == [
        'kernels.indexer = "triton"',
        'kernels.rope = "triton"',
    ]
    assert all("TRITON_INTERPRET=1" in line and 'use "reference"' in line for line in lines)


def test_auto_says_what_it_chose():
    config = load([CONFIG], ["kernels.attention=auto", "kernels.grouped_output=auto"])
    chosen = choose_kernels(config, CPU)
    assert chosen.note == "kernels: auto chose attention reference, grouped_output library"
    assert chosen.choice.attention is Backend.REFERENCE
    assert chosen.choice.grouped_output is Backend.LIBRARY
    assert choose_kernels(load([CONFIG]), CPU).note == ""
