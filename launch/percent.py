"""Percentages on a command line: 2 and 2% are two in a hundred; what could be a share is refused.

`--jitter` and `--stragglers` mean the same in every command.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from cyclopts import Parameter, Token


def _share(kind: object, tokens: Sequence[Token]) -> float:
    """The percentage that was typed, as a share. Raises ValueError, which the parser prints with
    the option."""
    text = tokens[0].value.strip()
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(f'"{text}" is no percentage; write such as 2 or 2%') from None
    if not 0 <= percent < math.inf:
        raise ValueError(f'"{text}" is out of range; give a percentage, 0 or more')
    if 0 < percent < 1 and not text.endswith("%"):
        raise ValueError(
            f'"{text}" is under 1 %; it is in percent, so write {100 * percent:g} if a share was '
            f"meant, else {percent:g}%"
        )
    return percent / 100


Percent: TypeAlias = Annotated[float, Parameter(converter=_share)]
"""Typed in percent, given as a share. Under 1 only with the sign, since a share may be meant."""
MaybePercent: TypeAlias = Annotated[float | None, Parameter(converter=_share)]
