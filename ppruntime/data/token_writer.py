"""Writes token files, all or nothing. Start at `write`; the format is told in `token_file.py`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ppruntime.data.token_file import (
    HEADER,
    MAGIC,
    TYPE_OF_CODE,
    VERSION,
    DataError,
    Integers,
    TokenFileInfo,
    checksum,
    part_path,
)

_CODE_OF_TYPE = {name: code for code, name in TYPE_OF_CODE.items()}


@dataclass(frozen=True, slots=True)
class Document:
    """One document's ids, and which of them are to be learnt (None: all)."""

    ids: Integers
    learn: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a token file mean."""

    tokenizer: str
    size: int
    sha256: str = ""
    eod: int | None = None


def write(
    prefix: str | Path,
    documents: Iterable[Document],
    vocabulary: Vocabulary,
    *,
    if_exists: Literal["refuse", "replace", "keep"] = "refuse",
) -> None:
    """Writes a token file. Documents without ids are left out.

    All or nothing: files are written beside their places and renamed, the index last, without which
    there is no token file. With `keep`, several processes may write the same documents at once.
    Raises DataError for ids outside the vocabulary, for no documents at all, if it exists, and if
    it cannot be written.
    """
    prefix = Path(prefix)
    if if_exists == "keep" and part_path(prefix, "idx").exists():
        return
    if if_exists == "refuse" and part_path(prefix, "idx").exists():
        raise DataError(f"{part_path(prefix, 'idx')} exists; remove it or choose another prefix")
    item_type = "<u1" if vocabulary.size <= 256 else "<u2" if vocabulary.size <= 65536 else "<i4"
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        _write_all(prefix, documents, vocabulary, item_type, replace=if_exists == "replace")
    except OSError as error:
        raise DataError(f"{prefix}: cannot be written ({error.strerror})") from None


def _write_all(
    prefix: Path,
    documents: Iterable[Document],
    vocabulary: Vocabulary,
    item_type: str,
    *,
    replace: bool,
) -> None:
    with ExitStack() as stack:
        temporary = {
            suffix: stack.enter_context(_Temporary(part_path(prefix, suffix)))
            for suffix in ("bin", "mask", "idx", "json")
        }
        lengths, has_mask = _write_ids(
            documents, vocabulary, item_type, temporary["bin"].file, temporary["mask"].file
        )
        if not lengths:
            raise DataError(f"nothing to write to {prefix}: no document has a token")
        _write_index(temporary["idx"].file, lengths, item_type)
        kept = ["bin", "mask", "idx"] if has_mask else ["bin", "idx"]
        info = TokenFileInfo(
            tokenizer=vocabulary.tokenizer,
            tokenizer_sha256=vocabulary.sha256,
            vocab_size=vocabulary.size,
            eod=vocabulary.eod,
            num_tokens=sum(lengths),
            num_documents=len(lengths),
            sha256={suffix: temporary[suffix].checksum() for suffix in kept},
        )
        temporary["json"].file.write(msgspec.json.format(msgspec.json.encode(info)) + b"\n")
        if replace:
            for suffix in ("idx", "mask"):
                part_path(prefix, suffix).unlink(missing_ok=True)
        for suffix in sorted([*kept, "json"], key=lambda s: s == "idx"):
            temporary[suffix].commit()


class _Temporary:
    """A file that is written beside its place, and is gone unless it is committed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Writers on several hosts may share the folder, so a process id would not tell them apart.
        self.temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")

    def __enter__(self) -> _Temporary:
        self.file: BinaryIO = self.temporary.open("w+b")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.file.close()
        finally:
            self.temporary.unlink(missing_ok=True)

    def checksum(self) -> str:
        self.file.flush()
        return checksum(self.temporary)

    def commit(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.rename(self.path)


def _write_ids(
    documents: Iterable[Document],
    vocabulary: Vocabulary,
    item_type: str,
    ids_file: BinaryIO,
    mask_file: BinaryIO,
) -> tuple[list[int], bool]:
    """Lengths of the documents written, and whether any has tokens that are not to be learnt."""
    lengths: list[int] = []
    has_mask = False
    for document in documents:
        ids, learn = document.ids, document.learn
        if len(ids) == 0:
            continue
        if ids.min() < 0 or ids.max() >= vocabulary.size:
            raise DataError(
                f"document {len(lengths)} has ids {ids.min()} to {ids.max()}, the vocabulary of "
                f"{vocabulary.tokenizer} ends at {vocabulary.size - 1}"
            )
        ids_file.write(ids.astype(item_type).tobytes())
        to_learn = np.ones(len(ids), np.uint8) if learn is None else learn.astype(np.uint8)
        mask_file.write(to_learn.tobytes())
        has_mask |= learn is not None and not learn.all()
        lengths.append(len(ids))
    return lengths, has_mask


def _write_index(file: BinaryIO, lengths: list[int], item_type: str) -> None:
    """One sequence a document, as Megatron's own preprocessing does."""
    sizes = np.asarray(lengths, np.int64)
    if sizes.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"document {sizes.argmax()} has {sizes.max()} tokens, the format ends at 2^31 - 1"
        )
    itemsize = np.dtype(item_type).itemsize
    pointers = (np.cumsum(sizes) - sizes) * itemsize
    file.write(
        HEADER.pack(MAGIC, VERSION, _CODE_OF_TYPE[item_type], len(lengths), len(lengths) + 1)
    )
    file.write(sizes.astype("<i4").tobytes())
    file.write(pointers.astype("<i8").tobytes())
    file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
