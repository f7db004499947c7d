"""What a rule between the keys of a config is, and words that several of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from ppruntime.config.errors import show
from ppruntime.config.keys import Config

Broken: TypeAlias = tuple[str, str]
"""The key to blame, and the sentence about it: what is wrong, with the values and the remedy."""
Rule: TypeAlias = Callable[[Config], Iterator[Broken]]
"""Yields what a config breaks. An option that would have no effect is a mistake, not a silence."""


def either(names: Iterable[str]) -> str:
    """`"a" or "b"`: the choices that a remedy offers."""
    return " or ".join(show(name) for name in sorted(names))
