"""What a wrong config looks like to its author: place, key, value, what is allowed, what was
meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

COMMAND_LINE = "command line"
_LONGEST_VALUE = 80


class ConfigError(ValueError):
    """The config cannot be run. The text has one line per mistake, each beginning with its
    place."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a value was set: a file and its line from 1, or the command line (line 0)."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """One thing that is wrong, in one sentence that names the key and the remedy."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """`; did you mean "x"?` for the nearest of `allowed`, or an empty text when none is near."""
    near = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else ""


def show(value: Any) -> str:
    """A TOML value as its author wrote it, on one line, long ones cut short."""
    # Any: whatever TOML can hold. JSON spells these values as TOML does, dates and non-finite
    # numbers apart.
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.replace("NaN", "nan").replace("Infinity", "inf")
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def describe(kind: inspect.Type) -> str:
    """What a field takes, in words: `an integer from 1 to 1024`, `true or false`, `one of "a",
    "b"`."""
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(describe(t) for t in types if not isinstance(t, inspect.NoneType))
        case inspect.LiteralType(values=values) if len(values) == 1:
            return show(values[0])
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(show(v) for v in values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _range(kind)
        case inspect.FloatType():
            return "a finite number" + _range(kind)
        case inspect.StrType():
            return "a text in quotes"
        case inspect.VarTupleType(item_type=item):
            return f"a list, each entry {describe(item)}"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}, each entry {describe(items[0])}"
        case inspect.DictType(value_type=value):
            return f"a table, each value {describe(value)}"
        case inspect.StructType():
            return "a table"
        case _:
            raise AssertionError(f"no words for {kind}; a new type of key needs a case here")


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge:g} to {kind.le}"
    bounds = (
        (kind.ge, "at least"),
        (kind.gt, "above"),
        (kind.le, "at most"),
        (kind.lt, "below"),
    )
    words = " and ".join(f"{word} {bound:g}" for bound, word in bounds if bound is not None)
    return f" {words}" if words else ""


def choices(kind: inspect.Type) -> tuple[str, ...]:
    """The texts that a field may hold, where only certain ones are allowed."""
    match kind:
        case inspect.LiteralType(values=values):
            return tuple(str(v) for v in values)
        case inspect.UnionType(types=types):
            return tuple(c for t in types for c in choices(t))
        case _:
            return ()


def wrong_value(key: str, value: Any, annotation: Any) -> str:
    """The sentence for a value that its field's type refuses."""
    kind = inspect.type_info(annotation)
    hint = did_you_mean(value, choices(kind)) if isinstance(value, str) else ""
    return f"{key} = {show(value)} is not allowed; expected {describe(kind)}{hint}"


def convert(value: Any, annotation: Any) -> Any:
    """`value` as the field's type has it. Raises msgspec.ValidationError, also for nan and inf."""
    converted = msgspec.convert(value, annotation)
    _refuse_nonfinite(value)
    return converted


def _refuse_nonfinite(value: Any) -> None:
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise msgspec.ValidationError(f"Expected a finite number, got {value}")
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _refuse_nonfinite(item)
