"""How a bench's record says what was run. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath


def typed(words: Sequence[str] | None = None) -> str:
    """`ppruntime WORDS`, as anyone can type it: files by absolute paths are named without their
    folders. `words`: this process's own by default."""
    return shlex.join(
        ["ppruntime", *map(_without_folder, sys.argv[1:] if words is None else words)]
    )


def command_line(bench: str, arguments: Sequence[str] | None = None) -> str:
    """`typed` of `bench BENCH ARGUMENTS`; `arguments`: this process's own by default."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == ["bench", bench]:
        words = words[2:]
    return typed(["bench", *bench.split(), *words])


def _without_folder(word: str) -> str:
    key, equals, value = word.rpartition("=")
    name = PurePath(value).name if value.startswith("/") else value
    return f"{key}{equals}{name}"
