"""Whole numbers on a command line: 3 and 3.0, but not 3.5, which the parser alone would round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, get_origin

from cyclopts import Parameter, Token


def _exactly(kind: object, tokens: Sequence[Token]) -> int | list[int]:
    """The numbers that were typed. Raises ValueError, which the parser prints with the option."""
    numbers = [_whole(token.value) for token in tokens]
    return numbers if get_origin(kind) is list else numbers[0]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if not number.is_integer():
        raise ValueError(f'"{text}" is no whole number')
    return int(number)


Whole: TypeAlias = Annotated[int, Parameter(converter=_exactly)]
MaybeWhole: TypeAlias = Annotated[int | None, Parameter(converter=_exactly)]
MaybeWholes: TypeAlias = Annotated[list[int] | None, Parameter(converter=_exactly)]
