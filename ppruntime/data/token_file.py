"""Token files: ids of whole documents on disk, memory-mapped. Start at `TokenFile.open`.

The format is Megatron's, so that its files can be read and it can read ours:

    PREFIX.bin   the ids of all documents, one after another, little-endian, one integer type
    PREFIX.idx   magic, version, type, then where each sequence and each document begins
    PREFIX.mask  ours, optional: one byte a token, 0 where the token is not to be learnt
    PREFIX.json  ours, optional: tokenizer, vocabulary, checksums (`TokenFileInfo`)

Nothing in such a file is trusted: every count is checked against the sizes of the files before
anything is allocated, and whatever does not fit is a DataError.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document bounds
TYPE_OF_CODE = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BLOCK_TOKENS = 1 << 22


class DataError(ValueError):
    """Training data is missing, broken or does not fit the model; the text names file and place."""


class TokenFileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """PREFIX.json: what the ids mean, and what the other files have to be."""

    format: int = 1
    tokenizer: str
    """`bytes`, or the name of the tokenizer's file."""
    tokenizer_sha256: str
    """Of the tokenizer's file; empty for `bytes`."""
    vocab_size: int
    """Ids are below this."""
    eod: int | None
    """Id that ends each document; None: documents just end."""
    num_tokens: int
    num_documents: int
    sha256: dict[str, str]
    """Suffix of a file -> its checksum."""


@dataclass(frozen=True, slots=True)
class _Map:
    """A file mapped read-only. An empty file has no memory to map."""

    path: Path
    memory: mmap.mmap | None
    content: NDArray[np.uint8]


