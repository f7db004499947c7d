"""How a bench's record says what was run. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath


def command_line(bench: str, arguments: Sequence[str] | None = None) -> str:
    """`ppruntime bench BENCH ARGUMENTS`, as anyone can type it: files by absolute paths are named
    without their folders. `arguments`: this process's own by default."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == ["bench", bench]:
        words = words[2:]
    return shlex.join(["ppruntime", "bench", *bench.split(), *map(_without_folder, words)])


def _without_folder(word: str) -> str:
    key, equals, value = word.rpartition("=")
    name = PurePath(value).name if value.startswith("/") else value
    return f"{key}{equals}{name}"
