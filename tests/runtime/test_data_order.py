"""Orders without state are permutations, differ by key, and never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.data.order import key, mix, permutation, permute

KEYS = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), KEYS)
def test_both_ways_of_permuting_hit_every_number_once(size, with_key):
    everything = np.arange(size)
    assert np.array_equal(np.sort(permute(everything, size, with_key)), everything)
    assert np.array_equal(np.sort(permutation(size, with_key)), everything)


@given(st.integers(2, 2**62), KEYS, st.lists(st.integers(0), min_size=1, max_size=20))
def test_a_number_goes_where_it_goes_whoever_asks(size, with_key, values):
    values = np.array([value % size for value in values])
    together = permute(values, size, with_key)
    assert ((together >= 0) & (together < size)).all()
    alone = [int(permute(values[i : i + 1], size, with_key)[0]) for i in range(len(values))]
    assert together.tolist() == alone
    assert len(set(alone)) == len(set(values.tolist()))


def test_neighbours_are_scattered_and_keys_give_other_orders():
    """Mean distance of neighbours in a random order of n is n / 3."""
    size = 10_000
    orders = [permute(np.arange(size), size, key("test", seed)) for seed in range(20)]
    for order in orders:
        assert abs(np.abs(np.diff(order)).mean() / (size / 3) - 1) < 0.05
    for first, second in zip(orders, orders[1:], strict=False):  # noqa: RUF007 (numpy arrays)
        assert (first == second).sum() < 10


@pytest.mark.parametrize("label", ["a", "b"])
def test_a_hash_s_bits_are_even(label):
    hashed = mix(np.arange(1 << 14), key(label))
    for bit in range(64):
        share = ((hashed >> np.uint64(bit)) & np.uint64(1)).mean()
        assert abs(share - 0.5) < 0.02


def test_the_orders_are_those_of_every_earlier_version():
    """A run that resumes has to go on with the order it began with: these numbers never change."""
    assert key("order", 1) == 0xEE63BF98C97CCFF4
    assert mix(np.arange(2), 5).tolist() == [13168350753275463132, 15093541023163888492]
    assert permutation(8, 5).tolist() == [5, 2, 6, 7, 4, 0, 1, 3]
    assert permute(np.arange(8), 8, 5).tolist() == [7, 6, 1, 4, 2, 3, 5, 0]
    assert permute(np.arange(2), 2**40, 5).tolist() == [1086864537956, 324508458619]
