"""V4's attention sees what it should: own document, window, whole groups, the indexer's picks."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from whole_model import build_units, random_batch

from ppruntime.models.attention_v4 import visible_entries
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import Role, preset
from ppruntime.models.rope import rotate
from ppruntime.models.units import AttentionUnit

DIMS = replace(preset("tiny-v4"), num_layers=3, compress_ratios=(0, 4, 8), hca_ratio=8, window=5)
ROLES = (Role.SWA, Role.CSA, Role.HCA)
A_QUARTER = settings(max_examples=settings.default.max_examples // 4)
SOME_DOCUMENTS = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@cache
def attention_of(role, dims=DIMS):
    """A layer's attention in fp64. Shared by the tests: nobody changes it."""
    units = build_units(dims, 0, torch.float64)
    return next(
        unit.attention
        for unit in units
        if isinstance(unit, AttentionUnit) and unit.spec.role is role
    )


def batch_of(lengths):
    return random_batch(DIMS, 0, [lengths])


def random_input(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, num_tokens, DIMS.hidden_size, generator=generator, dtype=torch.float64)


def outputs(attention, x, batch):
    return attention(x, Carry(), batch)[0]


@pytest.mark.parametrize("role", ROLES)
@A_QUARTER
@given(lengths=SOME_DOCUMENTS)
def test_a_packed_document_is_treated_as_if_it_were_alone(role, lengths):
    attention = attention_of(role)
    x = random_input(sum(lengths))
    together = outputs(attention, x, batch_of(lengths))
    apart = [
        outputs(attention, part, batch_of([part.shape[1]])) for part in x.split(lengths, dim=1)
    ]
    torch.testing.assert_close(together, torch.cat(apart, dim=1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("role", ROLES)
@A_QUARTER
@given(lengths=SOME_DOCUMENTS, data=st.data())
def test_no_output_depends_on_later_tokens_or_other_documents(role, lengths, data):
    attention = attention_of(role)
    total = sum(lengths)
    batch = batch_of(lengths)
    place = data.draw(st.integers(0, total - 1))
    x = random_input(total).requires_grad_()
    outputs(attention, x, batch)[0, place].sum().backward()
    is_read = x.grad[0].abs().amax(-1) > 0
    start = place - int(batch.positions[0, place])
    assert not is_read[:start].any()
    assert not is_read[place + 1 :].any()
    assert is_read[place]


def test_rows_of_a_batch_are_independent():
    attention = attention_of(Role.CSA)
    rows = [[7, 13, 5], [25], [1, 2, 22]]
    x = torch.cat([random_input(25, seed) for seed in range(3)])
    together = outputs(attention, x, random_batch(DIMS, 0, rows))
    for row, lengths in enumerate(rows):
        alone = outputs(attention, x[row : row + 1], batch_of(lengths))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-10, atol=1e-10)


@given(lengths=SOME_DOCUMENTS, ratio=st.integers(2, 9))
def test_visible_entries_are_the_whole_groups_up_to_the_query(lengths, ratio):
    batch = batch_of(lengths)
    found = visible_entries(batch.positions, ratio)[0]
    assert found.shape == (sum(lengths), sum(lengths) // ratio)
    for place, position in enumerate(batch.positions[0].tolist()):
        start = place - position
        ends = range(start + ratio - 1, place + 1, ratio)
        expected = [(end - ratio + 1) // ratio for end in ends]
        row = found[place].tolist()
        assert row == expected + [-1] * (len(row) - len(expected))


def naive_entries(compressor, x_TD, rope):
    """Compressed entries of one whole document, written as sums over tokens."""
    width, ratio = compressor.norm.weight.shape[0], compressor.ratio
    values, gates = compressor.value(x_TD), compressor.gate(x_TD)
    entries = []
    for group in range(len(x_TD) // ratio):
        pooled = []
        for channel in range(width):
            slots = []
            for place in range(ratio):
                own = channel + width if compressor.overlaps else channel
                token = group * ratio + place
                bias = compressor.position_bias[place]
                slots.append((gates[token, own] + bias[own], values[token, own]))
                if compressor.overlaps and group > 0:
                    token -= ratio
                    slots.append((gates[token, channel] + bias[channel], values[token, channel]))
            weights = torch.stack([gate for gate, _ in slots]).softmax(0)
            pooled.append((weights * torch.stack([value for _, value in slots])).sum())
        entry = compressor.norm(torch.stack(pooled))
        rotation = rope(torch.tensor([[group * ratio]]))
        entries.append(rotate(entry.view(1, 1, -1), rotation).view(-1))
    return torch.stack(entries)


@pytest.mark.parametrize("role", [Role.CSA, Role.HCA])
def test_an_entry_is_a_softmax_weighted_sum_over_its_group_and_for_csa_the_one_before(role):
    attention = attention_of(role)
    x = random_input(18)
    positions = torch.arange(18)[None]
    with torch.no_grad():
        found = attention.compressor(x, positions, attention.rope)[0]
        expected = naive_entries(attention.compressor, x[0], attention.rope)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_indexer_picks_the_entries_with_the_highest_written_out_scores():
    dims = replace(DIMS, index_topk=3)
    attention = attention_of(Role.CSA, dims)
    indexer, rope = attention.indexer, attention.rope
    num_tokens, heads, width = 29, dims.index_heads, dims.index_head_dim
    x = random_input(num_tokens)
    positions = torch.arange(num_tokens)[None]
    q_latent = attention.q_norm(attention.q_a(x))
    made = indexer.scoring(x, q_latent, rope(positions), positions_BT=positions, rope=rope)
    picked = indexer(made, positions)[0]

    keys = naive_entries(indexer.compressor, x[0], rope)
    queries = rotate(indexer.query(q_latent).view(1, num_tokens, heads, width), rope(positions))[0]
    weights = indexer.head_weights(x)[0]
    for token in range(num_tokens):
        scores = []
        for entry in range((token + 1) // indexer.ratio):
            products = [float(queries[token, head] @ keys[entry]) for head in range(heads)]
            score = sum(
                float(weights[token, head]) * max(product, 0.0)
                for head, product in enumerate(products)
            )
            scores.append(score / math.sqrt(width * heads))
        best = sorted(range(len(scores)), key=lambda entry: (-scores[entry], entry))[:3]
        assert picked[token].tolist() == sorted(best) + [-1] * (3 - len(best))


@torch.no_grad()
@pytest.mark.parametrize("role", ROLES)
def test_the_softmax_is_joint_over_window_entries_and_sink_and_the_output_is_turned_back(role):
    """One query and head at a time, from the keys the layer makes."""
    attention = attention_of(role)
    num_tokens, rope = 23, attention.rope
    x = random_input(num_tokens)
    positions = torch.arange(num_tokens)[None]
    batch = MicroBatch(ids=positions, labels=positions, positions=positions)
    q_latent = attention.q_norm(attention.q_a(x))
    window = rotate(attention.kv_norm(attention.kv(x)), rope(positions))[0]
    if role is not Role.SWA:
        entries = naive_entries(attention.compressor, x[0], rope)
    if role is Role.CSA:
        indexer, places = attention.indexer, {"positions_BT": positions, "rope": rope}
        scoring = indexer.scoring(x, q_latent, rope(positions), **places)
        picks = indexer(scoring, positions)[0]
    heads, width = DIMS.num_heads, DIMS.head_dim
    q = attention.q_b(q_latent).view(num_tokens, heads, width)
    q = q / (q.square().mean(-1, keepdim=True) + DIMS.norm_eps).sqrt()
    q = rotate(q[None], rope(positions))[0]

    o = torch.zeros(num_tokens, heads, width, dtype=torch.float64)
    for token in range(num_tokens):
        seen = list(window[max(0, token - DIMS.window + 1) : token + 1])
        if role is Role.HCA:
            seen += list(entries[: (token + 1) // attention.ratio])
        elif role is Role.CSA:
            seen += [entries[entry] for entry in picks[token].tolist() if entry >= 0]
        for head in range(heads):
            exps = [torch.exp(q[token, head] @ key / math.sqrt(width)) for key in seen]
            total = sum(exps) + torch.exp(attention.sink[head])
            o[token, head] = sum(e / total * key for e, key in zip(exps, seen, strict=True))
    o = rotate(o[None], rope(-positions))[0]
    groups = o.view(num_tokens, DIMS.o_groups, -1)
    low = torch.stack(
        [groups[:, g] @ attention.o_a.weight[g].T for g in range(DIMS.o_groups)], dim=1
    )
    expected = attention.o_b(low.flatten(1))
    torch.testing.assert_close(outputs(attention, x, batch)[0], expected, rtol=1e-9, atol=1e-10)
