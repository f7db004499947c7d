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
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ppruntime.config.keys import Config
from ppruntime.data.corpus import build_stdlib, stdlib_prefix
from ppruntime.data.order import key, permutation
from ppruntime.data.sources import MadeUpTokens, Source, TokenSource
from ppruntime.data.token_file import DataError, Integers, TokenFile

if TYPE_CHECKING:
    from ppruntime.models.carry import MicroBatch

_PAGES_CHECKED = 64

Split = Literal["train", "validation"]


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
