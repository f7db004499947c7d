"""The order in which ranks are handed to a mesh."""

from __future__ import annotations

from itertools import product

from ppruntime.ranks import Layout, ranks_by_place


def test_strides_fall_along_the_axes_also_of_size_one():
    """torch 2.11 takes an axis with a larger stride than the one before as out of order."""
    for pp, dp, ep in product((1, 2), (1, 2, 3), (1, 2, 4)):
        layout = Layout(pp=pp, dp=dp, ep=ep)
        by_place = ranks_by_place(layout)
        assert by_place.stride() == (dp * ep, dp, 1)
        for rank in range(layout.world):
            stage, copy, expert = layout.place(rank)
            assert by_place[stage, expert, copy] == rank
