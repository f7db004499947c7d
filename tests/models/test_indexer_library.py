"""The indexer by cuDNN's frontend: what the package is given and what becomes of its answers, by a
stand-in that does what its documentation says; on a Hopper by the package itself."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from whole_model import random_batch

from ppruntime.models import selection as reference
from ppruntime.models.dims import preset
from ppruntime.models.kernels import indexer_library as library

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"


class DocumentedPackage:
    """DSA's two functions, by their documentation."""

    @staticmethod
    def indexer_forward_wrapper(q, k, w, *, ratio, q_causal_offsets):
        assert all(x.is_contiguous() for x in (q, k, w))
        assert (q.dim(), k.dim(), w.dim()) == (4, 4, 3)
        assert k.shape[2] == 1
        assert q_causal_offsets.dtype is torch.int32
        products = torch.einsum("bthi,bci->bthc", q.float(), k[:, :, 0].float()).relu()
        scores = (products * w.float().unsqueeze(-1)).sum(2)
        # A zero may have either sign, by how the terms were added.
        is_negative_zero = (scores == 0) & (torch.arange(k.shape[1]) % 2 == 0)
        scores = torch.where(is_negative_zero, -0.0, scores)
        places = torch.arange(q.shape[1]) + q_causal_offsets[:, None]
        is_hidden = torch.arange(k.shape[1]) >= ((places + 1) // ratio).unsqueeze(-1)
        return {"scores": scores.masked_fill(is_hidden, -torch.inf)}

    @staticmethod
    def indexer_top_k_wrapper(values, lengths, k, *, return_val, tie_break, deterministic):
        assert values.is_contiguous()
        assert lengths.dtype is torch.int32
        assert (return_val, tie_break, deterministic) == (False, 1, True)
        assert 0 < k <= values.shape[1]
        rows = []
        for row, length in zip(values.tolist(), lengths.tolist(), strict=True):
            signs = torch.signbit(torch.tensor(row)).tolist()
            order = sorted(range(length), key=lambda c: (-row[c], row[c] == 0 and signs[c], c))
            picked = sorted(order[:k])
            rows.append(picked + [-1] * (k - len(picked)))
        return {"indices": torch.tensor(rows, dtype=torch.int32)}


def assert_same_choice(rows, ratio, *, heads=2, width=8, topk=3, device="cpu", blocks=2):
    """On scores that are small integers, so exact in any order and often equal, also as 0."""
    dims = replace(preset("tiny"), index_topk=topk, candidate_blocks=blocks, candidate_block_size=3)
    positions = random_batch(dims, 0, rows).positions.to(device)
    batch, num_tokens = positions.shape
    generator = torch.Generator().manual_seed(ratio)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).to(device, torch.bfloat16)

    q = integers(-1, 2, batch, num_tokens, heads, width)
    keys = integers(-1, 2, batch, num_tokens // ratio, width)
    weights = integers(-2, 3, batch, num_tokens, heads)
    arguments = (dims, q, weights, keys, positions, ratio)
    finding = reference.select_entries(*arguments, finds_candidates=True)
    for options in (
        {},
        {"finds_candidates": True},
        {"candidates": finding.candidates},
        {"candidates": torch.zeros_like(finding.candidates)},
    ):
        ours = library.select_entries(*arguments, **options)
        expected = reference.select_entries(*arguments, **options)
        assert ours.entries_BTk.dtype is torch.int32
        assert torch.equal(ours.entries_BTk, expected.entries_BTk.int()), options
        if "finds_candidates" in options:
            assert torch.equal(ours.candidates, expected.candidates)


@pytest.mark.parametrize("max_scores", [1 << 25, 150])
def test_the_choice_is_the_references_with_ties_documents_and_candidates(max_scores, monkeypatch):
    monkeypatch.setattr(library, "_dsa", lambda: DocumentedPackage)
    monkeypatch.setattr(library, "MAX_SCORES", max_scores)
    assert_same_choice([(20, 1, 9), (30,)], 2)
    assert_same_choice([(9, 5), (14,)], 1, topk=4)
    assert_same_choice([(2, 1)], 2, topk=5)
    assert_same_choice([(1,)], 2)


def test_the_op_says_its_shapes_without_running(monkeypatch):
    monkeypatch.setattr(library, "_dsa", lambda: DocumentedPackage)
    q, weights, keys = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2), torch.zeros(1, 4, 8)
    places = torch.arange(4).view(1, 4)
    arguments = (q, weights, keys, 0 * places, places + 1, None, 3, 2, 1, 1)
    op = torch.ops.ppruntime.index_select_library.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_is_missing_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    cuda = torch.device("cuda")
    assert "float32" in library.unavailable_reason(cuda, torch.float32)
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    assert library.unavailable_reason(cuda, torch.bfloat16) == (
        "the package nvidia-cudnn-frontend is not installed; pip install 'ppruntime[attention]' "
        'or use kernels.indexer = "triton"'
    )


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_on_a_gpu_the_packages_choice_is_the_references_at_full_width(ratio):
    reason = library.unavailable_reason(torch.device("cuda"), torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)
    rows = [(1500, 1, 547), (2048,)]
    for heads in (32, 64):
        assert_same_choice(rows, ratio, heads=heads, width=128, topk=512, device="cuda")
