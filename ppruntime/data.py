"""Which tokens a micro-batch holds: a pure function of the config and the step. Start at
`open_data`.

The order. In each epoch the documents are permuted and laid end to end, and this stream is cut into
windows of `seq_len` tokens; sample i of the epoch is the window that a second permutation names. A
window's last label is the first token of the next window, so every token is an input once per
epoch. The last window is filled up with tokens that are not learnt.

Samples are numbered through all epochs, and step s has samples s x B to (s + 1) x B of them, B
being the global batch. Data rank d takes the d-th part of these. So the cursor of a run is its
step, nothing else has to be saved, and the samples of a step are the same at any number of data
ranks.

Shape letters: B sequences, T tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ppruntime.config_keys import Config
from ppruntime.corpus import build_stdlib, stdlib_prefix
from ppruntime.data_order import key, mix, permutation, permute
from ppruntime.token_file import DataError, Integers, TokenFile

if TYPE_CHECKING:
    from ppruntime.models.carry import MicroBatch

_PAGES_CHECKED = 64
_BLOCK_SAMPLES = 64

Split = Literal["train", "validation"]


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
class Batches:
    """A source, cut into the steps, data ranks and micro-batches of a run."""

    source: Source
    micro_batch_size: int
    num_micro_batches: int
    """Of one data rank in one step."""
    num_data_ranks: int

    @property
    def samples_per_step(self) -> int:
        """Sequences in one step, over all data ranks."""
        return self.micro_batch_size * self.num_micro_batches * self.num_data_ranks

    def samples(self, step: int, index: int, data_rank: int = 0) -> Integers:
        """The numbers of the sequences in one micro-batch."""
        assert 0 <= index < self.num_micro_batches, f"no micro-batch {index}"
        assert 0 <= data_rank < self.num_data_ranks, f"no data rank {data_rank}"
        place = data_rank * self.num_micro_batches + index
        first = step * self.samples_per_step + place * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size)

    def micro_batch(self, step: int, index: int, data_rank: int = 0) -> MicroBatch:
        """Micro-batch `index` of a data rank in `step`, on the CPU; the caller owns the tensors.

        The same call gives the same tokens on every rank and in every process. Raises DataError.
        """
        # Not above: `ppruntime data check` works without torch.
        import torch

        from ppruntime.models.carry import IGNORED_LABEL, MicroBatch

        read = self.source.read(self.samples(step, index, data_rank))
        labels = np.where(read.learn, read.tokens[:, 1:], IGNORED_LABEL)
        return MicroBatch(
            ids=torch.from_numpy(read.tokens[:, :-1].copy()),
            labels=torch.from_numpy(labels),
            positions=torch.from_numpy(read.positions),
        )

    def num_valid(self, step: int) -> int:
        """Labels in the whole step, over all data ranks and micro-batches: what the loss is divided
        by. No communication. It can be 0 when a mask leaves nothing to learn."""
        first = step * self.samples_per_step
        return self.source.num_valid(np.arange(first, first + self.samples_per_step))

    def epoch(self, step: int) -> float:
        """How often the data has been read when `step` begins; 0 for a source without end."""
        per_epoch = self.source.samples_per_epoch
        return step * self.samples_per_step / per_epoch if per_epoch else 0.0


def open_data(config: Config, split: Split = "train") -> Batches:
    """The run's batches, or those of its validation. Builds the standard library's token file on
    first use. Raises DataError, also for ids that the model's vocabulary lacks."""
    train, vocab_size = config.train, config.model.dims.vocab_size
    source: Source
    if config.data.type in ("random", "counting"):
        source = MadeUpTokens(
            learnable=config.data.type == "counting",
            vocab_size=vocab_size,
            seq_len=train.seq_len,
            with_key=key(split, train.seed),
        )
    else:
        source = _token_source(config, split)
    batches = Batches(
        source=source,
        micro_batch_size=train.micro_batch_size,
        num_micro_batches=train.num_micro_batches,
        num_data_ranks=config.parallel.num_data_ranks,
    )
    per_epoch = source.samples_per_epoch
    needed = train.eval_steps * batches.samples_per_step
    if split == "validation" and per_epoch is not None and needed > per_epoch:
        raise DataError(
            f"train.eval_steps = {train.eval_steps} reads {needed} sequences, validation has "
            f"{per_epoch}; use at most {per_epoch // batches.samples_per_step}, or raise "
            "data.validation_share"
        )
    return batches


def _token_source(config: Config, split: Split) -> TokenSource:
    data, train = config.data, config.train
    prefix = Path(data.path) if data.path is not None else stdlib_prefix()
    if data.type == "stdlib":
        build_stdlib(prefix)
    file = TokenFile.open(prefix)
    file.check_ids(config.model.dims.vocab_size, num_pages=_PAGES_CHECKED)
    training, validation = split_documents(file.num_documents, data.validation_share)
    return TokenSource(
        file=file,
        documents=training if split == "train" else validation,
        seq_len=train.seq_len,
        vocab_size=config.model.dims.vocab_size,
        # Validation reads in one order, or its loss would change with the seed.
        shuffle_key=key("order", train.seed) if split == "train" else None,
        reset_positions=data.reset_positions,
        ignore_tokens=np.asarray(data.ignore_tokens, np.int64),
    )


def split_documents(num_documents: int, validation_share: float) -> tuple[Integers, Integers]:
    """The documents for training and those held out, both ascending; the same for every seed.

    At least one is held out if the share is above 0. Raises DataError if none is left for training.
    """
    num_held_out = min(num_documents, int(np.ceil(num_documents * validation_share)))
    order = permutation(num_documents, key("validation"))
    if num_held_out == num_documents:
        raise DataError(
            f"{num_documents} document with data.validation_share = {validation_share:g} leaves "
            "none to "
            "train on; set the share to 0 or use more documents"
        )
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])


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
