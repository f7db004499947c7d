import torch
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.models.documents import (
    document_starts,
    first_entries,
    group_places,
    num_visible_entries,
    take_rows,
    window_slots,
)

documents = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def positions_of(lengths):
    return torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)


def entries_of(lengths, ratio):
    """[(document start, tokens of entry 0), ...] by plain counting: entry -> list of row places."""
    start, found = 0, []
    for length in lengths:
        groups = [[start + ratio * k + i for i in range(ratio)] for k in range(length // ratio)]
        found.append((start, length, groups))
        start += length
    return found


@given(documents, st.integers(1, 5))
def test_entries_are_whole_groups_of_one_document(lengths, ratio):
    positions = positions_of(lengths)
    places, first = group_places(positions, ratio)[0], first_entries(positions, ratio)[0]
    visible = num_visible_entries(positions, ratio)[0]
    used = set()
    for start, length, groups in entries_of(lengths, ratio):
        for k, group in enumerate(groups):
            entry = int(first[start]) + k
            assert places[entry].tolist() == group
            assert entry not in used
            used.add(entry)
        for place in range(start, start + length):
            seen = groups[: int(visible[place])]
            assert seen == [group for group in groups if group[-1] <= place]


@given(documents, st.integers(1, 9))
def test_window_holds_the_last_tokens_of_the_document(lengths, window):
    positions = positions_of(lengths)
    slots, starts = window_slots(positions, window)[0], document_starts(positions)[0]
    for place in range(sum(lengths)):
        seen = [slot for slot in slots[place].tolist() if slot >= 0]
        assert seen == list(range(max(int(starts[place]), place - window + 1), place + 1))


def test_rows_are_taken_per_sequence_and_their_gradients_add_up():
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[[0, 4], [0, 0]], [[1, 2], [2, 2]]])
    taken = take_rows(x, index)
    assert torch.equal(taken, torch.stack([x[b][index[b]] for b in range(2)]))
    taken.sum().backward()
    times = torch.tensor([[3, 0, 0, 0, 1], [0, 1, 3, 0, 0]], dtype=torch.float64)
    assert torch.equal(x.grad, times.unsqueeze(-1).expand(-1, -1, 3))
