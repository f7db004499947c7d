"""Numbers and tables for people, as plain text. Columns are as wide as they need."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: str = "") -> list[str]:
    """Lines of a table: headings, a rule, rows. Right-aligned but for the column `left`."""
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if heading == left else cell.rjust(width)
            for heading, cell, width in zip(headings, cells, widths, strict=True)
        ).rstrip()

    return [line(headings), "  ".join("-" * width for width in widths), *map(line, rows)]


def short(number: float) -> str:
    """Four digits and a letter: 551.6B."""
    return _scaled(number, 4, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")))


def short_bytes(number: float) -> str:
    """Three digits and a unit, powers of ten: 10.9 GB; a dash for none."""
    units = ((1e15, " PB"), (1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))
    return _scaled(number, 3, units) if number >= 1e3 else f"{number} B" if number else "-"


def _scaled(number: float, digits: int, units: Sequence[tuple[float, str]]) -> str:
    for limit, unit in units:
        # What rounds up to the limit is written in its unit: 1 GB, not 1e+03 MB.
        if float(f"{number:.{digits}g}") >= limit:
            text = f"{number / limit:#.{digits}g}".rstrip(".")
            return f"{text}{unit}"
    return f"{number:.{digits}g}"
