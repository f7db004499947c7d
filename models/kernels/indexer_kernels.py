"""Triton kernels of indexer.py beside this file, which says what they compute.

Scores become unsigned integers in the same order (`_query_scores`), so that the k-th highest is
found by its bits. 0 is no score: hidden, or excluded. A program of the selection has ROWS queries:
one on a GPU; in the interpreter, where every operation costs as much as a thousand, many.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter multiplies bf16 tiles as if they were integers: there they are widened first."""


@triton.jit(do_not_specialize=("start", "end"))
def score_kernel(
    q_ptr, weights_ptr, keys_ptr, first_ptr, num_visible_ptr, scores_ptr, start, end, num_entries,
    H: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """A tile of scores of the queries from `start`; nothing where none of them sees an entry."""
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    queries = start + rows
    is_query = queries < end
    entries = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    first = tl.load(first_ptr + queries, mask=is_query, other=0)
    num_visible = tl.load(num_visible_ptr + queries, mask=is_query, other=0)
    sees = num_visible > 0
    lowest = tl.min(tl.where(sees, first, num_entries))
    highest = tl.max(tl.where(sees, first + num_visible, 0))
    if (tl.program_id(1) * ENTRIES < highest) & ((tl.program_id(1) + 1) * ENTRIES > lowest):
        channels = tl.arange(0, WIDTH)
        keys = tl.load(
            keys_ptr + entries[:, None] * WIDTH + channels[None, :],
            mask=(entries < num_entries)[:, None],
            other=0.0,
        )
        if INTERPRETED:
            keys = keys.to(tl.float32)
        wide = queries.to(tl.int64)
        scores = tl.zeros([QUERIES, ENTRIES], tl.float32)
        for head in tl.range(0, H):
            q = tl.load(
                q_ptr + ((wide * H + head) * WIDTH)[:, None] + channels[None, :],
                mask=is_query[:, None],
                other=0.0,
            )
            if INTERPRETED:
                q = q.to(tl.float32)
            weights = tl.load(weights_ptr + wide * H + head, mask=is_query, other=0.0)
            products = tl.dot(q, keys.T, input_precision="ieee")
            scores += tl.maximum(products, 0.0) * weights.to(tl.float32)[:, None]
        places = rows.to(tl.int64)[:, None] * num_entries + entries[None, :]
        is_place = is_query[:, None] & (entries < num_entries)[None, :]
        tl.store(scores_ptr + places, scores, mask=is_place)


@triton.jit
def _query_scores(scores, masks, local, num_visible, BLOCK: tl.constexpr):
    """Queries' local entries as uint32 in their scores' order, from 1 on; 0 where there is no score
    or it is -inf. Both zeros are one. NaN is above all, as in torch's sorts.

    `scores`: where a query's first entry lies; `masks`: where its candidate blocks begin, or None.
    """
    is_there = local < num_visible[:, None]
    if masks is not None:
        allowed = tl.load(masks[:, None] + local // BLOCK, mask=is_there, other=0)
        is_there = is_there & (allowed != 0)
    found = tl.load(scores[:, None] + local, mask=is_there, other=0.0)
    found = tl.where(found == 0.0, 0.0, found)
    bits = found.to(tl.uint32, bitcast=True)
    bits = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    bits = tl.where(found != found, 0xFFFFFFFF, bits)
    return tl.where(is_there & (found != float("-inf")), bits, 0).to(tl.uint32)


@triton.jit
def _threshold(
    ordered, scores, masks, num_visible, most_visible, wanted,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, IN_ONE: tl.constexpr,
):  # fmt: skip
    """[ROWS] the highest value that at least `wanted` of a query's scores reach; 0 if it has fewer.

    Bit by bit, from how many scores are at or above a value. `ordered` has all scores if IN_ONE,
    else they are read again for each count.
    """
    low = tl.zeros([ROWS], tl.uint32)
    bit = tl.full([ROWS], 1 << 31, tl.uint32)
    for _ in tl.range(0, 32):
        counts = tl.zeros([ROWS], tl.int32)
        for begin in tl.range(0, most_visible, STEP):
            if IN_ONE:
                part = ordered
            else:
                local = begin + tl.arange(0, STEP)[None, :]
                part = _query_scores(scores, masks, local, num_visible, BLOCK)
            counts += tl.sum((part >= (low | bit)[:, None]).to(tl.int32), 1)
        low = tl.where(counts >= wanted, low | bit, low)
        bit = bit >> 1
    return low


@triton.jit(do_not_specialize=("start", "end"))
def select_kernel(
    scores_ptr, first_ptr, num_visible_ptr, mask_ptr, entries_ptr, start, end, num_entries,
    num_selected, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, IN_ONE: tl.constexpr,
    WRITTEN: tl.constexpr,
):  # fmt: skip
    """Writes queries' chosen entries, ascending; what is behind them stays as it is."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    queries = start + rows
    is_query = queries < end
    first = tl.load(first_ptr + queries, mask=is_query, other=0)
    num_visible = tl.load(num_visible_ptr + queries, mask=is_query, other=0)
    most_visible = tl.max(num_visible)
    scores = scores_ptr + rows * num_entries + first
    masks = None
    if mask_ptr is not None:
        masks = mask_ptr + queries * num_blocks
    targets = entries_ptr + queries * num_selected
    local = tl.arange(0, STEP)[None, :]

    ordered = tl.zeros([ROWS, STEP], tl.uint32)
    if IN_ONE:
        ordered = _query_scores(scores, masks, local, num_visible, BLOCK)
    low = _threshold(
        ordered, scores, masks, num_visible, most_visible, num_selected, ROWS, BLOCK, STEP, IN_ONE
    )
    if IN_ONE:
        num_above = tl.sum((ordered > low[:, None]).to(tl.int32), 1)
    else:
        num_above = tl.zeros([ROWS], tl.int32)
        for begin in tl.range(0, most_visible, STEP):
            part = _query_scores(scores, masks, begin + local, num_visible, BLOCK)
            num_above += tl.sum((part > low[:, None]).to(tl.int32), 1)
    num_ties = tl.where(low > 0, num_selected - num_above, 0)
    above_before = tl.zeros([ROWS], tl.int32)
    ties_before = tl.zeros([ROWS], tl.int32)
    # In shorter steps, read again: running counts and places of all at once would not fit.
    for begin in tl.range(0, most_visible, WRITTEN):
        places = begin + tl.arange(0, WRITTEN)[None, :]
        part = _query_scores(scores, masks, places, num_visible, BLOCK)
        is_above = (part > low[:, None]).to(tl.int32)
        is_tie = ((part == low[:, None]) & (part > 0)).to(tl.int32)
        # Two running counts in one: a step has fewer than 2^15 entries.
        counted = tl.cumsum(is_above | (is_tie << 16), 1)
        above = above_before[:, None] + (counted & 0xFFFF) - is_above
        ties = ties_before[:, None] + (counted >> 16) - is_tie
        is_chosen = (is_above != 0) | ((is_tie != 0) & (ties < num_ties[:, None]))
        place = above + tl.minimum(ties, num_ties[:, None])
        tl.store(targets[:, None] + place, first[:, None] + places, mask=is_chosen)
        above_before += tl.sum(is_above, 1)
        ties_before += tl.sum(is_tie, 1)


@triton.jit(do_not_specialize=("start", "end"))
def candidate_kernel(
    scores_ptr, first_ptr, num_visible_ptr, kept_ptr, start, end, num_entries, num_kept, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Marks the blocks with the highest best score, the newest among them whatever it has."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    queries = start + rows
    is_query = queries < end
    first = tl.load(first_ptr + queries, mask=is_query, other=0)
    num_visible = tl.load(num_visible_ptr + queries, mask=is_query, other=0)
    scores = scores_ptr + rows * num_entries + first
    blocks = tl.arange(0, ALL_BLOCKS)[None, :]
    best = tl.zeros([ROWS, ALL_BLOCKS], tl.uint32)
    for place in tl.static_range(BLOCK):
        found = _query_scores(scores, None, blocks * BLOCK + place, num_visible, BLOCK)
        best = tl.maximum(best, found)
    newest = (num_visible - 1) // BLOCK
    is_newest = (blocks == newest[:, None]) & (num_visible > 0)[:, None]
    best = tl.where(is_newest, 0xFFFFFFFF, best).to(tl.uint32)
    low = _threshold(best, scores, None, num_visible, 1, num_kept, ROWS, BLOCK, ALL_BLOCKS, True)
    is_above = best > low[:, None]
    num_ties = tl.where(low > 0, num_kept - tl.sum(is_above.to(tl.int32), 1), 0)
    is_tie = (best == low[:, None]) & (best > 0)
    ties = tl.cumsum(is_tie.to(tl.int32), 1)
    is_kept = is_above | (is_tie & (ties <= num_ties[:, None]))
    is_place = is_query[:, None] & (blocks < num_blocks)
    tl.store(kept_ptr + (queries * num_blocks)[:, None] + blocks, is_kept.to(tl.uint8), is_place)