@dataclass(frozen=True)
class TokenFile:
    """An open token file. Opening reads the index once and maps the rest; it checks everything
    except the ids themselves (`max_id`, `checksum_problems`)."""

    prefix: Path
    tokens: NDArray[np.integer]
    """Ids of all documents, mapped read-only."""
    document_starts: Integers
    """Where each document begins in `tokens`, and the end of the last: one entry more than
    documents."""
    learn: NDArray[np.uint8] | None
    """Per token: 0 where it is not to be learnt, mapped read-only. None: learn all."""
    info: TokenFileInfo | None
    """What PREFIX.json says, if it is there."""
    maps: tuple[_Map, ...]
    """The files behind `tokens` and `learn`."""

    @staticmethod
    def open(prefix: str | Path) -> TokenFile:
        """Maps PREFIX.bin and what belongs to it. Raises DataError."""
        prefix = Path(prefix)
        index = _map(prefix, "idx")
        starts, item_type = parse_index(index.content, index.path)
        size = int(starts[-1])
        tokens = _map(prefix, "bin")
        wanted = size * np.dtype(item_type).itemsize
        if len(tokens.content) != wanted:
            raise DataError(
                f"{tokens.path}: {len(tokens.content)} bytes, its index wants {wanted}; the file "
                "is "
                "truncated or belongs to another index"
            )
        maps = [tokens]
        if part_path(prefix, "mask").exists():
            maps.append(_map(prefix, "mask"))
            if len(maps[1].content) != size:
                raise DataError(
                    f"{maps[1].path}: {len(maps[1].content)} bytes, wanted one for each of the "
                    f"{size} tokens; build the file anew"
                )
        info = _read_info(part_path(prefix, "json"))
        if info is not None and (info.num_tokens, info.num_documents) != (size, len(starts) - 1):
            raise DataError(
                f"{part_path(prefix, 'json')}: speaks of {info.num_tokens} tokens in "
                f"{info.num_documents} documents, the index of {size} in {len(starts) - 1}; build "
                "the file anew"
            )
        return TokenFile(
            prefix=prefix,
            tokens=tokens.content.view(item_type),
            document_starts=starts,
            learn=maps[1].content if len(maps) > 1 else None,
            info=info,
            maps=tuple(maps),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.document_starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that tell this data from other data: from the index, the sizes, and the
        checksums of PREFIX.json if it is there. Does not read the ids."""
        digest = hashlib.sha256(part_path(self.prefix, "idx").read_bytes())
        sizes = [len(part.content) for part in self.maps]
        digest.update(repr((sizes, self.info.sha256 if self.info else {})).encode())
        return digest.hexdigest()[:16]

    def check_unchanged(self) -> None:
        """Raises DataError if a file was cut short since it was opened: to touch what is no longer
        there would end the process without a word."""
        for part in self.maps:
            if part.memory is not None and part.memory.size() != len(part.content):
                raise DataError(
                    f"{part.path}: {part.memory.size()} bytes, {len(part.content)} when it was "
                    "opened; restart the run when the file is finished"
                )

    def check_ids(self, vocab_size: int, *, num_pages: int | None = None) -> None:
        """Raises DataError for an id outside a vocabulary; looks at `num_pages` pages spread over
        the file, or at all of it."""
        page = 4096 if num_pages else _BLOCK_TOKENS
        starts = np.arange(0, self.num_tokens, page)
        if num_pages and len(starts) > num_pages:
            starts = starts[np.linspace(0, len(starts) - 1, num_pages).astype(np.int64)]
        for start in starts.tolist():
            ids = self.tokens[start : start + page].astype(np.int64)
            wrong = (ids < 0) | (ids >= vocab_size)
            if wrong.any():
                raise self.wrong_id(start + int(wrong.argmax()), vocab_size)

    def wrong_id(self, at: int, vocab_size: int) -> DataError:
        """The error for the id at `at`, which a vocabulary lacks."""
        return DataError(
            f"{part_path(self.prefix, 'bin')}: token {int(self.tokens[at])} at byte "
            f"{at * self.tokens.itemsize}, the vocabulary has ids 0 to {vocab_size - 1}; build "
            "the file with the model's tokenizer"
        )

    def check_content(self, vocab_size: int | None = None) -> None:
        """Raises DataError unless every id is in the vocabulary, by default that of PREFIX.json,
        and the files are those that PREFIX.json speaks of. Reads everything."""
        if vocab_size is None:
            vocab_size = self.info.vocab_size if self.info else 1 << 31
        self.check_ids(vocab_size)
        for suffix, wanted in (self.info.sha256 if self.info else {}).items():
            path = part_path(self.prefix, suffix)
            found = checksum(path)
            if found != wanted:
                raise DataError(
                    f"{path}: sha256 differs (want {wanted[:12]}..., got {found[:12]}...); build "
                    "the file anew"
                )

    def summary(self) -> str:
        """What the file holds, in one line."""
        what = f"{self.prefix}: {self.num_tokens:,} tokens in {self.num_documents:,} documents"
        tokenizer = f", tokenizer {self.info.tokenizer}" if self.info else ""
        share = "" if self.learn is None else f", {np.count_nonzero(self.learn):,} to be learnt"
        return f"{what}, {self.tokens.dtype.name}{tokenizer}{share}"


def parse_index(index: NDArray[np.uint8], path: Path) -> tuple[Integers, str]:
    """What the bytes of a PREFIX.idx say: where documents start in the tokens, with the end of the
    last, and the type of the ids. Raises DataError for whatever is not such an index."""
    if len(index) < HEADER.size:
        raise DataError(
            f"{path}: {len(index)} bytes, a header has {HEADER.size}; the file is truncated"
        )
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(f"{path}: not the index of a token file, it does not begin with {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path}: format version {version}, only {VERSION} can be read")
    if code not in TYPE_OF_CODE:
        raise DataError(
            f"{path}: type code {code} is no integer type; ids have {sorted(TYPE_OF_CODE)}"
        )
    wanted = HEADER.size + 12 * num_sequences + 8 * num_bounds
    # A multimodal index has one more byte for each sequence; what it says does not matter here.
    if len(index) not in (wanted, wanted + num_sequences):
        raise DataError(
            f"{path}: {len(index)} bytes, {num_sequences} sequences and {num_bounds} document "
            "bounds want "
            f"{wanted}; the file is truncated or broken"
        )
    if num_sequences == 0 or num_bounds < 2:
        raise DataError(f"{path}: holds no documents")
    at = HEADER.size
    lengths = np.frombuffer(index, "<i4", num_sequences, at).astype(np.int64)
    pointers = np.frombuffer(index, "<i8", num_sequences, at + 4 * num_sequences)
    bounds = np.frombuffer(index, "<i8", num_bounds, at + 12 * num_sequences)
    if lengths.min() < 1:
        at_sequence = int(lengths.argmin())
        raise DataError(
            f"{path}: sequence {at_sequence} has {lengths[at_sequence]} tokens, at least 1 wanted"
        )
    starts = np.concatenate([[0], np.cumsum(lengths)])
    expected = starts[:-1] * np.dtype(TYPE_OF_CODE[code]).itemsize
    if (pointers != expected).any():
        wrong = int((pointers != expected).argmax())
        raise DataError(
            f"{path}: sequence {wrong} begins at byte {pointers[wrong]}, the lengths before it end "
            "at byte "
            f"{expected[wrong]}; the file is broken"
        )
    if bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 1).any():
        raise DataError(
            f"{path}: document bounds have to rise from 0 to {num_sequences}, without empty "
            "documents; "
            "the file is broken"
        )
    return starts[bounds], TYPE_OF_CODE[code]


def _read_info(path: Path) -> TokenFileInfo | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenFileInfo)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); remove it or build the file anew"
        ) from None


def _map(prefix: Path, suffix: str) -> _Map:
    path = part_path(prefix, suffix)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return _Map(path, None, np.empty(0, np.uint8))
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; make it with: ppruntime data build --out {prefix} FILES"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return _Map(path, memory, np.frombuffer(memory, np.uint8))


def part_path(prefix: Path, suffix: str) -> Path:
    """PREFIX.suffix."""
    return prefix.with_name(f"{prefix.name}.{suffix}")


def checksum(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
