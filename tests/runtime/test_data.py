"""Batches: the same tokens whoever asks, every token once per epoch, labels inside documents."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.config import load
from ppruntime.data.batches import Batches, open_data, split_documents
from ppruntime.data.sources import MadeUpTokens, TokenSource
from ppruntime.data.token_file import DataError, TokenFile
from ppruntime.data.token_writer import Document, Vocabulary, write
from ppruntime.models.carry import IGNORED_LABEL

NO_TOKENS = np.empty(0, np.int64)


def source_of(path, lengths, *, seq_len, shuffle_key=1, masked=False, ignore=NO_TOKENS, **options):
    """A source over documents of these lengths; id n is the n-th token of the file."""
    ends = np.cumsum(lengths)
    documents = [
        Document(np.arange(end - n, end), np.arange(n) % 3 > 0 if masked else None)
        for n, end in zip(lengths, ends, strict=True)
    ]
    write(path, documents, Vocabulary("t", 1 << 20), if_exists="replace")
    file = TokenFile.open(path)
    return TokenSource(
        file=file,
        documents=np.arange(file.num_documents),
        seq_len=seq_len,
        vocab_size=1 << 20,
        shuffle_key=shuffle_key,
        ignore_tokens=ignore,
        **options,
    )


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda n: max(n) > 1)


@given(LENGTHS, st.integers(2, 40), st.booleans(), st.integers(0, 3))
def test_an_epoch_has_every_token_once_as_input(tmp_path_factory, lengths, seq_len, shuffle, epoch):
    path = tmp_path_factory.getbasetemp() / "epoch"
    source = source_of(path, lengths, seq_len=seq_len, shuffle_key=5 if shuffle else None)
    per_epoch = source.samples_per_epoch
    read = source.read(np.arange(epoch * per_epoch, (epoch + 1) * per_epoch))
    inputs = read.tokens[:, :-1].ravel()
    num_filled = per_epoch * seq_len - sum(lengths)
    assert 0 <= num_filled < seq_len
    assert np.array_equal(np.sort(inputs)[num_filled:], np.arange(sum(lengths)))
    # Each token of a document except its first is a label once.
    starts = {0, *np.cumsum(lengths).tolist()}
    labels = read.tokens[:, 1:][read.learn]
    assert sorted(labels) == [t for t in range(sum(lengths)) if t not in starts]


@given(LENGTHS, st.integers(2, 40), st.integers(0, 50))
def test_labels_follow_inputs_and_positions_count_from_the_document_s_start(
    tmp_path_factory, lengths, seq_len, sample
):
    path = tmp_path_factory.getbasetemp() / "follow"
    read = source_of(path, lengths, seq_len=seq_len).read(np.array([sample]))
    tokens, positions, learn = read.tokens[0], read.positions[0], read.learn[0]
    starts = {0, *np.cumsum(lengths).tolist()}
    for t in range(seq_len):
        if learn[t]:
            assert tokens[t + 1] == tokens[t] + 1
        # Where a document, or the window, or the filler begins, positions are 0; else they count.
        if positions[t] > 0:
            assert positions[t] == positions[t - 1] + 1
        if t and positions[t] == 0:
            assert tokens[t] in starts
    assert positions[0] == 0
    assert all(learn[t] == (positions[t + 1] > 0) for t in range(seq_len - 1) if tokens[t + 1])


def test_without_reset_positions_count_through_the_window(tmp_path):
    source = source_of(tmp_path / "a", [3, 4, 5], seq_len=6, reset_positions=False)
    assert source.read(np.array([0, 1])).positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_a_window_s_layout_without_shuffling(tmp_path):
    """Documents 0 1 2 | 3 | 4 5 6 7 8 | 9 10, windows of 4, then one that is filled up."""
    source = source_of(tmp_path / "a", [3, 1, 5, 2], seq_len=4, shuffle_key=None)
    read = source.read(np.arange(3))
    assert read.tokens.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 0, 0]]
    assert read.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 1, 0]]
    assert read.learn.astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]


@given(
    LENGTHS,
    st.integers(2, 20),
    st.booleans(),
    st.sampled_from([[], [4], [0, 5, 6]]),
    st.integers(0, 30),
)
def test_the_number_of_valid_labels_is_known_without_reading_them(
    tmp_path_factory, lengths, seq_len, masked, ignore, first
):
    path = tmp_path_factory.getbasetemp() / "valid"
    ignored = np.array(ignore, np.int64)
    source = source_of(path, lengths, seq_len=seq_len, masked=masked, ignore=ignored)
    samples = np.arange(first, first + 9)
    read = source.read(samples)
    assert source.num_valid(samples) == read.learn.sum()
    assert not np.isin(read.tokens[:, 1:][read.learn], ignored).any()


def test_masked_tokens_are_read_but_never_labels(tmp_path):
    source = source_of(tmp_path / "a", [6, 6], seq_len=6, shuffle_key=None, masked=True)
    read = source.read(np.arange(2))
    assert read.tokens[:, :-1].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert read.tokens[:, 1:][read.learn].tolist() == [1, 2, 4, 5, 7, 8, 10, 11]


def batches(source, num_micro_batches=4, num_data_ranks=1):
    return Batches(
        source=source,
        micro_batch_size=2,
        num_micro_batches=num_micro_batches,
        num_data_ranks=num_data_ranks,
    )


@pytest.mark.parametrize("num_data_ranks", [1, 2, 4])
def test_a_step_has_the_same_micro_batches_at_every_number_of_data_ranks(tmp_path, num_data_ranks):
    source = source_of(tmp_path / "a", [7, 30, 2, 19], seq_len=5)
    alone = batches(source, 4, 1)
    shared = batches(source, 4 // num_data_ranks, num_data_ranks)
    for step in range(6):
        assert shared.num_valid(step) == alone.num_valid(step)
        together = [
            shared.micro_batch(step, index, rank)
            for rank in range(num_data_ranks)
            for index in range(4 // num_data_ranks)
        ]
        for index, micro_batch in enumerate(together):
            wanted = alone.micro_batch(step, index)
            assert torch.equal(micro_batch.ids, wanted.ids)
            assert torch.equal(micro_batch.labels, wanted.labels)
            assert torch.equal(micro_batch.positions, wanted.positions)


def test_any_step_can_be_asked_for_first(tmp_path):
    """Resuming is asking for a later step: nothing that was asked before matters."""
    lengths = [7, 30, 2, 19, 40]
    told = batches(source_of(tmp_path / "a", lengths, seq_len=5))
    steps = [[told.micro_batch(step, i) for i in range(4)] for step in range(40)]
    random = np.random.default_rng(3)
    for first in random.integers(0, 20, 10).tolist():
        resumed = batches(source_of(tmp_path / "a", lengths, seq_len=5))
        for step in range(first, first + 20):
            for i in range(4):
                assert torch.equal(resumed.micro_batch(step, i).ids, steps[step][i].ids)
                assert torch.equal(resumed.micro_batch(step, i).labels, steps[step][i].labels)


def test_a_micro_batch_is_int64_and_marks_what_is_not_learnt(tmp_path):
    data = batches(source_of(tmp_path / "a", [3, 1, 5, 2], seq_len=4, shuffle_key=None))
    micro_batch = data.micro_batch(0, 0)
    tensors = (micro_batch.ids, micro_batch.labels, micro_batch.positions)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}
    assert {tuple(tensor.shape) for tensor in tensors} == {(2, 4)}
    assert micro_batch.ids.is_contiguous()
    x = IGNORED_LABEL
    assert micro_batch.labels.tolist() == [[1, 2, x, x], [5, 6, 7, 8]]


def test_other_seeds_and_epochs_have_other_orders(tmp_path):
    lengths = [9] * 20
    source = source_of(tmp_path / "a", lengths, seq_len=6)
    other = source_of(tmp_path / "a", lengths, seq_len=6, shuffle_key=2)
    samples = np.arange(source.samples_per_epoch)
    first = source.read(samples).tokens
    assert not np.array_equal(first, other.read(samples).tokens)
    assert not np.array_equal(first, source.read(samples + len(samples)).tokens)


@given(st.integers(1, 400), st.floats(0, 0.5))
def test_the_two_splits_share_no_document_and_leave_none_out(num_documents, share):
    if num_documents == 1 and share:
        with pytest.raises(DataError, match="leaves none to train on"):
            split_documents(num_documents, share)
        return
    training, validation = split_documents(num_documents, share)
    assert sorted([*training, *validation]) == list(range(num_documents))
    assert bool(len(validation)) == (share > 0)
    for documents in (training, validation):
        assert all(a < b for a, b in pairwise(documents))


@pytest.fixture
def config(tmp_path, monkeypatch):
    """`config(*overrides)` -> a config over a token file of 40 documents in the working folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    texts = [Document(random.integers(0, 256, n)) for n in random.integers(5, 60, 40)]
    write("data", texts, Vocabulary("bytes", 256))
    Path("run.toml").write_text('[model]\nname = "tiny"\n[data]\npath = "data"\n')
    small = ["train.seq_len=8", "train.num_micro_batches=2"]

    def make(*overrides):
        return load(["run.toml"], [*small, *overrides])

    return make


