import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from whole_model import random_batch

from ppruntime.models import selection
from ppruntime.models.dims import preset
from ppruntime.models.selection import best_entries, candidate_blocks, index_scores, select_entries

TINY = preset("tiny")


def plain_selection(scores, first, visible, candidates, block_size, k):
    """Row entries chosen for one query: highest first, ties to the smaller, then ascending."""
    local = [
        (-float(scores[first + i]), i)
        for i in range(visible)
        if candidates is None or candidates[i // block_size]
    ]
    chosen = sorted(i for _, i in sorted(local)[:k])
    return [first + i for i in chosen] + [-1] * (k - len(chosen))


def plain_candidates(scores, first, visible, block_size, num_kept, num_blocks):
    best = []
    for block in range(num_blocks):
        inside = range(block * block_size, min((block + 1) * block_size, visible))
        if inside:
            newest = (visible - 1) // block_size == block
            top = max(float(scores[first + i]) for i in inside)
            best.append((-torch.inf if newest else -top, block))
    kept = {block for _, block in sorted(best)[:num_kept]}
    return [block in kept for block in range(num_blocks)]


rows = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(rows, st.sampled_from([1, 2]), st.integers(0, 10_000))
def test_selection_and_candidates_equal_a_plain_search(lengths, ratio, seed):
    dims = replace(TINY, index_topk=3, candidate_blocks=2, candidate_block_size=3)
    batch = random_batch(dims, 0, [lengths])
    num_tokens, positions = sum(lengths), batch.positions[0]
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values, so that scores are often equal.
    q = torch.randint(-1, 2, (1, num_tokens, 2, 4), generator=generator).float()
    keys = torch.randint(-1, 2, (1, num_tokens // ratio, 4), generator=generator).float()
    weights = torch.ones(1, num_tokens, 2)
    scores = index_scores(q, weights, keys)[0]
    found = select_entries(dims, q, weights, keys, batch.positions, ratio, finds_candidates=True)
    again = select_entries(
        dims, q, weights, keys, batch.positions, ratio, candidates=found.candidates
    )
    num_blocks = found.candidates.shape[-1]
    assert num_blocks == (0 if num_tokens // ratio <= 6 else -(-(num_tokens // ratio) // 3))
    for t in range(num_tokens):
        first = (t - int(positions[t])) // ratio
        visible = (int(positions[t]) + 1) // ratio
        entries = plain_selection(scores[t], first, visible, None, 3, 3)
        assert found.entries_BTk[0, t].tolist() == entries
        candidates = None
        if num_blocks:
            candidates = plain_candidates(scores[t], first, visible, 3, 2, num_blocks)
            assert found.candidates[0, t].tolist() == candidates
        entries = plain_selection(scores[t], first, visible, candidates, 3, 3)
        assert again.entries_BTk[0, t].tolist() == entries


def test_scores_are_weighted_sums_of_positive_products():
    q, keys = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 8)
    weights = torch.randn(2, 3, 4)
    scores = index_scores(q, weights, keys)
    for b, t, c in [(0, 0, 0), (1, 2, 4), (0, 1, 3)]:
        expected = sum(weights[b, t, h] * (q[b, t, h] @ keys[b, c]).relu() for h in range(4))
        torch.testing.assert_close(scores[b, t, c], expected)


def test_blocks_of_queries_change_nothing(monkeypatch):
    dims = replace(TINY, candidate_blocks=2)
    batch = random_batch(dims, 0, [(40,), (40,)])
    q, keys = torch.randn(2, 40, 4, 32), torch.randn(2, 40, 32)
    weights = torch.randn(2, 40, 4)
    args = (dims, q, weights, keys, batch.positions, 1)
    whole = select_entries(*args, finds_candidates=True)
    monkeypatch.setattr(selection, "_MAX_PRODUCTS", 2 * 40 * 4 * 7)
    parts = select_entries(*args, finds_candidates=True)
    assert torch.equal(whole.entries_BTk, parts.entries_BTk)
    assert torch.equal(whole.candidates, parts.candidates)


def test_the_newest_block_is_always_a_candidate():
    scores = torch.tensor([[[5.0, 5, 5, 5, 0, 0, -torch.inf, -torch.inf]]])
    kept = candidate_blocks(scores, torch.tensor([[6]]), 2, 1)
    assert kept.tolist() == [[[False, False, True, False]]]


def test_fewer_visible_entries_than_wanted_leave_empty_places():
    scores = torch.tensor([[[1.0, 3.0, -torch.inf, -torch.inf]]])
    assert best_entries(scores, 3).tolist() == [[[0, 1, -1]]]
    assert best_entries(scores[..., :0], 2).tolist() == [[[-1, -1]]]
