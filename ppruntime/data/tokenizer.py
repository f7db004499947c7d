"""Text -> token ids: bytes as they are, or any `tokenizer.json` through the `tokenizers`
package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ppruntime.data.token_file import DataError, Integers


class Tokenizer(Protocol):
    """What `data build` needs to know about a tokenizer."""

    @property
    def name(self) -> str:
        """What PREFIX.json calls it."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def sha256(self) -> str:
        """Checksum of the tokenizer's file; empty if it has none."""

    def encode(self, text: bytes) -> Integers:
        """Ids of a text, without special tokens around it. Raises DataError."""

    def id_of(self, token: str) -> int:
        """Id of a token such as an end-of-document mark. Raises DataError if it has none."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token a byte: 256 ids, nothing to install, every file is legal."""

    name: str = "bytes"
    vocab_size: int = 256
    sha256: str = ""

    def encode(self, text: bytes) -> Integers:
        return np.frombuffer(text, np.uint8).astype(np.int64)

    def id_of(self, token: str) -> int:
        if token.isdecimal() and int(token) < self.vocab_size:
            return int(token)
        raise DataError(f"the byte tokenizer has no token {token!r}; give a number below 256")


class JsonTokenizer:
    """A `tokenizer.json` as Hugging Face's `tokenizers` reads it."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Implementation
        except ImportError:
            raise DataError(
                f"{path} needs the package tokenizers; install ppruntime[tokenizers], or use bytes"
            ) from None
        try:
            content = path.read_bytes()
            # Any: the package has no types of its own.
            self._implementation: Any = Implementation.from_str(content.decode())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        except Exception as error:  # the package raises plain Exception for a file that it refuses
            raise DataError(f"{path}: not a tokenizer.json ({error})") from None
        self.name = path.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = 1 + max(self._implementation.get_vocab(with_added_tokens=True).values())

    def encode(self, text: bytes) -> Integers:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"byte {error.start} is not UTF-8; use the byte tokenizer") from None
        encoding = self._implementation.encode(decoded, add_special_tokens=False)
        return np.asarray(encoding.ids, np.int64)

    def id_of(self, token: str) -> int:
        token_id = self._implementation.token_to_id(token)
        if token_id is None and token.isdecimal() and int(token) < self.vocab_size:
            return int(token)
        if token_id is None:
            raise DataError(f"{self.name} has no token {token!r}; give one of its tokens or an id")
        return int(token_id)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the path of a `tokenizer.json`. Raises DataError."""
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(Path(name))