def test_validation_is_the_same_for_every_seed_and_shares_nothing_with_training(config):
    def tokens(split, seed):
        made = config(f"train.seed={seed}", "data.validation_share=0.2")
        data = open_data(made, split)
        samples = np.arange(data.source.samples_per_epoch)
        return data.source.read(samples).tokens

    assert np.array_equal(tokens("validation", 1), tokens("validation", 2))
    assert not np.array_equal(tokens("train", 1), tokens("train", 2))
    held_out = open_data(config("data.validation_share=0.2"), "validation").source.num_tokens
    left = open_data(config("data.validation_share=0.2")).source.num_tokens
    assert held_out + left == TokenFile.open("data").num_tokens


def test_more_validation_steps_than_there_is_data_are_refused(config):
    held_out = ["train.eval_interval=1", "train.num_micro_batches=1", "data.validation_share=0.2"]
    made = config(*held_out, "train.eval_steps=500")
    per_epoch = open_data(config(*held_out), "validation").source.samples_per_epoch
    with pytest.raises(DataError) as caught:
        open_data(made, "validation")
    assert str(caught.value) == (
        f"train.eval_steps = 500 reads 500 sequences, validation has {per_epoch}; use at most "
        f"{per_epoch}, or raise data.validation_share"
    )


def test_ids_that_the_model_lacks_are_found_before_the_first_step(config):
    made = config("model.vocab_size=200", "model.engram_compressed_vocab=200")
    with pytest.raises(DataError, match=r"data\.bin: token 2\d\d at byte \d+, the vocabulary has"):
        open_data(made)


