"""The order in which ranks are handed to a mesh."""

from __future__ import annotations

from itertools import product

import pytest

from ppruntime.config import ConfigError
from ppruntime.ranks import Layout, check_gpus, ranks_by_place


def test_strides_fall_along_the_axes_also_of_size_one():
    """torch 2.11 takes an axis with a larger stride than the one before as out of order."""
    for pp, dp, ep in product((1, 2), (1, 2, 3), (1, 2, 4)):
        layout = Layout(pp=pp, dp=dp, ep=ep)
        by_place = ranks_by_place(layout)
        assert by_place.stride() == (dp * ep, dp, 1)
        for rank in range(layout.world):
            stage, copy, expert = layout.place(rank)
            assert by_place[stage, expert, copy] == rank


def test_a_host_with_fewer_gpus_than_processes_is_refused_in_all_of_them():
    for local_rank in "01":
        environment = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "2"}
        check_gpus(environment, 2)
        with pytest.raises(ConfigError) as caught:
            check_gpus(environment, 1)
        assert str(caught.value) == (
            "2 processes started on a host with 1 GPU, each needs one of its own; start 1 on it, or"
            ' set run.device = "cpu"'
        )
    check_gpus({}, 1)
    with pytest.raises(ConfigError, match=r"^1 process started on a host with no GPUs, each needs"):
        check_gpus({}, 0)
