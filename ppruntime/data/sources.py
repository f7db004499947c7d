"""Sequences of tokens by number: from a token file, or made up. `batches.py` tells the order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ppruntime.data.order import key, mix, permutation, permute
from ppruntime.data.token_file import DataError, Integers, TokenFile

_BLOCK_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Samples:
    """Some sequences, before labels are told apart from what is not learnt."""

    tokens: Integers
    """[B, T + 1] ids; the inputs, and after them the last label."""
    positions: Integers
    """[B, T] places in the document, or in the window for a document that began before it."""
    learn: NDArray[np.bool_]
    """[B, T] whether token t + 1 is to be predicted from token t."""


class Source(Protocol):
    """Sequences by number."""

    def read(self, samples: Integers) -> Samples:
        """The sequences with these numbers. Raises DataError."""

    def num_valid(self, samples: Integers) -> int:
        """How many labels these sequences have; cheaper than to read them."""

    @property
    def samples_per_epoch(self) -> int | None:
        """None for a source without end."""

    @property
    def fingerprint(self) -> str:
        """Tells this data from other data; a run that resumes on other data is another run."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """The documents of one epoch, end to end."""

    documents: Integers
    """In the order in which they are read."""
    ends: Integers
    """Where each of them ends in the stream."""


class TokenSource:
    """Sequences of a token file, in the order that the module's text describes."""

    def __init__(
        self,
        *,
        file: TokenFile,
        documents: Integers,
        seq_len: int,
        vocab_size: int,
        shuffle_key: int | None,
        reset_positions: bool = True,
        ignore_tokens: Integers,
    ) -> None:
        """`documents` are the ones to read; without a `shuffle_key` they are read in that order."""
        lengths = np.diff(file.document_starts)
        self._file = file
        self._lengths = lengths
        self._documents = documents
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._shuffle_key = shuffle_key
        self._reset_positions = reset_positions
        self._ignore_tokens = ignore_tokens
        self._num_tokens = int(lengths[documents].sum())
        # Two epochs: a step may lie across their border.
        self._stream = lru_cache(2)(self._make_stream)
        if self._num_tokens == len(documents):
            raise DataError(
                f"{file.prefix}: every document has one token, so there is nothing to predict; "
                "build the "
                "file from longer documents"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in one epoch."""
        return self._num_tokens

    @property
    def samples_per_epoch(self) -> int:
        return -(-self._num_tokens // self._seq_len)

    @property
    def fingerprint(self) -> str:
        return self._file.fingerprint

    def read(self, samples: Integers) -> Samples:
        self._file.check_unchanged()
        tokens = np.empty((len(samples), self._seq_len + 1), np.int64)
        positions = np.empty((len(samples), self._seq_len), np.int64)
        learn = np.empty((len(samples), self._seq_len), np.bool_)
        epochs = samples // self.samples_per_epoch
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            read = self._read_windows(self._stream(epoch), self._windows(samples[rows], epoch))
            tokens[rows], positions[rows], learn[rows] = read.tokens, read.positions, read.learn
        return Samples(tokens, positions, learn)

    def num_valid(self, samples: Integers) -> int:
        if self._file.learn is not None or len(self._ignore_tokens):
            blocks = (
                samples[i : i + _BLOCK_SAMPLES] for i in range(0, len(samples), _BLOCK_SAMPLES)
            )
            return sum(int(self.read(block).learn.sum()) for block in blocks)
        # A label is there for every token of the stream that has a token of its document before it.
        count = 0
        epochs = samples // self.samples_per_epoch
        for epoch in np.unique(epochs).tolist():
            first = self._windows(samples[epochs == epoch], epoch) * self._seq_len
            last = np.minimum(first + self._seq_len, self._num_tokens - 1)
            ends = self._stream(epoch).ends
            num_ends = np.searchsorted(ends, last, "right") - np.searchsorted(ends, first, "right")
            count += int((last - first - num_ends).sum())
        return count

    def _make_stream(self, epoch: int) -> _Stream:
        documents = self._documents
        if self._shuffle_key is not None:
            order = permutation(len(documents), key("documents", self._shuffle_key, epoch))
            documents = documents[order]
        return _Stream(documents, np.cumsum(self._lengths[documents]))

    def _windows(self, samples: Integers, epoch: int) -> Integers:
        """Which windows of the epoch's stream the samples are."""
        places = samples % self.samples_per_epoch
        if self._shuffle_key is None:
            return places
        with_key = key("windows", self._shuffle_key, epoch)
        return permute(places, self.samples_per_epoch, with_key)

    def _read_windows(self, stream: _Stream, windows: Integers) -> Samples:
        at = windows[:, None] * self._seq_len + np.arange(self._seq_len + 1)
        is_filler = at >= self._num_tokens
        at = np.minimum(at, self._num_tokens - 1)
        place = np.searchsorted(stream.ends, at, "right")
        document = stream.documents[place]
        offset = at - (stream.ends[place] - self._lengths[document])
        source = self._file.document_starts[document] + offset
        tokens = np.where(is_filler, 0, self._file.tokens[source].astype(np.int64))
        self._check_ids(tokens, source)

        learn = (place[:, 1:] == place[:, :-1]) & ~is_filler[:, 1:]
        if self._file.learn is not None:
            learn &= self._file.learn[source[:, 1:]] != 0
        if len(self._ignore_tokens):
            learn &= ~np.isin(tokens[:, 1:], self._ignore_tokens)

        in_window = np.broadcast_to(np.arange(self._seq_len), learn.shape)
        if not self._reset_positions:
            return Samples(tokens, in_window.copy(), learn)
        # Filler is a document of its own, which begins behind the last token.
        filler_start = np.argmax(is_filler, axis=1, keepdims=True)
        positions = np.where(
            is_filler[:, :-1], in_window - filler_start, np.minimum(offset[:, :-1], in_window)
        )
        return Samples(tokens, positions, learn)

    def _check_ids(self, tokens: Integers, source: Integers) -> None:
        """What the look at some pages at the start may have missed."""
        wrong = (tokens < 0) | (tokens >= self._vocab_size)
        if wrong.any():
            raise self._file.wrong_id(int(source[wrong][0]), self._vocab_size)


@dataclass(frozen=True, slots=True)
class MadeUpTokens:
    """Sequences without a file, one document each, no two alike.

    Counting sequences (t + 1 follows t) can be learnt, so that a loss has to fall; the others
    cannot.
    """

    learnable: bool
    vocab_size: int
    seq_len: int
    with_key: int

    @property
    def samples_per_epoch(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        return f"{key('made up', self.learnable, self.vocab_size, self.with_key):016x}"

    def read(self, samples: Integers) -> Samples:
        shape = (len(samples), self.seq_len)
        if self.learnable:
            start = mix(samples, self.with_key)[:, None] % np.uint64(self.vocab_size)
            tokens = (start.astype(np.int64) + np.arange(self.seq_len + 1)) % self.vocab_size
        else:
            places = samples[:, None] * (self.seq_len + 1) + np.arange(self.seq_len + 1)
            tokens = (mix(places, self.with_key) % np.uint64(self.vocab_size)).astype(np.int64)
        positions = np.broadcast_to(np.arange(self.seq_len), shape).copy()
        return Samples(tokens, positions, np.ones(shape, np.bool_))

    def num_valid(self, samples: Integers) -> int:
        return len(samples) * self.seq_len