def test_ids_that_the_first_look_missed_stop_the_run(config):
    data = open_data(config())
    ids = bytearray(Path("data.bin").read_bytes())
    source = TokenSource(
        file=TokenFile.open("data"),
        documents=np.arange(40),
        seq_len=8,
        vocab_size=max(ids),
        shuffle_key=None,
        ignore_tokens=NO_TOKENS,
    )
    with pytest.raises(
        DataError, match=rf"data\.bin: token {max(ids)} at byte {ids.index(max(ids))},"
    ):
        source.read(np.arange(source.samples_per_epoch))
    data.micro_batch(0, 0)
    os.truncate("data.bin", 4)
    with pytest.raises(DataError, match=r"data\.bin: 4 bytes, .* when it was opened"):
        data.micro_batch(0, 1)


def test_documents_of_one_token_cannot_be_trained_on(config):
    write(
        "data",
        [Document(np.array([n])) for n in range(9)],
        Vocabulary("b", 256),
        if_exists="replace",
    )
    with pytest.raises(DataError, match="every document has one token"):
        open_data(config())


def test_epochs_are_counted(config):
    data = open_data(config("data.validation_share=0"))
    per_epoch = data.source.samples_per_epoch
    assert data.epoch(per_epoch) == data.samples_per_step == 2
    assert open_data(load([], ["model.name=tiny", "data.type=random"])).epoch(5) == 0


@pytest.mark.parametrize("learnable", [True, False])
def test_made_up_tokens_are_pure_functions_of_key_and_number(learnable):
    def source(with_key):
        return MadeUpTokens(learnable=learnable, vocab_size=50, seq_len=100, with_key=with_key)

    read = source(1).read(np.arange(7, 20))
    assert np.array_equal(read.tokens[3:4], source(1).read(np.array([10])).tokens)
    assert not np.array_equal(read.tokens, source(2).read(np.arange(7, 20)).tokens)
    assert read.tokens.min() >= 0
    assert set(read.tokens.ravel().tolist()) == set(range(50))
    assert read.learn.all()
    assert source(1).num_valid(np.arange(7, 20)) == read.learn.sum()
    assert (((read.tokens[:, 1:] - read.tokens[:, :-1]) % 50 == 1).all()) == learnable


@pytest.mark.parametrize("kind", ["random", "counting"])
def test_made_up_validation_is_not_the_training_data(kind):
    made = load([], ["model.name=tiny", f"data.type={kind}", "train.seq_len=16"])
    training, validation = open_data(made), open_data(made, "validation")
    assert not torch.equal(training.micro_batch(0, 0).ids, validation.micro_batch(0, 0).ids)


def test_the_standard_library_is_built_on_first_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = load([], ["model.name=tiny", "data.type=stdlib", "train.seq_len=64"])
    data = open_data(made)
    (index,) = (tmp_path / "runs" / "data").glob("*.idx")
    assert data.source.num_tokens > 5_000_000
    written = index.stat().st_mtime_ns
    micro_batch = open_data(made).micro_batch(3, 1)
    assert index.stat().st_mtime_ns == written
    text = bytes(micro_batch.ids[0].tolist())
    assert text.isascii() or text.decode(errors="ignore")
    assert (micro_batch.labels != IGNORED_LABEL).sum() > 50
