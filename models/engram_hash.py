"""Engram's token map and table sizes: plain integers and text, no torch.

Source: DeepSeek-V4.1 report, section 2.4 (Engram); sizes agree with the released tables.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppruntime.models.dims import ModelDims


def bucket_sizes(dims: ModelDims) -> tuple[tuple[int, ...], ...]:
    """Rows of each table, one tuple per Engram layer, in (order, head) order."""
    return _bucket_sizes(
        len(dims.engram_layers),
        dims.engram_max_order - 1,
        dims.engram_heads,
        dims.engram_bucket_floor,
    )


_BLANKS = re.compile(r"[ \t\r\n]+")


@lru_cache(maxsize=64)
def _bucket_sizes(
    num_layers: int, num_orders: int, num_heads: int, floor: int
) -> tuple[tuple[int, ...], ...]:
    """Primes from `floor` on; each layer and order starts there again and takes unused ones."""
    used: set[int] = set()
    layers: list[tuple[int, ...]] = []
    for _ in range(num_layers):
        sizes: list[int] = []
        for _ in range(num_orders):
            sizes += _unused_primes(num_heads, floor, used)
        layers.append(tuple(sizes))
    return tuple(layers)


def _unused_primes(count: int, floor: int, used: set[int]) -> list[int]:
    found: list[int] = []
    number = floor
    while len(found) < count:
        if number not in used and is_prime(number):
            used.add(number)
            found.append(number)
        number += 1
    return found


def is_prime(number: int) -> bool:
    """By trial division: a few thousand steps for the sizes of real tables."""
    if number < 4:
        return number > 1
    if number % 2 == 0 or number % 3 == 0:
        return False
    divisor = 5
    while divisor * divisor <= number:
        if number % divisor == 0 or number % (divisor + 2) == 0:
            return False
        divisor += 6
    return True


def normalized(text: str) -> str:
    """The text that tokens of one class share: no accents, lower case, single blanks, stripped.

    A lone blank stays a blank; a text of which nothing would be left stays as it is.
    """
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Letter by letter: a word-final sigma has no lower-case form of its own here.
    plain = "".join(c.lower() for c in decomposed if not unicodedata.category(c).startswith("M"))
    single = _BLANKS.sub(" ", plain)
    return single if single == " " else single.strip() or text


def token_map(texts: Sequence[str], symbols: Sequence[str]) -> tuple[int, ...]:
    """Class of each token, numbered by first occurrence.

    `texts[i]` is token i decoded alone, `symbols[i]` its entry in the vocabulary. A token that is
    only a part of a character decodes to U+FFFD; its entry keeps it apart from the others.
    """
    classes: dict[str, int] = {}
    keys = (
        symbol if "\ufffd" in text else normalized(text)
        for text, symbol in zip(texts, symbols, strict=True)
    )
    return tuple(classes.setdefault(key, len(classes)) for key in keys)
