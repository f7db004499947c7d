"""Documents out of text files, JSON lines or the Python standard library, for
`token_file.write`."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ppruntime.data.token_file import DataError
from ppruntime.data.token_writer import Document, Vocabulary, write
from ppruntime.data.tokenizer import ByteTokenizer, Tokenizer

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Text:
    """A document before tokenizing. Its first part, `given`, is read but not learnt."""

    origin: str
    """File, and line where a file holds several documents."""
    text: bytes
    given: bytes = b""


class _Line(msgspec.Struct):
    """One line of a .jsonl file: a text, or a prompt with the completion that is to be learnt."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None


def build(
    prefix: str | Path,
    texts: Iterable[Text],
    tokenizer: Tokenizer,
    *,
    eod: str | None = None,
    if_exists: Literal["refuse", "replace", "keep"] = "refuse",
) -> None:
    """Tokenizes `texts` into a token file; `eod` names the token that ends each document, if
    any."""
    eod_id = None if eod is None else tokenizer.id_of(eod)
    vocabulary = Vocabulary(tokenizer.name, tokenizer.vocab_size, tokenizer.sha256, eod_id)
    documents = (_document(text, tokenizer, eod_id) for text in texts)
    write(prefix, documents, vocabulary, if_exists=if_exists)


def file_texts(paths: Iterable[str | Path]) -> Iterator[Text]:
    """The documents in `paths`, in order; a folder stands for its files, sorted by path.

    A `.jsonl` file holds a document a line, `{"text": ...}` or `{"prompt": ..., "completion":
    ...}`; any other file is one document. Raises DataError.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.suffix == ".jsonl":
                yield from _json_lines(file)
            else:
                yield Text(str(file), _read(file))


def stdlib_texts() -> Iterator[Text]:
    """The running Python's standard library: one document a source file, sorted by path, tests left
    out. About 11 MB. Raises DataError where Python comes without sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    names = [name for name in sorted(sources) if not _NOT_LIBRARY & set(name.split("/")[:-1])]
    if not names:
        raise DataError(
            f"{root} holds no Python sources; build a token file from texts of your own"
        )
    for name in names:
        yield Text(name, _read(sources[name]))


def stdlib_prefix() -> Path:
    """Where the standard library's token file belongs, one for each version of Python."""
    return Path("runs", "data", f"stdlib-{platform.python_version()}")


def build_stdlib(prefix: Path) -> None:
    """Builds the standard library's token file unless it is there; several processes may at
    once."""
    build(prefix, stdlib_texts(), ByteTokenizer(), if_exists="keep")


def _document(text: Text, tokenizer: Tokenizer, eod: int | None) -> Document:
    try:
        given = tokenizer.encode(text.given) if text.given else np.empty(0, np.int64)
        learnt = tokenizer.encode(text.text)
    except DataError as error:
        raise DataError(f"{text.origin}: {error}") from None
    if eod is not None and len(given) + len(learnt):
        learnt = np.append(learnt, eod)
    learn = np.arange(len(given) + len(learnt)) >= len(given) if len(given) else None
    return Document(np.concatenate([given, learnt]), learn)


def _json_lines(path: Path) -> Iterator[Text]:
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            origin = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{origin}: {error}") from None
            if record.text is not None:
                yield Text(origin, record.text.encode())
            elif record.prompt is not None and record.completion is not None:
                yield Text(origin, record.completion.encode(), given=record.prompt.encode())
            else:
                raise DataError(f'{origin}: no "text", and no "prompt" with a "completion"')


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
