"""How a bench's record says what was run. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ppruntime.typed_command import typed


def command_line(bench: str, arguments: Sequence[str] | None = None) -> str:
    """`typed` of `bench BENCH ARGUMENTS`; `arguments`: this process's own by default."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == ["bench", bench]:
        words = words[2:]
    return typed(["bench", *bench.split(), *words])
