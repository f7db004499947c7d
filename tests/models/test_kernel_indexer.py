"""The indexer kernels choose what the reference chooses: ties, documents, candidates, any size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from whole_model import random_batch

from ppruntime.models import selection as reference
from ppruntime.models.dims import preset
from ppruntime.models.kernels import indexer as kernels

TESTS = Path(__file__).parent.parent
on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
interpreted = pytest.mark.skipif(on_gpu, reason="small shapes, for the interpreter")


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not on_gpu, reason="needs a GPU")(test))


def assert_same_choice(rows, ratio, seed, *, topk=3, heads=2, width=16, dtype=torch.float32):
    """On scores that are small integers, so exact in any order and often equal."""
    dims = replace(preset("tiny"), index_topk=topk, candidate_blocks=2, candidate_block_size=3)
    positions = random_batch(dims, 0, rows).positions.to(DEVICE)
    batch, num_tokens = positions.shape
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).to(DEVICE, dtype)

    q = integers(-1, 2, batch, num_tokens, heads, width)
    keys = integers(-1, 2, batch, num_tokens // ratio, width)
    weights = integers(-2, 3, batch, num_tokens, heads)
    arguments = (dims, q, weights, keys, positions, ratio)
    ours = kernels.select_entries(*arguments, finds_candidates=True)
    expected = reference.select_entries(*arguments, finds_candidates=True)
    assert ours.entries_BTk.dtype is torch.int32
    assert torch.equal(ours.entries_BTk, expected.entries_BTk.int())
    assert torch.equal(ours.candidates, expected.candidates)
    ours = kernels.select_entries(*arguments, candidates=expected.candidates)
    within = reference.select_entries(*arguments, candidates=expected.candidates)
    assert torch.equal(ours.entries_BTk, within.entries_BTk.int())
    assert ours.candidates is expected.candidates


@interpreted
def test_the_choice_is_the_references_with_ties_documents_and_candidates():
    assert_same_choice([(20, 1, 9), (30,)], 2, 1, dtype=torch.bfloat16)
    assert_same_choice([(9, 2)], 1, 4, topk=4, heads=3)
    assert_same_choice([(1,)], 2, 0)


@interpreted
def test_lists_longer_than_a_program_holds_and_blocks_of_queries_change_nothing(monkeypatch):
    monkeypatch.setattr(kernels, "_IN_REGISTERS", 16)
    monkeypatch.setattr(kernels, "MAX_SCORES", 1)
    monkeypatch.setattr(kernels, "_QUERIES", 16)
    assert_same_choice([(12, 5)], 1, 5, topk=5)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_both_zeros_are_equal_and_infinities_and_nan_have_the_references_places():
    dims = replace(preset("tiny"), index_topk=2)
    positions = torch.arange(6).unsqueeze(0)
    # One head of one effective channel: the score is weight * relu(q * key).
    q, keys = torch.zeros(1, 6, 1, 16), torch.zeros(1, 6, 16)
    q[..., 0], keys[0, :, 0] = 1.0, torch.tensor([0.0, -1.0, 1.0, 0.0, torch.inf, torch.nan])
    for weight in (-1.0, 1.0):
        weights = torch.full((1, 6, 1), weight)
        for last in (4, 6):
            inputs = (q[:, :last], weights[:, :last], keys[:, :last], positions[:, :last], 1)
            # A product of 0 and infinity or NaN is NaN for both.
            ours = kernels.select_entries(dims, *inputs)
            expected = reference.select_entries(dims, *inputs)
            assert torch.equal(ours.entries_BTk, expected.entries_BTk.int()), (weight, last)


@interpreted
def test_the_registration_is_consistent_and_bad_inputs_are_named():
    q, weights, keys = torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2), torch.zeros(1, 4, 16)
    first, visible = torch.zeros(1, 4, dtype=torch.long), torch.arange(1, 5).unsqueeze(0)
    op = torch.ops.ppruntime.index_select.default
    arguments = (q, weights, keys, first, visible, None, 3, 2, 1)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    for place, value, message in (
        (0, torch.zeros(1, 4, 2, 24), "keys is"),
        (0, torch.zeros(1, 4, 2, 16).half(), "both have to be bfloat16 or both float32"),
        (1, torch.zeros(1, 4, 3), r"weights is \[1, 4, 3\]"),
        (2, torch.zeros(4, 16), r"\[B, C, I\]"),
        (5, torch.zeros(1, 4, 3, dtype=torch.bool), r"they have to be \[1, 4, 2\]"),
    ):
        wrong = list(arguments)
        wrong[place] = value
        with pytest.raises(ValueError, match=message):
            op(*wrong)
    empty = op(q[:, :0], weights[:, :0], keys, first[:, :0], visible[:, :0], None, 3, 2, 1)
    assert [tuple(t.shape) for t in empty] == [(1, 0, 3), (1, 0, 2)]


@gpu
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_on_a_gpu_the_choice_is_the_references_at_full_width(ratio):
    assert_same_choice(
        [(1500, 1, 547)], ratio, 3, topk=512, heads=32, width=128, dtype=torch.bfloat16
    )


@gpu
def test_on_a_gpu_long_documents_need_steps_and_blocks_of_queries():
    assert_same_choice([(20000, 77)], 1, 3, topk=512, heads=2, width=16, dtype=torch.bfloat16)


@gpu
def test_on_a_gpu_no_more_than_a_block_of_scores_is_held():
    dims = preset("v41-flash")
    positions = torch.arange(8192, device="cuda").unsqueeze(0)
    q = torch.randn(1, 8192, 32, 128, device="cuda").bfloat16()
    weights = torch.randn(1, 8192, 32, device="cuda").bfloat16()
    keys = torch.randn(1, 8192, 128, device="cuda").bfloat16()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    picked = kernels.select_entries(dims, q, weights, keys, positions, 1)
    made = picked.entries_BTk.numel() * 4
    assert torch.cuda.max_memory_allocated() - before - made < 24 << 20
    scores = reference.index_scores(q[:, -64:], weights[:, -64:], keys)[0]
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, picked.entries_BTk[0, -64:].long(), True)
    # All that is chosen is at least as high as all that is not, but for the sums' rounding.
    visible = torch.arange(8192, device="cuda") <= positions[0, -64:, None]
    lowest = scores.masked_fill(~chosen, torch.inf).amin(1)
    highest = scores.masked_fill(chosen | ~visible, -torch.inf).amax(1)
    assert (chosen.sum(1) == 512).all()
    assert (highest - lowest < 1e-3 * scores.abs().amax(1)).all()


@pytest.mark.compiles
@pytest.mark.slow
def test_indexer_and_rotation_compile_for_hopper_without_spills():
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)


def _compile_all():
    from offline_compile import captured

    from ppruntime.models.kernels import rope
    from ppruntime.models.rope import Rotation

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, positions = 512, meta(1, 512, dtype=torch.int64)
    with captured() as found:
        for num_entries, heads, kept in ((8192, 32, 0), (32768, 32, 2048)):
            q, weights = meta(1, tokens, heads, 128), meta(1, tokens, heads)
            keys = meta(1, num_entries, 128)
            candidates = meta(1, tokens, num_entries // 8, dtype=torch.bool) if kept else None
            kernels.run_select(q, weights, keys, positions, positions, candidates, 512, 8, kept)
        angles = Rotation(*(meta(1, tokens, 32, dtype=torch.float32) for _ in range(2)))
        x = meta(1, tokens, 64, 512)
        rope.turn_(x, angles)
        rope._launch(x, meta(1, tokens, 64, 512), *angles, inverse=True)
    for kernel in {k.name + str(k.registers): k for k in found}.values():
        print(kernel)
        assert kernel.spills == 0, kernel
        if kernel.name == "score_kernel":
            assert kernel.matrix_instructions > 0, kernel


if __name__ == "__main__":
    _compile_all()
