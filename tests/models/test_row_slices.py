"""Micro-batches whose pools 32-bit offsets do not reach are computed in parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.models.fp8_expert_rules import most_rows
from ppruntime.models.row_slices import MOST_ELEMENTS, token_slices


@given(
    num_tokens=st.integers(0, 3000),
    per_token=st.integers(1, 8),
    num_experts=st.integers(1, 48),
    width=st.integers(1, 512),
    spare=st.integers(0, 10**6),
)
def test_parts_are_all_tokens_in_order_each_within_the_limit_and_no_fewer_would_do(
    num_tokens, per_token, num_experts, width, spare
):
    most = most_rows(per_token, num_experts) * width + spare
    parts = token_slices(num_tokens, per_token, num_experts, width, most)
    assert [n for part in parts for n in range(num_tokens)[part]] == list(range(num_tokens))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(most_rows(size * per_token, num_experts) * width <= most for size in sizes)
    if len(parts) > 1:
        longest = -(-num_tokens // (len(parts) - 1))
        assert most_rows(longest * per_token, num_experts) * width > most


def test_the_models_own_sizes_are_cut_where_offsets_end():
    """V4.1-Flash's experts over 8 ranks: 48 experts, 5,120 wide, top 6; rows that come have one."""
    assert len(token_slices(49_152, 1, 48, 5120)) == 1
    assert len(token_slices(413_000, 1, 48, 5120)) == 1
    assert len(token_slices(420_000, 1, 48, 5120)) == 2
    assert MOST_ELEMENTS // 5120 == 419_430


def test_a_token_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="one token's 2 rows of 64 values"):
        token_slices(5, 2, 4, 64, 1000)
