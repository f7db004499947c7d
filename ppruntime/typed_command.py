"""What was typed to start this process, for records. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath


def typed(words: Sequence[str] | None = None) -> str:
    """`ppruntime WORDS`, as anyone can type it: files by absolute paths are named without their
    folders. `words`: this process's own by default."""
    words = sys.argv[1:] if words is None else words
    return shlex.join(["ppruntime", *map(_without_folder, words)])


def _without_folder(word: str) -> str:
    key, equals, value = word.rpartition("=")
    name = PurePath(value).name if value.startswith("/") else value
    return f"{key}{equals}{name}"
